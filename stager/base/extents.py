"""TODO."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Bytes to which extents are rounded outwards: what O_DIRECT asks of any disk so far.
ALIGNMENT = 4096
#: Holes of fewer bytes travel as zeros: to skip them would cost more system calls than it spares.
SMALLEST_HOLE = 64 * 1024
#: More extents than this are not worth their list; the largest holes are kept.
MOST_EXTENTS = 16_384


class Extent(NamedTuple):
    """``length`` bytes of data from ``offset`` on."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """The first offset behind it."""
        return self.offset + self.length


def rounded(extents: Iterable[Extent], size: int) -> tuple[Extent, ...]:
    """``extents`` of a file of ``size`` bytes, as a Layout takes them.

    Rounded outwards to ALIGNMENT, joined over holes that are too small, and few enough.
    """
    wide = [
        (extent.offset // ALIGNMENT * ALIGNMENT, min(size, -(-extent.end // ALIGNMENT) * ALIGNMENT))
        for extent in extents
    ]
    spans = _joined(wide, SMALLEST_HOLE)
    holes = [after[0] - before[1] for before, after in pairwise(spans)]
    largest = sorted(range(len(holes)), key=holes.__getitem__)[-(MOST_EXTENTS - 1) :]
    ends = [spans[number][1] for number in sorted(largest)] + [span[1] for span in spans[-1:]]
    begins = [span[0] for span in spans[:1]] + [spans[number + 1][0] for number in sorted(largest)]
    return tuple(Extent(begin, end - begin) for begin, end in zip(begins, ends, strict=True))


def _joined(spans: Iterable[tuple[int, int]], hole: int) -> list[tuple[int, int]]:
    """The ascending ``spans``, those less than ``hole`` apart made one."""
    joined: list[tuple[int, int]] = []
    for begin, end in spans:
        if joined and begin - joined[-1][1] < hole:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
