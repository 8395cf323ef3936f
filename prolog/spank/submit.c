/*
 * In sbatch, salloc and srun, as the user, when the command line has been read: check the values of
 * --stage, then pass the list to the job.
 *
 * Slurm forwards only the last value of an option to the nodes. So the whole list travels in the
 * environment: in a batch job's through spank_job_control_setenv, in a step's with srun's own.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "script.h"
#include "stage.h"

/* Of the command that loads the plugin, which is not linked with libslurm. 0 if it lacks it. */
#pragma weak slurm_get_log_level
extern int slurm_get_log_level(void);

/* Slurm's level for what is neither an error nor asked for by --verbose; --quiet lowers it. */
enum { LEVEL_INFO = 3 };

/* The helper's arguments before the values. */
enum { FIXED_ARGUMENTS = 13 };

/* Exits with `code`, and names the variable that may be the cause if it asks for files. */
static _Noreturn void give_up(int code)
{
	if (stage_options_variable())
		(void)fprintf(stderr,
			      "stage: %s is set, which counts as one more --stage; if it is the "
			      "cause, correct or unset it\n",
			      stage_options_variable());
	exit(code);
}

static _Noreturn void refuse(int code, const char *text)
{
	(void)fprintf(stderr, "stage: %s\n", text);
	give_up(code);
}

/*
 * Checks the values; if one is wrong, exits with the helper's code. The helper prints why, and with
 * --submits it warns of sources that are missing: a step finds out by itself at once. Returns the
 * values, joined, with what their variables stand for here; the caller frees them. NULL if out of
 * memory.
 */
static char *check_or_exit(const struct stage_config *config)
{
	const char *tolerate = stage_options_tolerate();
	const bool submits = spank_context() == S_CTX_ALLOCATOR;
	const bool is_step = !submits && getenv("SLURM_JOB_ID");
	const char *const fixed[FIXED_ARGUMENTS] = {
		STAGE_PROGRAM(config, "stager", "check", "--quiet"),
		"--stage-tolerate",
		tolerate ? tolerate : "",
		"--fill",
		is_step				      ? "--step"
		: submits && !getenv(STAGE_QUIET_ENV) ? "--submits"
						      : "--quiet",
		"--",
	};
	const size_t values = stage_options_count();
	const char **argv = calloc(FIXED_ARGUMENTS + 1 + values, sizeof(*argv));
	char *filled = NULL;
	int code = STAGE_LAUNCH;

	if (argv) {
		memcpy(argv, fixed, sizeof(fixed));
		for (size_t i = 0; i < values; i++)
			argv[FIXED_ARGUMENTS + i] = stage_options_value(i);
		code = stage_child_read((char *const *)argv, environ, &filled);
	}
	free(argv);
	if (code == 0)
		return filled;
	if (code == STAGE_NOT_RUN) {
		(void)fprintf(stderr, "stage: %s cannot be run; tell the administrator\n",
			      config->python);
		exit(code);
	}
	give_up(code);
}

static void refuse_long_list(size_t length)
{
	if (length <= STAGE_LIST_MAX)
		return;
	(void)fprintf(stderr, STAGE_TOO_LONG, STAGE_LIST_MAX);
	give_up(STAGE_USAGE);
}

/* Before the helper gets them as arguments, which may be too long for it. */
static void refuse_long_values(const char *inherited)
{
	size_t length = strlen(inherited);

	for (size_t i = 0; i < stage_options_count(); i++)
		length += (length > 0) + strlen(stage_options_value(i));
	refuse_long_list(length);
}

/* The inherited list and the values; the caller frees it. NULL if out of memory. */
static char *join(const char *inherited, const char *values)
{
	char *list = NULL;

	if (asprintf(&list, "%s%s%s", inherited, inherited[0] && values[0] ? ";" : "", values) < 0)
		return NULL;
	refuse_long_list(strlen(list));
	return list;
}

static int unset_all(const char *const names[], size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (unsetenv(names[i]) != 0)
			return -1;
	return 0;
}

/*
 * Removes from the environment the options of the job around, which Slurm would take for this
 * command's own; for a job that is submitted within a job, also what is known of the outer one.
 */
int stage_submit_forget_outer_job(void)
{
	static const char *const options[] = {
		"_SLURM_SPANK_OPTION_slurm_stage_stage",
		"SLURM_SPANK__SLURM_SPANK_OPTION_slurm_stage_stage",
		"SPANK__SLURM_SPANK_OPTION_slurm_stage_stage",
		"_SLURM_SPANK_OPTION_slurm_stage_stage_tolerate",
		"SLURM_SPANK__SLURM_SPANK_OPTION_slurm_stage_stage_tolerate",
		"SPANK__SLURM_SPANK_OPTION_slurm_stage_stage_tolerate",
	};
	static const char *const of_job[] = {
		STAGE_LIST_ENV,	  STAGE_QUIET_ENV,	  STAGE_SHARDS_ENV, STAGE_TOLERATE_ENV,
		STAGE_FAILED_ENV, "SLURM_RESTART_COUNT", /* which Slurm sets in a restarted job
							    alone */
		"SPANK_STAGE",	  "SPANK_STAGE_TOLERATE", STAGE_SHARED_ENV, STAGE_SHARED_PROLOG_ENV,
	};

	if (unset_all(options, sizeof(options) / sizeof(options[0])) != 0)
		return -1;
	return spank_context() == S_CTX_ALLOCATOR
		       ? unset_all(of_job, sizeof(of_job) / sizeof(of_job[0]))
		       : 0;
}

/*
 * Slurm calls stage_submit for each component of a heterogeneous job. Each component would need a
 * stage of its own, but here the options of all are collected together.
 */
static void refuse_het_job(void)
{
	static unsigned int components;

	if (++components == 1 || stage_options_count() == 0)
		return;
	refuse(STAGE_USAGE, "staging does not work in a heterogeneous job; submit each part as its "
			    "own job");
}

/* The lines may differ, and Slurm calls stage_submit for each as for one more component. */
static void refuse_repeated_plugin(void)
{
	if (!stage_config_is_repeated() || stage_options_count() == 0)
		return;
	refuse(STAGE_POLICY, STAGE_REPEATED);
}

static void refuse_late_plugin(void)
{
	if (stage_options_count() == 0 || !stage_order_pyxis())
		return;
	refuse(STAGE_POLICY, stage_order_fault());
}

static void refuse_root(void)
{
	if (stage_options_count() == 0 || (getuid() != 0 && geteuid() != 0))
		return;
	refuse(STAGE_POLICY, STAGE_NOT_ROOT);
}

/* An argument of this command's; the caller frees it. NULL if there are fewer. */
static char *argument(int number)
{
	FILE *arguments = fopen("/proc/self/cmdline", "re");
	char *text = NULL;
	size_t size = 0;
	ssize_t length = arguments ? 0 : -1;

	for (int i = 0; i <= number && length >= 0; i++)
		length = getdelim(&text, &size, '\0', arguments);
	if (arguments)
		(void)fclose(arguments); /* nothing was written */
	if (length >= 0)
		return text;
	free(text);
	return NULL;
}

/* Whether salloc was given --no-shell. What stands behind its own arguments is a program's. */
static bool has_no_shell(void)
{
	static const char option[] = "--no-shell";
	/* getopt knows an option by its beginning if no other one begins like that. */
	const size_t shortest = strlen("--no-s");
	bool found = false;

	for (int i = 0; !found && i < optind; i++) {
		char *text = argument(i);
		const size_t length = text ? strlen(text) : 0;

		found = length >= shortest && strncmp(text, option, length) == 0;
		free(text);
	}
	return found;
}

/*
 * Files are staged before the first step, which in such a job is an srun without salloc's
 * environment: it does not know of them.
 */
static void refuse_no_shell(void)
{
	if (stage_options_count() == 0 || strcmp(program_invocation_short_name, "salloc") != 0)
		return;
	if (has_no_shell())
		refuse(STAGE_USAGE,
		       "salloc --no-shell stages nothing; submit without --stage, then "
		       "give --stage to srun --jobid=ID, or run stagectl stage --job "
		       "ID SRC:DST");
}

/* Tells whoever types salloc what an srun in another terminal cannot know. */
static void tell_first_srun(void)
{
	if (strcmp(program_invocation_short_name, "salloc") == 0 && !getenv(STAGE_QUIET_ENV) &&
	    isatty(STDERR_FILENO))
		(void)fprintf(stderr,
			      "stage: each srun of this salloc stages first; an srun --jobid "
			      "from elsewhere does not\n");
}

/* Notes in the environment of the job, or step, that the command has the option --quiet. */
void stage_submit_pass_on_quiet(spank_t spank)
{
	if (!slurm_get_log_level || slurm_get_log_level() >= LEVEL_INFO)
		return;
	if (setenv(STAGE_QUIET_ENV, "1", 1) != 0 ||
	    (spank_context() == S_CTX_ALLOCATOR &&
	     spank_job_control_setenv(spank, STAGE_QUIET_NAME, "1", 1) != ESPANK_SUCCESS))
		slurm_error("stage: %s cannot be set", STAGE_QUIET_ENV);
}

/* Passes on how many nodes may fail: with --export=NONE, Slurm forwards no option. */
static bool pass_on_tolerate(spank_t spank)
{
	const char *tolerate = stage_options_tolerate();

	return !tolerate ||
	       spank_job_control_setenv(spank, STAGE_TOLERATE_NAME, tolerate, 1) == ESPANK_SUCCESS;
}

/* Has each node's prolog start the filesystem of the job's disks, before the first step there. */
static bool pass_on_shared(spank_t spank)
{
	return setenv(STAGE_SHARED_ENV, "1", 1) == 0 &&
	       spank_job_control_setenv(spank, STAGE_SHARED_NAME, "1", 1) == ESPANK_SUCCESS;
}

/*
 * Whether #STAGE lines of the batch script name the filesystem of the job's disks. They are read
 * in the job, which is too late to start it. A script that is no file cannot be read a second time.
 */
static bool script_shares(void)
{
	const bool has_script = strcmp(program_invocation_short_name, "sbatch") == 0;
	char *path = has_script ? argument(optind) : NULL;
	struct stat facts;
	char *lines = NULL;
	bool found = false;

	if (path && stat(path, &facts) == 0 && S_ISREG(facts.st_mode))
		lines = stage_script_lines(path);
	found = lines && strstr(lines, STAGE_SHARED_DST);
	free(lines);
	free(path);
	return found;
}

int stage_submit(spank_t spank, const struct stage_config *config)
{
	/* In salloc, each srun stages the job's list, too; in a batch job its script has none. */
	const char *had = spank_context() == S_CTX_LOCAL ? getenv(STAGE_LIST_ENV) : NULL;
	const char *inherited = had ? had : "";
	char *values = NULL;
	char *list = NULL;
	int failed = 0;

	/* The helper's step may be the first on most nodes: their prologs see its variables alone.
	 */
	if (getenv(STAGE_SHARED_ENV) && !pass_on_shared(spank))
		return -1;
	if (stage_options_helper())
		return 0;
	refuse_repeated_plugin();
	refuse_late_plugin();
	refuse_root();
	refuse_het_job();
	refuse_no_shell();
	stage_submit_pass_on_quiet(spank);
	if (script_shares() && !pass_on_shared(spank))
		return -1;
	if (stage_options_count() == 0 && !stage_options_tolerate())
		return 0;
	refuse_long_values(inherited);
	values = check_or_exit(config);
	list = values ? join(inherited, values) : NULL;
	free(values);
	if (!list)
		return -1;
	tell_first_srun();
	failed = !pass_on_tolerate(spank) ||
		 (strstr(list, STAGE_SHARED_DST) && !pass_on_shared(spank)) ||
		 setenv(STAGE_LIST_ENV, list, 1) != 0 ||
		 spank_job_control_setenv(spank, STAGE_LIST_NAME, list, 1) != ESPANK_SUCCESS;
	free(list);
	return failed ? -1 : 0;
}
