"""Measure where the time of a stage goes. Each moment is counted in one phase, so they add up."""

from __future__ import annotations

import os
import time
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


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
