"""Stage again on the other nodes when some fail, as long as the job tolerates that.

MPI ends all ranks when one is lost (`rank.guard`), so the ranks of the nodes that remain start
again. What a node had received whole is current then, and sent on to those that lack it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stager.base.errors import (
    NO_PLUGIN,
    DestinationError,
    Failure,
    LaunchError,
    SpaceError,
)
from stager.base.outcome import Evicted, Outcome
from stager.base.phases import Phase
from stager.launch.run import EndedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: The codes of failures that are a node's own, and not the source's or the request's.
_OF_NODES = frozenset({SpaceError.code, DestinationError.code, LaunchError.code})
#: Seconds without a sign of life after which a node is given up.
SILENCE = 10.0
#: What is said of a node that an earlier stage of the job left out.
_BEFORE = "an earlier stage of this job failed there"


@dataclass(frozen=True, slots=True)
class Crew:
    """The nodes that are to be staged to.

    ``own`` is the one on which this process runs, if it is one of them: the job's script, or the
    first task of an srun, waits there. At most ``most`` may fail; ``asked`` is how users see that.
    ``before`` are those that an earlier stage of the job left out.
    """

    nodes: tuple[str, ...]
    own: str
    most: int
    asked: str
    before: tuple[str, ...] = ()


def refusal(crew: Crew, lost: Sequence[Failure], failed: Sequence[Failure]) -> str | None:
    """Return why the stage cannot go on without the nodes that have ``failed`` now. Pure.

    ``lost`` are the failures of those that it goes on without already. Return None if it can go on,
    and an empty text if the failures are not those of single nodes.
    """
    nodes = {one.node for one in failed}
    remaining = {*crew.nodes} - {one.node for one in lost}
    if not nodes or not nodes <= remaining or any(one.code not in _OF_NODES for one in failed):
        return ""
    if any(one.message == NO_PLUGIN for one in failed):
        return "tasks on a node without the plugin cannot be kept from starting"
    if crew.own in nodes:
        return f"the stage was started on {crew.own}, so it cannot go on without that node"
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
    lost = [Failure(LaunchError.code, _BEFORE, node) for node in crew.before if node in crew.nodes]
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
