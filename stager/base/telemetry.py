"""Tell what this process gets done, what it is doing now, and where its time goes.

A process that stands still is known by its count, which does not change: whoever moves bytes or
goes through many entries calls `count`. Whoever may wait for a disk, for storage or for other
processes does so within `doing`, and whoever writes to the node's disk within `writing`. There is
one count, and one `writing`, for the whole process. A `Stopwatch` counts each moment of a stage in
one phase, so they add up.
"""

from __future__ import annotations

import os
import time
from _thread import allocate_lock, get_ident  # threading is slow to import
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Kind(IntEnum):
    """What a thread may wait for. What this process does itself comes before what others do."""

    READ = 0
    WRITE = 1
    #: Any other step on this node's own disk.
    STEP = 2
    RECEIVE = 3
    SEND = 4
    #: A step that other processes have not finished.
    WAIT = 5


class Activity(NamedTuple):
    """What a thread is doing; ``what`` is a path, or empty."""

    kind: Kind
    what: str = ""


_counted = 0
_subject = ""
_of_threads: dict[int, Activity] = {}


def count() -> None:
    """Note that something was done."""
    global _counted  # noqa: PLW0603 - one count for the whole process is what this module is for
    _counted += 1


def counted() -> int:
    """Return how often something was done. (Threads may lose a count, never the change.)"""
    return _counted


def about(path: str) -> None:
    """Note the path that is worked for from now on: that of activities that name none."""
    global _subject  # noqa: PLW0603
    _subject = path


def current() -> Activity:
    """Return the activity of the thread that all others in this process wait for."""
    kind, what = min(list(_of_threads.values()), default=Activity(Kind.WAIT))
    return Activity(kind, what or _subject)


class doing:  # noqa: N801 - used like a function
    """A context in which this thread does something; what it did before goes on afterwards."""

    __slots__ = ("_activity", "_before", "_thread")

    def __init__(self, kind: Kind, what: str = "") -> None:
        self._activity = Activity(kind, what)

    def __enter__(self) -> None:
        self._thread = get_ident()
        self._before = _of_threads.get(self._thread)
        _of_threads[self._thread] = self._activity

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            _of_threads.pop(self._thread, None)
        else:
            _of_threads[self._thread] = self._before


def wait_for(kind: Kind) -> None:
    """Note within `doing` that this thread waits for something else now."""
    _of_threads[get_ident()] = Activity(kind)


class Phase(StrEnum):
    """What a stage does, in order.

    Reading, broadcast and writing overlap. Time is charged to the one that all else waited for, and
    to the broadcast while nothing waits.
    """

    LAUNCH = "launch"
    MPI_INIT = "MPI init"
    SURVEY = "survey"
    WAIT = "wait"
    OPEN = "open"
    READ = "read"
    BROADCAST = "broadcast"
    WRITE = "write"
    FSYNC = "fsync"
    VERIFY = "verify"
    PUBLISH = "publish"
    END = "end"


Seconds = dict[str, float]


class Stopwatch:
    """Seconds by phase, and the ``phase`` now. It starts at ``begun`` on the monotonic clock."""

    def __init__(self, begun: float, phase: Phase) -> None:
        self._begun = self._last = begun
        self.phase = phase
        self.seconds: Seconds = {}

    @property
    def total(self) -> float:
        """Seconds from the start to the last change of phase: the sum of all phases."""
        return self._last - self._begun

    def enter(self, phase: Phase, parts: Mapping[Phase, float] | None = None) -> None:
        """End the current phase and begin ``phase``.

        ``parts`` are the seconds of the current one that are charged to other phases instead.
        """
        now = time.monotonic()
        left, self._last = now - self._last, now
        for part, seconds in (parts or {}).items():
            taken = min(left, seconds)
            left -= taken
            self._add(part, taken)
        self._add(self.phase, left)
        self.phase = phase

    def _add(self, phase: Phase, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


def process_begun() -> float:
    """Return the start of this process on the monotonic clock, to the kernel's tick of 10 ms."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        # proc(5): the name in parentheses may contain anything; starttime is the 22nd field.
        ticks = int(file.read().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, age)


class Figures(NamedTuple):
    """Bytes that were written, the seconds in which that was done, and those it held all else up.

    Several threads that write at once are busy once.
    """

    size: int
    busy: float
    held: float


class Writing:
    """The context in which a thread writes, and the figures so far."""

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._threads = 0
        self._size = 0
        self._held = 0.0
        #: The seconds of what has ended, and when the threads that write now began.
        self._busy = self._since = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._threads:
                self._since = time.monotonic()
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                self._busy += time.monotonic() - self._since

    def count(self, size: int) -> None:
        """Count bytes that were written."""
        with self._lock:
            self._size += size

    def hold_up(self, seconds: float) -> None:
        """Count seconds in which nothing moved here because of the disk. Only one thread may."""
        self._held += seconds

    def figures(self) -> Figures:
        """Return the figures so far, with the time of what is being written."""
        with self._lock:
            now = time.monotonic() - self._since if self._threads else 0.0
            return Figures(self._size, self._busy + now, self._held)


writing = Writing()
