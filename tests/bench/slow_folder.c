/*
 * slow_folder FOLDER MOUNTPOINT MICROSECONDS: show FOLDER at MOUNTPOINT with the latency of remote
 * storage. Each request is answered MICROSECONDS later. Attributes that came with a listing or a
 * look-up are valid for a second, as in network filesystems. Read only, unless OPTIONS, the mount
 * options that may follow, lack "ro": then files that exist can be written. Behind them may follow
 * RATE and CLOCK: all that have this file read RATE bytes a second together.
 */
#define FUSE_USE_VERSION 35
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static int folder;
static struct timespec latency;
static int64_t rate;
/* When all that was asked for so far has been read: nanoseconds of the monotonic clock. */
static _Atomic int64_t *busy_until;

/* One request to the server. */
static void ask(void)
{
	(void)nanosleep(&latency, NULL);
}

/* The storage reads for one after the other, and for nobody in advance. */
static void wait_for_bytes(int64_t bytes)
{
	int64_t begun, end;
	struct timespec until;

	(void)clock_gettime(CLOCK_MONOTONIC, &until);
	begun = atomic_load(busy_until);
	do {
		const int64_t now = until.tv_sec * 1000000000 + until.tv_nsec;

		end = (begun > now ? begun : now) + bytes * 1000000000 / rate;
	} while (!atomic_compare_exchange_weak(busy_until, &begun, end));
	until.tv_sec = end / 1000000000;
	until.tv_nsec = end % 1000000000;
	(void)clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
}

static const char *inner(const char *path)
{
	return path[1] ? path + 1 : ".";
}

static int slow_getattr(const char *path, struct stat *facts, struct fuse_file_info *file)
{
	(void)file;
	ask();
	return fstatat(folder, inner(path), facts, AT_SYMLINK_NOFOLLOW) ? -errno : 0;
}

static int slow_readlink(const char *path, char *target, size_t size)
{
	ssize_t length;

	ask();
	length = readlinkat(folder, inner(path), target, size - 1);
	if (length < 0)
		return -errno;
	target[length] = '\0';
	return 0;
}

static int slow_open(const char *path, struct fuse_file_info *file)
{
	const int descriptor = openat(folder, inner(path), file->flags & ~O_NOFOLLOW);

	ask();
	if (descriptor < 0)
		return -errno;
	file->fh = (uint64_t)descriptor;
	return 0;
}

static int slow_read(const char *path, char *data, size_t size, off_t offset,
		     struct fuse_file_info *file)
{
	const ssize_t length = pread((int)file->fh, data, size, offset);

	(void)path;
	ask();
	if (rate && length > 0)
		wait_for_bytes(length);
	return length < 0 ? -errno : (int)length;
}

static int slow_write(const char *path, const char *data, size_t size, off_t offset,
		      struct fuse_file_info *file)
{
	const ssize_t length = pwrite((int)file->fh, data, size, offset);

	(void)path;
	ask();
	return length < 0 ? -errno : (int)length;
}

static int slow_release(const char *path, struct fuse_file_info *file)
{
	(void)path;
	return close((int)file->fh) ? -errno : 0;
}

/* The whole listing, with attributes, in one answer. */
static int slow_readdir(const char *path, void *list, fuse_fill_dir_t fill, off_t offset,
			struct fuse_file_info *file, enum fuse_readdir_flags flags)
{
	const int descriptor = openat(folder, inner(path), O_RDONLY | O_DIRECTORY);
	DIR *entries = descriptor < 0 ? NULL : fdopendir(descriptor);

	(void)offset;
	(void)file;
	(void)flags;
	ask();
	if (!entries)
		return -errno;
	for (struct dirent *entry = readdir(entries); entry; entry = readdir(entries)) {
		struct stat facts;

		if (fstatat(descriptor, entry->d_name, &facts, AT_SYMLINK_NOFOLLOW) == 0)
			(void)fill(list, entry->d_name, &facts, 0, FUSE_FILL_DIR_PLUS);
	}
	return closedir(entries) ? -errno : 0;
}

/* Inodes are those of the folder, the same on all nodes. */
static void *slow_init(struct fuse_conn_info *connection, struct fuse_config *config)
{
	(void)connection;
	config->use_ino = 1;
	return NULL;
}

static const struct fuse_operations operations = {
	.init = slow_init,
	.getattr = slow_getattr,
	.readlink = slow_readlink,
	.open = slow_open,
	.read = slow_read,
	.write = slow_write,
	.release = slow_release,
	.readdir = slow_readdir,
};

int main(int argc, char **argv)
{
	char *arguments[] = { argv[0], argc > 2 ? argv[2] : "", "-o",
			      argc > 4 ? argv[4]
				       : "allow_other,default_permissions,ro,max_threads=64",
			      NULL };
	long microseconds;

	if (argc < 4) {
		(void)fprintf(stderr,
			      "usage: %s FOLDER MOUNTPOINT MICROSECONDS "
			      "[OPTIONS [RATE CLOCK]]\n",
			      argv[0]);
		return 2;
	}
	folder = open(argv[1], O_RDONLY | O_DIRECTORY);
	if (folder < 0) {
		perror(argv[1]);
		return 1;
	}
	microseconds = strtol(argv[3], NULL, 10);
	latency.tv_sec = microseconds / 1000000;
	latency.tv_nsec = microseconds % 1000000 * 1000;
	if (argc > 6) {
		const int file = open(argv[6], O_RDWR | O_CREAT, 0600);
		void *map = MAP_FAILED;

		if (file >= 0 && ftruncate(file, sizeof *busy_until) == 0)
			map = mmap(NULL, sizeof *busy_until, PROT_READ | PROT_WRITE, MAP_SHARED,
				   file, 0);
		if (map == MAP_FAILED) {
			perror(argv[6]);
			return 1;
		}
		busy_until = map;
		rate = strtol(argv[5], NULL, 10);
	}
	(void)prctl(PR_SET_TIMERSLACK, 1); /* inherited by threads started later */
	return fuse_main(4, arguments, &operations, NULL);
}
