"""Ask nodes of a job by a step of that job."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from stager.base.errors import LaunchError
from stager.copies.upkeep import Action
from stager.launch import answers
from stager.launch.answers import NODE_ARGV, Mailbox, no_answer
from stager.launch.commands import find_srun
from stager.launch.environment import step_environment
from stager.launch.process import Process
from stager.launch.srun import step_argv

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stager.copies.upkeep import Command
    from stager.launch.answers import Answer
    from stager.launch.job import JobContext
    from stager.request.policy import Policy

#: Seconds for srun to end by itself once all nodes have answered, and when it is told to end.
_LEAVE = 0.25
#: What srun prints for a node on which it could not start a task.
_NOT_STARTED = re.compile(r"srun: error: Task launch for \S+ failed on node (\S+?): (.*)")
#: What it says of the task on a node, and how it labels the lines of a task.
_LAUNCHED = re.compile(r"srun: launching \S+ on host (\S+), 1 tasks: \[?([0-9]+)\]?")
_FAILURE = re.compile(r"srun: (error|fatal): ")
_LABELLED = re.compile(r" *([0-9]+): (.*)")


def ask_by_step(
    nodes: Sequence[str],
    command: Command,
    job: JobContext,
    policy: Policy,
    environment: Mapping[str, str],
) -> dict[str, Answer]:
    """Return what each of the job's ``nodes`` answers, or why it does not; nothing is raised."""
    mailbox = Mailbox(nodes)
    try:
        srun = find_srun(policy.launch.srun)
        argv = step_argv(srun, job, nodes, [*NODE_ARGV, command.to_text()])
        process = Process(argv, step_environment(environment, policy, job.job, job.variables))
    except LaunchError as error:
        for node in nodes:
            mailbox.give_up(node, error.message)
        return mailbox.answers
    with process:
        try:
            _listen(process, mailbox, command)
        finally:
            # With a node that does not answer, srun would stay for long.
            failed = any(answer.problem for answer in mailbox.answers.values())
            if failed or not process.ends_within(_LEAVE):
                process.end(_LEAVE)
    cut_off = [n for n in nodes if n in mailbox.begun and mailbox.answers[n].problem]
    if command.action is Action.VERIFY and 0 < len(cut_off) < len(nodes):
        # When a task does not start on one node, srun ends the others after a while.
        mailbox.answers |= ask_by_step(cut_off, command, job, policy, environment)
    return mailbox.answers


def _listen(process: Process, mailbox: Mailbox, command: Command) -> None:
    """Return when every node has answered or was given up."""
    deadline = time.monotonic() + answers.PATIENCE
    #: The last line of each node that is no answer, and under no name that of srun.
    last_lines: dict[str, str] = {}
    #: The node of each task, by the task's number.
    tasks: dict[str, str] = {}
    while process.is_open and mailbox.waiting:
        left = deadline - time.monotonic()
        lines = process.read_lines(left if left > 0 else _LEAVE)
        # srun says where a task is before the task says anything.
        for line in sorted(lines, key=lambda line: not _LAUNCHED.match(line)):
            _take(line, mailbox, tasks, last_lines)
        if time.monotonic() >= deadline:
            for node in mailbox.overdue(command):
                mailbox.give_up(node, last_lines.get(node) or no_answer())
    ended = "the step ended without an answer of this node"
    remedy = "check that slurm-stage is installed there"
    for node in list(mailbox.waiting):
        why = last_lines.get(node) or last_lines.get("") or f"{ended}; {remedy}"
        mailbox.give_up(node, why)


def _take(line: str, mailbox: Mailbox, tasks: dict[str, str], last_lines: dict[str, str]) -> None:
    """Take a line of a task or of srun. Keep it if it may be the reason of a failure."""
    if launched := _LAUNCHED.fullmatch(line):
        tasks[launched[2]] = launched[1]
    elif failed := _NOT_STARTED.fullmatch(line):
        mailbox.give_up(failed[1], f"Slurm could not start a task: {failed[2]}")
    elif labelled := _LABELLED.fullmatch(line):
        node = tasks.get(labelled[1], "")
        if not mailbox.take(labelled[2], node) and labelled[2].strip():
            last_lines[node] = labelled[2].strip()
    elif (not line.startswith("srun: ") or _FAILURE.match(line)) and line.strip():
        last_lines[""] = line.strip()
