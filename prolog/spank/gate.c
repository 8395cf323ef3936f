/*
 * In every task, as the user, after its output was connected and before its program starts: hold
 * it until the stage is over. The first task of a step runs the helper, which stages to all nodes
 * of the job; the others wait for the word that the helper's rank leaves on their node.
 *
 * To fail is to _exit with the helper's code: the job fails with it, and no node is drained.
 */
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <slurm/slurm.h>

#include "stage.h"

enum {
	/* Seconds that a task waits while no rank on its node is at work. */
	PATIENCE = 300,
	PAUSE_NS = 20 * 1000 * 1000,
	/* Bytes of STAGE_SHARDS, which the kernel limits to 128 KiB with its name. */
	SHARDS_MAX = 120 * 1024,
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
	char node[256]; /* the name of this node, for messages */
};

/* What a word on this node says to a task. */
enum word { WORD_NONE, WORD_AT_WORK, WORD_SAID };

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
	const int size = STAGE_LIST_MAX + 1;
	char *text = malloc(size);
	const spank_err_t got = text ? spank_getenv(spank, STAGE_LIST_ENV, text, size) :
				       ESPANK_ERROR;

	if (got == ESPANK_NOSPACE) {
		tell(STAGE_TOO_LONG, STAGE_LIST_MAX);
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
	char restart[16];
	char **argv = NULL;
	int argc = 0;

	if (spank_get_item(spank, S_JOB_UID, &gate->uid) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_ID, &gate->job) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_STEPID, &gate->step) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_TASK_GLOBAL_ID, &gate->task) != ESPANK_SUCCESS)
		return false;
	/* Slurm 22.05 has the count in the environment alone. */
	if (spank_getenv(spank, "SLURM_RESTART_COUNT", restart, sizeof(restart)) == ESPANK_SUCCESS)
		gate->restart = (uint32_t)strtoul(restart, NULL, 10);
	else if (spank_get_item(spank, S_SLURM_RESTART_COUNT, &gate->restart) != ESPANK_SUCCESS)
		gate->restart = 0;
	if (spank_getenv(spank, "SLURMD_NODENAME", gate->node, sizeof(gate->node)) !=
	    ESPANK_SUCCESS)
		(void)snprintf(gate->node, sizeof(gate->node), "this node");
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
		code = stage_child_run((char *const *)argv, environment, 0);
	free(environment);
	if (code == 127)
		tell("stage: %s cannot be run on this node; tell the administrator\n",
		     config->python);
	if (code > 128)
		tell("stage: ended by signal %d; the job's own program was not started\n",
		     code - 128);
	return code;
}

/* Opens a file of this job's words, see stager/store.py; `suffix` is empty or names a step. */
static int open_word(const struct gate *gate, const char *suffix)
{
	char path[256];

	if (snprintf(path, sizeof(path), STAGE_RUN_USER "/%s%s", (unsigned int)gate->uid, gate->word,
		     suffix) < 0)
		return -1;
	/* Its user may have put something else there, which is not to be waited for. */
	return open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
}

/* Whether an earlier stage of this job has brought all of the list; it has a line for each. */
static bool already_done(const struct gate *gate)
{
	const int fd = open_word(gate, "");
	FILE *file = fd < 0 ? NULL : fdopen(fd, "r");
	char *line = NULL;
	size_t size = 0;
	bool done = false;
	ssize_t length = 0;

	if (!file) {
		if (fd >= 0)
			(void)close(fd);
		return false;
	}
	while (!done && (length = getline(&line, &size, file)) > 0) {
		if (line[length - 1] == '\n')
			line[length - 1] = '\0';
		done = stage_list_contains(line, gate->list);
	}
	free(line);
	(void)fclose(file); /* it was only read */
	return done;
}

/* Looks at the step's word on this node; the rank holds a lock on the file while it is at work. */
static enum word read_word(const struct gate *gate, int *code)
{
	char suffix[16];
	char text[16] = "";
	enum word word = WORD_NONE;
	char *rest = NULL;
	int fd = -1;

	(void)snprintf(suffix, sizeof(suffix), ".%u", gate->step);
	fd = open_word(gate, suffix);
	if (fd < 0)
		return WORD_NONE;
	if (flock(fd, LOCK_SH | LOCK_NB) != 0) {
		word = WORD_AT_WORK;
	} else if (read(fd, text, sizeof(text) - 1) > 0) {
		const long said = strtol(text, &rest, 10);

		if (rest != text && rest[0] == '\n' && said >= 0 && said <= 255) {
			*code = (int)said;
			word = WORD_SAID;
		}
	}
	(void)close(fd); /* it was only read */
	return word;
}

static volatile sig_atomic_t ended;

/* Signals of the user's own are for a program that is not here yet. */
static void end(int number)
{
	if (number != SIGUSR1 && number != SIGUSR2 && number != SIGALRM)
		ended = number;
}

/* What `hear_scancel` changes in this process, for `unhear_scancel` to put back. */
static const int heard[] = { SIGTERM, SIGINT, SIGHUP, SIGXCPU, SIGUSR1, SIGUSR2, SIGALRM };
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

		if (word == WORD_SAID)
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

	if (gate->step != SLURM_BATCH_SCRIPT && already_done(gate))
		return 0;
	hear_scancel();
	code = gate->task == 0 ? run_helper(spank, gate, config) : wait_for_word(gate);
	if (code == 0 && ended)
		code = STAGE_LAUNCH; /* the job was cancelled when the stage was just done */
	unhear_scancel();
	return code;
}

/* Has the task find the lists of what each node holds of a folder that is spread over them. */
static void name_shards(spank_t spank, const struct gate *gate)
{
	const int fd = open_word(gate, ".shards");
	char *lists = NULL;
	ssize_t length = -1;

	if (fd < 0)
		return; /* as for most jobs */
	lists = malloc(SHARDS_MAX + 2);
	if (lists)
		length = read(fd, lists, SHARDS_MAX + 2);
	(void)close(fd); /* it was only read */
	if (length > 0 && lists[length - 1] == '\n')
		length--;
	if (length > SHARDS_MAX) {
		tell("stage: %s: %s is not set: the paths of its lists are longer than %d bytes "
		     "together; stage fewer folders with mode=shard\n",
		     gate->node, STAGE_SHARDS_ENV, SHARDS_MAX);
	} else if (length > 0) {
		lists[length] = '\0';
		for (char *end = strchr(lists, '\n'); end; end = strchr(end, '\n'))
			*end = ':';
		if (spank_setenv(spank, STAGE_SHARDS_ENV, lists, 1) != ESPANK_SUCCESS)
			tell("stage: %s: %s cannot be set\n", gate->node, STAGE_SHARDS_ENV);
	}
	free(lists);
}

/* Whether the environment says that this step is the helper of this very job. */
static bool marked_as_helper(spank_t spank)
{
	char said[24];
	uint32_t job = 0;

	return spank_getenv(spank, STAGE_HELPER_ENV, said, sizeof(said)) == ESPANK_SUCCESS &&
	       spank_get_item(spank, S_JOB_ID, &job) == ESPANK_SUCCESS &&
	       strtoul(said, NULL, 10) == job;
}

int stage_gate(spank_t spank, const struct stage_config *config)
{
	struct gate gate = { 0 };
	int code = 0;

	if (stage_options_helper() || marked_as_helper(spank))
		return 0;
	if (!look(spank, &gate)) {
		tell("stage: Slurm does not tell the plugin what this job is\n");
		_exit(STAGE_LAUNCH);
	}
	if (!gate.list[0] && !gate.script)
		goto out;
	if (stage_config_is_repeated()) {
		tell("stage: %s: %s\n", gate.node, STAGE_REPEATED);
		_exit(STAGE_POLICY);
	}
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
	name_shards(spank, &gate);
out:
	free(gate.list);
	return 0;
}
