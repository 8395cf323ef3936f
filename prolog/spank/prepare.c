/*
 * On every node, as root, before the helper's rank: have the user's folders made, by the same
 * program that a site's prolog may run. It is told a uid and the site's own stage.toml, and
 * touches no path that a user named. Whatever it cannot do, the rank finds and explains.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>

#include "stage.h"

static char *const clean_environment[] = { "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8",
					   NULL };

void stage_prepare(spank_t spank, const struct stage_config *config)
{
	uid_t uid = 0;
	char uid_text[24];
	int code = 0;

	if (!stage_options_helper())
		return;
	if (spank_get_item(spank, S_JOB_UID, &uid) != ESPANK_SUCCESS ||
	    snprintf(uid_text, sizeof(uid_text), "%u", (unsigned int)uid) < 0) {
		slurm_error("stage: the job's user is not known");
		return;
	}
	const char *const argv[] = {
		config->python, "-I", "-m", "stager.prepare", "--config", config->config, uid_text, NULL,
	};
	code = stage_child_run((char *const *)argv, clean_environment);
	if (code != 0)
		slurm_error("stage: the folders of uid %s were not made (exit code %d)", uid_text,
			    code);
}
