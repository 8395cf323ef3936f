"""Describe where a file has data, in extents that are fit for O_DIRECT and for travel.

The extents of a file and the files of a folder travel as streams of spans that follow each other.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: A span's number, where the slice begins in the range and in the span, and its length.
Slice: TypeAlias = tuple[int, int, int, int]


class Spans:
    """Spans of the given ``lengths`` in bytes, each of which begins where the one before ends."""

    def __init__(self, lengths: Iterable[int]) -> None:
        # There may be millions: an array takes 8 bytes for each.
        self._ends = array("Q", accumulate(lengths))

    @property
    def size(self) -> int:
        """Bytes of all spans together."""
        return self._ends[-1] if self._ends else 0

    def slices(self, begin: int, end: int) -> Iterator[Slice]:
        """Yield in order what the bytes from ``begin`` to before ``end`` take of each span.

        A span without bytes is passed over. Raise IndexError if ``end`` lies beyond the last span.

        >>> list(Spans([4, 0, 10]).slices(3, 9))
        [(0, 0, 3, 1), (2, 1, 0, 5)]
        """
        ends = self._ends
        number = bisect_right(ends, begin)
        within = begin - (ends[number - 1] if number else 0)
        at = begin
        while at < end:
            behind = ends[number]
            if behind > end:
                behind = end
            if behind > at:
                yield number, at - begin, within, behind - at
                at = behind
            number += 1
            within = 0


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
