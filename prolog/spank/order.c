/*
 * The plugin's place in plugstack.conf. Slurm calls the plugins in that order in task_init, where
 * pyxis starts a container and enters its mount namespace. Listed before this plugin, it would look
 * for an image that is not staged yet, and the helper could not be run from within the container.
 */
#include <dlfcn.h>
#include <glob.h>
#include <limits.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <slurm/slurm.h>

#include "stage.h"

/* The configuration of the process that loads the plugin, which is not linked with libslurm. */
#pragma weak slurm_conf
extern slurm_conf_t slurm_conf;

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

/* Lines that are read of plugstack.conf, and of each file that it includes. */
enum { LINES_MAX = 4096 };

/* Where plugstack.conf names a plugin; the line is 0 until it is found. */
struct place {
	const char *plugin;
	char file[PATH_MAX];
	unsigned int line;
};

struct places {
	struct place pyxis;
	struct place own;
};

static void look_at_path(struct place *place, const char *path, const char *file, unsigned int line)
{
	const char *name = place->plugin ? strrchr(place->plugin, '/') : NULL;

	/* Slurm looks for a name without a folder in folders of its own. */
	if (place->line || !name || strcmp(path, path[0] == '/' ? place->plugin : name + 1) != 0)
		return;
	place->line = line;
	(void)snprintf(place->file, sizeof(place->file), "%s", file);
}

static void look_at_file(struct places *places, const char *file,
			 void (*include)(struct places *places, const char *pattern))
{
	FILE *stream = file[0] == '/' ? fopen(file, "re") : NULL;
	char *text = NULL;
	size_t size = 0;

	for (unsigned int line = 1;
	     stream && line <= LINES_MAX && getline(&text, &size, stream) > 0; line++) {
		char *rest = NULL;
		const char *kind = strtok_r(text, " \t\n", &rest);
		const char *path = strtok_r(NULL, " \t\n", &rest);

		if (places->own.line || !path || kind[0] == '#')
			continue;
		if (strcmp(kind, "include") != 0) {
			look_at_path(&places->pyxis, path, file, line);
			look_at_path(&places->own, path, file, line);
		} else if (include) {
			include(places, path);
		}
	}
	free(text);
	if (stream)
		(void)fclose(stream); /* nothing was written */
}

/*
 * What these files include is not followed. Slurm looks for a relative name in the folder of
 * plugstack.conf; the folder that this process works in may be a user's.
 */
static void look_at_included(struct places *places, const char *pattern)
{
	const char *name = slurm_conf.plugstack;
	const char *slash = strrchr(name, '/');
	const int folder = pattern[0] == '/' || !slash ? 0 : (int)(slash + 1 - name);
	char path[PATH_MAX];
	glob_t files = { 0 };
	const int length = snprintf(path, sizeof(path), "%.*s%s", folder, name, pattern);

	if (path[0] != '/' || length < 0 || length >= (int)sizeof(path))
		return;
	if (glob(path, 0, NULL, &files) == 0)
		for (size_t i = 0; i < files.gl_pathc; i++)
			look_at_file(places, files.gl_pathv[i], NULL);
	globfree(&files);
}

const char *stage_order_fault(void)
{
	static char text[6 * PATH_MAX];
	static struct places at;
	const int size = sizeof(text);
	int length = 0;

	at = (struct places){ { .plugin = stage_order_pyxis() }, { .plugin = stage_order_own() } };
	length = snprintf(text, sizeof(text), STAGE_AFTER_PYXIS, at.pyxis.plugin, at.own.plugin);
	/* A process of root has its path from Slurm, not from a user. */
	if (&slurm_conf && slurm_conf.plugstack)
		look_at_file(&at, slurm_conf.plugstack, look_at_included);
	/* The files may have changed since Slurm read them. */
	if (at.pyxis.line && at.own.line && length < size)
		(void)snprintf(text + length, (size_t)(size - length),
			       " (line %u of %s, below line %u of %s)", at.own.line, at.own.file,
			       at.pyxis.line, at.pyxis.file);
	return text;
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
