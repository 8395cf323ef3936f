"""Show the progress that ranks report: bars on a terminal, else a line every few seconds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

from stager.base.interfaces import Interface, Kind
from stager.base.text import bytes_text, seconds_text
from stager.cli.render import SoFar, evicted_lines, progress_line
from stager.cli.terminal import is_screen
from stager.launch.job import fold

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

    from stager.base.outcome import Evicted
    from stager.cli.bars import Bars

#: Seconds between two lines about the same stage.
_LINE_PERIOD = 5.0


class Progress:
    """Shows events of the ranks until the block is left.

    If a signal ends the block, the copies that were removed to make room are named.

    Lines are printed by ``say``; if the stream ``bars`` is a terminal, bars are drawn there
    instead. If ``verbose``, srun's MPI plugin, the network and nodes that do not watch each other
    are named.
    """

    def __init__(
        self, say: Callable[[str], None], *, bars: TextIO | None, verbose: bool = False
    ) -> None:
        self._say = say
        self._verbose = verbose
        self._screen = bars if bars and is_screen(bars) else None
        self._last_line = time.monotonic()
        self._waiting = False
        self._pace = _Pace()
        self._bars: Bars | None = None
        #: The item that was last told of.
        self._destination = ""
        #: The copies that were removed so far to make room.
        self._evicted: list[Evicted] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bars is not None:
            self._bars.close()
        if kind and not issubclass(kind, Exception):  # a signal: no outcome will tell of them
            self._tell_evicted()

    def _tell_evicted(self) -> None:
        if self._evicted:
            for line in evicted_lines(self._evicted):
                self._say(line)

    def show(self, event: dict[str, Any]) -> None:
        """Show one event; events that are not about progress are ignored."""
        self._destination = event.get("destination", self._destination)
        if event["event"] == "progress":
            self._move(self._so_far(event), event.get("quiet", []))
        elif event["event"] == "waiting":
            words = f"waiting for {event['holder']} on {event['node']}"
            self._wait(event["destination"], words, event["seconds"], at_once=not self._waiting)
            self._waiting = True
        elif event["event"] == "working":
            self._work(event["text"], event["seconds"])
        elif event["event"] == "evicted":
            self._evicted.append(event["copy"])
        elif event["event"] == "making":
            words = f"{event['node']} makes a file of the image"
            self._wait(event["destination"], words, event["seconds"])
        elif line := _line(event) or (_detail(event) if self._verbose else ""):
            self._say(line)

    def _so_far(self, event: dict[str, Any]) -> SoFar:
        """Return how far an item is. Raise TypeError, ValueError or OverflowError for no number."""
        destination, seconds = event["destination"], event["seconds"]
        sent, size = int(event["sent"]), int(event["size"])
        idle = self._pace.idle(destination, sent, seconds) if sent < size else 0.0
        return SoFar(destination, sent, size, seconds, idle, event.get("steady", True))

    def _move(self, so_far: SoFar, quiet: list[str]) -> None:
        if self._screen:
            self._drawn(self._screen).move(so_far)
        elif self._is_time():
            self._say(progress_line(so_far) + (_quiet_text(quiet) if so_far.idle else ""))

    def _wait(self, destination: str, words: str, seconds: float, *, at_once: bool = False) -> None:
        if seconds >= 1:
            words = f"{words}, {seconds_text(seconds)} so far"
        if self._screen:
            self._drawn(self._screen).wait(destination, words)
        elif at_once or self._is_time():
            self._say(f"{destination}: {words}")

    def _work(self, text: str, seconds: float) -> None:
        """Show what the ranks do while no bytes are sent, as when a disk takes them."""
        words = f"{text}, {seconds_text(seconds)} since the start"
        if self._screen and self._destination:
            self._drawn(self._screen).say(self._destination, words)
        elif not self._screen and self._is_time():
            self._say(words)

    def _is_time(self) -> bool:
        now = time.monotonic()
        due = now - self._last_line >= _LINE_PERIOD
        if due:
            self._last_line = now
        return due

    def _drawn(self, screen: TextIO) -> Bars:
        if self._bars is None:
            from stager.cli.bars import Bars  # rich is slow to import

            self._bars = Bars(screen)
        return self._bars


class _Pace:
    """Knows for how long no byte of the item moved that is staged now."""

    def __init__(self) -> None:
        self._destination = ""
        self._sent = 0
        self._moved_at = 0.0

    def idle(self, destination: str, sent: int, seconds: float) -> float:
        """Return the seconds in which no byte moved; 0 if they are less than the time of a line.

        The item's first ``sent`` bytes took so many ``seconds``.
        """
        if destination != self._destination:
            self._destination, self._sent, self._moved_at = destination, 0, 0.0
        if sent != self._sent:
            self._sent, self._moved_at = sent, seconds
        idle = seconds - self._moved_at
        return idle if idle >= _LINE_PERIOD else 0.0


def _quiet_text(nodes: list[str]) -> str:
    """Return what is added to a line about ``nodes`` that do not answer."""
    if not nodes:
        return ""
    return f", no answer from {fold(nodes)}"


def _line(event: dict[str, Any]) -> str:
    """Return the line that is always said of an event, if there is one."""
    if event["event"] == "restarted":
        return f"{event['why']}; the staging starts again"
    if event["event"] == "hosts":
        return str(event["line"])
    if event["event"] == "slow":
        return f"{event['text']}; they wait for it"
    if event["event"] == "shared":
        room = f"{bytes_text(event['free'])} of {bytes_text(event['size'])} free"
        nodes = event["nodes"]
        return f"{event['mount']}: filesystem of the disks of {_nodes_text(nodes)}, {room}"
    if event["event"] == "starting":
        absent = event["nodes"]
        what = f"the staging process on {fold(absent)} to begin" if absent else "MPI to start"
        return f"waiting for {what}, {seconds_text(event['seconds'])} so far"
    if event["event"] == "silent":
        so_far = f"{seconds_text(event['seconds'])} so far"
        return f"waiting for {fold(event['nodes'])} to answer, {so_far}"
    return ""


def _nodes_text(nodes: int) -> str:
    return f"{nodes} nodes" if nodes > 1 else "one node"


def _detail(event: dict[str, Any]) -> str:
    """Return the line that --verbose adds for an event, if there is one."""
    if event["event"] == "launch":
        return f"srun --mpi={event['mpi']} starts the ranks"
    if event["event"] == "network":
        return _network_line(event)
    if event["event"] == "unwatched":
        return (
            f"{event['node']} does not watch {event['neighbour']}: no TCP connection could be "
            "made; if that node fails, the stage ends only after stall_timeout"
        )
    return ""


def _network_line(event: dict[str, Any]) -> str:
    """Return which network the ranks use, and the interface of rank 0 in it."""
    interface = Interface(event["name"], Kind(event["type"]), event["speed"]).text
    where = f"{event['network']}, on {event['node']} by {interface}"
    if event["named"]:
        return f"the ranks use the network {where}, as stage.toml says"
    return f"the ranks watch each other over the network {where}"
