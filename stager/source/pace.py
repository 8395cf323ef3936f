"""Hold what several threads read to a rate. Pure: the caller tells the time, and sleeps."""

from __future__ import annotations

import threading


class Pace:
    """Says how long to wait after bytes have come, so that no more than ``rate`` come in a second.

    Time that nothing was read in is not made up for later. ``rate`` 0 is no limit.
    """

    def __init__(self, rate: int) -> None:
        self._rate = rate
        #: The time until which the bytes that have come are enough.
        self._until = 0.0
        self._lock = threading.Lock()

    def pause(self, length: int, now: float) -> float:
        """Return the seconds to wait after ``length`` bytes that came at ``now``, in seconds."""
        if not self._rate:
            return 0.0
        with self._lock:
            self._until = max(self._until, now) + length / self._rate
            return self._until - now
