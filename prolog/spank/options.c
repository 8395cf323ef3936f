/*
 * The options --stage and --stage-helper: registers them and collects their values, and that of the
 * variable that stands for one more --stage.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "stage.h"

/* Occurrences on one command line; a value may hold many directives. */
enum { VALUES_MAX = 256 };

static char *values[VALUES_MAX];
static size_t count;
static bool helper;

static int take_value(int val, const char *text, int remote)
{
	(void)val;
	(void)remote;
	/* Slurm calls twice for one occurrence in a step, and again for the job's own value. */
	for (size_t i = 0; i < count; i++)
		if (strcmp(values[i], text) == 0)
			return 0;
	if (count == VALUES_MAX) {
		slurm_error("stage: more than %d --stage options; join directives by ';'",
			    VALUES_MAX);
		return -1;
	}
	values[count] = strdup(text);
	if (!values[count]) {
		slurm_error("stage: out of memory");
		return -1;
	}
	count++;
	return 0;
}

static int take_helper(int val, const char *text, int remote)
{
	(void)val;
	(void)text;
	(void)remote;
	helper = true;
	return 0;
}

static struct spank_option stage_option = {
	"stage",
	"SRC:DST[,key=value...]",
	"stage the file, folder or archive SRC to DST on every node before the job starts; "
	"repeat the option, or join several SRC:DST by ';' in quotes",
	1,
	0,
	take_value,
};

/* Marks the helper's step; unlike an environment variable, it works with --export=NONE. */
static struct spank_option helper_option = {
	"stage-helper", NULL, "for internal use; do not give this option", 0, 0, take_helper,
};

int stage_options_register(spank_t spank)
{
	/* Only the helper's own srun gives the second, so that --help of the others is without. */
	const bool hidden = spank_context() != S_CTX_REMOTE && !getenv(STAGE_HELPER_ENV);

	if (spank_option_register(spank, &stage_option) != ESPANK_SUCCESS ||
	    (!hidden && spank_option_register(spank, &helper_option) != ESPANK_SUCCESS))
		return -1;
	return 0;
}

/*
 * The variable that this program reads as one more --stage, as it reads variables for its own
 * options. NULL in srun, whose environment is that of its job, and if it is not set or is empty.
 */
const char *stage_options_variable(void)
{
	static const char *const names[][2] = { { "sbatch", "SBATCH_STAGE" },
						{ "salloc", "SALLOC_STAGE" } };

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		const char *value = getenv(names[i][1]);

		if (strcmp(program_invocation_short_name, names[i][0]) == 0 && value && value[0])
			return names[i][1];
	}
	return NULL;
}

/* Before the command line is read. */
int stage_options_take_variable(void)
{
	const char *name = stage_options_variable();
	const char *value = name ? getenv(name) : NULL;

	return value ? take_value(0, value, 0) : 0;
}

size_t stage_options_count(void)
{
	return count;
}

const char *stage_options_value(size_t index)
{
	return values[index];
}

bool stage_options_helper(void)
{
	return helper;
}
