"""Build the environment of the ranks, and of other steps, from an allow-list. Pure.

A job's own SLURM_, PMIX_ and OMPI_ variables are meant for the user's program, and would change how
the ranks are started.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from stager.request.items import REQUEST_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stager.request.items import StageRequest
    from stager.request.policy import Policy

#: The command of a rank, for any launcher. -I keeps the user's PYTHON* and site folder out.
RANK = (sys.executable, "-I", "-m", "stager.rank")
#: Tells the plugin in the nested srun that this step is the helper. Slurm reads it as the plugin's
#: hidden option --stage-helper, and ignores it if there is no such plugin.
HELPER_OPTION = "_SLURM_SPANK_OPTION_slurm_stage_stage_helper"
#: The same for programs that see only the step's environment; its value is the job's id.
HELPER_SENTINEL = "STAGE_HELPER"
#: What a nested srun needs to find its job and controller, and nothing that changes the step.
_KEPT = (
    "LANG", "LOGNAME", "TMPDIR", "TZ", "USER",
    "SLURM_CLUSTER_NAME", "SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES", "SLURM_NODE_ALIASES", "SLURM_STEPMGR", "SLURM_WORKING_CLUSTER",
)  # fmt: skip
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"


def rank_environment(
    environment: Mapping[str, str],
    policy: Policy,
    request: StageRequest,
    for_launcher: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment of launcher and ranks, with the request in it.

    ``for_launcher`` is what this launcher needs besides. Raise UsageError if the request is too
    long.
    """
    return {
        **step_environment(environment, policy, request.job, for_launcher),
        REQUEST_VARIABLE: request.to_json(),
    }


def step_environment(
    environment: Mapping[str, str],
    policy: Policy,
    job: int,
    for_launcher: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment of a step of ``job`` that the plugin lets pass without a stage."""
    kept = {name: environment[name] for name in _KEPT if name in environment}
    return {
        **kept,
        # Open MPI wants one, and would read settings there that are meant for the user's program.
        "HOME": "/",
        "PATH": _PATH,
        # Waiting ranks spin otherwise, on cores that readers and writers need.
        "OMPI_MCA_mpi_yield_when_idle": "1",
        # MPI_Init ends with a barrier. By Slurm's other kind, a tree, a rank may leave it before
        # the last has come (seen with 22.05): what it sends then crashes Open MPI there.
        "SLURM_PMIX_FENCE": "ring",
        **(for_launcher or {}),
        **policy.launch.environment,
        HELPER_OPTION: "1",
        HELPER_SENTINEL: str(job),
    }
