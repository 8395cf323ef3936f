/*
 * The options --stage, --stage-tolerate and --stage-helper: registers them and collects their
 * values, and those of the variables that stand for them.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "stage.h"

/* Occurrences on one command line; a value may hold many directives. */
enum { VALUES_MAX = 256 };

static char *values[VALUES_MAX];
static size_t count;
static char *tolerate;
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

/* The last of several counts, as with Slurm's own options. */
static int take_tolerate(int val, const char *text, int remote)
{
	(void)val;
	(void)remote;
	free(tolerate);
	tolerate = strdup(text);
	if (!tolerate)
		slurm_error("stage: out of memory");
	return tolerate ? 0 : -1;
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

static struct spank_option tolerate_option = {
	"stage-tolerate",
	"N|N%",
	"start the job though staging fails on up to N nodes, or N percent of its nodes: they "
	"leave "
	"the job, and are in STAGE_FAILED_NODES",
	1,
	0,
	take_tolerate,
};

/* Marks the helper's step; unlike an environment variable, it works with --export=NONE. */
static struct spank_option helper_option = {
	"stage-helper", NULL, "for internal use; do not give this option", 0, 0, take_helper,
};

int stage_options_register(spank_t spank)
{
	const bool remote = spank_context() == S_CTX_REMOTE;
	/* Only the helper's own srun gives this, so that --help of the others is without. */
	const bool hidden = !remote && !getenv(STAGE_HELPER_ENV);
	/* Only of a batch script can the plugin change the environment when nodes have left. */
	const bool batch = spank_context() == S_CTX_ALLOCATOR &&
			   strcmp(program_invocation_short_name, "salloc") != 0;

	if (spank_option_register(spank, &stage_option) != ESPANK_SUCCESS ||
	    ((remote || batch) &&
	     spank_option_register(spank, &tolerate_option) != ESPANK_SUCCESS) ||
	    (!hidden && spank_option_register(spank, &helper_option) != ESPANK_SUCCESS))
		return -1;
	return 0;
}

/*
 * The variable that counts as one more --stage, as such of Slurm's for its own options. NULL in
 * srun, whose environment is that of its job, and if it is not set or is empty.
 */
const char *stage_options_variable(void)
{
	const char *program = program_invocation_short_name;
	const char *name = strcmp(program, "sbatch") == 0   ? "SBATCH_STAGE"
			   : strcmp(program, "salloc") == 0 ? "SALLOC_STAGE"
							    : NULL;
	const char *value = name ? getenv(name) : NULL;

	return value && value[0] ? name : NULL;
}

/* Before the command line is read. */
int stage_options_take_variable(void)
{
	const char *stage = stage_options_variable();
	const char *list = stage ? getenv(stage) : NULL;

	return list ? take_value(0, list, 0) : 0;
}

/* How many nodes may fail, as text; NULL if that was not given. */
const char *stage_options_tolerate(void)
{
	return tolerate;
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
