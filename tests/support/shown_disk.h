/*
 * A file that is shown as FOLDER/disk by FUSE, so that a filesystem in it can be mounted by a loop
 * device. What happens when it is written is the program's that includes this. It has one thread:
 * requests come one after the other.
 */
#define FUSE_USE_VERSION 35
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* What it does besides writing. */
#define DISK_OPERATIONS .getattr = disk_getattr, .open = disk_open, .read = disk_read

static int file;

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

/* Shows argv[1] in argv[2], until it is unmounted; as a daemon, unless the option "-f" is given. */
static int show_disk(char **argv, char *option, const struct fuse_operations *operations)
{
	char *arguments[] = { argv[0], argv[2], "-s", option, NULL };

	file = open(argv[1], O_RDWR);
	if (file < 0) {
		perror(argv[1]);
		return 1;
	}
	return fuse_main(option ? 4 : 3, arguments, operations, NULL);
}
