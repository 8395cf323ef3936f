"""Start the ranks by a launcher, pass their events on, and return the Outcome they agreed on.

Ranks write events on their stdout (`base.events`). All other lines are the launcher's own; the last
of them are part of the message if there is no Outcome.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from stager.base.codec import codec_of
from stager.base.errors import MPI_REMEDY, Failure, LaunchError
from stager.base.events import Parts, read_event
from stager.base.outcome import Evicted, Outcome
from stager.base.telemetry import Phase
from stager.launch.health import Health, Paces, Pulses, Stall
from stager.launch.job import fold
from stager.launch.process import Process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Lines of the launcher's own output that the message of a failure repeats.
_TAIL = 12
#: The failure of ranks that started on some node at least, but did not begin.
_NOT_CONNECTED = (
    "MPI started, but did not connect all nodes within {:g} s: a node has failed, or a firewall or "
    "another program connects to MPI's TCP ports; submit again, and tell the administrator"
)
#: The failure of ranks that could not begin because of Slurm.
_DISCONNECTED = (
    "MPI did not start: Slurm lost a connection between two nodes; submit again, and if it fails "
    "again tell the administrator"
)
#: The failure of ranks that could not begin because Slurm started not all of them.
_REFUSED = (
    "MPI did not start: Slurm could not start the staging process on {}; submit again, and if it "
    "fails again tell the administrator (slurmd's log there says why)"
)
#: The failure of ranks that could not begin because of nodes that srun names, and of each node.
_UNREACHED = (
    "MPI did not start: {}: {}; submit again; if it fails again, use other nodes (--exclude) and "
    "tell the administrator"
)
_UNREACHED_THERE = "Slurm could not start the staging process there: {}"
#: The failure of ranks of which one ended before all had begun.
_LOST_RANK = (
    "MPI did not start: {}: the staging process there ended first ({}); submit again; if it fails "
    "again, use other nodes (--exclude) and tell the administrator"
)
#: The failure of ranks that could not begin because others were not even there.
_ABSENT = (
    "MPI did not start within {:g} s: the staging process on {} has not begun; the node or its "
    "network has failed, or the process is stopped or cannot read its Python; submit again; if it "
    "fails again, use other nodes (--exclude) and tell the administrator"
)
#: The failure of ranks of which none has begun, and what to do where Slurm starts them.
_NONE = (
    "MPI did not start within {:g} s: {} has started no staging process on any node, or none that "
    "can read its Python; {}"
)
_NONE_REMEDY = (
    "submit again, and if it fails again tell the administrator (slurmd's log on the nodes says "
    "whether it started the step; stagectl doctor, whether the Python is there)"
)
#: The failure of ranks that have all begun, but do not find each other.
_WAITING = (
    "MPI did not start within {:g} s: the staging processes run on all nodes, but wait for each "
    "other in MPI_Init: the network between the nodes, or MPI's settings, may be at fault; {}"
)
#: Why a stage ends that one of its ranks reported nonsense about.
_UNREADABLE = (
    "the answer of a rank cannot be read; tell the administrator to check that all nodes have the "
    "same version of slurm-stage"
)
#: What Slurm's PMIx plugin says when a connection between two nodes is refused as the ranks start:
#: it came while slurmstepd acted as the user, who may not check it (22.05; users report it of other
#: versions). Slurm never makes it again, and MPI mostly waits for it in vain.
_CONNECTION_LOST = "_direct_conn_establish"
#: What srun says of a task that slurmstepd could not prepare, and then of the tasks that it ends
#: because of it. PMIx refuses a step whose folder of an earlier run of the job was left on the node
#: (a slurmstepd that was killed, a node that failed, a requeue). Another start is another step.
_LAUNCH_REFUSED = re.compile(r"srun: error: task (?P<task>\d+) launch failed: ")
#: Seconds in which the ranks may begin in spite of these, and how often they are started at most.
_LOST_PATIENCE, _STARTS = 5.0, 3
#: Seconds of silence as ranks start after which they are started again, once. Now and then MPI
#: libraries, and Slurm's plugin for PMIx, wait for ever then: here in one of some thousand stages,
#: and https://github.com/openpmix/openpmix/issues/2967 has up to 4 in 5,000.
_HANG = 40.0
#: Seconds between two reports that the ranks have not begun.
_TELL = 10.0
#: The longest wait for output, in seconds: then the clocks are looked at.
_TICK = 1.0
#: What srun says of a node that it does not reach, or where slurmd refuses the step (22.05).
_NOT_LAUNCHED = re.compile(
    r"srun: error: (?:Task launch for \S+ failed on node (?P<node>\S+): (?P<why>.*)"
    r"|Node failure on (?P<failed>[^\s,\[\]]+)$)"
)
#: What srun and slurmstepd say of the node where a rank was lost (22.05).
_BLAMING = tuple(
    re.compile(text)
    for text in (
        r"slurmstepd: error:\s+mpi/pmix\w*: _errhandler: (?P<node>\S+) \[\d+\]: ",
        # With codes 1 and 8, ranks end themselves.
        r"srun: error: (?P<node>[^\s,\[\]]+): task \d+: (?!Exited with exit code [18]$)(?P<why>.*)",
    )
)
#: What a rank says of a neighbour that it has lost, and what is said here of such a node.
LOST = "the staging process there was killed, or the node failed"


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds for the launcher: to end by itself when the ranks are done, and when one has crashed;
    and to end its tasks when it is told to.

    The ranks have 10 s for the end of MPI (`rank.program`), and srun waits 15 s for the last
    (`srun_argv`).
    """

    end: float = 40.0
    crash: float = 20.0
    stop: float = 10.0


#: For a launcher whose ranks are started again on other nodes.
SHORT = Patience(end=10.0, crash=1.0, stop=1.0)
#: For all others.
USUAL = Patience()


class EndedError(LaunchError):
    """The ranks have ended, or have not begun, without an Outcome.

    ``blamed`` has a Failure for each node that is known to be the reason, ``evicted`` the copies
    that the ranks had removed to make room.
    """

    def __init__(
        self, message: str, blamed: Sequence[Failure] = (), evicted: Sequence[Evicted] = ()
    ) -> None:
        super().__init__(message)
        self.blamed = tuple(blamed)
        self.evicted = tuple(evicted)


def with_evictions(start: Callable[[], Outcome]) -> Outcome:
    """Return what ``start`` returns, or an Outcome if ranks ended after they had removed copies.

    So these are told, too. Raise what it raises otherwise.
    """
    try:
        return start()
    except EndedError as error:
        if not error.evicted:
            raise
        failure = Failure(error.code, error.message, "")
        return Outcome([], [failure], 0.0, evicted=[*error.evicted])


class NotStartedError(EndedError):
    """No rank has begun, or one failed before all were connected."""


def run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    start_timeout: float,
    on_event: Callable[[dict[str, Any]], None],
    pulses: Pulses | None = None,
    remedy: str = MPI_REMEDY,
    patience: Patience = USUAL,
    paces: Paces | None = None,
) -> Outcome:
    """Start the ranks, pass their events on, and return the Outcome they agreed on.

    Its time is from the launch to the launcher's end. ``pulses`` takes the ranks' pulses and finds
    out whether they stall, ``paces`` which nodes are slow. ``remedy`` is for ranks that do not
    start. Start them again if Slurm lost a connection before they began, or could not start one;
    and once if they hang: if none has begun 40 s after the last was seen to live, and no node is
    known as the reason. ``start_timeout``, in seconds, is for all starts together.

    Raise LaunchError if the launcher cannot be started; EndedError if the ranks stall, end without
    an Outcome, or have to be given up because of slow nodes; NotStartedError if no rank begins in
    time or at all, or one fails before all are connected.
    """
    begun = time.monotonic()
    deadline = begun + start_timeout
    health = Health(pulses or Pulses(list, "", limit=0), paces or Paces())
    listener = _Listener(start_timeout, on_event, health, patience)
    for left in reversed(range(_STARTS)):
        with Process(argv, environment, bound=True) as process:
            listener.listen(process, deadline, is_last=not left)
            if listener.gave_up:
                process.end(patience.stop)
        why = listener.why_again()
        if not (why and left) or time.monotonic() > deadline:
            break
        on_event({"event": "restarted", "why": why})
    if listener.outcome is None:
        launcher = os.path.basename(argv[0])
        kind = EndedError if listener.connected else NotStartedError
        message = _no_outcome(launcher, process.code, listener, start_timeout, remedy)
        raise kind(message, listener.blamed(), listener.evicted)
    outcome = listener.outcome
    return _with_launch(
        replace(outcome, evicted=[*outcome.evicted, *listener.evicted]),
        before=listener.outcome_at - begun,
        after=time.monotonic() - listener.outcome_at,
    )


def _with_launch(outcome: Outcome, *, before: float, after: float) -> Outcome:
    """Return ``outcome`` with the launcher's own time added, given the seconds before and after."""
    phases = {Phase.LAUNCH: max(0.0, before - outcome.seconds), **outcome.phases}
    phases[Phase.END] = phases.get(Phase.END, 0.0) + after
    return replace(outcome, phases=phases, seconds=sum(phases.values()))


def _no_outcome(
    launcher: str, code: int, listener: _Listener, start_timeout: float, remedy: str
) -> str:
    """Return the message for ranks that ended, or did not begin, without an Outcome."""
    ended = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    if listener.stall:
        return f"staging ended early: {listener.stall}"
    if listener.is_disconnected:
        problem = _DISCONNECTED
    elif listener.is_refused:
        problem = _REFUSED.format(listener.refused_node())
    elif unreached := listener.unreached():
        why = _UNREACHED_THERE.format(next(iter(unreached.values())))
        problem = _UNREACHED.format(fold(list(unreached)), why)
    elif listener.timed_out and listener.start.has_pulse:
        return _NOT_CONNECTED.format(start_timeout)
    elif listener.timed_out:
        problem = _not_begun(launcher, listener, start_timeout, remedy)
    elif not listener.begun and listener.first_lost:
        problem = _LOST_RANK.format(*listener.first_lost)
    elif not listener.begun:
        problem = f"MPI did not start: {launcher} {ended}; {remedy}"
    else:
        why = listener.crash() or f"{launcher} {ended}"
        problem = f"staging ended early: {why}; submit again"
    return problem + "".join(f"\n  {line}" for line in listener.last_lines)


def _not_begun(launcher: str, listener: _Listener, start_timeout: float, remedy: str) -> str:
    """Return the message for ranks that have not begun in time."""
    if absent := listener.absent():
        return _ABSENT.format(start_timeout, fold(absent))
    if not listener.start.alive:
        how = _NONE_REMEDY if remedy == MPI_REMEDY else remedy
        return _NONE.format(start_timeout, launcher, how)
    # They may be called otherwise.
    if 0 < len(listener.names()) <= len(listener.start.alive):
        return _WAITING.format(start_timeout, remedy)
    return f"MPI did not start within {start_timeout:g} s; {remedy}"


@dataclass(slots=True)
class _Start:
    """What is known of one start of the ranks: which live, and what the launcher says of others."""

    #: The nodes whose rank has begun, before MPI; and whether one has sent a pulse.
    alive: set[str] = field(default_factory=set)
    has_pulse: bool = False
    #: The launcher's last lines.
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL))
    #: The nodes on which it could start no rank, and why.
    unreached: dict[str, str] = field(default_factory=dict)
    #: The first node whose rank ended, and how.
    lost: str = ""
    how_lost: str = ""
    #: Whether Slurm lost a connection, and the task that it could not start.
    has_lost_connection: bool = False
    refused_task: int | None = None

    def absent(self, names: list[str]) -> list[str]:
        """Return those of the nodes whose rank has not begun, if others have.

        Return none if nodes are known by other names than they have, as hosts may be.
        """
        absent = [name for name in names if name not in self.alive]
        return absent if self.alive.issubset(names) and len(absent) < len(names) else []

    def take(self, line: str) -> str:
        """Take a line. Return the node that has failed, if it says so."""
        if line.strip():
            self.tail.append(line.rstrip())
        unreached = _NOT_LAUNCHED.match(line)
        if unreached:
            node = unreached["node"] or unreached["failed"]
            self.unreached.setdefault(node, unreached["why"] or "it has failed")
        # After a refusal, Slurm ends ranks that are at no fault.
        if not self.lost and self.refused_task is None:
            found = next(filter(None, (pattern.match(line) for pattern in _BLAMING)), None)
            if found:
                self.lost = found["node"]
                self.how_lost = found.groupdict().get("why") or "it has failed"
        self.has_lost_connection = self.has_lost_connection or _CONNECTION_LOST in line
        if self.refused_task is None and (refused := _LAUNCH_REFUSED.match(line)):
            self.refused_task = int(refused["task"])
        return (unreached and unreached["failed"]) or ""


class _Listener:
    """Takes what the ranks and their launcher print.

    Some rank must begin within ``start_timeout`` seconds, and then ``health`` must find no stall.
    """

    def __init__(
        self,
        start_timeout: float,
        on_event: Callable[[dict[str, Any]], None],
        health: Health,
        patience: Patience,
    ) -> None:
        self._patience = patience
        self._start_timeout = start_timeout
        #: When they are started again if no other lives by then, and when they are given up if
        #: Slurm has lost a connection or refused a start.
        self._again_at = self._lost_until = math.inf
        self._on_event = on_event
        self._health = health
        self.names = health.names
        self._parts = Parts()
        self.start = _Start()
        #: Whether all have begun, whether they hang and are to be started again, and whether they
        #: had not begun at the deadline.
        self.begun = self.hangs = self._has_hung = self.timed_out = False
        #: Whether a rank has told more than that it failed.
        self.connected = False
        #: Why the ranks were given up, if they stalled; and when they had no more to say: on the
        #: RunningClock.
        self.stall: Stall | None = None
        self._over_at = 0.0
        #: The first rank of which an unexpected failure was told, and why.
        self._crash = ""
        #: The nodes that ranks blame, with the reason; and those whose ranks ended because of
        #: others, which their neighbours then blame.
        self._blamed: dict[str, str] = {}
        self._ended: set[str] = set()
        #: What the ranks agreed on, and when it came, on the monotonic clock.
        self.outcome: Outcome | None = None
        #: The copies that the ranks have removed to make room.
        self.evicted: list[Evicted] = []
        self.outcome_at = 0.0

    @property
    def last_lines(self) -> list[str]:
        """The launcher's last lines, and how each event begins of which the end is missing."""
        return [*self.start.tail, *self._parts.beginnings()]

    @property
    def gave_up(self) -> bool:
        """Whether the launcher must be ended: its ranks do not begin, do not move, or are over."""
        return self.timed_out or self.hangs or bool(self.stall) or self._is_overdue()

    @property
    def is_disconnected(self) -> bool:
        """Whether the ranks did not begin because Slurm lost a connection, to an unknown node."""
        return self.start.has_lost_connection and not self._is_explained

    @property
    def is_refused(self) -> bool:
        """Whether the ranks did not begin because Slurm could not start one, on an unknown node."""
        return self.start.refused_task is not None and not self._is_explained

    @property
    def _is_explained(self) -> bool:
        """Whether the ranks have begun, or it is known where they did not."""
        return self.begun or bool(self.start.unreached)

    def refused_node(self) -> str:
        """Return the node of the task that Slurm could not start; there is one task on each."""
        names, task = self.names(), self.start.refused_task
        return names[task] if task is not None and task < len(names) else "a node"

    @property
    def first_lost(self) -> tuple[str, str] | None:
        """The first node whose rank ended as the launcher says, and how; None if srun ended it."""
        lost, how = self.start.lost, self.start.how_lost
        return (lost, how) if lost in self.names() and how != "Terminated" else None

    def unreached(self) -> dict[str, str]:
        """Return the nodes on which no rank could be started, with what srun says of the first.

        What it says otherwise of others may be a consequence. None once a rank has begun.
        """
        unreached = {} if self.begun else self.start.unreached
        first = next(iter(unreached.values()), "")
        return {node: why for node, why in unreached.items() if why == first}

    def why_again(self) -> str:
        """Return why the ranks should be started again, for the user; empty if they should not."""
        if self.is_disconnected:
            return "Slurm lost a connection between the nodes"
        if self.is_refused:
            return "Slurm could not start a process"
        return "MPI does not start" if self.hangs else ""

    def blamed(self) -> list[Failure]:
        """Return a failure for each node that is known to be the reason why the ranks ended.

        Of the ranks that are lost, only the first is: then Slurm, or a neighbour, ends the others.
        """
        if self.stall:
            nodes = self.stall.nodes if self.stall.is_nodes_own else ()
            return [Failure(LaunchError.code, self.stall.why, node) for node in nodes]
        if self.is_disconnected or self.is_refused:
            return []
        unreached = self.unreached()
        if self.timed_out and not unreached:
            why = f"the staging process there did not begin within {self._start_timeout:g} s"
            return [Failure(LaunchError.code, why, node) for node in self.absent()]
        if culprit := self._culprit():
            return [Failure(LaunchError.code, self._blamed[culprit], culprit)]
        found = {node: _UNREACHED_THERE.format(why) for node, why in unreached.items()}
        if not found:
            found = {next(iter(self.start.unreached), self.start.lost): LOST}
        known = self.names()
        return [
            Failure(LaunchError.code, why, node) for node, why in found.items() if node in known
        ]

    def crash(self) -> str:
        """Return the rank that failed unexpectedly, and why; empty if none is known.

        What its neighbours tell may come after what is told of them.
        """
        culprit = self._culprit()
        return f"{culprit}: {self._blamed[culprit]}" if culprit else self._crash

    def _culprit(self) -> str:
        """Return the first node that ranks blame, and whose rank did not end because of others."""
        return next((node for node in self._blamed if node not in self._ended), "")

    def listen(self, process: Process, deadline: float, *, is_last: bool) -> None:
        """Take all output, unless the ranks do not begin in time or the launcher is given up.

        ``deadline`` is on the monotonic clock. The last start has all that is left, even if the
        ranks hang, and any start of which less than `_HANG` would be left to the next.
        """
        now = started = time.monotonic()
        tell_at = now + _TELL
        self._lost_until = math.inf
        self._has_hung = self._has_hung or self.hangs
        self._again_at = math.inf if is_last or self._has_hung else now + _HANG
        self.timed_out = self.hangs = False
        self._parts, self.start = Parts(), _Start()
        while process.is_open and not self.gave_up:
            for line in process.read_lines(_TICK):
                self._take(line)
            now = time.monotonic()
            is_known = bool(self.start.unreached)
            limit = deadline if is_known else min(deadline, self._lost_until)
            self.timed_out = not self.begun and now >= limit
            self.hangs = self._again_at <= now <= deadline - _HANG and self._may_hang()
            if not (self.begun or self.timed_out) and now >= tell_at:
                tell_at += _TELL
                waits = {"nodes": self.absent(), "seconds": now - started}
                self._on_event({"event": "starting", **waits})
            if self.begun and not self._over_at:
                if work := self._health.work():
                    self._on_event({"event": "working", "text": work, "seconds": self._health.now})
                self.stall = self._health.verdict()

    def _may_hang(self) -> bool:
        """Whether the ranks do not begin for a reason that another start may not meet."""
        said = self.start
        is_known = said.has_lost_connection or said.lost or said.unreached
        return not (self.begun or said.has_pulse or is_known or self.absent())

    def absent(self) -> list[str]:
        """Return the nodes whose rank has not begun, if others have."""
        return self.start.absent(self.names()) if self.start.alive else []

    def _is_overdue(self) -> bool:
        """Whether all was said, but the launcher has not ended for too long."""
        patience = self._patience.end if self.outcome else self._patience.crash
        return self._over_at > 0 and self._health.now - self._over_at > patience

    def _take(self, line: str) -> None:
        try:
            line = self._parts.join(line)
            if (event := read_event(line)) is not None:
                self._obey(event)
                return
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
            self._crash = self._crash or _UNREADABLE
            self._over_at = self._over_at or self._health.now
            return
        failed = self.start.take(line)
        if self.begun and failed:  # then Slurm ends the ranks, which blame each other
            self._blamed = {failed: LOST, **self._blamed}
        if self.start.has_lost_connection or self.is_refused:
            self._lost_until = min(self._lost_until, time.monotonic() + _LOST_PATIENCE)

    def _obey(self, event: dict[str, Any]) -> None:
        if event["event"] == "alive":
            self.start.alive.add(event["node"])
            self._again_at = max(self._again_at, time.monotonic() + _HANG)
            return
        if event["event"] == "pulse":
            self.start.has_pulse = True
            for text in self._health.hear(event):
                self._on_event({"event": "slow", "text": text})
            return
        if not self.begun:
            self.begun = True
            self._health.begin()
        self.connected = self.connected or event["event"] != "crashed"
        if event["event"] == "result":
            self.outcome_at = time.monotonic()
            self.outcome = Outcome.from_json(event["outcome"])
            self._over_at = self._health.now
        elif event["event"] == "crashed":
            self._note_crash(event["node"], event["error"], event.get("by", ""))
            self._over_at = self._over_at or self._health.now
        else:
            self._show(event)

    def _show(self, event: dict[str, Any]) -> None:
        """Pass an event on that a user may be shown."""
        if event["event"] in ("progress", "waiting", "making"):
            self._health.note_shown()
        if event["event"] == "evicted":
            gone = {name: event[name] for name in ("node", "destination", "size")}
            self.evicted.append(one := codec_of(Evicted).from_data(gone))
            event = {"event": "evicted", "copy": one}
        elif event["event"] == "progress":
            event = {**event, "quiet": self._health.quiet()}
        self._on_event(event)

    def _note_crash(self, node: str, why: str, reporter: str) -> None:
        """Note that a rank has failed, or that the one on node ``reporter`` ends because of it."""
        if not all(isinstance(text, str) for text in (node, why, reporter)):
            raise TypeError
        self._crash = self._crash or f"{node}: {why}"
        if reporter:
            self._ended.add(reporter)
        self._blamed.setdefault(node, why)
