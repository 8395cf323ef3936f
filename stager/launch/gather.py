"""Nodes and an Order in, what each node answers out: by a step of the job, or by ClusterShell.

A node answers on its stdout by short lines, since Slurm keeps only those whole: first that it has
begun, then its answer in pieces. Whatever else comes, a banner or a library's complaint, is no
answer, and its last line is told where none comes.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import selectors
import shlex
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stager.base.errors import LaunchError
from stager.base.text import printable
from stager.copies.upkeep import Action
from stager.launch import job
from stager.launch.environment import rank_environment
from stager.request.items import StageRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from stager.copies.upkeep import Command
    from stager.launch.job import JobContext
    from stager.request.policy import Policy

#: What runs on each node; behind it comes the order. -I shuts out the user's PYTHON*.
NODE_ARGV = (sys.executable, "-I", "-m", "stager", "node")
#: Seconds in which a node has to begin; and, where nothing but records are read, to answer.
PATIENCE = 4.0
#: Seconds for the launcher to leave by itself when all is said.
_LEAVE = 0.25
#: How a line that is meant for `Mailbox` begins; the number is that of this protocol.
_MARK = "@stage1"
#: The number of a line of an answer, and the most bytes of an answer; other nodes are not believed.
_PIECE_NUMBER, _MOST_SAID = re.compile(r"[0-9]{1,6}"), 256 << 20
#: Characters of an answer in one line. Slurm hands lines of more than 1024 bytes on in parts, which
#: those of other nodes may come between (MAX_MSG_LEN in slurmstepd's io.c).
_PIECE = 800
#: What srun says of a node on which it could not start a task.
_NOT_STARTED = re.compile(r"srun: error: Task launch for \S+ failed on node (\S+?): (.*)")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one node said, or the ``problem`` for which it did not; its ``state`` in Slurm."""

    node: str
    said: dict[str, Any] | None
    problem: str = ""
    state: str = ""


def hello(node: str) -> str:
    """The line by which a node tells that it has begun."""
    return f"{_MARK} {node} hello"


def frames(node: str, said: dict[str, Any]) -> Iterator[str]:
    """A node's answer as lines."""
    text = base64.b64encode(zlib.compress(json.dumps(said).encode(), 1)).decode()
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    for number, piece in enumerate(pieces):
        yield f"{_MARK} {node} {number} {len(pieces)} {piece}"


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


class Mailbox:
    """Puts the lines that come from ``nodes`` together to answers."""

    def __init__(self, nodes: Sequence[str]) -> None:
        #: Those from which an answer may still come.
        self.waiting = dict.fromkeys(nodes)
        #: Those that have begun.
        self.begun: set[str] = set()
        self.answers: dict[str, Answer] = {}
        self._pieces: dict[str, dict[int, str]] = {}

    def hear(self, line: str) -> bool:
        """Take one line; False where it is no part of an answer."""
        words = line.split(" ")
        if words[0] != _MARK or len(words) < 3 or words[1] not in self.waiting:
            return False
        node = words[1]
        self.begun.add(node)
        if len(words) == 5 and all(_PIECE_NUMBER.fullmatch(word) for word in words[2:4]):
            pieces = self._pieces.setdefault(node, {})
            pieces[int(words[2])] = words[4]
            if len(pieces) == int(words[3]):
                self._open(node, "".join(pieces[number] for number in sorted(pieces)))
        return True

    def _open(self, node: str, text: str) -> None:
        try:
            packed = zlib.decompressobj()
            said = json.loads(
                packed.decompress(base64.b64decode(text), _MOST_SAID), parse_constant=_no_number
            )
        except (ValueError, zlib.error, binascii.Error, RecursionError):
            said = None
        if not isinstance(said, dict):
            self.give_up(node, "its answer cannot be read")
            return
        self.answers[node] = Answer(node, said)
        del self.waiting[node]

    def give_up(self, node: str, problem: str) -> None:
        """Wait for this node no longer."""
        if node in self.waiting:
            self.answers[node] = Answer(node, None, printable(problem))
            del self.waiting[node]


def ask(
    nodes: Sequence[str],
    order: Command,
    context: JobContext | None,
    policy: Policy,
    environment: Mapping[str, str],
) -> list[Answer]:
    """What each of ``nodes`` answers, in their order; nothing is raised for those that do not.

    Those of ``context``, the job that this runs in, are asked by a step, the others by
    ClusterShell; those that are down as Slurm knows are not waited for.
    """
    states = job.node_states(",".join(nodes))
    away = [node for node in nodes if job.is_away(states.get(node, ""))]
    ours = set(job.unfold(context.nodes)) if context else set()
    inside = [node for node in nodes if node not in away and node in ours]
    outside = [node for node in nodes if node not in away and node not in ours]
    answers = {node: Answer(node, None, states[node].strip("*")) for node in away}
    if inside and outside:
        with ThreadPoolExecutor(1) as pool:
            # In a thread, since ClusterShell's engine wants the main one.
            step = pool.submit(_ask_by_step, inside, order, context, policy, environment)
            answers |= _ask_by_clustershell(outside, order)
            answers |= step.result()
    else:
        answers |= _ask_by_step(inside, order, context, policy, environment)
        answers |= _ask_by_clustershell(outside, order)
    return [
        Answer(node, answers[node].said, answers[node].problem, states.get(node, ""))
        for node in nodes
    ]


def _no_answer() -> str:
    return f"no answer within {PATIENCE:g} s"


def _overdue(mailbox: Mailbox, order: Command) -> list[str]:
    """The nodes that should have begun, or answered, when the time for that is over."""
    at_once = order.action is Action.STATUS
    return [node for node in mailbox.waiting if at_once or node not in mailbox.begun]


# By a step.


def step_argv(
    context: JobContext, policy: Policy, nodes: Sequence[str], order: Command
) -> list[str]:
    """The srun that runs COMMAND once on each of ``nodes``, beside whatever runs there.

    As in `launch.srun_argv`, but that no node's failure ends the others, and without MPI.
    """
    count = str(len(nodes))
    return [
        policy.launch.srun, "--jobid", str(context.job), "--job-name=stagectl", "--quiet",
        "--overlap", "--mpi=none", "--export=ALL", f"--nodelist={job.fold(list(nodes))}",
        "-N", count, "-n", count, "--ntasks-per-node=1", "--mem=0", "--gres=none",
        "--cpu-bind=none", "--chdir=/", "--kill-on-bad-exit=0", "--wait=0", "--input=none",
        *NODE_ARGV, order.to_text(),
    ]  # fmt: skip


def _ask_by_step(
    nodes: Sequence[str],
    order: Command,
    context: JobContext | None,
    policy: Policy,
    environment: Mapping[str, str],
) -> dict[str, Answer]:
    if not nodes or context is None:
        return {}
    mailbox = Mailbox(nodes)
    # An empty request: what is wanted of it is the environment, by which the plugin does not gate.
    request = StageRequest((), len(nodes), 0.0, job=context.job)
    variables = rank_environment(environment, policy, request)
    argv = step_argv(context, policy, nodes, order)
    try:
        process = subprocess.Popen(
            argv, env=variables, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        for node in nodes:
            mailbox.give_up(node, f"{argv[0]} cannot be started: {error.strerror}")
        return mailbox.answers
    with process:
        try:
            _Step(process, mailbox, order).listen()
        finally:
            _end(process, patient=not any(a.problem for a in mailbox.answers.values()))
    cut_off = [n for n in nodes if n in mailbox.begun and mailbox.answers[n].problem]
    if order.action is Action.VERIFY and 0 < len(cut_off) < len(nodes):
        # For the sake of a node on which no task starts, srun ends the others after a while.
        mailbox.answers |= _ask_by_step(cut_off, order, context, policy, environment)
    return mailbox.answers


class _Step:
    """Reads what the tasks of a step and their srun print, until nothing more is to be had."""

    def __init__(self, process: subprocess.Popen[bytes], mailbox: Mailbox, order: Command) -> None:
        self._process = process
        self._mailbox = mailbox
        self._order = order
        self._last_word = ""

    def listen(self) -> None:
        """Return when every node has answered or was given up."""
        deadline = time.monotonic() + PATIENCE
        with selectors.DefaultSelector() as selector:
            for stream in (self._process.stdout, self._process.stderr):
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, bytearray())
            while selector.get_map() and self._mailbox.waiting:
                left = deadline - time.monotonic()
                for key, _ in selector.select(left if left > 0 else _LEAVE):
                    if not self._read(key):
                        selector.unregister(key.fileobj)
                if time.monotonic() >= deadline:
                    for node in _overdue(self._mailbox, self._order):
                        self._mailbox.give_up(node, _no_answer())
        for node in list(self._mailbox.waiting):
            self._mailbox.give_up(node, self._last_word or "the step ended without its answer")

    def _read(self, key: selectors.SelectorKey) -> bool:
        block = os.read(key.fd, 1 << 16)
        key.data.extend(block or b"\n")
        *lines, rest = key.data.split(b"\n")
        key.data[:] = rest
        for line in lines:
            self._hear(line.decode(errors="replace"))
        return bool(block)

    def _hear(self, line: str) -> None:
        failed = _NOT_STARTED.fullmatch(line)
        if failed:
            self._mailbox.give_up(failed[1], f"Slurm could not start a task: {failed[2]}")
        elif not self._mailbox.hear(line) and line.strip():
            self._last_word = line.strip()


def _end(process: subprocess.Popen[bytes], *, patient: bool) -> None:
    """See the launcher off; with a node that does not answer it would stay for long."""
    if patient:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LEAVE)
            return
    process.terminate()  # by which it asks the controller to end the step
    with suppress(subprocess.TimeoutExpired):
        process.wait(_LEAVE)
        return
    process.kill()


# By ClusterShell.


def _ask_by_clustershell(nodes: Sequence[str], order: Command) -> dict[str, Answer]:
    if not nodes:
        return {}
    from ClusterShell.Task import task_self

    mailbox = Mailbox(nodes)
    task = task_self()
    _apply_site_settings(task)
    ears = _ears(mailbox, order)
    line = shlex.join([*NODE_ARGV, order.to_text()])
    for node in nodes:
        ears.workers[node] = task.shell(line, nodes=node, handler=ears, stdin=False, stderr=True)
    task.timer(_LEAVE, handler=ears, interval=_LEAVE, autoclose=True)
    task.resume()
    for node in list(mailbox.waiting):
        mailbox.give_up(node, "it ended without an answer")
    return mailbox.answers


class _Unset:
    """The options of clush's command line, none of which is given."""

    option = ()

    def __getattr__(self, name: str) -> None:
        return None


def _apply_site_settings(task: Any) -> None:
    """Have ClusterShell work as clush does here, by the site's clush.conf."""
    from configparser import Error

    from ClusterShell.CLI.Config import ClushConfig, ClushConfigError

    try:
        config = ClushConfig(_Unset())
        task.set_info("fanout", config.fanout)
        task.set_info("connect_timeout", config.connect_timeout)
        for name in ("ssh_path", "ssh_user", "ssh_options"):
            value = getattr(config, name)
            if value:
                task.set_info(name, value)
    except (ClushConfigError, Error) as error:
        raise LaunchError(f"clush.conf: {printable(str(error))}") from None


def _ears(mailbox: Mailbox, order: Command) -> Any:
    """What hears ClusterShell's events: made here, where ClusterShell is imported at last."""
    from ClusterShell.Event import EventHandler

    class Ears(EventHandler):  # type: ignore[misc]
        """One worker a node, so that one can be given up without the others."""

        def __init__(self) -> None:
            self.workers: dict[str, Any] = {}
            self._deadlines: dict[str, float] = {}
            self._last_words: dict[str, str] = {}

        def ev_pickup(self, worker: Any, node: str) -> None:
            # Not before: with more nodes than ClusterShell's fan-out, some begin later.
            self._deadlines[node] = time.monotonic() + PATIENCE

        def ev_read(self, worker: Any, node: str, sname: str, msg: bytes) -> None:
            line = msg.decode(errors="replace")
            if not mailbox.hear(line) and line.strip():
                self._last_words[node] = line.strip()

        def ev_hup(self, worker: Any, node: str, rc: int) -> None:
            why = self._last_words.get(node) or f"it ended with code {rc} and without an answer"
            mailbox.give_up(node, why)

        def ev_timer(self, timer: Any) -> None:
            now = time.monotonic()
            for node in _overdue(mailbox, order):
                if now >= self._deadlines.get(node, now + 1):
                    mailbox.give_up(node, _no_answer())
                    self.workers[node].abort()

    return Ears()
