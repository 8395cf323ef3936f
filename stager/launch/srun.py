"""Build the arguments of a nested srun: for the ranks, and for a command on some nodes. Pure.

``srun`` is its path (`job.find_srun`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stager.launch.environment import RANK
from stager.launch.job import fold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stager.launch.job import JobContext
    from stager.request.policy import Policy

#: The ranks of a trial of MPI (`targets.smoke_test`).
HELLO_RANKS = 2


def srun_argv(
    srun: str,
    job: JobContext,
    policy: Policy,
    library: str | None = None,
    nodes: Sequence[str] = (),
) -> list[str]:
    """Return the srun that starts one rank on each node of the job, with ``library`` preloaded.

    One rank's failure ends all, and the last has 30 s to end after the first. If not all of the
    job's nodes are to have a rank, ``nodes`` names those that are.
    """
    tasks = _tasks(srun, job, len(nodes) or job.node_count)
    named = fold(list(nodes)) if nodes else job.nodes if job.is_step else ""
    chosen = [f"--nodelist={named}"] if named else []
    return [*tasks, *chosen, *_ranks(policy, library)]


def hello_argv(
    srun: str, job: JobContext, policy: Policy, nodes: Sequence[str], library: str | None = None
) -> list[str]:
    """Return the srun that starts two ranks as `srun_argv` does, on one or two of the job's nodes.

    On one node, they may have to share a CPU.
    """
    beside = ["--overcommit"] if len(nodes) < HELLO_RANKS else []
    tasks = _tasks(srun, job, len(nodes), HELLO_RANKS // len(nodes))
    return [*tasks, f"--nodelist={fold(list(nodes))}", *beside, *_ranks(policy, library)]


def _ranks(policy: Policy, library: str | None) -> list[str]:
    # Not by the environment of srun, which would load the library too.
    preloading = ["/usr/bin/env", f"LD_PRELOAD={library}"] if library else []
    return [
        "--quiet", "--job-name=stage", f"--mpi={policy.launch.mpi}", "--kill-on-bad-exit=1",
        "--wait=15", *preloading, *RANK,
    ]  # fmt: skip


def step_argv(
    srun: str, job: JobContext, nodes: Sequence[str], command: Sequence[str]
) -> list[str]:
    """Return the srun that runs ``command``, which needs no MPI, on each of the job's ``nodes``.

    No node's failure ends the others, however much later they end. srun says on which node it
    starts which task, and labels each line of a task with the task's number.
    """
    return [
        *_tasks(srun, job, len(nodes)), "--verbose", "--label",
        "--job-name=stagectl", "--mpi=none",
        f"--nodelist={fold(list(nodes))}", "--kill-on-bad-exit=0", "--wait=0", *command,
    ]  # fmt: skip


def _tasks(srun: str, job: JobContext, nodes: int, a_node: int = 1) -> list[str]:
    """Return what every nested srun has: ``a_node`` tasks on each node, beside whatever runs there.

    ``-n`` overrides an inherited SLURM_NTASKS; ``--mem=0`` and ``--gres=none`` claim nothing that
    the job's own steps need; ``--cpu-bind=none`` lets a task's threads use all CPUs.
    """
    return [
        srun, "--jobid", str(job.job), "--overlap", "--export=ALL",
        "-N", str(nodes), "-n", str(nodes * a_node), f"--ntasks-per-node={a_node}",
        "--mem=0", "--gres=none", "--cpu-bind=none", "--chdir=/", "--input=none",
    ]  # fmt: skip
