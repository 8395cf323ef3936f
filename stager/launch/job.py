"""The environment in, else pyslurm's answer, else scontrol's, a JobContext out.

Which nodes are meant is always learnt from Slurm: there is no default of "this host".
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stager.base.errors import LaunchError, UsageError
from stager.base.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Probe = Callable[[int], "JobContext | None"]
    StateProbe = Callable[[str], dict[str, str]]

#: Seconds for one answer of the controller.
_ANSWER_TIMEOUT = 30
#: Seconds for the states of nodes, which one can do without.
_STATES_TIMEOUT = 2
#: Words and marks of Slurm's states (sinfo(1)) for nodes that cannot be reached.
_AWAY = frozenset({"down", "future", "unknown", "powered_down", "powering_down", "powering_up"})
_AWAY_MARKS = frozenset("~#%")
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
    het_size = environment.get("SLURM_HET_SIZE", "")
    if het_size.isdecimal() and int(het_size) > 1:
        raise UsageError("a heterogeneous job cannot be staged to: submit its parts as jobs")
    return look_up(int(text), environment, probes)


def look_up(
    job: int, environment: Mapping[str, str], probes: Sequence[Probe] | None = None
) -> JobContext:
    """The job of that id, which need not be the one that this process runs in.

    Raises LaunchError where Slurm cannot tell the job's nodes.
    """
    ours = environment.get("SLURM_JOB_ID") == str(job)
    found = _from_environment(job, environment) if ours else None
    for probe in (_from_pyslurm, _from_scontrol) if probes is None else probes:
        found = found or probe(job)
    if found is None:
        raise LaunchError(f"Slurm does not tell which nodes job {job} has; is it still running?")
    return found


def node_states(nodes: str, probes: Sequence[StateProbe] | None = None) -> dict[str, str]:
    """The states of ``nodes`` in Slurm's words: ``idle``, ``drained``, ``down*``; by node.

    Empty where there is no Slurm to tell.
    """
    states: dict[str, str] = {}
    for probe in (_states_from_pyslurm, _states_from_sinfo) if probes is None else probes:
        states = states or probe(nodes)
    return states


def is_away(state: str) -> bool:
    """Whether a node of this state cannot answer: down, or without power."""
    words = re.split(r"[^a-z_]+", state.lower())
    return not _AWAY.isdisjoint(words) or not _AWAY_MARKS.isdisjoint(state)


def is_drained(state: str) -> bool:
    """Whether a node of this state takes no new jobs."""
    return "drain" in state.lower()


def own_name(environment: Mapping[str, str]) -> str:
    """This node's name, as Slurm has it where this runs in a job."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def unfold(nodes: str) -> list[str]:
    """The names that a list such as ``n[1-4]`` or ``@group`` stands for. Raises UsageError."""
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    try:
        # Names come in the order of their numbers.
        names = [str(name) for name in NodeSet(nodes)]
    except NodeSetException as error:
        raise UsageError(f"{printable(nodes)} is no list of nodes: {_plain(error)}") from None
    if not names:
        raise UsageError("the list of nodes names none")
    return names


def _plain(error: Exception) -> str:
    return printable(" ".join(str(error).split()))


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
    nodes, count = (_only(answer.stdout, key) for key in ("NodeList", "NumNodes"))
    nodes = "" if nodes == "(null)" else nodes  # a job that has not started
    return JobContext(job, nodes, int(count)) if nodes and count.isdecimal() else None


def _only(record: str, key: str) -> str:
    """The value of ``key``; nothing where it is there twice: names and folders are users' text."""
    values = [word.partition("=")[2] for word in record.split() if word.startswith(f"{key}=")]
    return values[0] if len(values) == 1 else ""


def _states_from_pyslurm(nodes: str) -> dict[str, str]:
    try:
        import pyslurm
    except ImportError:
        return {}
    try:
        known = pyslurm.Nodes.load()
    except (AttributeError, pyslurm.RPCError):  # its release for Slurm 22.05 has no such call
        return {}
    return {name: str(known[name].state).lower() for name in unfold(nodes) if name in known}


def _states_from_sinfo(nodes: str) -> dict[str, str]:
    try:
        answer = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%N|%T", f"--nodes={nodes}"],
            capture_output=True, text=True, errors="replace", timeout=_STATES_TIMEOUT, check=True,
            env={"PATH": os.defpath, **os.environ},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = (line.partition("|") for line in answer.stdout.splitlines())
    return {node.strip(): state.strip() for node, _, state in lines if state.strip()}
