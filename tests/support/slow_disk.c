/*
 * slow_disk FILE FOLDER BYTES: show FILE as FOLDER/disk, which takes BYTES a second when it is
 * written. A filesystem in it, mounted by a loop device, is on a slow disk.
 */
#define FUSE_USE_VERSION 35
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static int file;
static long rate;

static int is_disk(const char *path)
{
	return strcmp(path, "/disk") == 0;
}

static int disk_getattr(const char *path, struct stat *facts, struct fuse_file_info *open_file)
{
	(void)open_file;
	if (is_disk(path))
		return fstat(file, facts) ? -errno : 0;
	facts->st_mode = S_IFDIR | 0755;
	facts->st_nlink = 2;
	return strcmp(path, "/") == 0 ? 0 : -ENOENT;
}

static int disk_open(const char *path, struct fuse_file_info *open_file)
{
	(void)open_file;
	return is_disk(path) ? 0 : -ENOENT;
}

static int disk_read(const char *path, char *data, size_t size, off_t offset,
		     struct fuse_file_info *open_file)
{
	const ssize_t length = pread(file, data, size, offset);

	(void)path;
	(void)open_file;
	return length < 0 ? -errno : (int)length;
}

/* Requests come one after the other: this program has one thread. */
static int disk_write(const char *path, const char *data, size_t size, off_t offset,
		      struct fuse_file_info *open_file)
{
	const long long nanoseconds = (long long)size * 1000000000 / rate;
	const struct timespec pause = { nanoseconds / 1000000000, nanoseconds % 1000000000 };
	const ssize_t length = pwrite(file, data, size, offset);

	(void)path;
	(void)open_file;
	(void)nanosleep(&pause, NULL);
	return length < 0 ? -errno : (int)length;
}

static const struct fuse_operations operations = {
	.getattr = disk_getattr,
	.open = disk_open,
	.read = disk_read,
	.write = disk_write,
};

int main(int argc, char **argv)
{
	char *arguments[] = { argv[0], argc > 2 ? argv[2] : "", "-s", NULL };

	if (argc < 4) {
		(void)fprintf(stderr, "usage: %s FILE FOLDER BYTES\n", argv[0]);
		return 2;
	}
	rate = strtol(argv[3], NULL, 10);
	file = open(argv[1], O_RDWR);
	if (file < 0 || rate <= 0) {
		perror(argv[1]);
		return 1;
	}
	return fuse_main(3, arguments, &operations, NULL);
}
