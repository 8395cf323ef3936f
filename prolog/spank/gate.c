/*
 * In every task, as the user, when its output is connected and before its program starts: hold the
 * task until the stage is over. The first task of a step runs the helper, which stages to all nodes
 * of the step, or of a batch job. The others wait for the step status that a rank writes on theirs.
 *
 * A task that may not start calls _exit with the helper's code: the job fails with that code, and
 * no node is drained.
 */
#include <ctype.h>
#include <fcntl.h>
#include <limits.h>
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

#include "script.h"
#include "stage.h"

/* Of the process that loads the plugin, which is not linked with libslurm. NULL if it lacks it. */
#pragma weak slurm_signal_job_step

enum {
	/* Seconds that ending a task, or the other tasks of a step, may take. */
	END_LIMIT = 30,
	/* Seconds that a task waits while no rank works on its node. */
	WAIT_LIMIT = 300,
	PAUSE_NS = 20 * 1000 * 1000,
	/* Bytes of a variable, which the kernel limits to 128 KiB with its name. */
	VALUE_MAX = 120 * 1024,
};

struct gate {
	uid_t uid;
	uint32_t job;
	uint32_t step;
	uint32_t restart;
	uint32_t task;
	bool quiet;	/* whether to print failures alone */
	char *list;	/* directives joined by ';', may be empty */
	char *exports;	/* what the helper has written, if this task has run it, else NULL */
	char *script;	/* a batch step's script if the helper must read it, else NULL */
	char name[128]; /* JOB.RESTART: the statuses of steps in STAGE_RUN_USER begin with it */
	char node[256]; /* the name of this node, for messages */
};

/* The process of slurmstepd. While a task is privileged Slurm ends it if that is gone. */
static pid_t parent;

/* A step's status on this node: no rank has come, a rank works, the stage has ended. */
enum status { STATUS_NONE, STATUS_WORKING, STATUS_ENDED };

static void complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

static void complain(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	(void)vdprintf(STDERR_FILENO, format, arguments);
	va_end(arguments);
}

/*
 * The list in the job's environment; in a step without srun's environment, the last value of
 * --stage, which Slurm forwards. The caller frees it. NULL if out of memory.
 */
static char *read_list(spank_t spank)
{
	const int size = STAGE_LIST_MAX + 1;
	char *text = malloc(size);
	const spank_err_t got =
		text ? spank_getenv(spank, STAGE_LIST_ENV, text, size) : ESPANK_ERROR;

	if (got == ESPANK_NOSPACE) {
		complain(STAGE_TOO_LONG, STAGE_LIST_MAX);
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

/* Fills `gate`; false if Slurm does not give the task's job or step. */
static bool read_task(spank_t spank, struct gate *gate)
{
	char restart[16];
	char quiet[8];
	char **argv = NULL;
	int argc = 0;

	if (spank_get_item(spank, S_JOB_UID, &gate->uid) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_ID, &gate->job) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_STEPID, &gate->step) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_TASK_GLOBAL_ID, &gate->task) != ESPANK_SUCCESS)
		return false;
	/* In Slurm 22.05 only the environment has the count. */
	if (spank_getenv(spank, "SLURM_RESTART_COUNT", restart, sizeof(restart)) == ESPANK_SUCCESS)
		gate->restart = (uint32_t)strtoul(restart, NULL, 10);
	else if (spank_get_item(spank, S_SLURM_RESTART_COUNT, &gate->restart) != ESPANK_SUCCESS)
		gate->restart = 0;
	/* Slurm has set the variable when task_init is called, but not before. */
	if (spank_getenv(spank, "SLURMD_NODENAME", gate->node, sizeof(gate->node)) !=
		    ESPANK_SUCCESS &&
	    gethostname(gate->node, sizeof(gate->node) - 1) != 0)
		(void)snprintf(gate->node, sizeof(gate->node), "this node");
	gate->quiet = spank_getenv(spank, STAGE_QUIET_ENV, quiet, sizeof(quiet)) == ESPANK_SUCCESS;
	gate->list = read_list(spank);
	if (!gate->list)
		return false;
	if (gate->step == SLURM_BATCH_SCRIPT &&
	    spank_get_item(spank, S_JOB_ARGV, &argc, &argv) == ESPANK_SUCCESS && argc > 0 &&
	    stage_script_may_stage(argv[0]))
		gate->script = argv[0];
	return snprintf(gate->name, sizeof(gate->name), "%u.%u", gate->job, gate->restart) > 0;
}

/*
 * Whether the helper gets a variable always: Slurm's own, a few about the user and the place, and
 * what opens stores. Of these, it passes on to the ranks what they need.
 */
static bool is_for_helper(const char *variable)
{
	static const char *const names[] = { "SLURM_",
					     "SLURMD_",
					     "HOME=",
					     "USER=",
					     "LOGNAME=",
					     "LANG=",
					     "TZ=",
					     "TERM=",
					     "TMPDIR=",
					     "AWS_",
					     "AZURE_",
					     "GOOGLE_",
					     "HF_",
					     "CLOUDSDK_CONFIG=",
					     "XDG_CACHE_HOME=",
					     "XDG_CONFIG_HOME=",
					     "XDG_RUNTIME_DIR=",
					     "REGISTRY_AUTH_FILE=",
					     "DOCKER_CONFIG=" };

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if (strncmp(variable, names[i], strlen(names[i])) == 0)
			return strncmp(variable, "SLURM_SPANK_", 12) != 0;
	return false;
}

/* Whether a text names the variable of `setting`, NAME=value, as $NAME or ${NAME}. */
static bool is_named(const char *setting, const char *text)
{
	const size_t length = strcspn(setting, "=");

	for (const char *at = text ? strchr(text, '$') : NULL; at && length > 0;
	     at = strchr(at + 1, '$')) {
		const char *name = at[1] == '{' ? at + 2 : at + 1;

		if (strncmp(name, setting, length) == 0 && name[length] != '_' &&
		    !isalnum((unsigned char)name[length]))
			return true;
	}
	return false;
}

/* Whether the helper may get a variable that a directive names: none by which it would run. */
static bool may_be_named(const char *variable)
{
	static const char *const names[] = { "LD_",	     "PYTHON", "OMPI_", "PMIX_",
					     "SLURM_SPANK_", "STAGE_", "PATH=" };

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if (strncmp(variable, names[i], strlen(names[i])) == 0)
			return false;
	return true;
}

/*
 * PATH for the helper: the system's folders, and that of this Slurm's commands, which is beside
 * the folder of slurmstepd. NULL if out of memory.
 */
static char *helper_path(void)
{
	char program[PATH_MAX] = "";
	char *path = NULL;

	if (readlink("/proc/self/exe", program, sizeof(program) - 1) < 0)
		program[0] = '\0';
	/* PREFIX/sbin/slurmstepd becomes PREFIX. */
	for (int level = 0; level < 2; level++) {
		char *slash = strrchr(program, '/');

		if (slash)
			*slash = '\0';
	}
	if (asprintf(&path, "PATH=/usr/local/bin:/usr/bin:/bin:%s/bin", program) < 0)
		return NULL;
	return path;
}

/* The caller frees the array, but not its strings. NULL if out of memory. */
static char **helper_environment(spank_t spank, const struct gate *gate)
{
	char *lines = NULL;
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
	lines = gate->script ? stage_script_lines(gate->script) : NULL;
	for (size_t i = 0; i < count; i++)
		if (is_for_helper(all[i]) ||
		    (may_be_named(all[i]) &&
		     (is_named(all[i], gate->list) || is_named(all[i], lines))))
			kept[used++] = all[i];
	free(lines);
	kept[used] = helper_path();
	if (!kept[used++] || asprintf(&kept[used], "STAGE_DIRECTIVES=%s", gate->list) < 0) {
		free(kept);
		return NULL;
	}
	return kept;
}

/* From 25.11 on, Slurm takes job and step as one value. */
static void signal_step(const struct gate *gate)
{
#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(25, 11, 0)
	slurm_step_id_t step = SLURM_STEP_ID_INITIALIZER;

	step.job_id = gate->job;
	step.step_id = gate->step;
	(void)slurm_signal_job_step(&step, SIGTERM);
#else
	(void)slurm_signal_job_step(gate->job, gate->step, SIGTERM);
#endif
}

/*
 * Ends the step's other tasks, which wait for a rank that may never come. A child with a limit does
 * that: this process is a fork of slurmstepd, and locks of slurmstepd's threads may be held here.
 */
static void end_step(const struct gate *gate)
{
	pid_t pid = 0;

	if (!slurm_signal_job_step || gate->step >= SLURM_MAX_NORMAL_STEP_ID)
		return;
	pid = fork();
	if (pid == 0) {
		signal_step(gate);
		_exit(0);
	}
	if (pid > 0)
		(void)stage_child_wait(pid, END_LIMIT);
}

static int run_helper(spank_t spank, struct gate *gate, const struct stage_config *config)
{
	char tolerate[16] = ""; /* empty for the site's default */
	char step[24];
	char **environment = helper_environment(spank, gate);
	int code = STAGE_LAUNCH;

	(void)spank_getenv(spank, STAGE_TOLERATE_ENV, tolerate, sizeof(tolerate));
	(void)snprintf(step, sizeof(step), "%u", gate->step);
	const char *const argv[] = { STAGE_PROGRAM(config, "stager", "gate"),
				     "--status-file",
				     gate->name,
				     "--step",
				     step,
				     "--script",
				     gate->script ? gate->script : "",
				     "--tolerate",
				     tolerate,
				     gate->quiet ? "--quiet" : NULL,
				     NULL };
	if (environment)
		code = stage_child_read((char *const *)argv, environment, &gate->exports);
	free(environment);
	if (code == STAGE_NOT_RUN)
		complain("stage: %s: %s cannot be run; tell the administrator\n", gate->node,
			 config->python);
	if (code > STAGE_SIGNALLED)
		complain("stage: ended by signal %d; the job's own program was not started\n",
			 code - STAGE_SIGNALLED);
	if (code == STAGE_LAUNCH || code >= STAGE_NOT_RUN)
		end_step(gate);
	return code;
}

/* Opens the status of the step on this node. */
static int open_status(const struct gate *gate)
{
	char path[256];
	const int length = snprintf(path, sizeof(path), STAGE_RUN_USER "/%s.%u",
				    (unsigned int)gate->uid, gate->name, gate->step);

	if (length < 0 || (size_t)length >= sizeof(path))
		return -1;
	/* The folder is the user's: a FIFO in the file's place must not block the task. */
	return open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
}

/* Reads the step status on this node; the rank holds a lock on its file while it works. */
static enum status read_status(const struct gate *gate, int *code)
{
	char text[16] = "";
	enum status status = STATUS_NONE;
	char *rest = NULL;
	const int fd = open_status(gate);

	if (fd < 0)
		return STATUS_NONE;
	if (flock(fd, LOCK_SH | LOCK_NB) != 0) {
		status = STATUS_WORKING;
	} else if (read(fd, text, sizeof(text) - 1) > 0) {
		const long written = strtol(text, &rest, 10);

		if (rest != text && rest[0] == '\n' && written >= 0 && written <= 255) {
			*code = (int)written;
			status = STATUS_ENDED;
		}
	}
	(void)close(fd); /* nothing was written */
	return status;
}

static volatile sig_atomic_t cancelled;

/* USR1, USR2 and ALRM are the user's own, for a program that has not started. */
static void handle_signal(int number)
{
	if (number != SIGUSR1 && number != SIGUSR2 && number != SIGALRM)
		cancelled = 1;
}

/* What `catch_signals` changes in this process, for `restore_signals`. */
static const int caught[] = { SIGTERM, SIGINT, SIGHUP, SIGXCPU, SIGUSR1, SIGUSR2, SIGALRM };
static struct sigaction old_actions[sizeof(caught) / sizeof(caught[0])];
static sigset_t old_mask;
static char old_name[16]; /* TASK_COMM_LEN */

/*
 * A task whose program has not started still has slurmstepd's name and signal mask, and
 * proctrack/linuxproc skips processes of that name: scancel would not reach it.
 */
static void catch_signals(void)
{
	struct sigaction action = { .sa_handler = handle_signal };
	sigset_t set;

	(void)sigemptyset(&set);
	for (size_t i = 0; i < sizeof(caught) / sizeof(caught[0]); i++) {
		(void)sigaction(caught[i], &action, &old_actions[i]);
		(void)sigaddset(&set, caught[i]);
	}
	(void)sigprocmask(SIG_UNBLOCK, &set, &old_mask);
	(void)prctl(PR_GET_NAME, old_name);
	(void)prctl(PR_SET_NAME, "stage-gate");
}

static void restore_signals(void)
{
	(void)prctl(PR_SET_NAME, old_name);
	(void)sigprocmask(SIG_SETMASK, &old_mask, NULL);
	for (size_t i = 0; i < sizeof(caught) / sizeof(caught[0]); i++)
		(void)sigaction(caught[i], &old_actions[i], NULL);
}

/* Waits until the stage has ended and returns the code in this node's step status. */
static int wait_for_status(const struct gate *gate)
{
	const struct timespec pause = { 0, PAUSE_NS };
	time_t last_work = time(NULL);
	int code = 0;

	while (!cancelled) {
		const enum status status = read_status(gate, &code);

		if (status == STATUS_ENDED)
			return code;
		if (status == STATUS_WORKING)
			last_work = time(NULL);
		if (time(NULL) - last_work > WAIT_LIMIT) {
			complain("stage: %s: staging made no progress on this node for %d s, so "
				 "this task was not started; submit again, and tell the "
				 "administrator\n",
				 gate->node, WAIT_LIMIT);
			return STAGE_LAUNCH;
		}
		(void)nanosleep(&pause, NULL); /* a signal may cut it short */
	}
	return STAGE_CANCELLED;
}

/* Waits until the stage has ended and returns its code. */
static int hold(spank_t spank, struct gate *gate, const struct stage_config *config)
{
	int code = 0;

	catch_signals();
	code = gate->task == 0 ? run_helper(spank, gate, config) : wait_for_status(gate);
	if (code == 0 && cancelled)
		code = STAGE_LAUNCH; /* the job was cancelled just when the stage was done */
	restore_signals();
	return code;
}

/* Sets the variables that lines `export NAME=value` in a file name. */
static void export_from(spank_t spank, const struct gate *gate, FILE *file)
{
	static const char begin[] = "export ";
	char *line = NULL;
	size_t size = 0;

	while (getline(&line, &size, file) > 0) {
		char *name = line + strlen(begin);
		char *value = strchr(line, '=');

		if (strncmp(line, begin, strlen(begin)) != 0 || !value)
			continue;
		*value++ = '\0';
		value[strcspn(value, "\n")] = '\0';
		if (strlen(value) > VALUE_MAX)
			complain("stage: %s: %s is not set, as it would have more than %d bytes; "
				 "stage fewer folders with mode=shard\n",
				 gate->node, name, VALUE_MAX);
		else if (spank_setenv(spank, name, value, 1) != ESPANK_SUCCESS)
			complain("stage: %s: %s cannot be set\n", gate->node, name);
	}
	free(line);
}

/*
 * Sets the variables that tell the task what was staged where. The helper's task has them from it:
 * a site's plugin may hide from it what was mounted at STAGE_RUN_USER since it began.
 */
static void set_variables(spank_t spank, const struct gate *gate)
{
	const int fd = gate->exports ? -1 : open_status(gate);
	FILE *file = NULL;

	if (gate->exports && gate->exports[0])
		file = fmemopen(gate->exports, strlen(gate->exports), "r");
	else if (fd >= 0)
		file = fdopen(fd, "r");
	if (file) {
		export_from(spank, gate, file);
		(void)fclose(file); /* nothing was written */
	} else if (fd >= 0) {
		(void)close(fd);
	}
}

/* Whether the environment marks this step as the helper of this job, and not of an outer one. */
static bool is_helper_by_environment(spank_t spank)
{
	char id[24];
	uint32_t job = 0;

	return spank_getenv(spank, STAGE_HELPER_ENV, id, sizeof(id)) == ESPANK_SUCCESS &&
	       spank_get_item(spank, S_JOB_ID, &job) == ESPANK_SUCCESS &&
	       strtoul(id, NULL, 10) == job;
}

/*
 * Ends the task before Slurm has let it go on. Slurm would complain that nobody reads its word, so
 * a child keeps the pipe, until Slurm has noticed the task's end.
 */
static void end_early(int code) __attribute__((noreturn));

static void end_early(int code)
{
	const struct timespec pause = { 0, PAUSE_NS };
	const pid_t task = getpid();

	if (fork() == 0)
		for (int i = 0; i < END_LIMIT * (1000000000 / PAUSE_NS) && kill(task, 0) == 0; i++)
			(void)nanosleep(&pause, NULL);
	_exit(code);
}

/*
 * As root, before any plugin's task_init: end a task that would stage after pyxis has started its
 * container, which may fail first for want of the image. A batch script that is read here is
 * slurmd's file, at a path that no user can change.
 */
void stage_gate_check_order(spank_t spank)
{
	struct gate gate = { 0 };

	parent = getppid();
	stage_order_note_surroundings();
	if (!stage_order_pyxis() || stage_options_helper() || is_helper_by_environment(spank) ||
	    !read_task(spank, &gate))
		return;
	if (gate.list[0] || gate.script) {
		complain("stage: %s: %s\n", gate.node, stage_order_fault());
		end_early(STAGE_POLICY);
	}
	free(gate.list);
}

/* Lets a rank notice an end of slurmstepd before the rank's own begin. */
static void set_parent(spank_t spank)
{
	char text[24];

	(void)snprintf(text, sizeof(text), "%d", parent);
	if (spank_setenv(spank, STAGE_PARENT_ENV, text, 1) != ESPANK_SUCCESS)
		slurm_error("stage: %s cannot be set", STAGE_PARENT_ENV);
}

int stage_gate(spank_t spank, const struct stage_config *config)
{
	struct gate gate = { 0 };
	int code = 0;

	if (stage_options_helper() || is_helper_by_environment(spank)) {
		set_parent(spank);
		return 0;
	}
	if (!read_task(spank, &gate)) {
		complain("stage: Slurm does not give the plugin the job, the step or the task; "
			 "submit again\n");
		_exit(STAGE_LAUNCH);
	}
	if (!gate.list[0] && !gate.script)
		goto out;
	if (stage_config_is_repeated()) {
		complain("stage: %s: %s\n", gate.node, STAGE_REPEATED);
		_exit(STAGE_POLICY);
	}
	if (stage_order_is_elsewhere()) {
		complain("stage: %s: " STAGE_ELSEWHERE "\n", gate.node, stage_order_own());
		_exit(STAGE_POLICY);
	}
	if (config->fault) {
		complain("stage: %s: plugstack.conf: argument '%s' is not valid; tell the "
			 "administrator\n",
			 gate.node, config->fault);
		_exit(STAGE_POLICY);
	}
	if (gate.uid == 0 || geteuid() == 0 || getuid() == 0) {
		complain("stage: %s: %s\n", gate.node, STAGE_NOT_ROOT);
		_exit(STAGE_POLICY);
	}
	if (geteuid() != gate.uid || getuid() != gate.uid) {
		complain("stage: %s: this task does not run as the job's user; tell the "
			 "administrator\n",
			 gate.node);
		_exit(STAGE_LAUNCH);
	}
	code = hold(spank, &gate, config);
	if (code != 0)
		_exit(code);
	set_variables(spank, &gate);
	/* What is done: an srun in a batch script stages what it asks for itself. */
	(void)spank_unsetenv(spank, STAGE_LIST_ENV);
	free(gate.exports);
out:
	free(gate.list);
	return 0;
}
