"""Ask nodes to carry out a Command: those of a job by a step, all others by ClusterShell."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from stager.launch import job
from stager.launch.answers import Answer
from stager.launch.by_clustershell import ask_by_clustershell
from stager.launch.by_step import ask_by_step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stager.copies.upkeep import Command
    from stager.launch.job import JobContext
    from stager.request.policy import Policy


def ask(
    nodes: Sequence[str],
    command: Command,
    context: JobContext | None,
    policy: Policy,
    environment: Mapping[str, str],
) -> list[Answer]:
    """Return what each of ``nodes`` answers, in their order, or why it does not.

    ``context`` is the job that may be asked by a step, if any. Nodes that Slurm reports as down are
    not asked. Raise LaunchError if ClusterShell cannot be used.
    """
    states = job.node_states(",".join(nodes), policy.launch.srun)
    away = [node for node in nodes if job.is_away(states.get(node, ""))]
    ours = set(job.unfold(context.nodes)) if context else set()
    inside = [node for node in nodes if node not in away and node in ours]
    outside = [node for node in nodes if node not in away and node not in ours]
    answers = {node: Answer(node, None, states[node].strip("*")) for node in away}
    if context and inside and outside:
        with ThreadPoolExecutor(1) as pool:
            # The step in a thread, since ClusterShell's engine wants the main one.
            step = pool.submit(ask_by_step, inside, command, context, policy, environment)
            answers |= ask_by_clustershell(outside, command)
            answers |= step.result()
    elif context and inside:
        answers |= ask_by_step(inside, command, context, policy, environment)
    elif outside:
        answers |= ask_by_clustershell(outside, command)
    return [replace(answers[node], state=states.get(node, "")) for node in nodes]
