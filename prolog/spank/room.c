/*
 * A user's room beneath /run: a small filesystem of the user's own, so that nobody can fill /run.
 * It is mounted before the first of the user's jobs that stages here, and removed by root's
 * clean-up (stager/node/runtime.py) after the last one.
 *
 * With job_container/tmpfs each job has a mount namespace of its own. There the room is mounted in
 * slurmd's namespace, where the user's other jobs and the clean-up find it, and attached to the
 * job's. Where that fails, the room is a plain folder, and the job goes on.
 */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#include "stage.h"

/* Not in the headers of older systems. The numbers are those of all architectures. */
#ifndef SYS_open_tree
#define SYS_open_tree 428
#define SYS_move_mount 429
#endif
#ifndef OPEN_TREE_CLONE
#define OPEN_TREE_CLONE 1
#endif
#ifndef MOVE_MOUNT_F_EMPTY_PATH
#define MOVE_MOUNT_F_EMPTY_PATH 4
#endif

enum {
	LOCK_LIMIT = 5,	  /* seconds */
	ATTACH_LIMIT = 5, /* seconds */
	PAUSE_NS = 2 * 1000 * 1000,
};

#define OWN_NAMESPACE "/proc/self/ns/mnt"

static ino_t inode_of(const char *path)
{
	struct stat facts;

	return stat(path, &facts) == 0 ? facts.st_ino : 0;
}

/* In slurmd: note where rooms are to be mounted. */
void stage_room_note_namespace(void)
{
	FILE *note = fopen(STAGE_RUN_SLURMD, "we");

	if (note)
		(void)fprintf(note, "%d %llu\n", (int)getpid(),
			      (unsigned long long)inode_of(OWN_NAMESPACE));
	if (!note || fclose(note) != 0)
		slurm_error("stage: " STAGE_RUN_SLURMD " cannot be written: %s", strerror(errno));
}

/*
 * Opens slurmd's namespace. -1 if it cannot be opened, or is another one by now: the inode tells,
 * as a process of another user may have slurmd's id.
 */
static int open_slurmd_namespace(int pid, ino_t inode)
{
	char path[64];
	struct stat facts;
	int fd = -1;

	(void)snprintf(path, sizeof(path), "/proc/%d/ns/mnt", pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd >= 0 && (fstat(fd, &facts) != 0 || facts.st_ino != inode)) {
		(void)close(fd);
		return -1;
	}
	return fd;
}

/* Reads slurmd's note; false if there is none. */
static bool read_note(int *pid, ino_t *inode)
{
	FILE *note = fopen(STAGE_RUN_SLURMD, "re");
	char line[64] = "";
	char *rest = NULL;

	if (!note)
		return false;
	if (fgets(line, sizeof(line), note)) {
		*pid = (int)strtol(line, &rest, 10);
		*inode = (ino_t)strtoull(rest, NULL, 10);
	}
	(void)fclose(note); /* nothing was written */
	return *inode != 0;
}

/* Waits for the lock for a limited time. -1 if it was not got: then the job goes on without. */
int stage_room_lock(void)
{
	const struct timespec pause = { 0, PAUSE_NS };
	const time_t begun = time(NULL);
	const int fd = open(STAGE_RUN_LOCK, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);

	while (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0) {
		if (time(NULL) - begun > LOCK_LIMIT) {
			slurm_error("stage: " STAGE_RUN_LOCK " is held by another process for "
				    "longer than %d s; end that process",
				    LOCK_LIMIT);
			(void)close(fd);
			return -1;
		}
		(void)nanosleep(&pause, NULL);
	}
	return fd;
}

/* The device of the filesystem that is at `path`, 0 if that is not to be known. */
static dev_t device_of(const char *path)
{
	struct statx facts;

	if (statx(AT_FDCWD, path, STAGE_STATX, STATX_TYPE, &facts) != 0)
		return 0;
	return makedev(facts.stx_dev_major, facts.stx_dev_minor);
}

static bool mount_room(const char *path, uid_t uid, gid_t gid)
{
	char options[128];

	if (mkdir(path, 0700) != 0 && errno != EEXIST)
		return false;
	if (device_of(path) != device_of(STAGE_RUN))
		return true; /* by an earlier job, or the user has mounted something over it */
	(void)snprintf(options, sizeof(options), STAGE_ROOM_SIZE ",mode=0700,uid=%u,gid=%u",
		       (unsigned int)uid, (unsigned int)gid);
	/* What is below is root's, so that nobody gets hold of it before the mount or after it. */
	return lchown(path, 0, 0) == 0 &&
	       mount("slurm-stage", path, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options) == 0;
}

/* In a process of its own: mounts the room in slurmd's namespace and attaches it to the job's. */
static bool mount_and_attach(const char *path, uid_t uid, gid_t gid, int slurmd)
{
	const int own = open(OWN_NAMESPACE, O_RDONLY | O_CLOEXEC);
	const dev_t here = device_of(path);
	dev_t there = 0;
	int tree = -1;

	if (own < 0 || setns(slurmd, CLONE_NEWNS) != 0 || !mount_room(path, uid, gid))
		return false;
	there = device_of(path);
	tree = (int)syscall(SYS_open_tree, AT_FDCWD, path,
			    OPEN_TREE_CLONE | O_CLOEXEC | AT_SYMLINK_NOFOLLOW);
	if (tree < 0 || setns(own, CLONE_NEWNS) != 0)
		return false;
	/* A copy of slurmd's mounts, made when the job began, may have the same room. */
	return here == there ||
	       syscall(SYS_move_mount, tree, "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH) == 0;
}

static bool attach_in_child(const char *path, uid_t uid, gid_t gid, int slurmd)
{
	const pid_t pid = fork();

	if (pid == 0)
		_exit(mount_and_attach(path, uid, gid, slurmd) ? 0 : 1);
	return pid > 0 && stage_child_wait(pid, ATTACH_LIMIT) == 0;
}

static bool make_bounded(const char *path, uid_t uid, gid_t gid)
{
	int pid = 0;
	ino_t inode = 0;
	int slurmd = -1;
	bool done = false;

	if (!read_note(&pid, &inode) || inode == inode_of(OWN_NAMESPACE))
		return mount_room(path, uid, gid);
	slurmd = open_slurmd_namespace(pid, inode);
	if (slurmd < 0)
		return false;
	done = attach_in_child(path, uid, gid, slurmd);
	(void)close(slurmd);
	return done;
}

/*
 * Makes the user's room. It is `bounded` where root's clean-up will remove it: elsewhere, and where
 * it cannot be mounted, it is a plain folder.
 */
void stage_room_make(uid_t uid, gid_t gid, bool bounded)
{
	char path[64];

	(void)snprintf(path, sizeof(path), STAGE_RUN_USER, (unsigned int)uid);
	if (bounded && make_bounded(path, uid, gid))
		return;
	if (bounded)
		slurm_error("stage: no filesystem can be mounted at %s: %s; the user can fill /run",
			    path, strerror(errno));
	if (!stage_make_folder(STAGE_RUN, 0755) || (mkdir(path, 0700) != 0 && errno != EEXIST) ||
	    (device_of(path) == device_of(STAGE_RUN) && lchown(path, uid, gid) != 0))
		slurm_error("stage: %s cannot be made: %s", path, strerror(errno));
}
