"""Ask nodes to carry out a Command, and read what they answer.

`Scope` says which nodes are meant. Those of a job are asked by a step of that job, others by
ClusterShell, which reaches them as the site's clush.conf says: by ssh. A node first prints that it
has begun, then its answer, each as an event; all other lines, such as a banner or a library's
complaint, are not part of it. Other nodes are not trusted.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import shlex
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from stager.base.codec import codec_of
from stager.base.errors import LaunchError, StageError, UsageError
from stager.base.events import Parts, event, read_event
from stager.base.interfaces import name_here
from stager.base.paths import SITE_CONFIG
from stager.base.text import printable
from stager.launch import job
from stager.launch.environment import step_environment
from stager.launch.job import find_srun
from stager.launch.process import Process
from stager.launch.schedulers import choose, read_text
from stager.launch.srun import step_argv
from stager.node.agent import Facts, Status, Verify, answer, text_of
from stager.request.names import absolute
from stager.store.states import NodeStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stager.launch.job import JobContext
    from stager.node.agent import Command
    from stager.node.facts import NodeFacts
    from stager.request.policy import Launch, Policy

_Result = TypeVar("_Result")

#: Runs on each node, with a Command behind it. -I keeps the user's PYTHON* and site folder out.
NODE_ARGV = (sys.executable, "-I", "-m", "stager", "node")
#: Seconds in which a node must begin; and, if it only reads records, answer.
PATIENCE = 10.0
#: The most bytes of an answer, packed or not, and the most values in it: a short value takes some
#: 80 bytes in Python. The status of 100,000 copies has 30 MiB and 1.6 million values.
_LONGEST_ANSWER, _MOST_VALUES = 64 << 20, 4_000_000
#: The commas of an answer's event.
_COMMAS = 2


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
        if whole != line and whole.count(",") > _COMMAS:
            self.give_up(source, "its answer cannot be read")
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


@dataclass(frozen=True, slots=True)
class Scope:
    """The nodes that a command is about.

    ``disks`` maps the nodes whose disks this process sees to the folders where it sees them. The
    other ``nodes`` are asked; those of the job ``context`` by a step, which sees what the job sees.
    ``whole_job`` says that the nodes are all nodes of one job, and ``other_job`` is its number if
    this process is not in it.
    """

    disks: dict[str, str] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=list)
    context: JobContext | None = None
    whole_job: bool = False
    other_job: int = 0

    @property
    def is_here_alone(self) -> bool:
        """Whether only this machine is asked."""
        return not self.nodes and [*self.disks.values()] == [""]

    @classmethod
    def find(
        cls,
        environment: Mapping[str, str],
        srun: str,
        *,
        nodes: str = "",
        job_id: int | None = None,
        local_root: Path | None = None,
        hostfile: Path | None = None,
        launcher: str | None = None,
    ) -> Scope:
        """Return the nodes that are named, else those that the environment means.

        At most one is named: a list of ``nodes``, a Slurm job, the folder of simulated nodes, a
        hostfile, or another scheduler. ``srun`` is that of stage.toml, beside which Slurm's other
        commands are. Raise StageError.
        """
        given = (nodes, job_id, local_root, hostfile, launcher)
        if sum(map(bool, given)) > 1:
            raise UsageError(
                "use only one of --nodes, --job, --hostfile, --launcher and --local-root"
            )
        if local_root:
            return cls.of_simulated(local_root)
        if not nodes and not job_id:
            _, hosts = choose(
                environment, read_text, hosts="", file=str(hostfile or ""), launcher=launcher or ""
            )
            if hosts:
                return cls.of_hosts(hosts.names)
        here = job.own_name(environment)
        context = None
        whole_job = True
        if nodes:
            names = job.unfold(nodes)
            whole_job = False
            with suppress(StageError):  # outside of a job
                context = job.find(environment, srun)
        elif job_id and environment.get("SLURM_JOB_ID") != str(job_id):
            return cls._of_other(job_id, environment, srun)
        elif environment.get("SLURM_JOB_ID"):
            context = job.find(environment, srun)
            names = job.unfold(context.nodes)
        else:
            names = [here]
        if names == [here]:
            return cls(disks={here: ""})
        return cls(nodes=names, context=context, whole_job=whole_job)

    @classmethod
    def _of_other(cls, number: int, environment: Mapping[str, str], srun: str) -> Scope:
        """Return the nodes of a job that this process is not in. Raise StageError."""
        by_step = os.getuid() != 0  # no step of root's can enter a user's job
        if by_step:
            job.enter(number, dict(environment), srun)
        found = job.look_up(number, environment, srun)
        names = job.unfold(found.nodes)
        here = job.own_name(environment)
        if names == [here] and not by_step:
            return cls(disks={here: ""}, other_job=number)
        context = found if by_step else None
        return cls(nodes=names, context=context, whole_job=True, other_job=number)

    @classmethod
    def of_hosts(cls, names: Sequence[str]) -> Scope:
        """Return these hosts, of which this machine may be one."""
        own = name_here(names)
        return cls(disks={own: ""} if own else {}, nodes=[name for name in names if name != own])

    @classmethod
    def of_simulated(cls, root: Path) -> Scope:
        """Return the simulated nodes of `stage --local` whose disks are folders of ``root``.

        Raise UsageError if there are none.
        """
        folder = absolute(str(root))
        disks = [path for path in Path(folder).glob("node*") if path.is_dir()]
        if not disks:
            raise UsageError(
                f"{folder} has no simulated nodes (folders node1, node2, …); name the folder that "
                "`stagectl stage --local` used"
            )
        disks.sort(key=lambda path: (len(path.name), path.name))
        return cls(disks={path.name: str(path) for path in disks})

    def without_ssh(self, words: Sequence[str], answers: Iterable[Answer]) -> str:
        """Return how to run stagectl without ssh, if a node gave no answer that needs ssh.

        ``words`` are those of the command line, but for the nodes.
        """
        inside = job.unfold(self.context.nodes) if self.context else []
        there = [one for one in answers if one.node in self.nodes and not job.is_away(one.state)]
        if not any(one.problem and one.node not in inside for one in there):
            return ""
        if os.getuid() == 0:  # no step of root's can enter a user's job
            nodes = job.fold([one.node for one in there])
            return (
                "if these nodes cannot be reached by ssh, ask them within a job of root's: "
                f"salloc -w {nodes} --overcommit stagectl {shlex.join(words)}"
            )
        nodes, command = job.fold(self.nodes), f"stagectl {shlex.join(words)}"
        return (
            "if these nodes cannot be reached by ssh, ask them within a job of yours: "
            f"{command} --job ID, or salloc -w {nodes} {command}"
        )

    def ask(self, command: Command, rules: Policy, environment: Mapping[str, str]) -> list[Answer]:
        """Carry out ``command`` on all nodes and return the answer of each."""
        answers = [Answer(node, answer(command, disk)) for node, disk in self.disks.items()]
        if self.nodes:
            own = job.outside(environment) if self.other_job else environment
            answers += ask(self.nodes, command, self.context, rules, own)
        return answers


def read_answers(
    answers: Iterable[Answer], kind: type[_Result]
) -> tuple[dict[str, _Result], dict[str, str]]:
    """Return each answer as a ``kind``, and why other nodes have none; both by node."""
    results: dict[str, _Result] = {}
    problems: dict[str, str] = {}
    for one in answers:
        if one.content is None:
            problems[one.node] = one.problem
            continue
        try:
            results[one.node] = codec_of(kind).from_data(one.content)
        except ValueError:
            problems[one.node] = (
                "its slurm-stage has another version than this one; "
                "the administrator must install the same version on all nodes"
            )
    return results, problems


def status(
    config: Path = Path(SITE_CONFIG), *, nodes: str = "", local_root: Path | None = None
) -> tuple[dict[str, NodeStatus], dict[str, str]]:
    """Return what this user has on each node, and why other nodes do not tell; both by node.

    ``nodes`` is a list such as ``n[1-4]``, ``local_root`` the folder of simulated nodes. Without
    both, the nodes are those of this process's job, or this one. Raise StageError.
    """
    from stager.request.policy import load_here  # takes a while, as it imports pydantic

    rules = load_here(config, os.environ, simulated=local_root is not None)
    scope = Scope.find(os.environ, rules.launch.srun, nodes=nodes, local_root=local_root)
    command = Status(rules.roots, rules.shared_roots, rules.shared_owner)
    return read_answers(scope.ask(command, rules, os.environ), NodeStatus)


def by_problem(problems: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the nodes of each problem. Pure.

    Where a text names its node, as those of ssh do, it names all that have the same text but for
    that.

    >>> by_problem({"n1": "ssh: no route to n1", "n2": "ssh: no route to n2", "n3": "late"})
    {'ssh: no route to n[1-2]': ['n1', 'n2'], 'late': ['n3']}
    """
    nodes: dict[str, list[str]] = {}
    for node, problem in problems.items():
        itself = rf"(?<![\w.-]){re.escape(node)}(?![\w-])"
        nodes.setdefault(re.sub(itself, "\0", problem), []).append(node)
    return {text.replace("\0", job.fold(names)): names for text, names in nodes.items()}


def why_not_started(context: JobContext, rules: Policy) -> str:
    """Return what keeps ranks from starting on the job's nodes, as a message; nothing if unknown.

    ``rules`` name the variables for the MPI library.
    """
    from stager.node.facts import NodeFacts  # only for this failure

    try:
        scope = Scope(nodes=job.unfold(context.nodes), context=context)
        facts, _ = read_answers(scope.ask(Facts(), rules, os.environ), NodeFacts)
    except StageError:  # the failure to start is what the user must know
        return ""
    return absent_interface(facts, rules.launch)


def absent_interface(nodes: Mapping[str, NodeFacts], launch: Launch) -> str:
    """Return a message if some nodes have none of the interfaces that the site names for MPI."""
    from stager.node.probes import fits  # only for such failures

    where, named = launch.interfaces
    if not named:
        return ""
    wanted = named.split(",")
    lack = [
        name
        for name, node in nodes.items()
        if not any(fits(link, one) for link in node.links for one in wanted)
    ]
    if not lack:
        return ""
    return (
        f"MPI did not start: {job.fold(lack)} has no interface that is up and leads to other "
        f"nodes of those that {where} of stage.toml names ({named}); tell the administrator"
    )
