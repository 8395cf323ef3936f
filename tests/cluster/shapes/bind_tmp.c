/*
 * A site's SPANK plugin that gives each job its own /tmp and /dev/shm, as auto_tmpdir does: folders
 * FOLDER/JOB/tmp and FOLDER/JOB/shm, made by job_prolog and removed by job_epilog, which each
 * step's slurmstepd binds over the two in init_post_opt, in a mount namespace of its own.
 *
 * plugstack.conf: required bind_tmp.so FOLDER
 */
#include <ftw.h>
#include <limits.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(bind_tmp, 1)

static const char *const names[][2] = { { "tmp", "/tmp" }, { "shm", "/dev/shm" } };
enum { NAMES = sizeof(names) / sizeof(names[0]) };

static int job_of(spank_t spank, uint32_t *job)
{
	return spank_get_item(spank, S_JOB_ID, job) == ESPANK_SUCCESS ? 0 : -1;
}

int slurm_spank_job_prolog(spank_t spank, int argc, char **argv)
{
	char path[PATH_MAX];
	uint32_t job = 0;
	uid_t uid = 0;
	gid_t gid = 0;

	(void)argc;
	if (job_of(spank, &job) != 0 || spank_get_item(spank, S_JOB_UID, &uid) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_GID, &gid) != ESPANK_SUCCESS)
		return -1;
	(void)snprintf(path, sizeof(path), "%s/%u", argv[0], job);
	if (mkdir(path, 0700) != 0)
		goto fault;
	for (int i = 0; i < NAMES; i++) {
		(void)snprintf(path, sizeof(path), "%s/%u/%s", argv[0], job, names[i][0]);
		if (mkdir(path, 0700) != 0 || chown(path, uid, gid) != 0)
			goto fault;
	}
	return 0;
fault:
	slurm_error("bind_tmp: %s: %m", path);
	return -1;
}

int slurm_spank_init_post_opt(spank_t spank, int argc, char **argv)
{
	char path[PATH_MAX];
	uint32_t job = 0;

	(void)argc;
	if (!spank_remote(spank))
		return 0;
	if (job_of(spank, &job) != 0 || unshare(CLONE_NEWNS) != 0 ||
	    mount("none", "/", NULL, MS_REC | MS_SLAVE, NULL) != 0) {
		slurm_error("bind_tmp: no mount namespace: %m");
		return -1;
	}
	for (int i = 0; i < NAMES; i++) {
		(void)snprintf(path, sizeof(path), "%s/%u/%s", argv[0], job, names[i][0]);
		if (mount(path, names[i][1], NULL, MS_BIND, NULL) != 0) {
			slurm_error("bind_tmp: %s over %s: %m", path, names[i][1]);
			return -1;
		}
	}
	return spank_setenv(spank, "TMPDIR", "/tmp", 1) == ESPANK_SUCCESS ? 0 : -1;
}

static int remove_one(const char *path, const struct stat *facts, int kind, struct FTW *place)
{
	(void)facts;
	(void)kind;
	(void)place;
	return remove(path);
}

int slurm_spank_job_epilog(spank_t spank, int argc, char **argv)
{
	char path[PATH_MAX];
	uint32_t job = 0;

	(void)argc;
	if (job_of(spank, &job) != 0)
		return -1;
	(void)snprintf(path, sizeof(path), "%s/%u", argv[0], job);
	if (nftw(path, remove_one, 64, FTW_DEPTH | FTW_PHYS) != 0)
		slurm_error("bind_tmp: %s: %m", path);
	return 0;
}
