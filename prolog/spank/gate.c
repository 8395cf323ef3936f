/*
 * In every task, as the user, after its output was connected and before its program starts: hold
 * it until the stage is over. The first task of a step runs the helper, which stages to all nodes
 * of the job; the others wait for the word that the helper's rank leaves on their node.
 *
 * To fail is to _exit with the helper's code: the job fails with it, and no node is drained.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <slurm/slurm.h>

#include "stage.h"

/* Where the ranks leave their word: /run/slurm-stage/UID/JOB.RESTART, see stager/store.py. */
#define WORDS "/run/slurm-stage"

enum {
	/* Seconds that a task waits while no rank on its node is at work. */
	PATIENCE = 300,
	PAUSE_NS = 20 * 1000 * 1000,
	WORD_MAX = STAGE_LIST_MAX + 64,
};

struct gate {
	uid_t uid;
	uint32_t job;
	uint32_t step;
	uint32_t restart;
	uint32_t task;
	char *list;   /* directives joined by ';', may be empty */
	char *script; /* of a batch step that has #STAGE lines, else NULL */
	char word[128];
};

/* What a word on this node says to a task. */
enum word { WORD_NONE, WORD_AT_WORK, WORD_DONE, WORD_FAILED };

static void tell(const char *format, ...) __attribute__((format(printf, 1, 2)));

static void tell(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	(void)vdprintf(STDERR_FILENO, format, arguments);
	va_end(arguments);
}

/* Whether the comment lines at the script's head hold one that begins with #STAGE. */
static bool has_stage_lines(const char *path)
{
	FILE *script = fopen(path, "re");
	char *line = NULL;
	size_t size = 0;
	bool found = false;

	if (!script)
		return false; /* a script that the user cannot read cannot run either */
	while (!found && getline(&line, &size, script) >= 0) {
		const char *text = line + strspn(line, " \t\r\n\f\v");

		if (text[0] != '#' && text[0])
			break;
		found = strncmp(line, "#STAGE", 6) == 0 && strchr(" \t\r\n", line[6]);
	}
	free(line);
	(void)fclose(script); /* it was only read */
	return found;
}

/* The list that the job's environment holds, else the one value that Slurm forwards by itself. */
static char *find_list(spank_t spank)
{
	char *text = malloc(STAGE_LIST_MAX);
	const spank_err_t got =
		text ? spank_getenv(spank, STAGE_LIST_ENV, text, STAGE_LIST_MAX) : ESPANK_ERROR;

	if (got == ESPANK_NOSPACE) {
		tell("stage: the list of directives is too long\n");
		_exit(STAGE_USAGE);
	}
	if (got == ESPANK_SUCCESS || !text)
		return text;
	text[0] = '\0';
	if (stage_options_count() > 0) {
		free(text);
		text = strdup(stage_options_value(stage_options_count() - 1));
	}
	return text;
}

static bool look(spank_t spank, struct gate *gate)
{
	char **argv = NULL;
	int argc = 0;

	if (spank_get_item(spank, S_JOB_UID, &gate->uid) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_ID, &gate->job) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_STEPID, &gate->step) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_TASK_GLOBAL_ID, &gate->task) != ESPANK_SUCCESS)
		return false;
	if (spank_get_item(spank, S_SLURM_RESTART_COUNT, &gate->restart) != ESPANK_SUCCESS)
		gate->restart = 0;
	gate->list = find_list(spank);
	if (!gate->list)
		return false;
	if (gate->step == SLURM_BATCH_SCRIPT &&
	    spank_get_item(spank, S_JOB_ARGV, &argc, &argv) == ESPANK_SUCCESS && argc > 0 &&
	    has_stage_lines(argv[0]))
		gate->script = argv[0];
	return snprintf(gate->word, sizeof(gate->word), "%u.%u", gate->job, gate->restart) > 0;
}

/* The helper's environment: Slurm's variables and a few that say who and where the user is. */
static bool wanted(const char *variable)
{
	static const char *const names[] = { "SLURM_", "SLURMD_", "HOME=", "USER=", "LOGNAME=",
					     "LANG=",  "TZ=",	  "TERM=", "TMPDIR=" };

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if (strncmp(variable, names[i], strlen(names[i])) == 0)
			return strncmp(variable, "SLURM_SPANK_", 12) != 0;
	return false;
}

/* Returns NULL without memory. The strings belong to slurmstepd, but for the list's. */
static char **helper_environment(spank_t spank, const char *list)
{
	char **all = NULL;
	char **kept = NULL;
	size_t count = 0;
	size_t used = 0;

	if (spank_get_item(spank, S_JOB_ENV, &all) != ESPANK_SUCCESS || !all)
		return NULL;
	while (all[count])
		count++;
	kept = calloc(count + 3, sizeof(*kept));
	if (!kept)
		return NULL;
	for (size_t i = 0; i < count; i++)
		if (wanted(all[i]))
			kept[used++] = all[i];
	kept[used++] = "PATH=/usr/local/bin:/usr/bin:/bin";
	if (asprintf(&kept[used], "STAGE_DIRECTIVES=%s", list) < 0) {
		free(kept);
		return NULL;
	}
	return kept;
}

static int run_helper(spank_t spank, const struct gate *gate, const struct stage_config *config)
{
	char step[24];
	char **environment = helper_environment(spank, gate->list);
	int code = STAGE_LAUNCH;

	(void)snprintf(step, sizeof(step), "%u", gate->step);
	const char *const argv[] = {
		config->python, "-I",	"-m",	  "stager", "gate", "--config", config->config,
		"--word",	gate->word, "--step", step,
		gate->script ? "--script" : NULL, gate->script, NULL,
	};
	if (environment)
		code = stage_child_run((char *const *)argv, environment);
	free(environment);
	if (code == 127)
		tell("stage: %s cannot be run on this node; tell the administrator\n",
		     config->python);
	return code;
}

/* Understands "CODE STEP LIST"; of an older step only its success counts. */
static enum word understand(const struct gate *gate, const char *text, int *code)
{
	char *rest = NULL;
	const unsigned long said = strtoul(text, &rest, 10);
	const unsigned long step = rest != text ? strtoul(rest, &rest, 10) : 0;

	if (rest == text || rest[0] != ' ' || said > 255)
		return WORD_NONE;
	*code = (int)said;
	if (said == 0 && stage_list_contains(rest + 1, gate->list))
		return WORD_DONE;
	return said != 0 && step == gate->step ? WORD_FAILED : WORD_NONE;
}

/* Looks at this node's word; the rank holds a lock on the file while it is at work. */
static enum word read_word(const struct gate *gate, int *code)
{
	char path[256];
	char *text = NULL;
	enum word word = WORD_NONE;
	int fd = -1;
	ssize_t length = 0;

	if (snprintf(path, sizeof(path), "%s/%u/%s", WORDS, (unsigned int)gate->uid,
		     gate->word) < 0)
		return WORD_NONE;
	fd = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0)
		return WORD_NONE;
	text = calloc(1, WORD_MAX);
	if (flock(fd, LOCK_SH | LOCK_NB) != 0) {
		word = WORD_AT_WORK;
	} else if (text) {
		length = read(fd, text, WORD_MAX - 1);
		if (length > 0 && text[length - 1] == '\n') {
			text[length - 1] = '\0';
			word = understand(gate, text, code);
		}
	}
	free(text);
	(void)close(fd); /* it was only read */
	return word;
}

static volatile sig_atomic_t ended;

static void end(int number)
{
	ended = number;
}

/* What `hear_scancel` changes in this process, for `unhear_scancel` to put back. */
static const int heard[] = { SIGTERM, SIGINT, SIGHUP, SIGXCPU };
static struct sigaction old_actions[sizeof(heard) / sizeof(heard[0])];
static sigset_t old_mask;
static char old_name[16]; /* TASK_COMM_LEN */

/*
 * A task that has not started yet is a child of slurmstepd by name and by signal mask, and
 * proctrack/linuxproc passes over processes of that name: scancel would not reach it.
 */
static void hear_scancel(void)
{
	struct sigaction action = { .sa_handler = end };
	sigset_t set;

	(void)sigemptyset(&set);
	for (size_t i = 0; i < sizeof(heard) / sizeof(heard[0]); i++) {
		(void)sigaction(heard[i], &action, &old_actions[i]);
		(void)sigaddset(&set, heard[i]);
	}
	(void)sigprocmask(SIG_UNBLOCK, &set, &old_mask);
	(void)prctl(PR_GET_NAME, old_name);
	(void)prctl(PR_SET_NAME, "stage-gate");
}

static void unhear_scancel(void)
{
	(void)prctl(PR_SET_NAME, old_name);
	(void)sigprocmask(SIG_SETMASK, &old_mask, NULL);
	for (size_t i = 0; i < sizeof(heard) / sizeof(heard[0]); i++)
		(void)sigaction(heard[i], &old_actions[i], NULL);
}

/* Waits for this node's word and returns the code that it tells. */
static int wait_for_word(const struct gate *gate)
{
	const struct timespec pause = { 0, PAUSE_NS };
	time_t last_work = time(NULL);
	int code = 0;

	while (!ended) {
		const enum word word = read_word(gate, &code);

		if (word == WORD_DONE || word == WORD_FAILED)
			return code;
		if (word == WORD_AT_WORK)
			last_work = time(NULL);
		if (time(NULL) - last_work > PATIENCE) {
			tell("stage: no word of the stage for %d s; this task was not started\n",
			     PATIENCE);
			return STAGE_LAUNCH;
		}
		(void)nanosleep(&pause, NULL); /* a signal may cut it short */
	}
	return STAGE_LAUNCH;
}

/* The code with which the stage ended, once it has. */
static int hold(spank_t spank, const struct gate *gate, const struct stage_config *config)
{
	int code = 0;

	if (gate->step != SLURM_BATCH_SCRIPT && read_word(gate, &code) == WORD_DONE)
		return 0;
	hear_scancel();
	code = gate->task == 0 ? run_helper(spank, gate, config) : wait_for_word(gate);
	if (code == 0 && ended)
		code = STAGE_LAUNCH; /* the job was cancelled when the stage was just done */
	unhear_scancel();
	return code;
}

int stage_gate(spank_t spank, const struct stage_config *config)
{
	struct gate gate = { 0 };
	char helper[2];
	int code = 0;

	if (stage_options_helper() ||
	    spank_getenv(spank, STAGE_HELPER_ENV, helper, sizeof(helper)) != ESPANK_ENV_NOEXIST)
		return 0;
	if (!look(spank, &gate)) {
		tell("stage: Slurm does not tell the plugin what this job is\n");
		_exit(STAGE_LAUNCH);
	}
	if (!gate.list[0] && !gate.script)
		goto out;
	if (config->fault) {
		stage_config_complain(config);
		tell("stage: plugstack.conf on this node has a fault; tell the administrator\n");
		_exit(STAGE_LAUNCH);
	}
	if (geteuid() != gate.uid || getuid() != gate.uid) {
		tell("stage: this task does not run as the job's user\n");
		_exit(STAGE_LAUNCH);
	}
	code = hold(spank, &gate, config);
	if (code != 0)
		_exit(code);
out:
	free(gate.list);
	return 0;
}
