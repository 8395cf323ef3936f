/*
 * A site's SPANK plugin that gives each job a folder: FOLDER/USER.JOB.RESTARTS, the user's alone,
 * made by job_prolog and removed by job_epilog. Its variable SLURM_TMPDIR is set in task_init.
 *
 * plugstack.conf: required job_folder.so FOLDER
 */
#include <ftw.h>
#include <glob.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(job_folder, 1)

int slurm_spank_job_prolog(spank_t spank, int argc, char **argv)
{
	char path[PATH_MAX];
	uint32_t job = 0;
	uid_t uid = 0;
	gid_t gid = 0;

	(void)argc;
	if (spank_get_item(spank, S_JOB_ID, &job) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_UID, &uid) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_GID, &gid) != ESPANK_SUCCESS)
		return -1;
	/* S_SLURM_RESTART_COUNT cannot be asked for here. */
	(void)snprintf(path, sizeof(path), "%s/%s.%u.%s", argv[0], getenv("SLURM_JOB_USER"), job,
		       getenv("SLURM_JOB_RESTART_COUNT"));
	if (mkdir(path, 0700) != 0 || chown(path, uid, gid) != 0) {
		slurm_error("job_folder: %s: %m", path);
		return -1;
	}
	return 0;
}

static int remove_one(const char *path, const struct stat *facts, int kind, struct FTW *place)
{
	(void)facts;
	(void)kind;
	(void)place;
	return remove(path);
}

/* The epilog of a job that is requeued is told of the next restart already: it removes any. */
int slurm_spank_job_epilog(spank_t spank, int argc, char **argv)
{
	char pattern[PATH_MAX];
	glob_t folders = { 0 };
	uint32_t job = 0;

	(void)argc;
	if (spank_get_item(spank, S_JOB_ID, &job) != ESPANK_SUCCESS)
		return -1;
	(void)snprintf(pattern, sizeof(pattern), "%s/%s.%u.*", argv[0], getenv("SLURM_JOB_USER"),
		       job);
	if (glob(pattern, 0, NULL, &folders) == 0)
		for (size_t i = 0; i < folders.gl_pathc; i++)
			if (nftw(folders.gl_pathv[i], remove_one, 64, FTW_DEPTH | FTW_PHYS) != 0)
				slurm_error("job_folder: %s: %m", folders.gl_pathv[i]);
	globfree(&folders);
	return 0;
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv)
{
	char path[PATH_MAX], user[64], restarts[16] = "0";
	uint32_t job = 0;

	(void)argc;
	/* The batch step of a job's first run has no count. */
	(void)spank_getenv(spank, "SLURM_RESTART_COUNT", restarts, sizeof(restarts));
	if (spank_get_item(spank, S_JOB_ID, &job) != ESPANK_SUCCESS ||
	    spank_getenv(spank, "SLURM_JOB_USER", user, sizeof(user)) != ESPANK_SUCCESS)
		return -1;
	(void)snprintf(path, sizeof(path), "%s/%s.%u.%s", argv[0], user, job, restarts);
	return spank_setenv(spank, "SLURM_TMPDIR", path, 1) == ESPANK_SUCCESS ? 0 : -1;
}
