/*
 * A SPANK plugin that does to a task what pyxis does, for the test of the order in plugstack.conf:
 * with --image=IMAGE, each task needs that file in task_init, and goes on in a mount namespace
 * of its own. There the folder /opt is empty, as in an image, so that slurm-stage is not found.
 *
 * With the argument private_tmp it does what plugins for private folders do, without --image: each
 * task has a mount namespace of its own, with its own /tmp, from task_init_privileged on.
 */
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(enter_container, 1)

static const char *image;

static int take_image(int val, const char *text, int remote)
{
	(void)val;
	(void)remote;
	image = strdup(text);
	return image ? 0 : -1;
}

static struct spank_option option = {
	"image", "IMAGE", "start tasks in a container", 1, 0, take_image,
};

int slurm_spank_init(spank_t spank, int argc, char **argv)
{
	(void)argc;
	(void)argv;
	if (spank_context() == S_CTX_SLURMD)
		return 0;
	return spank_option_register(spank, &option) == ESPANK_SUCCESS ? 0 : -1;
}

/* Maps an id to itself in the new user namespace. */
static int map_id(const char *path, unsigned int id)
{
	char line[64];
	const int length = snprintf(line, sizeof(line), "%u %u 1", id, id);
	const int fd = open(path, O_WRONLY | O_CLOEXEC);

	return fd >= 0 && write(fd, line, (size_t)length) == length ? close(fd) : -1;
}

int slurm_spank_task_init_privileged(spank_t spank, int argc, char **argv)
{
	(void)spank;
	if (argc == 0 || strcmp(argv[0], "private_tmp") != 0)
		return 0;
	if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_SLAVE, NULL) != 0 ||
	    mount("none", "/tmp", "tmpfs", 0, "mode=1777") != 0) {
		slurm_error("private /tmp: %m");
		return -1;
	}
	return 0;
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv)
{
	const unsigned int uid = getuid();

	(void)spank;
	(void)argc;
	(void)argv;
	if (!image)
		return 0;
	if (access(image, R_OK) != 0) {
		slurm_error("container: %s: no such image", image);
		return -1;
	}
	/* A process that changed its user may not write its own maps otherwise. */
	if (prctl(PR_SET_DUMPABLE, 1) != 0 || unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0 ||
	    map_id("/proc/self/uid_map", uid) != 0 ||
	    mount("none", "/opt", "tmpfs", 0, NULL) != 0) {
		slurm_error("container: the mount namespace cannot be made: %m");
		return -1;
	}
	return 0;
}
