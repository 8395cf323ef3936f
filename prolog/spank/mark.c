/*
 * Root's mark of a job that stages on this node, from its helper's step to the job's end. While the
 * mark exists, copies that the job uses are not evicted.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include "stage.h"

struct job {
	uint32_t id;
	uid_t uid;
	char mark[64];
};

static bool find_job(spank_t spank, struct job *job)
{
	if (spank_get_item(spank, S_JOB_ID, &job->id) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_UID, &job->uid) != ESPANK_SUCCESS)
		return false;
	return snprintf(job->mark, sizeof(job->mark), STAGE_RUN_JOBS "/%u.%u", job->id,
			(unsigned int)job->uid) > 0;
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

void stage_clean_up(spank_t spank, const struct stage_config *config)
{
	struct job job = { 0 };
	struct stat facts;
	char id[16];
	char uid[16];
	int code = 0;

	/* Most jobs stage nothing and end here. */
	if (!find_job(spank, &job) || lstat(job.mark, &facts) != 0)
		return;
	(void)snprintf(id, sizeof(id), "%u", job.id);
	(void)snprintf(uid, sizeof(uid), "%u", (unsigned int)job.uid);
	const char *const argv[] = { STAGE_PROGRAM(config, "stager.root.epilog"), id, uid, NULL };
	code = stage_child_run((char *const *)argv, stage_clean_environment, STAGE_CLEAN_UP_LIMIT);
	stage_child_complain("cleaning up after job", id, code, STAGE_CLEAN_UP_LIMIT, config);
	if (unlink(job.mark) != 0 && errno != ENOENT)
		slurm_error("stage: the job's mark %s cannot be removed: %s; remove it", job.mark,
			    strerror(errno));
}
