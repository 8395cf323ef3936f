/* Running a program with nothing of slurmstepd's or sbatch's inside it but its stdio. */
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

/* What root's own programs are given. */
char *const stage_clean_environment[] = { "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8",
					  NULL };

enum { NOT_STARTED = 127, SIGNALLED = 128, FIRST_FREE_FD = 3, FALLBACK_FDS = 1024 };

static void close_descriptors(void)
{
#ifdef SYS_close_range
	if (syscall(SYS_close_range, FIRST_FREE_FD, ~0U, 0) == 0)
		return;
#endif
	for (int fd = FIRST_FREE_FD; fd < FALLBACK_FDS; fd++)
		(void)close(fd); /* most are not open */
}

/* slurmstepd blocks and ignores signals; the program is to die of them as any other would. */
static void reset_signals(void)
{
	sigset_t none;

	for (int number = 1; number < NSIG; number++)
		(void)signal(number, SIG_DFL); /* KILL, STOP and some others refuse */
	/* But not of those that a user has sent to a program that is not here yet. */
	(void)signal(SIGUSR1, SIG_IGN);
	(void)signal(SIGUSR2, SIG_IGN);
	if (sigemptyset(&none) == 0)
		(void)sigprocmask(SIG_SETMASK, &none, NULL);
}

static void child(pid_t parent, char *const argv[], char *const envp[], unsigned int limit)
{
	const int null = open("/dev/null", O_RDONLY);

	if (null < 0 || dup2(null, STDIN_FILENO) < 0)
		_exit(NOT_STARTED);
	reset_signals();
	/* Whoever kills the one who waits kills the helper too. */
	if (prctl(PR_SET_PDEATHSIG, SIGTERM) != 0 || getppid() != parent)
		_exit(NOT_STARTED);
	close_descriptors();
	(void)alarm(limit);
	(void)execve(argv[0], argv, envp);
	_exit(NOT_STARTED);
}

int stage_child_run(char *const argv[], char *const envp[], unsigned int limit)
{
	const pid_t parent = getpid();
	const pid_t pid = fork();
	int status = 0;

	if (pid < 0)
		return NOT_STARTED;
	if (pid == 0)
		child(parent, argv, envp, limit);
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return NOT_STARTED;
	/* A signalled helper has not done its work, whatever it had come to. */
	return WIFEXITED(status) ? WEXITSTATUS(status) : SIGNALLED + WTERMSIG(status);
}
