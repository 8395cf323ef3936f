"""Describe where a file has data, in extents that are fit for O_DIRECT and for travel."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Bytes to which extents are rounded outwards: the largest block that O_DIRECT needs on any disk.
ALIGNMENT = 4096
#: Holes of fewer bytes travel as zeros: to skip them would take more system calls than it saves.
SMALLEST_HOLE = 64 * 1024
#: Most extents of a file. Of a file with more, only the largest holes are kept.
MOST_EXTENTS = 16_384


class Extent(NamedTuple):
    """``length`` bytes of data from ``offset`` on, in bytes."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """The first offset behind the extent."""
        return self.offset + self.length


def rounded(extents: Iterable[Extent], size: int) -> tuple[Extent, ...]:
    """Return the ``extents`` of a file of ``size`` bytes as a Layout takes them.

    They are rounded outwards to ALIGNMENT, joined over holes of less than SMALLEST_HOLE, and at
    most MOST_EXTENTS.
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
    """Join those of the ascending ``spans`` that are less than ``hole`` bytes apart."""
    joined: list[tuple[int, int]] = []
    for begin, end in spans:
        if joined and begin - joined[-1][1] < hole:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
