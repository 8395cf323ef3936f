/*
 * The plugin's place in plugstack.conf. Slurm calls the plugins in that order in task_init, where
 * pyxis starts a container and enters its mount namespace. Listed before this plugin, it would look
 * for an image that is not staged yet, and the helper could not be run from within the container.
 */
#include <dlfcn.h>
#include <link.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>

#include "stage.h"

/* The places of objects in memory are those in which plugstack.conf had them loaded. */
struct search {
	const void *own;
	const char *pyxis;
	bool found_own;
};

static int look_at_object(struct dl_phdr_info *info, size_t size, void *data)
{
	struct search *search = data;
	const char *slash = strrchr(info->dlpi_name, '/');

	(void)size;
	search->found_own = info->dlpi_addr == (uintptr_t)search->own;
	if (!search->found_own && slash && strstr(slash, "pyxis"))
		search->pyxis = info->dlpi_name;
	return search->found_own;
}

static Dl_info own_object(void)
{
	static const char mine;
	Dl_info own = { 0 };

	(void)dladdr(&mine, &own); /* it fails for no object that is loaded */
	return own;
}

const char *stage_order_own(void)
{
	return own_object().dli_fname;
}

const char *stage_order_pyxis(void)
{
	struct search search = { .own = own_object().dli_fbase };

	(void)dl_iterate_phdr(look_at_object, &search);
	return search.found_own ? search.pyxis : NULL;
}

/* What a process sees files by. Zeros stand for what cannot be found out. */
struct surroundings {
	ino_t mounts; /* the namespaces */
	ino_t users;
	ino_t root; /* the root directory, on its filesystem */
	dev_t disk;
};

/* Those in which this task began. */
static struct surroundings begun;

static struct surroundings current_surroundings(void)
{
	struct surroundings current = { 0 };
	struct stat facts;

	if (stat("/proc/self/ns/mnt", &facts) == 0)
		current.mounts = facts.st_ino;
	if (stat("/proc/self/ns/user", &facts) == 0)
		current.users = facts.st_ino;
	if (stat("/", &facts) == 0) {
		current.root = facts.st_ino;
		current.disk = facts.st_dev;
	}
	return current;
}

void stage_order_note_surroundings(void)
{
	begun = current_surroundings();
}

/*
 * Mounts alone tell nothing: a plugin below this one may make private ones in task_init_privileged,
 * say of /tmp, after this one's note. A container has another root directory, and is made in a user
 * namespace unless root makes it.
 */
bool stage_order_is_elsewhere(void)
{
	const struct surroundings now = current_surroundings();

	return begun.mounts != 0 && begun.mounts != now.mounts &&
	       (begun.users != now.users || begun.root != now.root || begun.disk != now.disk);
}
