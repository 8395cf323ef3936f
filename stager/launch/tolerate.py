"""Stage again on the other nodes when some fail, as long as the job tolerates that.

MPI ends all ranks when one is lost (`rank.guard`), so the ranks of the nodes that remain start
again. What a node had received whole is current then, and sent on to those that lack it.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from stager.base.errors import DestinationError, Failure, LaunchError, SpaceError
from stager.base.outcome import Evicted, Outcome
from stager.base.telemetry import Phase
from stager.launch import job
from stager.launch.job import fold
from stager.launch.run import EndedError
from stager.request.grammar import asked_tolerance

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from stager.launch.job import JobContext
    from stager.request.items import StageRequest
    from stager.request.policy import Policy

#: The codes of failures that are a node's own, and not the source's or the request's.
_OF_NODES = frozenset({SpaceError.code, DestinationError.code, LaunchError.code})
#: Seconds without a sign of life after which a node is given up.
SILENCE = 10.0
#: One number of a variable that has one for each node, such as ``2(x3),1``, and how often it comes.
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")

#: The slurmstepds of a step on at least so many nodes report its end along a tree with so many
#: branches at each node. Each waits 60 s for those below it, and so many seconds more for each
#: level of them (Slurm's src/common/reverse_tree.c, stepd_wait_for_children_slurmstepd).
_BRANCHES, _A_LEVEL = 7, 3.0
#: Seconds that Slurm may need to tell all nodes that a step is to end, and to end it; and up to
#: which it delays each node's report where there are so many nodes (_random_sleep of slurmstepd).
_ENDING, _MANY, _DELAY = 2.0, 100, 5.0


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


@dataclass(frozen=True, slots=True)
class Tolerated:
    """At most ``most`` nodes may fail, which users see as ``asked``."""

    most: int
    asked: str


def tolerated(text: str, rules: Policy, nodes: int) -> Tolerated:
    """Return how many of so many ``nodes`` may fail by a user's option, or by stage.toml.

    No more than the site's limit. Raise UsageError.
    """
    launch = rules.launch
    asked = asked_tolerance(text, "--stage-tolerate", launch.tolerate)
    said = f"--stage-tolerate={asked}" if text else f"tolerate = {asked} in stage.toml"
    wanted, allowed = asked.of(nodes), launch.tolerate_limit.of(nodes)
    if allowed < wanted:
        said += f", and this site allows {launch.tolerate_limit}"
    return Tolerated(min(wanted, allowed), said)


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


def safe_after(nodes: int) -> float:
    """Return the seconds after a step that lost a slurmstepd in which its job must not end. Pure.

    The slurmstepd of another of its ``nodes`` still waits for the lost one then. When the job ends,
    Slurm (22.05) gives it 61 s more, by default, before it takes it for a process that cannot be
    killed, and drains the node.
    """
    levels, reached = 0, 1
    while reached < nodes >= _BRANCHES:
        levels += 1
        reached += _BRANCHES**levels
    delay = _DELAY if nodes > _MANY else 0.0
    return levels * _A_LEVEL + _ENDING + delay if levels else 0.0


def run_tolerantly(
    context: JobContext,
    request: StageRequest,
    tolerance: Tolerated,
    srun: str,
    start: Callable[..., Outcome],
    on_event: Callable[[dict[str, Any]], None],
) -> Outcome:
    """Run ``request`` on as many nodes of the job as must have it. Raise LaunchError, UsageError.

    ``start`` runs a request on the nodes that it is given.
    """
    names = tuple(job.unfold(context.nodes))
    may_end = 0.0
    own = job.own_name(os.environ)
    crew = Crew(names, own, tolerance.most, tolerance.asked)

    def away(nodes: list[str]) -> list[Failure]:
        states = job.node_states(fold(nodes), srun)
        found = {name: states[name] for name in nodes if job.is_away(states.get(name, ""))}
        return [
            Failure(LaunchError.code, f"Slurm says that this node is {state}", name)
            for name, state in found.items()
        ]

    def start_on(nodes: list[str], lost: list[Failure]) -> Outcome:
        nonlocal may_end
        steps: list[str] = []

        def note(event: dict[str, Any]) -> None:
            if event["event"] == "started" and event.get("step"):
                steps.append(str(event["step"]))
            on_event(event)

        left_out = tuple(one.node for one in lost)
        silence = SILENCE if tolerance.most else 0.0
        wanted = replace(
            request, nodes=len(nodes), failed_nodes=left_out,
            silence=min(silence, request.stall_timeout or silence),
        )  # fmt: skip
        try:
            return start(wanted, on_event=note, nodes=nodes, most_slow=tolerance.most - len(lost))
        except LaunchError as error:
            # A launcher that was killed leaves its step, whose ranks hold the destinations' locks.
            for step in steps:
                job.kill_step(context.job, step, srun)
            if isinstance(error, EndedError):
                may_end = time.monotonic() + safe_after(len(nodes))
            raise

    try:
        return stage_tolerantly(crew, start_on, away)
    finally:
        time.sleep(max(0.0, may_end - time.monotonic()))


def give_back(context: JobContext, outcome: Outcome, srun: str) -> Outcome:
    """Let the nodes that the stage went on without leave the job.

    If Slurm refuses, the Outcome has their failures.
    """
    failed = outcome.failed_nodes
    gone = [one.node for one in failed]
    staged = [name for name in job.unfold(context.nodes) if name not in gone]
    why_not = job.keep(staged, os.environ, srun)
    if not why_not:
        return outcome
    nodes = fold(gone)
    told = f"Slurm does not let {nodes} leave the job: {why_not}"
    refused = Failure(failed[0].code, f"{told}; submit again with --exclude={nodes}", "")
    return Outcome([], [*failed, refused], outcome.seconds, evicted=outcome.evicted)
