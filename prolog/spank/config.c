/* The plugin's line in plugstack.conf, and its arguments: python=PATH and config=PATH. */
#include <string.h>

#include "stage.h"

#define DEFAULT_PYTHON "/opt/slurm-stage/bin/python3"
#define DEFAULT_CONFIG "/etc/slurm/stage.toml"

static const char *value_of(const char *argument, const char *key)
{
	const size_t length = strlen(key);

	return strncmp(argument, key, length) == 0 ? argument + length : NULL;
}

struct stage_config stage_config_parse(int argc, char **argv)
{
	struct stage_config config = { DEFAULT_PYTHON, DEFAULT_CONFIG, NULL };

	for (int i = 0; i < argc; i++) {
		const char *python = value_of(argv[i], "python=");
		const char *path = value_of(argv[i], "config=");

		if (python && python[0] == '/')
			config.python = python;
		else if (path && path[0] == '/')
			config.config = path;
		else
			config.fault = argv[i];
	}
	return config;
}

/* Lines of plugstack.conf: Slurm loads the plugin once and calls its init for each line. */
static unsigned int lines;

void stage_config_count_line(void)
{
	lines++;
}

bool stage_config_is_repeated(void)
{
	return lines > 1;
}

void stage_config_complain(const struct stage_config *config)
{
	slurm_error("stage: " STAGE_NOT_VALID, config->fault);
}
