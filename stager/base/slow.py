"""Find the nodes whose disks hold all others back, by what each node wrote and how long. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stager.base.outcome import Slow

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: A node is slow below this share of what the others do: disks of one model differ by less, also a
#: full or a worn one by a factor of two.
SHARE = 1 / 3
#: Seconds that all others must have lost by it: less may be other work on the node, and is not
#: worth an administrator's time.
LOST = 5.0


@dataclass(frozen=True, slots=True)
class Pace:
    """What one node did: ``size`` bytes in ``busy`` seconds, of which ``held`` held up the others.

    Paces can be added up over several items.
    """

    node: str
    size: int = 0
    busy: float = 0.0
    held: float = 0.0

    def __add__(self, other: Pace) -> Pace:
        return Pace(
            self.node, self.size + other.size, self.busy + other.busy, self.held + other.held
        )

    @property
    def rate(self) -> float:
        """Bytes a second while it was busy; infinite if that took no time."""
        return self.size / self.busy if self.busy > 0 else float("inf")


def slow_nodes(paces: Iterable[Pace]) -> list[Slow]:
    """Return the nodes that do less than `SHARE` of what the others do, if that cost `LOST`.

    The others are all that moved anything but itself, and count by their median. What a node cost
    is the time for which it held the others up, at most what it took longer than they would have.
    """
    active = [one for one in paces if one.size and one.busy > 0]
    return list(_slow(active)) if len(active) > 1 else []


def _slow(active: Sequence[Pace]) -> Iterator[Slow]:
    rates = sorted(one.rate for one in active)
    for one in active:
        others = _median_without(rates, one.rate)
        lost = min(one.held, one.busy - one.size / others)
        if one.rate < SHARE * others and lost >= LOST:
            yield Slow(one.node, one.rate, others, lost)


def far_below(rates: Sequence[float]) -> list[bool]:
    """Return of each rate whether it is below `SHARE` of the median of the others."""
    if len(rates) < 2:
        return [False] * len(rates)
    ordered = sorted(rates)
    return [rate < SHARE * _median_without(ordered, rate) for rate in rates]


def _median_without(rates: Sequence[float], rate: float) -> float:
    """Return the median of the sorted ``rates`` but one of them. There are thousands of nodes."""
    place = bisect_left(rates, rate)
    count = len(rates) - 1

    def at(index: int) -> float:
        return rates[index + (index >= place)]

    return (at((count - 1) // 2) + at(count // 2)) / 2
