/*
 * On every node, as root, before the helper's rank: have the user's folders made, by the same
 * program that a site's prolog may run. It is told a uid and the site's own stage.toml, and
 * touches no path that a user named. Whatever it cannot do, the rank finds and explains.
 *
 * To start that program takes longer than all else that the plugin does, and the ranks wait for
 * it. So it leaves a note of what it has made, and as long as that holds it is not run again.
 */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "stage.h"

/* What differs between any two versions of a file, as stager/prepare.py writes it. */
static bool is_version(const char *path, const char *version)
{
	char text[96];
	struct stat facts;

	if (stat(path, &facts) != 0)
		return false;
	(void)snprintf(text, sizeof(text), "%llu %llu %lld", (unsigned long long)facts.st_dev,
		       (unsigned long long)facts.st_ino,
		       facts.st_ctim.tv_sec * 1000000000LL + facts.st_ctim.tv_nsec);
	return strcmp(text, version) == 0;
}

/* Whether a folder that users pass is root's and has one of the user's own in it. */
static bool holds_folder_of(const char *parent, uid_t uid)
{
	char path[PATH_MAX];
	struct stat facts;

	if (lstat(parent, &facts) != 0 || facts.st_uid != 0 || facts.st_mode != (S_IFDIR | 0755))
		return false;
	if (snprintf(path, sizeof(path), "%s/%u", parent, (unsigned int)uid) >= (int)sizeof(path))
		return false;
	return lstat(path, &facts) == 0 && S_ISDIR(facts.st_mode) && facts.st_uid == uid;
}

/* Whether the note of an earlier run holds: for this stage.toml, all folders are there. */
static bool already_prepared(uid_t uid, const char *config)
{
	char path[64];
	char *line = NULL;
	size_t size = 0;
	size_t lines = 0;
	bool good = true;
	ssize_t length = 0;
	FILE *note = NULL;

	(void)snprintf(path, sizeof(path), STAGE_RUN_PREPARED, (unsigned int)uid);
	note = fopen(path, "re");
	if (!note)
		return false;
	while (good && (length = getline(&line, &size, note)) > 0) {
		line[length - 1] = '\0'; /* the newline; a line that was cut short is no folder */
		good = lines++ == 0 ? is_version(config, line) : holds_folder_of(line, uid);
	}
	free(line);
	(void)fclose(note); /* it was only read */
	return good && lines > 1;
}

void stage_prepare(spank_t spank, const struct stage_config *config)
{
	uid_t uid = 0;
	char uid_text[24];
	int code = 0;

	if (!stage_options_helper())
		return;
	stage_mark(spank);
	if (spank_get_item(spank, S_JOB_UID, &uid) != ESPANK_SUCCESS ||
	    snprintf(uid_text, sizeof(uid_text), "%u", (unsigned int)uid) < 0) {
		slurm_error("stage: the job's user is not known");
		return;
	}
	if (already_prepared(uid, config->config))
		return;
	const char *const argv[] = {
		config->python, "-I", "-m", "stager.prepare", "--config", config->config, uid_text, NULL,
	};
	code = stage_child_run((char *const *)argv, stage_clean_environment, 0);
	if (code != 0)
		slurm_error("stage: the folders of uid %s were not made (exit code %d)", uid_text,
			    code);
}
