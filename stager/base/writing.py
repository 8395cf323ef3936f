"""Count what this process writes to its node's disk, how long that takes, and what it holds up.

As in `base.progress`, there is one count for the whole process. Whoever writes does so within
`writing`.
"""

from __future__ import annotations

import time
from _thread import allocate_lock  # threading is slow to import
from typing import NamedTuple


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
