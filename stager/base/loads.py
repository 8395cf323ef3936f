"""Say how fast requests to a disk, or to a store, were. Pure."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, gcd
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The golden ratio: steps of this part of a range come near no place again for a long time.
_GOLDEN = 0.618


@dataclass(frozen=True, slots=True)
class Load:
    """How requests are made: each of ``block`` bytes at most, by ``threads`` at once.

    ``what`` is ``read`` or ``write``. Without ``is_random``, the requests go through the files in
    order.
    """

    what: str
    block: int
    threads: int
    is_random: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a `Load`: ``size`` bytes by so many ``requests`` in ``seconds``.

    ``p50`` and ``p99`` are seconds within which half, and 99 of 100, of the requests were answered.
    ``retries`` were repeated.
    """

    what: str
    block: int
    threads: int
    requests: int
    size: int
    seconds: float
    p50: float
    p99: float
    retries: int = 0

    @classmethod
    def of(
        cls, load: Load, spent: Sequence[float], size: int, seconds: float, retries: int = 0
    ) -> Self:
        """Return the measurement of requests that took the seconds ``spent``, at least one."""
        return cls(
            load.what, load.block, load.threads, len(spent), size, seconds,
            percentile(spent, 50), percentile(spent, 99), retries,
        )  # fmt: skip

    @property
    def rate(self) -> float:
        """Bytes in a second."""
        return self.size / self.seconds if self.seconds > 0 else 0.0

    @property
    def iops(self) -> float:
        """Requests in a second."""
        return self.requests / self.seconds if self.seconds > 0 else 0.0


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the least of ``values`` that so many percent of them do not exceed.

    >>> percentile([3, 1, 2, 4], 50), percentile([3, 1, 2, 4], 99)
    (2, 4)
    """
    return sorted(values)[max(1, ceil(len(values) * percent / 100)) - 1]


def best(measured: Sequence[Measured]) -> tuple[Measured, Measured]:
    """Return the fastest, and the one with the fewest threads that has nine tenths of its rate."""
    fastest = max(measured, key=lambda one: one.rate)
    enough = [one for one in measured if one.rate >= 0.9 * fastest.rate]
    return fastest, min(enough, key=lambda one: (one.threads, one.block))


class Places:
    """Where each request begins, in files of these ``sizes``.

    Each file begins with a new request. No request goes beyond the end of its file.
    """

    def __init__(self, sizes: Sequence[int], load: Load) -> None:
        self._sizes = sizes
        self._block = load.block
        self._ends = list(accumulate(-(-size // load.block) for size in sizes))
        self._step = _step(self.count) if load.is_random else 1

    @property
    def count(self) -> int:
        """How many requests read all files once."""
        return self._ends[-1]

    def at(self, request: int) -> tuple[int, int, int]:
        """Return the number of the file, and the offset and the length in it, in bytes.

        After ``count`` requests, the first one comes again.
        """
        place = request * self._step % self.count
        file = bisect_right(self._ends, place)
        offset = (place - (self._ends[file - 1] if file else 0)) * self._block
        return file, offset, min(self._block, self._sizes[file] - offset)


def _step(count: int) -> int:
    """Return a step that meets each of ``count`` places once, and seldom near the last one."""
    step = max(1, int(count * _GOLDEN))
    while gcd(step, count) > 1:
        step += 1
    return step
