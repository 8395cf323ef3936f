"""Stage again on the other nodes when some fail, as long as the job tolerates that.

MPI ends all ranks when one is lost (`rank.guard`), so the ranks of the nodes that remain start
again. What a node had received whole is current then, and sent on to those that lack it.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from stager.base.errors import DestinationError, Failure, LaunchError, SpaceError
from stager.base.outcome import Evicted, Outcome
from stager.base.telemetry import Phase
from stager.launch.job import fold
from stager.launch.run import EndedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

#: The codes of failures that are a node's own, and not the source's or the request's.
_OF_NODES = frozenset({SpaceError.code, DestinationError.code, LaunchError.code})
#: Seconds without a sign of life after which a node is given up.
SILENCE = 10.0
#: One number of a variable that has one for each node, such as ``2(x3),1``, and how often it comes.
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True, slots=True)
class Crew:
    """The nodes that are to be staged to.

    ``own`` is the one on which this process runs, and the job's script waits. At most ``most`` may
    fail; ``asked`` is how users see that.
    """

    nodes: tuple[str, ...]
    own: str
    most: int
    asked: str


def refusal(crew: Crew, lost: Sequence[Failure], failed: Sequence[Failure]) -> str | None:
    """Return why the stage cannot go on without the nodes that have ``failed`` now. Pure.

    ``lost`` are the failures of those that it goes on without already. Return None if it can go on,
    and an empty text if the failures are not those of single nodes.
    """
    nodes = {one.node for one in failed}
    remaining = {*crew.nodes} - {one.node for one in lost}
    if not nodes or not nodes <= remaining or any(one.code not in _OF_NODES for one in failed):
        return ""
    if crew.own in nodes:
        return f"the job's script is to run on {crew.own}, which therefore cannot leave the job"
    count = len(nodes) + len({one.node for one in lost})
    if count <= crew.most:
        return None
    may = "none" if crew.most == 0 else f"only {crew.most}"
    of_all = f"{count} of {len(crew.nodes)} nodes" if len(crew.nodes) > 1 else "1 node"
    have = "has" if count == 1 else "have"
    return f"{of_all} {have} failed, and {may} may ({crew.asked})"


def stage_tolerantly(
    crew: Crew,
    start: Callable[[list[str], list[Failure]], Outcome],
    away: Callable[[list[str]], list[Failure]] = lambda _: [],
) -> Outcome:
    """Stage to as many nodes as the crew must have, and return the Outcome with those that failed.

    ``start`` stages to the nodes that it is given, without those that have failed, and ``away``
    returns failures for nodes that cannot be reached. If too many fail, the Outcome has all
    failures. Raise LaunchError if no Outcome can say what happened.
    """
    begun = time.monotonic()
    lost: list[Failure] = []
    evicted: list[Evicted] = []
    while True:
        nodes = [node for node in crew.nodes if node not in {one.node for one in lost}]
        started = time.monotonic()
        error: LaunchError | None = None
        failed = away(nodes)
        if not failed:
            try:
                outcome = start(nodes, lost)
            except LaunchError as ended:
                error, failed = ended, _blamed(ended)
                evicted += _evicted(ended)
            else:
                evicted += outcome.evicted
                if not outcome.failures:
                    return _with_earlier(outcome, lost, evicted, started - begun)
                failed = outcome.failures
        why_not = refusal(crew, lost, failed)
        if why_not is None:
            lost = sorted([*lost, *failed], key=lambda one: crew.nodes.index(one.node))
        elif error and not (lost or evicted):
            raise LaunchError(f"{error.message}\n  {why_not}" if why_not else error.message)
        else:
            if error and not (lost and failed):
                failed = [Failure(error.code, error.message, "")]
            told = [Failure(failed[0].code, why_not, "")] if why_not else []
            return Outcome([], [*failed, *lost, *told], time.monotonic() - begun, evicted=evicted)


def variables_without(
    environment: Mapping[str, str], nodes: Sequence[str], gone: Collection[str]
) -> dict[str, str]:
    """Return the variables of a job's script that change when of its ``nodes`` some are ``gone``.

    Pure. Tasks stay where they were to be: a job of ``--ntasks`` has fewer. All but the list of
    those that are gone are only there if the ``environment`` has them.
    """
    left = [node for node in nodes if node not in gone]
    tasks = _thinned(environment.get("SLURM_TASKS_PER_NODE", ""), nodes, gone)
    new = {
        "SLURM_NODELIST": fold(left), "SLURM_JOB_NODELIST": fold(left),
        "SLURM_NNODES": len(left), "SLURM_JOB_NUM_NODES": len(left),
        "SLURM_NTASKS": sum(tasks), "SLURM_NPROCS": sum(tasks),
        "SLURM_TASKS_PER_NODE": _repeated(tasks),
        "SLURM_JOB_CPUS_PER_NODE": _repeated(
            _thinned(environment.get("SLURM_JOB_CPUS_PER_NODE", ""), nodes, gone)
        ),
    }  # fmt: skip
    changed = {name: str(value) for name, value in new.items() if name in environment}
    return {**changed, "STAGE_FAILED_NODES": fold([*gone])}


def _thinned(numbers: str, nodes: Sequence[str], gone: Collection[str]) -> list[int]:
    """Return the numbers of the nodes that stay."""
    each = [int(one) for one, times in _REPEATED.findall(numbers) for _ in range(int(times or 1))]
    return [number for number, node in zip(each, nodes, strict=False) if node not in gone]


def _repeated(numbers: Sequence[int]) -> str:
    """Return numbers as Slurm writes them: ``2(x3),1``."""
    counted = [(number, len([*same])) for number, same in groupby(numbers)]
    return ",".join(f"{one}(x{times})" if times > 1 else f"{one}" for one, times in counted)


def _blamed(error: LaunchError) -> list[Failure]:
    return list(error.blamed) if isinstance(error, EndedError) else []


def _evicted(error: LaunchError) -> list[Evicted]:
    return list(error.evicted) if isinstance(error, EndedError) else []


def _with_earlier(
    outcome: Outcome, lost: Sequence[Failure], evicted: Sequence[Evicted], seconds: float
) -> Outcome:
    """Return ``outcome`` with the nodes that failed, and the seconds that attempts on them took.

    ``evicted`` are the copies that were removed in all attempts.
    """
    phases = dict(outcome.phases)
    if lost:
        phases[Phase.LAUNCH] = phases.get(Phase.LAUNCH, 0.0) + seconds
    else:
        seconds = 0.0
    return replace(
        outcome,
        failed_nodes=[*lost],
        phases=phases,
        evicted=[*evicted],
        seconds=outcome.seconds + seconds,
    )
