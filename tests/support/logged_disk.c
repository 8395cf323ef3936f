/*
 * logged_disk FILE FOLDER LOG: show FILE as FOLDER/disk, and log what is written to it. Of a
 * filesystem in it, mounted by a loop device, is known what its disk had at each moment.
 *
 * A write is logged as its offset and length, of 8 bytes each, and its data; a flush, after which
 * the disk keeps what was written before, as two numbers -1.
 */
#include "shown_disk.h"
#include <stdint.h>
#include <sys/uio.h>

static int log_file;

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
	DISK_OPERATIONS,
	.write = disk_write,
	.fsync = disk_fsync,
};

/* The log has the order in which the disk got the writes. */
int main(int argc, char **argv)
{
	if (argc < 4) {
		(void)fprintf(stderr, "usage: %s FILE FOLDER LOG\n", argv[0]);
		return 2;
	}
	log_file = open(argv[3], O_WRONLY | O_CREAT | O_APPEND, 0600);
	if (log_file < 0) {
		perror(argv[3]);
		return 1;
	}
	return show_disk(argv, "-f", &operations);
}
