/*
 * logged_disk FILE FOLDER LOG: show FILE as FOLDER/disk, and log what is written to it. Of a
 * filesystem in it, mounted by a loop device, is known what its disk had at each moment.
 *
 * A write is logged as its offset and length, of 8 bytes each, and its data; a flush, after which
 * the disk keeps what was written before, as two numbers -1.
 */
#define FUSE_USE_VERSION 35
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static int file;
static int log_file;

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

static int logged(int64_t offset, int64_t length, const char *data)
{
	int64_t head[] = { offset, length };
	const struct iovec parts[] = {
		{ head, sizeof(head) },
		{ (void *)data, length > 0 ? (size_t)length : 0 },
	};

	return writev(log_file, parts, 2) < 0 ? -errno : 0;
}

static int disk_write(const char *path, const char *data, size_t size, off_t offset,
		      struct fuse_file_info *open_file)
{
	const ssize_t length = pwrite(file, data, size, offset);

	(void)path;
	(void)open_file;
	if (length < 0)
		return -errno;
	return logged(offset, length, data) ? -EIO : (int)length;
}

static int disk_fsync(const char *path, int data_only, struct fuse_file_info *open_file)
{
	(void)path;
	(void)data_only;
	(void)open_file;
	return logged(-1, -1, NULL);
}

static const struct fuse_operations operations = {
	.getattr = disk_getattr,
	.open = disk_open,
	.read = disk_read,
	.write = disk_write,
	.fsync = disk_fsync,
};

/* One thread: the log has the order in which the disk got the writes. */
int main(int argc, char **argv)
{
	char *arguments[] = { argv[0], argc > 2 ? argv[2] : "", "-s", "-f", NULL };

	if (argc < 4) {
		(void)fprintf(stderr, "usage: %s FILE FOLDER LOG\n", argv[0]);
		return 2;
	}
	file = open(argv[1], O_RDWR);
	log_file = open(argv[3], O_WRONLY | O_CREAT | O_APPEND, 0600);
	if (file < 0 || log_file < 0) {
		perror(argv[1]);
		return 1;
	}
	return fuse_main(4, arguments, &operations, NULL);
}
