/*
 * restless FOLDER MOUNTPOINT: show FOLDER, to be read by all, with another inode number and another
 * time of change at each look, as filesystems of FUSE may that keep neither; folders with another
 * time of modification, too. Folders can be made in it. It says that it is larger than any disk.
 */
#define FUSE_USE_VERSION 35
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static const char *top;
static unsigned long looks;

static const char *below(const char *path)
{
	static char whole[PATH_MAX];

	(void)snprintf(whole, sizeof(whole), "%s%s", top, path);
	return whole;
}

static void *restless_init(struct fuse_conn_info *connection, struct fuse_config *config)
{
	(void)connection;
	config->use_ino = 1;
	config->entry_timeout = 0;
	config->attr_timeout = 0;
	return NULL;
}

static int restless_getattr(const char *path, struct stat *facts, struct fuse_file_info *file)
{
	(void)file;
	if (lstat(below(path), facts))
		return -errno;
	looks++;
	facts->st_ino = looks * (unsigned long)getpid();
	facts->st_ctim.tv_nsec = (long)(looks % 1000000000);
	if (S_ISDIR(facts->st_mode))
		facts->st_mtim = facts->st_ctim;
	return 0;
}

static int restless_readdir(const char *path, void *answer, fuse_fill_dir_t fill, off_t offset,
			    struct fuse_file_info *file, enum fuse_readdir_flags flags)
{
	const struct dirent *entry = NULL;
	DIR *folder = opendir(below(path));

	(void)offset;
	(void)file;
	(void)flags;
	if (!folder)
		return -errno;
	while ((entry = readdir(folder)))
		(void)fill(answer, entry->d_name, NULL, 0, 0);
	return closedir(folder) ? -errno : 0;
}

static int restless_open(const char *path, struct fuse_file_info *file)
{
	const int descriptor = open(below(path), O_RDONLY);

	file->fh = (uint64_t)descriptor;
	return descriptor < 0 ? -errno : 0;
}

static int restless_read(const char *path, char *data, size_t size, off_t offset,
			 struct fuse_file_info *file)
{
	const ssize_t length = pread((int)file->fh, data, size, offset);

	(void)path;
	return length < 0 ? -errno : (int)length;
}

static int restless_release(const char *path, struct fuse_file_info *file)
{
	(void)path;
	return close((int)file->fh) ? -errno : 0;
}

static int restless_mkdir(const char *path, mode_t mode)
{
	return mkdir(below(path), mode) ? -errno : 0;
}

static int restless_statfs(const char *path, struct statvfs *facts)
{
	if (statvfs(below(path), facts))
		return -errno;
	facts->f_blocks = 1UL << 50;
	return 0;
}

static const struct fuse_operations operations = {
	.init = restless_init,
	.getattr = restless_getattr,
	.readdir = restless_readdir,
	.open = restless_open,
	.read = restless_read,
	.release = restless_release,
	.mkdir = restless_mkdir,
	.statfs = restless_statfs,
};

int main(int argc, char **argv)
{
	char *arguments[] = { argv[0], argc > 2 ? argv[2] : "", "-s", "-o", "allow_other", NULL };

	if (argc < 3) {
		(void)fprintf(stderr, "usage: %s FOLDER MOUNTPOINT\n", argv[0]);
		return 2;
	}
	top = realpath(argv[1], NULL);
	/* Root alone may let others in. */
	return top ? fuse_main(getuid() ? 3 : 5, arguments, &operations, NULL) : 1;
}
