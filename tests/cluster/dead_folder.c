/*
 * dead_folder MOUNTPOINT [OPTIONS]: mount a filesystem that takes every request and answers none,
 * as a remote filesystem whose server is gone. Who looks at it waits in the kernel and cannot be
 * killed. Runs as an ordinary user, by fusermount3; OPTIONS are those of mount, as allow_other.
 */
#define FUSE_USE_VERSION 35
#include <fuse_lowlevel.h>
#include <stdio.h>

static void ignore_lookup(fuse_req_t request, fuse_ino_t parent, const char *name)
{
	(void)request;
	(void)parent;
	(void)name;
}

static void ignore_getattr(fuse_req_t request, fuse_ino_t node, struct fuse_file_info *file)
{
	(void)request;
	(void)node;
	(void)file;
}

static void ignore_access(fuse_req_t request, fuse_ino_t node, int mask)
{
	(void)request;
	(void)node;
	(void)mask;
}

static void ignore_statfs(fuse_req_t request, fuse_ino_t node)
{
	(void)request;
	(void)node;
}

static const struct fuse_lowlevel_ops operations = {
	.lookup = ignore_lookup,
	.getattr = ignore_getattr,
	.opendir = ignore_getattr,
	.access = ignore_access,
	.statfs = ignore_statfs,
};

int main(int argc, char **argv)
{
	char *arguments[] = { argv[0], "-o", argc > 2 ? argv[2] : "fsname=dead", NULL };
	struct fuse_args options = FUSE_ARGS_INIT(3, arguments);
	struct fuse_session *session = NULL;

	if (argc < 2) {
		(void)fprintf(stderr, "usage: %s MOUNTPOINT [OPTIONS]\n", argv[0]);
		return 2;
	}
	session = fuse_session_new(&options, &operations, sizeof(operations), NULL);
	if (!session || fuse_session_mount(session, argv[1]) != 0)
		return 1;
	(void)puts("mounted");
	(void)fflush(stdout);
	return fuse_session_loop(session) ? 1 : 0;
}
