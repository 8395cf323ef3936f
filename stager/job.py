"""The environment in, else pyslurm's answer, else scontrol's, a JobContext out.

Which nodes are meant is always learnt from Slurm: there is no default of "this host".
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stager.errors import LaunchError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Probe = Callable[[int], "JobContext | None"]

#: Seconds for one answer of the controller.
_ANSWER_TIMEOUT = 30

#: Numbers from here on are Slurm's batch, extern and interactive steps (slurm.h).
SPECIAL_STEPS = 0xFFFFFFF0


@dataclass(frozen=True, slots=True)
class JobContext:
    """The allocation: Slurm's job id, its node list as Slurm writes it, how many nodes."""

    job: int
    nodes: str
    node_count: int


def find(environment: Mapping[str, str], probes: Sequence[Probe] | None = None) -> JobContext:
    """The job in whose allocation this process runs.

    Raises UsageError outside of a job, LaunchError where Slurm cannot tell the job's nodes.
    """
    text = environment.get("SLURM_JOB_ID", "")
    if not text.isdecimal():
        raise UsageError(
            "not inside a Slurm job: use sbatch, salloc or srun first, "
            "or --local N to simulate N nodes on this machine"
        )
    if int(environment.get("SLURM_HET_SIZE", "0") or 0) > 1:
        raise UsageError("a heterogeneous job cannot be staged to: submit its parts as jobs")
    job = int(text)
    found = _from_environment(job, environment)
    for probe in (_from_pyslurm, _from_scontrol) if probes is None else probes:
        found = found or probe(job)
    if found is None:
        raise LaunchError(f"Slurm does not tell which nodes job {job} has; is it still running?")
    return found


def end_step(environment: Mapping[str, str], step: str) -> None:
    """Have Slurm tell the tasks of one of this job's steps to end."""
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            ["scancel", "--signal=TERM", f"{environment['SLURM_JOB_ID']}.{step}"],
            capture_output=True, timeout=_ANSWER_TIMEOUT, check=False,
        )  # fmt: skip


def fold(nodes: list[str]) -> str:
    """Node names in Slurm's short form: ``n[1-4]``."""
    from ClusterShell.NodeSet import NodeSet  # 20 ms that most paths need not spend

    return str(NodeSet.fromlist(nodes))


def _from_environment(job: int, environment: Mapping[str, str]) -> JobContext | None:
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    count = environment.get("SLURM_JOB_NUM_NODES", "")
    return JobContext(job, nodes, int(count)) if nodes and count.isdecimal() else None


def _from_pyslurm(job: int) -> JobContext | None:
    try:
        import pyslurm
    except ImportError:
        return None
    try:
        record = pyslurm.Job.load(job)
    except pyslurm.RPCError:
        return None
    return JobContext(job, record.allocated_nodes, record.num_nodes)


def _from_scontrol(job: int) -> JobContext | None:
    try:
        answer = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", str(job)],
            capture_output=True, text=True, errors="replace", timeout=_ANSWER_TIMEOUT, check=True,
            env={"PATH": os.defpath, **os.environ},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    fields = dict(word.partition("=")[::2] for word in answer.stdout.split())
    nodes, count = fields.get("NodeList", ""), fields.get("NumNodes", "")
    nodes = "" if nodes == "(null)" else nodes  # a job that has not started
    return JobContext(job, nodes, int(count)) if nodes and count.isdecimal() else None
