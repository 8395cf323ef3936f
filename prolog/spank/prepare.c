/*
 * On every node, as root, before the helper's rank starts: run the program that makes the user's
 * folders, the same one that a site's Prolog may run. It gets a uid and the site's stage.toml, and
 * touches no path that a user named. If it fails, the rank finds the folder missing and says so.
 *
 * The ranks wait for that program, and starting it takes longer than all else that the plugin does.
 * So it leaves a note of the folders that it made, and is not run again while the note is valid.
 */
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include "stage.h"

#ifndef STATX_ATTR_MOUNT_ROOT /* before Linux 5.8 */
#define STATX_ATTR_MOUNT_ROOT 0x2000
#endif

/* Whether the file is the version that the note names: by device, inode and ctime. */
static bool is_version(const char *path, const char *version)
{
	char text[96];
	struct stat facts;

	if (stat(path, &facts) != 0)
		return false;
	(void)snprintf(text, sizeof(text), "%llu %llu %lld", (unsigned long long)facts.st_dev,
		       (unsigned long long)facts.st_ino,
		       facts.st_ctim.tv_sec * 1000000000LL + facts.st_ctim.tv_nsec);
	return strcmp(text, version) == 0;
}

/*
 * Whether `parent` is root's, only root can write in it, and it has the user's own folder. The user
 * may have mounted a filesystem there that does not answer, so the kernel must not ask it.
 */
static bool holds_folder_of(const char *parent, uid_t uid)
{
	char path[PATH_MAX];
	struct statx above;
	struct statx own;

	if (statx(AT_FDCWD, parent, STAGE_STATX, STATX_TYPE | STATX_MODE | STATX_UID, &above) !=
		    0 ||
	    above.stx_uid != 0 || above.stx_mode != (S_IFDIR | 0755) ||
	    (above.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0)
		return false;
	if (snprintf(path, sizeof(path), "%s/%u", parent, (unsigned int)uid) >= (int)sizeof(path))
		return false;
	return statx(AT_FDCWD, path, STAGE_STATX, STATX_TYPE | STATX_UID, &own) == 0 &&
	       S_ISDIR(own.stx_mode) && own.stx_uid == uid;
}

/* Whether an earlier run's note is valid: stage.toml is unchanged and all folders exist. */
static bool already_prepared(uid_t uid, const char *config)
{
	char path[64];
	char *line = NULL;
	size_t size = 0;
	size_t lines = 0;
	bool good = true;
	ssize_t length = 0;
	FILE *note = NULL;

	(void)snprintf(path, sizeof(path), STAGE_RUN_PREPARED, (unsigned int)uid);
	note = fopen(path, "re");
	if (!note)
		return false;
	while (good && (length = getline(&line, &size, note)) > 0) {
		line[length - 1] = '\0'; /* the newline; a truncated line names no folder */
		good = lines++ == 0 ? is_version(config, line) : holds_folder_of(line, uid);
	}
	free(line);
	(void)fclose(note); /* nothing was written */
	return good && lines > 0;
}

/* In slurmd: root's folders beneath the roots, so that no user can take their names first. */
void stage_prepare_roots(const struct stage_config *config)
{
	const char *const argv[] = { STAGE_PROGRAM(config, "stager.node.prolog"), NULL };
	const int code =
		stage_child_run((char *const *)argv, stage_clean_environment, STAGE_PREPARE_LIMIT);

	stage_child_complain("making the folders of", "root", code, STAGE_PREPARE_LIMIT, config);
}

/* Marks the job and gives its user a room; the lock keeps the end of another job from removing it.
 */
static void begin(spank_t spank, uid_t uid)
{
	const int lock = stage_room_lock();
	gid_t gid = 0;

	if (spank_get_item(spank, S_JOB_GID, &gid) == ESPANK_SUCCESS)
		stage_room_make(uid, gid, stage_mark(spank));
	else
		slurm_error("stage: Slurm does not give the plugin the job's group");
	if (lock >= 0)
		(void)close(lock);
}

/* Whether this task may wait until a rank of the helper's step tells it, here, how that ended. */
static bool may_wait(spank_t spank)
{
	char start[2] = "";
	uint32_t task = 0;
	const spank_err_t got = spank_getenv(spank, STAGE_LIST_ENV, start, sizeof(start));

	return ((got == ESPANK_SUCCESS && start[0]) || got == ESPANK_NOSPACE ||
		stage_options_count() > 0) &&
	       spank_get_item(spank, S_TASK_GLOBAL_ID, &task) == ESPANK_SUCCESS && task > 0;
}

void stage_prepare(spank_t spank, const struct stage_config *config)
{
	uid_t uid = 0;
	char uid_text[24];
	int code = 0;

	if (!stage_options_helper() && !may_wait(spank))
		return;
	if (spank_get_item(spank, S_JOB_UID, &uid) != ESPANK_SUCCESS) {
		slurm_error("stage: Slurm does not give the plugin the job's user");
		return;
	}
	if (uid == 0)
		return; /* root stages nothing */
	begin(spank, uid);
	/* A site's plugin may give each step its own mounts: a room made later is not there. */
	if (!stage_options_helper())
		return;
	if (already_prepared(uid, config->config))
		return;
	(void)snprintf(uid_text, sizeof(uid_text), "%u", (unsigned int)uid);
	const char *const argv[] = { STAGE_PROGRAM(config, "stager.node.prolog"), uid_text, NULL };
	code = stage_child_run((char *const *)argv, stage_clean_environment, STAGE_PREPARE_LIMIT);
	stage_child_complain("making the folders of uid", uid_text, code, STAGE_PREPARE_LIMIT,
			     config);
}

/*
 * In the prolog, before any step: starts this node's part of the filesystem of the job's disks.
 * That outlives steps, as nothing does that a step starts. What fails is in a note for the ranks.
 */
void stage_start_shared(spank_t spank, const struct stage_config *config)
{
	const char *node = getenv("SLURMD_NODENAME");
	const char *nodes = getenv("SLURM_NODELIST");
	uint32_t job = 0;
	uid_t uid = 0;
	char job_text[16];
	char uid_text[24];
	int code = 0;

	if (!getenv(STAGE_SHARED_PROLOG_ENV))
		return;
	if (!node || !nodes || spank_get_item(spank, S_JOB_ID, &job) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_UID, &uid) != ESPANK_SUCCESS) {
		slurm_error("stage: Slurm does not give the prolog the job's nodes and user");
		return;
	}
	if (uid == 0)
		return; /* root stages nothing */
	(void)snprintf(job_text, sizeof(job_text), "%u", job);
	(void)snprintf(uid_text, sizeof(uid_text), "%u", (unsigned int)uid);
	const char *const argv[] = { STAGE_PROGRAM(config, "stager.node.prolog"),
				     "--job",
				     job_text,
				     "--shared",
				     node,
				     nodes,
				     uid_text,
				     NULL };
	code = stage_child_run((char *const *)argv, stage_clean_environment, STAGE_SHARED_LIMIT);
	stage_child_complain("starting the filesystem of job", job_text, code, STAGE_SHARED_LIMIT,
			     config);
}
