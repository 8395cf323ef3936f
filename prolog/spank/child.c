/* Runs a program that inherits nothing from slurmstepd or sbatch but stdout and stderr. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "stage.h"

/* The environment of the programs that run as root. */
char *const stage_clean_environment[] = { "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8",
					  NULL };

enum {
	FIRST_FREE_FD = 3,
	FALLBACK_FDS = 1024,
	PAUSE_NS = 2 * 1000 * 1000,
	/* Seconds for a killed program to end. One that waits for a dead disk does not. */
	GRACE = 1,
};

static void close_descriptors(void)
{
#ifdef SYS_close_range
	if (syscall(SYS_close_range, FIRST_FREE_FD, ~0U, 0) == 0)
		return;
#endif
	for (int fd = FIRST_FREE_FD; fd < FALLBACK_FDS; fd++)
		(void)close(fd); /* most are not open */
}

/* slurmstepd blocks and ignores signals, and the program would inherit that. */
static void reset_signals(void)
{
	sigset_t none;

	for (int number = 1; number < NSIG; number++)
		(void)signal(number, SIG_DFL); /* KILL, STOP and some others refuse */
	/* A user sends these to the job's own program, which has not started. */
	(void)signal(SIGUSR1, SIG_IGN);
	(void)signal(SIGUSR2, SIG_IGN);
	if (sigemptyset(&none) == 0)
		(void)sigprocmask(SIG_SETMASK, &none, NULL);
}

/* A program with a limit may be left behind, and must hold nothing that others wait for. */
static bool detach(void)
{
	const int null = open("/dev/null", O_WRONLY);

	return null >= 0 && dup2(null, STDOUT_FILENO) >= 0 && dup2(null, STDERR_FILENO) >= 0 &&
	       setsid() >= 0;
}

static void child(pid_t parent, char *const argv[], char *const envp[], bool limited)
{
	const int null = open("/dev/null", O_RDONLY);

	if (null < 0 || dup2(null, STDIN_FILENO) < 0 || (limited && !detach()))
		_exit(STAGE_NOT_RUN);
	reset_signals();
	/* If the waiting process is killed, the helper ends too. */
	if (prctl(PR_SET_PDEATHSIG, SIGTERM) != 0 || getppid() != parent)
		_exit(STAGE_NOT_RUN);
	close_descriptors();
	(void)execve(argv[0], argv, envp);
	_exit(STAGE_NOT_RUN);
}

static int exit_code(int status)
{
	return WIFEXITED(status) ? WEXITSTATUS(status) : STAGE_SIGNALLED + WTERMSIG(status);
}

/* Returns the exit code of the child, or STAGE_LATE if it has not ended within `limit` seconds. */
static int code_within(pid_t pid, unsigned int limit)
{
	const struct timespec pause = { 0, PAUSE_NS };
	struct timespec now = { 0 };
	struct timespec begun = { 0 };
	int status = 0;

	(void)clock_gettime(CLOCK_MONOTONIC, &begun);
	do {
		const pid_t ended = waitpid(pid, &status, WNOHANG);

		if (ended == pid)
			return exit_code(status);
		if (ended < 0 && errno != EINTR)
			return STAGE_NOT_RUN; /* Slurm has reaped it */
		(void)nanosleep(&pause, NULL);
		(void)clock_gettime(CLOCK_MONOTONIC, &now);
	} while (now.tv_sec - begun.tv_sec <= (time_t)limit);
	return STAGE_LATE;
}

int stage_child_wait(pid_t pid, unsigned int limit)
{
	const int code = code_within(pid, limit);

	if (code == STAGE_LATE) {
		(void)kill(-pid, SIGKILL); /* no such group if it has not become a session yet */
		(void)kill(pid, SIGKILL);
		(void)code_within(pid, GRACE); /* or it is left: the kernel ends it when it can */
	}
	return code;
}

int stage_child_run(char *const argv[], char *const envp[], unsigned int limit)
{
	const pid_t parent = getpid();
	const pid_t pid = fork();
	int status = 0;

	if (pid < 0)
		return STAGE_NOT_RUN;
	if (pid == 0)
		child(parent, argv, envp, limit > 0);
	if (limit > 0)
		return stage_child_wait(pid, limit);
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return STAGE_NOT_RUN;
	return exit_code(status);
}

/*
 * A file in memory, -1 if there can be none. It takes the number of no standard stream that is
 * closed here: with that of stdout, it would be closed in the helper.
 */
static int memory_file(void)
{
	const int file = memfd_create("stage", MFD_CLOEXEC);
	const int above = fcntl(file, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);

	if (file >= 0)
		(void)close(file); /* nothing is lost */
	return above;
}

/* Runs a program with `output` in the place of this process's stdout. */
static int run_into(int output, char *const argv[], char *const envp[])
{
	const int own = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
	int code = STAGE_LAUNCH;

	if (dup2(output, STDOUT_FILENO) >= 0)
		code = stage_child_run(argv, envp, 0);
	if (own < 0 || dup2(own, STDOUT_FILENO) < 0)
		(void)close(STDOUT_FILENO); /* as it was */
	if (own >= 0)
		(void)close(own);
	return code;
}

/* What was written to a file in memory; the caller frees it. NULL if out of memory. */
static char *text_of(int file)
{
	const off_t size = lseek(file, 0, SEEK_END);
	char *text = size < 0 ? NULL : calloc(1, (size_t)size + 1);

	if (text && pread(file, text, (size_t)size, 0) != size) {
		free(text);
		return NULL;
	}
	return text;
}

int stage_child_read(char *const argv[], char *const envp[], char **text)
{
	const int output = memory_file();
	int code = STAGE_LAUNCH;

	if (output < 0)
		return code;
	code = run_into(output, argv, envp);
	*text = text_of(output);
	(void)close(output); /* nothing is lost */
	return code;
}

void stage_child_complain(const char *what, const char *id, int code, unsigned int limit,
			  const struct stage_config *config)
{
	if (code == 0)
		return;
	if (code == STAGE_LATE)
		slurm_error("stage: %s %s took longer than %u s and was given up; look for a disk "
			    "that does not answer",
			    what, id, limit);
	else if (config->fault && (code == STAGE_NOT_RUN || access(config->config, R_OK) != 0))
		/* The plugin used a default path in place of the one that is mistyped. */
		slurm_error("stage: %s %s failed: " STAGE_NOT_VALID, what, id, config->fault);
	else if (code == STAGE_NOT_RUN)
		slurm_error("stage: %s %s failed: %s cannot be run; install slurm-stage there, or "
			    "correct python= in plugstack.conf",
			    what, id, config->python);
	else if (access(config->config, R_OK) != 0)
		slurm_error("stage: %s %s failed: %s: %s; restore it, or correct config= in "
			    "plugstack.conf",
			    what, id, config->config, strerror(errno));
	else
		slurm_error("stage: %s %s failed (exit code %d); see syslog (journalctl -t "
			    "slurm-stage)",
			    what, id, code);
}
