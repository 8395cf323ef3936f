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

/* The mount namespace in which this task began. */
static ino_t namespace;

static ino_t current_namespace(void)
{
	struct stat facts;

	return stat("/proc/self/ns/mnt", &facts) == 0 ? facts.st_ino : 0;
}

void stage_order_note_namespace(void)
{
	namespace = current_namespace();
}

bool stage_order_is_elsewhere(void)
{
	return namespace != 0 && namespace != current_namespace();
}
