/*
 * slow_disk FILE FOLDER BYTES: show FILE as FOLDER/disk, which takes BYTES a second when it is
 * written. A filesystem in it, mounted by a loop device, is on a slow disk.
 */
#include "shown_disk.h"
#include <stdlib.h>
#include <time.h>

static long rate;

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
	DISK_OPERATIONS,
	.write = disk_write,
};

int main(int argc, char **argv)
{
	if (argc < 4 || (rate = strtol(argv[3], NULL, 10)) <= 0) {
		(void)fprintf(stderr, "usage: %s FILE FOLDER BYTES\n", argv[0]);
		return 2;
	}
	return show_disk(argv, NULL, &operations);
}
