"""Ask nodes to carry out a Command, and take their answers from what they print.

The nodes of a job are asked by a step of it; all others by ClusterShell, which reaches them as the
site's clush.conf says: by ssh. A node first prints that it has begun, then its answer, each as an
event; all other lines, such as a banner or a library's complaint, are not part of it.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import shlex
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stager.base.errors import LaunchError
from stager.base.events import Parts, event, read_event
from stager.base.text import printable
from stager.launch import job
from stager.launch.environment import step_environment
from stager.launch.job import find_srun
from stager.launch.process import Process
from stager.launch.srun import step_argv
from stager.node.agent import Status, Verify, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stager.launch.job import JobContext
    from stager.node.agent import Command
    from stager.request.policy import Policy

#: Runs on each node, with a Command behind it. -I keeps the user's PYTHON* and site folder out.
NODE_ARGV = (sys.executable, "-I", "-m", "stager", "node")
#: Seconds in which a node must begin; and, if it only reads records, answer.
PATIENCE = 10.0
#: The most bytes of an answer, packed or not, and the most values in it: a short value takes some
#: 80 bytes in Python. The status of 100,000 copies has 30 MiB and 1.6 million values.
_LONGEST_ANSWER, _MOST_VALUES = 64 << 20, 4_000_000


@dataclass(frozen=True, slots=True)
class Answer:
    """What one node answered, a JSON object, or the ``problem`` if it did not answer."""

    node: str
    content: dict[str, Any] | None
    problem: str = ""
    #: The node's state in Slurm.
    state: str = ""


def hello(node: str) -> str:
    """Return the line that says that the node has begun."""
    return event("hello", node=node)


def frames(node: str, content: dict[str, Any]) -> list[str]:
    """Return the lines of a node's answer."""
    packed = base64.b64encode(zlib.compress(json.dumps(content).encode(), 1)).decode()
    return event("answer", node=node, content=packed).split("\n")


class Mailbox:
    """Puts the lines from several ``nodes`` together to one answer each."""

    def __init__(self, nodes: Sequence[str]) -> None:
        #: The nodes that may still answer, in their order.
        self.waiting = dict.fromkeys(nodes)
        self.begun: set[str] = set()
        self.answers: dict[str, Answer] = {}
        self._parts = {node: Parts() for node in nodes}

    def take(self, line: str, source: str) -> bool:
        """Take one line from the node ``source``. Return False if it is not part of the protocol.

        A node that answers for another one is not believed.
        """
        if source not in self.waiting or not line:
            return False
        try:
            whole = self._parts[source].join(line)
        except ValueError:
            self.give_up(source, "its answer is too long")
            return True
        told = read_event(whole)
        if whole and (told is None or told["event"] not in ("hello", "answer")):
            return False
        self.begun.add(source)
        if told is None:
            return True
        if told.get("node") != source:
            self.give_up(source, f"it answered in the name of {told.get('node')}; check this node")
        elif told["event"] == "answer":
            self._complete(source, told.get("content"))
        return True

    def _complete(self, node: str, text: object) -> None:
        content = _decode(text)
        if content is None:
            self.give_up(node, "its answer cannot be read")
            return
        self.answers[node] = Answer(node, content)
        del self.waiting[node]

    def give_up(self, node: str, problem: str) -> None:
        """Stop waiting for this node, unless it has answered."""
        if node in self.waiting:
            self.answers[node] = Answer(node, None, printable(problem))
            del self.waiting[node]

    def overdue(self, command: Command) -> list[str]:
        """Return the nodes that are late once their PATIENCE is over.

        A status reads records and takes no longer; other commands must only have begun.
        """
        at_once = isinstance(command, Status)
        return [node for node in self.waiting if at_once or node not in self.begun]


def no_answer() -> str:
    """Return the problem of a node that is late, and what to do."""
    return (
        f"no answer within {PATIENCE:g} s; ask again, and if it stays silent see whether the node "
        "and its disks work, or tell the administrator"
    )


def _decode(text: object) -> dict[str, Any] | None:
    """Return the content that `frames` encoded, or None."""
    try:
        packed = base64.b64decode(str(text))
        plain = zlib.decompressobj().decompress(packed, _LONGEST_ANSWER)
        if sum(map(plain.count, (b",", b"[", b"{"))) > _MOST_VALUES:
            return None
        content = json.loads(plain, parse_constant=_refuse_constant)
    except (ValueError, zlib.error, binascii.Error, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _refuse_constant(text: str) -> None:
    """Raise ValueError for NaN and the infinities, which Python's json reads as numbers."""
    raise ValueError(f"{text} is not a number")


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
        argv = step_argv(srun, job, nodes, [*NODE_ARGV, text_of(command)])
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
    if isinstance(command, Verify) and 0 < len(cut_off) < len(nodes):
        # When a task does not start on one node, srun ends the others after a while.
        mailbox.answers |= ask_by_step(cut_off, command, job, policy, environment)
    return mailbox.answers


def _listen(process: Process, mailbox: Mailbox, command: Command) -> None:
    """Return when every node has answered or was given up."""
    deadline = time.monotonic() + PATIENCE
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


#: Seconds between looks for nodes that are late.
_INTERVAL = 0.25
_REMEDY = "check ssh to it, and that slurm-stage is installed there"


def ask_by_clustershell(nodes: Sequence[str], command: Command) -> dict[str, Answer]:
    """Return what each of ``nodes`` answers, or why it does not.

    Raise LaunchError if clush.conf cannot be read. Must run in the main thread.
    """
    from ClusterShell.Task import task_self  # takes a while, and most commands do without

    mailbox = Mailbox(nodes)
    task = task_self()
    _apply_site_settings(task)
    handler = _make_handler(mailbox, command)
    for node in nodes:
        line = shlex.join([*NODE_ARGV, text_of(command), node])
        handler.workers[node] = task.shell(
            line, nodes=node, handler=handler, stdin=False, stderr=True
        )
    task.timer(_INTERVAL, handler=handler, interval=_INTERVAL, autoclose=True)
    task.resume()
    for node in list(mailbox.waiting):
        mailbox.give_up(node, f"stagectl on this node ended without an answer; {_REMEDY}")
    return mailbox.answers


class _NoOptions:
    """The command line of clush without any option."""

    option = ()

    def __getattr__(self, name: str) -> None:
        return None


def _apply_site_settings(task: Any) -> None:
    """Let ClusterShell work as clush does here, by the site's clush.conf."""
    from configparser import Error

    from ClusterShell.CLI.Config import ClushConfig, ClushConfigError

    try:
        config = ClushConfig(_NoOptions())
        task.set_info("fanout", config.fanout)
        task.set_info("connect_timeout", config.connect_timeout)
        for name in ("ssh_path", "ssh_user", "ssh_options"):
            value = getattr(config, name)
            if value:
                task.set_info(name, value)
    except (ClushConfigError, Error) as error:
        raise LaunchError(f"clush.conf: {printable(str(error))}") from None


def _make_handler(mailbox: Mailbox, command: Command) -> Any:
    """Return the handler of ClusterShell's events; its class needs ClusterShell imported."""
    from ClusterShell.Event import EventHandler

    class Handler(EventHandler):  # type: ignore[misc]
        """Has one worker a node, so that one can be given up without the others."""

        def __init__(self) -> None:
            self.workers: dict[str, Any] = {}
            self._deadlines: dict[str, float] = {}
            self._last_lines: dict[str, str] = {}

        def ev_pickup(self, worker: Any, node: str) -> None:
            # Not before: with more nodes than ClusterShell's fan-out, some begin later.
            self._deadlines[node] = time.monotonic() + PATIENCE

        def ev_read(self, worker: Any, node: str, sname: str, msg: bytes) -> None:
            line = msg.decode(errors="replace")
            if not mailbox.take(line, node) and line.strip():
                self._last_lines[node] = line.strip()

        def ev_hup(self, worker: Any, node: str, rc: int) -> None:
            ended = f"stagectl on this node ended with code {rc} without an answer"
            mailbox.give_up(node, self._last_lines.get(node) or f"{ended}; {_REMEDY}")

        def ev_timer(self, timer: Any) -> None:
            now = time.monotonic()
            for node in mailbox.overdue(command):
                if now >= self._deadlines.get(node, now + 1):
                    mailbox.give_up(node, no_answer())
                    self.workers[node].abort()

    return Handler()


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
