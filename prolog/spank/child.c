/* Runs a program that inherits nothing from slurmstepd or sbatch but stdin, stdout and stderr. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stage.h"

/* The environment of the programs that run as root. */
char *const stage_clean_environment[] = { "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8",
					  NULL };

enum { FIRST_FREE_FD = 3, FALLBACK_FDS = 1024 };

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

static void child(pid_t parent, char *const argv[], char *const envp[], unsigned int limit)
{
	const int null = open("/dev/null", O_RDONLY);

	if (null < 0 || dup2(null, STDIN_FILENO) < 0)
		_exit(STAGE_NOT_RUN);
	reset_signals();
	/* If the waiting process is killed, the helper ends too. */
	if (prctl(PR_SET_PDEATHSIG, SIGTERM) != 0 || getppid() != parent)
		_exit(STAGE_NOT_RUN);
	close_descriptors();
	(void)alarm(limit);
	(void)execve(argv[0], argv, envp);
	_exit(STAGE_NOT_RUN);
}

int stage_child_run(char *const argv[], char *const envp[], unsigned int limit)
{
	const pid_t parent = getpid();
	const pid_t pid = fork();
	int status = 0;

	if (pid < 0)
		return STAGE_NOT_RUN;
	if (pid == 0)
		child(parent, argv, envp, limit);
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return STAGE_NOT_RUN;
	return WIFEXITED(status) ? WEXITSTATUS(status) : STAGE_SIGNALLED + WTERMSIG(status);
}
