/*
 * In sbatch, salloc and srun, after the command line was read, as the user: have the values of
 * --stage checked, then hand the list to the job.
 *
 * Slurm forwards only the last value of an option to the nodes, so the whole list travels in the
 * job's environment: through spank_job_control_setenv to a batch job's own, and by srun's to its
 * step.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "stage.h"

/* What stands before the values in the helper's argument list, and the NULL behind them. */
enum { FIXED_ARGUMENTS = 9 };

/* Ends the command where a value is wrong, with the helper's exit code and nothing but its text. */
static void check_or_exit(const struct stage_config *config)
{
	const char *const fixed[FIXED_ARGUMENTS - 1] = {
		config->python, "-I", "-m", "stager", "check", "--quiet", "--config", config->config,
	};
	const size_t values = stage_options_count();
	const char **argv = calloc(FIXED_ARGUMENTS + 1 + values, sizeof(*argv));
	int code = STAGE_LAUNCH;

	if (argv) {
		memcpy(argv, fixed, sizeof(fixed));
		argv[FIXED_ARGUMENTS - 1] = "--";
		for (size_t i = 0; i < values; i++)
			argv[FIXED_ARGUMENTS + i] = stage_options_value(i);
		code = stage_child_run((char *const *)argv, environ, 0);
		free(argv);
	}
	if (code == 0)
		return;
	if (code == 127)
		(void)fprintf(stderr, "stage: %s cannot be run; tell the administrator\n",
			      config->python);
	exit(code);
}

/* The values that `inherited` lacks, joined to it; NULL without memory. */
static char *with_new_values(const char *inherited)
{
	char *list = stage_list_join(inherited, "");

	for (size_t i = 0; list && i < stage_options_count(); i++) {
		const char *value = stage_options_value(i);

		if (!stage_list_contains(list, value)) {
			char *longer = stage_list_join(list, value);

			free(list);
			list = longer;
		}
	}
	return list;
}

/*
 * A job submitted from within a job starts with its own list alone. Slurm would hand it the outer
 * job's: the variables below, and the option of that name as if it had been given again.
 */
int stage_submit_forget_outer_job(void)
{
	static const char *const names[] = {
		STAGE_LIST_ENV,
		STAGE_SHARDS_ENV,
		"SPANK_STAGE",
		"_SLURM_SPANK_OPTION_slurm_stage_stage",
		"SLURM_SPANK__SLURM_SPANK_OPTION_slurm_stage_stage",
		"SPANK__SLURM_SPANK_OPTION_slurm_stage_stage",
	};

	if (spank_context() != S_CTX_ALLOCATOR)
		return 0;
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if (unsetenv(names[i]) != 0)
			return -1;
	return 0;
}

/* Whether the job has all of the values already; Slurm repeats a job's own to its steps. */
static bool all_inherited(const char *inherited)
{
	for (size_t i = 0; i < stage_options_count(); i++)
		if (!stage_list_contains(inherited, stage_options_value(i)))
			return false;
	return true;
}

/*
 * Slurm calls once for each component of a heterogeneous job, each of which would need a stage of
 * its own; the options of all are collected together.
 */
static void refuse_het_job(void)
{
	static unsigned int components;

	if (++components == 1 || stage_options_count() == 0)
		return;
	(void)fprintf(stderr, "stage: a heterogeneous job cannot be staged to: "
			      "submit its parts as jobs\n");
	exit(STAGE_USAGE);
}

/* Which of the lines is meant is not known, and Slurm calls for each as for another component. */
static void refuse_repeated_plugin(void)
{
	if (!stage_config_is_repeated() || stage_options_count() == 0)
		return;
	(void)fprintf(stderr, "stage: %s\n", STAGE_REPEATED);
	exit(STAGE_POLICY);
}

int stage_submit(spank_t spank, const struct stage_config *config)
{
	/* A step goes on with its job's list. */
	const char *had = spank_context() == S_CTX_LOCAL ? getenv(STAGE_LIST_ENV) : NULL;
	const char *inherited = had ? had : "";
	char *list = NULL;
	int failed = 0;

	if (stage_options_helper())
		return 0;
	refuse_repeated_plugin();
	refuse_het_job();
	if (all_inherited(inherited))
		return 0;
	list = with_new_values(inherited);
	if (!list || strlen(list) > STAGE_LIST_MAX) {
		(void)fprintf(stderr, STAGE_TOO_LONG, STAGE_LIST_MAX);
		exit(STAGE_USAGE);
	}
	check_or_exit(config);
	failed = setenv(STAGE_LIST_ENV, list, 1) != 0 ||
		 spank_job_control_setenv(spank, STAGE_LIST_NAME, list, 1) != ESPANK_SUCCESS;
	free(list);
	return failed ? -1 : 0;
}
