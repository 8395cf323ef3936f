"""TODO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stager.launch.environment import RANK

if TYPE_CHECKING:
    from stager.launch.job import JobContext
    from stager.request.policy import Policy


def srun_argv(job: JobContext, policy: Policy) -> list[str]:
    """The nested srun: one rank on each node of the job, beside whatever runs there.

    ``-n`` is spelled out against an inherited SLURM_NTASKS; ``--mem=0`` and ``--gres=none`` claim
    nothing that the job's own steps need; ``--cpu-bind=none`` lets a rank's threads use all CPUs.
    """
    count = str(job.node_count)
    return [
        policy.launch.srun, "--jobid", str(job.job), "--job-name=stage", "--quiet", "--overlap",
        f"--mpi={policy.launch.mpi}", "--export=ALL", "-N", count, "-n", count,
        "--ntasks-per-node=1", "--mem=0", "--gres=none", "--cpu-bind=none", "--chdir=/",
        "--kill-on-bad-exit=1", "--wait=30", "--input=none", *RANK,
    ]  # fmt: skip
