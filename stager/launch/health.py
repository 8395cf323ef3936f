"""Does a stage still move, and which nodes hold the others up? The ranks' pulses tell.

A pulse (`rank.pulse`) is an event with the rank's node, a count that grows with all that it gets
done, what it is doing, and how fast it writes. There are two kinds of stall: a node sends no pulses
any more, because it, its network, its rank or its slurmstepd has stopped; or no node's count grows
any more.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stager.base.outcome import LOST, Pace, slow_nodes
from stager.base.telemetry import Kind
from stager.base.text import rate_text, seconds_text
from stager.launch.job import fold

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stager.base.outcome import Slow


class Paces:
    """How fast each node has written so far, by its last pulse.

    Slow nodes have to be given up when one has cost the others ``patience`` seconds, if they are at
    most so many; and never ``own``, on which this process runs.
    """

    def __init__(self, patience: float = 0.0, most: int = 0, own: str = "") -> None:
        self._patience = patience
        self._most = most if patience else 0
        self._own = own
        self._of_nodes: dict[str, Pace] = {}
        self._told: set[str] = set()
        #: The nodes that have to be given up.
        self.too_slow: list[Slow] = []

    def hear(self, pulse: dict[str, Any]) -> list[Slow]:
        """Take one pulse; return the nodes that are now seen to be slow, each only once.

        The nodes, of which there may be thousands, are compared only where one has held up others.
        """
        pace = Pace(pulse["node"], *pulse["pace"])
        self._of_nodes[pace.node] = pace
        is_due = self._most > 0 and pace.held >= self._patience
        if not is_due and (pace.held < LOST or pace.node in self._told):
            return []
        slow = slow_nodes(self._of_nodes.values())
        others = [one for one in slow if one.node != self._own]
        if len(others) <= self._most and any(one.seconds >= self._patience for one in others):
            self.too_slow = others
        new = [one for one in slow if one.node not in self._told]
        self._told.update(one.node for one in new)
        return new


def too_slow_text(slow: Sequence[Slow]) -> str:
    """Return why nodes that are ``slow`` were given up."""
    fastest = max(slow, key=lambda one: one.rate)
    rate, others = rate_text(fastest.rate), rate_text(fastest.others)
    most = "" if len(slow) == 1 else "at most "
    lost = seconds_text(min(one.seconds for one in slow))
    return f"too slow: it writes {most}{rate}, the others {others}, and cost them {lost}"


#: The most seconds that count between two looks at the clock: if they are more, this process was
#: suspended, and so were the ranks.
_LONGEST_TICK = 3.0
#: Parts of the limit: a node that was not heard for so long is late, as nodes send six pulses in
#: that time; and a silence after which it does not matter whether others are late.
_LATE, _LONGEST_SILENCE = 2 / 3, 1.5
#: Likewise: the silence of which progress tells, in which three pulses were due.
_QUIET = 1 / 3
#: Seconds from one pulse of a node to the next at most (`rank.pulse`), and some for the way.
_PULSE = 12.0
#: Seconds without a report on bytes or on a wait, which come every second, after which it is told
#: what the ranks do; and seconds from the first rank's pulse to those of the others.
_STILL, _OTHERS = 2.5, 0.5
#: Seconds between two looks at all nodes.
_BETWEEN = 0.5
_REMEDY = "submit again; if it fails again, use other nodes (--exclude) and tell the administrator"


class RunningClock:
    """Seconds in which this process ran: the clock stands still while it is suspended."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last = now()
        self._seconds = 0.0

    def seconds(self) -> float:
        """Return the seconds so far. Ask at least every second."""
        now = self._now()
        self._seconds += min(now - self._last, _LONGEST_TICK)
        self._last = now
        return self._seconds


@dataclass(frozen=True, slots=True)
class Stall:
    """Why a stage is given up, and because of which nodes: none if that is not to be seen.

    ``is_nodes_own`` says whether those nodes themselves are at fault: what a rank reads or receives
    may stand still because of others.
    """

    nodes: tuple[str, ...]
    why: str
    is_nodes_own: bool = True

    def __str__(self) -> str:
        where = f"{fold(list(self.nodes))}: " if self.nodes else ""
        return f"{where}{self.why}; {_REMEDY}"


@dataclass(slots=True)
class _Node:
    """What the pulses of one node said; times in seconds on the RunningClock."""

    heard_at: float
    moved_at: float
    count: int = -1
    kind: Kind = Kind.WAIT
    doing: str = ""


@dataclass(slots=True)
class Pulses:
    """The pulses of a stage so far.

    ``names`` returns its nodes; ``own`` is the one that this process runs on, if it is one of them.
    ``limit`` is the most seconds without a pulse of a node, or without progress on any; 0 for none.
    ``is_suspended`` asks whether the job is: if this process is outside of it, it is not suspended.
    ``silence`` is the most seconds without a pulse of a node, if that is not ``limit``.
    """

    names: Callable[[], list[str]]
    own: str
    limit: float
    is_suspended: Callable[[], bool] = lambda: False
    #: The launcher, as a message names it.
    launcher: str = "srun"
    silence: float = 0.0
    _begun: float = 0.0
    _looked_at: float = 0.0
    _expected: list[str] | None = None
    _nodes: dict[str, _Node] = field(default_factory=dict)

    def begin(self, now: float) -> None:
        """Note that the ranks have begun, and must send pulses from now on."""
        self._begun = now

    def hear(self, pulse: dict[str, Any], now: float) -> None:
        """Take one pulse. Raise TypeError or ValueError if a rank tells anything else."""
        if not (isinstance(pulse["node"], str) and isinstance(pulse["doing"], str)):
            raise TypeError
        node = self._nodes.setdefault(pulse["node"], _Node(now, now))
        node.heard_at = now
        if pulse["count"] != node.count:
            node.moved_at = now
        node.count = pulse["count"]
        node.kind, node.doing = Kind(pulse["activity"]), pulse["doing"]

    def quiet(self, now: float) -> list[str]:
        """Return the nodes that were heard before, but not lately while others were."""
        limit = _QUIET * (self.silence or self.limit)
        quiet = [name for name, node in self._nodes.items() if now - node.heard_at > limit]
        return quiet if limit and len(quiet) < len(self._nodes) else []

    def verdict(self, now: float) -> Stall | None:
        """Return why the stage has failed, None while it moves.

        Look at the nodes, of which there may be thousands, once in a while.
        """
        silence = self.silence or self.limit
        if not silence or now - max(self._begun + silence, self._looked_at + _BETWEEN) <= 0:
            return None
        self._looked_at = now
        self._expected = self._expected or self.names()
        silent = [
            name
            for name in dict.fromkeys([*self._expected, *self._nodes])
            if now - self._heard_at(name) > silence
        ]
        if silent and self._may_others_be_silent(silent, now, silence):
            return None
        if silent and all(name in silent for name in self._nodes) and self.is_suspended():
            self._wait_on(now)
        elif silent:
            return self._about_silent(silent, silence)
        elif self.limit and now - max(one.moved_at for one in self._nodes.values()) > self.limit:
            return self._about_standing()
        return None

    def _may_others_be_silent(self, silent: Sequence[str], now: float, limit: float) -> bool:
        """Whether a node that is late, but not too late, may have failed when the silent ones did.

        Nodes send their pulses at different times. Who is named depends on which nodes are silent,
        so that is waited for, for at most another half of the ``limit``, in seconds.
        """
        if now - min(map(self._heard_at, silent)) > _LONGEST_SILENCE * limit:
            return False
        others = (name for name in self._nodes if name not in silent)
        return any(now - self._heard_at(name) > _LATE * limit for name in others)

    def _wait_on(self, now: float) -> None:
        """Begin to wait anew for the pulses of all nodes."""
        self._begun = now
        for node in self._nodes.values():
            node.heard_at = node.moved_at = now

    def _heard_at(self, name: str) -> float:
        return self._nodes[name].heard_at if name in self._nodes else self._begun

    def _about_silent(self, silent: Sequence[str], seconds: float) -> Stall:
        heard = [name for name in self._nodes if name not in silent]
        waited = f"for {seconds:g} s"
        if not heard:
            where = f"on {self.own}" if self.own else "here"
            why = (
                f"no node has answered {waited}: the network or {self.launcher} has failed {where}"
            )
            return Stall((), why)
        if heard == [self.own] and len(silent) > 1:
            why = (
                f"no other node has answered {waited}: the network of this node has probably failed"
            )
            return Stall((self.own,), why)
        why = (
            f"no answer {waited}: the node or its network has failed, or the staging process there "
            "is stopped"
        )
        return Stall(tuple(silent), why)

    def _about_standing(self) -> Stall:
        worst, nodes, what = _behind(self._nodes)
        why = f"no progress for {self.limit:g} s while {what}"
        return Stall(nodes, why, is_nodes_own=worst in (Kind.WRITE, Kind.STEP))

    def work(self, now: float) -> str:
        """Return which nodes all others wait for, and what these do; empty if that is not known.

        What a node last said counts until its next pulse is overdue.
        """
        heard = {name: one for name, one in self._nodes.items() if now - one.heard_at <= _PULSE}
        kind, nodes, what = _behind(heard) if heard else (Kind.WAIT, (), "")
        if kind is not Kind.WAIT:
            return f"{fold(list(nodes))} {'are' if len(nodes) > 1 else 'is'} {what}"
        quiet = self.quiet(now)
        return f"{fold(quiet)} {'do' if len(quiet) > 1 else 'does'} not answer" if quiet else ""


class Health:
    """Whether the ranks move, which nodes hold them up, and what they do while nothing is told."""

    def __init__(self, pulses: Pulses, paces: Paces) -> None:
        self._pulses = pulses
        self._paces = paces
        self._clock = RunningClock()
        #: When it is to be told what the ranks do, 0 while it is not; when progress was last told.
        self._work_at = self._shown_at = 0.0

    @property
    def now(self) -> float:
        """Seconds on the RunningClock."""
        return self._clock.seconds()

    def names(self) -> list[str]:
        """Return the nodes that the ranks are to be on."""
        return self._pulses.names()

    def begin(self) -> None:
        """Note that the ranks have begun, and must send pulses from now on."""
        self._pulses.begin(self.now)

    def hear(self, pulse: dict[str, Any]) -> list[str]:
        """Take one pulse; return what is to be told of nodes that are now seen to be slow."""
        now = self.now
        self._pulses.hear(pulse, now)
        if not self._work_at and now - self._shown_at >= _STILL:
            self._work_at = now + _OTHERS
        return [one.text for one in self._paces.hear(pulse)]

    def note_shown(self) -> None:
        """Note that the user is told of bytes, or of a wait."""
        self._shown_at = self.now

    def quiet(self) -> list[str]:
        """Return the nodes that were heard before, but not lately while others were."""
        return self._pulses.quiet(self.now)

    def work(self) -> str:
        """Return what the ranks do while nothing else is told, when all of them have said it."""
        now = self.now
        if not self._work_at or now < self._work_at:
            return ""
        self._work_at = 0.0
        return self._pulses.work(now) if now - self._shown_at >= _STILL else ""

    def verdict(self) -> Stall | None:
        """Return why the stage has failed, None while it moves."""
        slow = self._paces.too_slow
        if slow:
            return Stall(tuple(one.node for one in slow), too_slow_text(slow))
        return self._pulses.verdict(self.now)


def _behind(nodes: Mapping[str, _Node]) -> tuple[Kind, tuple[str, ...], str]:
    """Return the activity that all others wait for, its nodes, and what these are doing."""
    worst = min(node.kind for node in nodes.values())
    behind = {name: node for name, node in nodes.items() if node.kind is worst}
    what = " or ".join(sorted({node.doing for node in behind.values()}))
    return worst, tuple(behind), what
