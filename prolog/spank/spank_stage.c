/*
 * The dispatcher: says which part of the plugin acts in which context.
 *
 *   context              init       init_post_opt   task_init_privileged   task_init
 *   srun, sbatch, salloc options    submit          -                      -
 *   srun, later          -          -               quiet, in local_user_init
 *   slurmstepd           options    -               order, prepare         gate
 *   slurmd               expect_marks, note_namespace, prepare_roots
 *   slurmd, prolog       -          -               start_shared, in job_prolog
 *   slurmd, epilog       -          -               clean_up, in job_epilog
 *
 * A failure in a node's init, init_post_opt, user_init, task_post_fork, job_prolog or job_epilog
 * drains the node; one in the two task functions fails the job. So on the nodes the functions of
 * the first kind always return 0 here, or are not defined.
 */
#include <stdlib.h>

#include "stage.h"

SPANK_PLUGIN(slurm_stage, 1)

#define TEXT_OF(value) #value
#define TEXT(value) TEXT_OF(value)
/* Read from the file by `stagectl doctor`, which compares them with the Python package's version,
 * and with that of Slurm. */
__attribute__((used)) static const char version[] = "slurm-stage " STAGE_VERSION;
__attribute__((used)) static const char built_for[] =
	"slurm-stage for Slurm " TEXT(SLURM_VERSION_NUMBER);

static bool submitting(void)
{
	const spank_context_t context = spank_context();

	return context == S_CTX_LOCAL || context == S_CTX_ALLOCATOR;
}

int slurm_spank_init(spank_t spank, int argc, char **argv)
{
	const struct stage_config config = stage_config_parse(argc, argv);
	bool repeated = false;

	stage_config_count_line();
	repeated = stage_config_is_repeated();
	if (submitting()) {
		if (config.fault) {
			stage_config_complain(&config);
			return -1;
		}
		if (stage_submit_forget_outer_job() != 0)
			return -1;
		/* If two lines register the options, Slurm warns the user of every command. */
		if (!repeated && stage_options_register(spank) != 0)
			return -1;
		return stage_options_take_variable();
	}
	if (spank_context() == S_CTX_SLURMD) {
		if (repeated)
			slurm_error("stage: %s", STAGE_REPEATED);
		if (stage_order_pyxis())
			slurm_error("stage: %s", stage_order_fault());
		if (config.fault)
			stage_config_complain(&config);
		stage_expect_marks();
		stage_room_note_namespace();
		if (!config.fault)
			stage_prepare_roots(&config);
	}
	if (spank_context() == S_CTX_REMOTE && !repeated && stage_options_register(spank) != 0)
		slurm_error("stage: registering the options failed");
	return 0;
}

int slurm_spank_init_post_opt(spank_t spank, int argc, char **argv)
{
	const struct stage_config config = stage_config_parse(argc, argv);

	return submitting() ? stage_submit(spank, &config) : 0;
}

int slurm_spank_local_user_init(spank_t spank, int argc, char **argv)
{
	/* Before, srun has not made use of its option --quiet. */
	(void)argc;
	(void)argv;
	stage_submit_pass_on_quiet(spank);
	return 0;
}

int slurm_spank_task_init_privileged(spank_t spank, int argc, char **argv)
{
	const struct stage_config config = stage_config_parse(argc, argv);

	stage_gate_check_order(spank);
	stage_prepare(spank, &config);
	return 0;
}

int slurm_spank_job_prolog(spank_t spank, int argc, char **argv)
{
	const struct stage_config config = stage_config_parse(argc, argv);

	stage_start_shared(spank, &config);
	return 0;
}

int slurm_spank_job_epilog(spank_t spank, int argc, char **argv)
{
	const struct stage_config config = stage_config_parse(argc, argv);

	stage_clean_up(spank, &config);
	return 0;
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv)
{
	const struct stage_config config = stage_config_parse(argc, argv);

	return stage_gate(spank, &config);
}
