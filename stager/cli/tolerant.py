"""Stage to the nodes of a job though some of them fail: `launch.tolerate` on real nodes."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stager.base.errors import Failure, LaunchError
from stager.base.outcome import Outcome
from stager.launch import job
from stager.launch.run import EndedError
from stager.launch.tolerate import SILENCE, Crew, stage_tolerantly
from stager.request.grammar import asked_tolerance

if TYPE_CHECKING:
    from collections.abc import Callable

    from stager.launch.job import JobContext
    from stager.request.items import StageRequest
    from stager.request.policy import Policy

#: The slurmstepds of a step on at least so many nodes report its end along a tree with so many
#: branches at each node. Each waits 60 s for those below it, and so many seconds more for each
#: level of them (Slurm's src/common/reverse_tree.c, stepd_wait_for_children_slurmstepd).
_BRANCHES, _A_LEVEL = 7, 3.0
#: Seconds that Slurm may need to tell all nodes that a step is to end, and to end it; and up to
#: which it delays each node's report where there are so many nodes (_random_sleep of slurmstepd).
_ENDING, _MANY, _DELAY = 2.0, 100, 5.0


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
        states = job.node_states(job.fold(nodes), srun)
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
    nodes = job.fold(gone)
    told = f"Slurm does not let {nodes} leave the job: {why_not}"
    refused = Failure(failed[0].code, f"{told}; submit again with --exclude={nodes}", "")
    return Outcome([], [*failed, refused], outcome.seconds, evicted=outcome.evicted)
