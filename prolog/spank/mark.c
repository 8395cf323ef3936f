/*
 * Root's mark of a job that stages on this node, from its helper's step to the job's end. While the
 * mark exists, copies that the job uses are not evicted.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

/* From Slurm 26.05 on, slurm_load_job() takes the number of a job only with this. */
#define SLURM_BACKWARD_COMPAT
#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>

#include "stage.h"

/* Of the process that loads the plugin, which is not linked with libslurm. NULL if it lacks it. */
#pragma weak slurm_load_job
#pragma weak slurm_free_job_info_msg

enum {
	/* Seconds after which slurmctld is asked, again, whether a marked job has ended. */
	ASK_AGAIN = 600,
	/* Seconds that it has for the answer. */
	ASK_LIMIT = 10,
};

struct job {
	uint32_t id;
	uid_t uid;
	char mark[64];
};

static void name_mark(struct job *job)
{
	(void)snprintf(job->mark, sizeof(job->mark), STAGE_RUN_JOBS "/%u.%u", job->id,
		       (unsigned int)job->uid);
}

static bool find_job(spank_t spank, struct job *job)
{
	if (spank_get_item(spank, S_JOB_ID, &job->id) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_UID, &job->uid) != ESPANK_SUCCESS)
		return false;
	name_mark(job);
	return true;
}

/* Only root can write in the folder that holds it, so it is root's if it exists. */
bool stage_make_folder(const char *path, mode_t mode)
{
	if (mkdir(path, mode) != 0 && errno != EEXIST)
		return false;
	return chmod(path, mode) == 0; /* mkdir obeyed the umask */
}

/*
 * Users may not look for marks: they would show who runs jobs here, in spite of PrivateData. slurmd
 * makes the folder of the marks, so that there are none before slurmd runs the plugin's epilog,
 * which removes them: without the folder no job is marked, and nothing is evicted.
 */
void stage_expect_marks(void)
{
	if (!stage_make_folder(STAGE_RUN, 0755) || !stage_make_folder(STAGE_RUN_JOBS, 0700))
		slurm_error("stage: %s cannot be made: %s; until it is there, no copies are "
			    "evicted on this node",
			    STAGE_RUN_JOBS, strerror(errno));
}

/* Returns whether the job is marked now. Without the folder, root's clean-up does not run here. */
bool stage_mark(spank_t spank)
{
	struct job job = { 0 };
	int fd = -1;

	if (!find_job(spank, &job))
		return false;
	fd = open(job.mark, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (fd >= 0)
		(void)close(fd); /* nothing was written */
	else if (errno != ENOENT)
		slurm_error("stage: the job's mark %s cannot be made: %s; its copies may be "
			    "evicted while it runs",
			    job.mark, strerror(errno));
	return fd >= 0;
}

static void clean_up(const struct job *job, const struct stage_config *config)
{
	char id[16];
	char uid[16];
	int code = 0;

	(void)snprintf(id, sizeof(id), "%u", job->id);
	(void)snprintf(uid, sizeof(uid), "%u", (unsigned int)job->uid);
	const char *const argv[] = { STAGE_PROGRAM(config, "stager.node.epilog"), id, uid, NULL };
	code = stage_child_run((char *const *)argv, stage_clean_environment, STAGE_CLEAN_UP_LIMIT);
	stage_child_complain("cleaning up after job", id, code, STAGE_CLEAN_UP_LIMIT, config);
	if (unlink(job->mark) != 0 && errno != ENOENT)
		slurm_error("stage: the job's mark %s cannot be removed: %s; remove it", job->mark,
			    strerror(errno));
}

/*
 * Finds a mark whose job nobody has asked for lately, and notes in its time of access that somebody
 * does now. Also a job without any process here may run, as in salloc: only slurmctld knows.
 */
static bool find_old_mark(struct job *job)
{
	const struct timespec now_and_unchanged[] = { { 0, UTIME_NOW }, { 0, UTIME_OMIT } };
	DIR *marks = opendir(STAGE_RUN_JOBS);
	bool found = false;

	while (marks && !found) {
		const struct dirent *entry = readdir(marks);
		struct stat facts;
		char *rest = NULL;

		if (!entry)
			break;
		/* That of a job whose clean-up runs begins with a dot. */
		job->id = (uint32_t)strtoul(entry->d_name, &rest, 10);
		job->uid = rest[0] == '.' ? (uid_t)strtoul(rest + 1, NULL, 10) : 0;
		name_mark(job);
		found = job->id != 0 && job->uid != 0 && lstat(job->mark, &facts) == 0 &&
			time(NULL) - facts.st_atim.tv_sec > ASK_AGAIN &&
			utimensat(AT_FDCWD, job->mark, now_and_unchanged, AT_SYMLINK_NOFOLLOW) == 0;
	}
	if (marks)
		(void)closedir(marks);
	return found;
}

/* Whether slurmctld says that the job has ended, on all nodes, or that it knows it no more. */
static bool is_over(uint32_t id)
{
	job_info_msg_t *jobs = NULL;
	bool over = false;

	if (slurm_load_job(&jobs, id, SHOW_ALL) != SLURM_SUCCESS)
		return errno == ESLURM_INVALID_JOB_ID;
	for (uint32_t i = 0; i < jobs->record_count; i++) {
		const slurm_job_info_t *job = &jobs->job_array[i];

		if (job->job_id == id)
			over = (job->job_state & JOB_STATE_BASE) >= JOB_COMPLETE &&
			       !(job->job_state & JOB_COMPLETING);
	}
	slurm_free_job_info_msg(jobs);
	return over;
}

/* A child asks, which can be killed if there is no answer. */
static bool has_ended(const struct job *job)
{
	pid_t pid = 0;

	if (!slurm_load_job || !slurm_free_job_info_msg)
		return false;
	pid = fork();
	if (pid == 0)
		_exit(is_over(job->id) ? 0 : 1);
	return pid > 0 && stage_child_wait(pid, ASK_LIMIT) == 0;
}

/* At a job's end: cleans up after it, and after one whose own end here passed without. */
void stage_clean_up(spank_t spank, const struct stage_config *config)
{
	struct job job = { 0 };
	struct stat facts;

	/* Most jobs stage nothing. */
	if (find_job(spank, &job) && lstat(job.mark, &facts) == 0)
		clean_up(&job, config);
	if (find_old_mark(&job) && has_ended(&job)) {
		slurm_info("stage: job %u ended without its clean-up here: it is done now", job.id);
		clean_up(&job, config);
	}
}
