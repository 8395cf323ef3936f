"""A file's data extents in, its Layout out: which bytes travel in which chunk. Pure.

Holes do not travel. The data of all extents is one stream, cut into chunks of equal length but for
the last; a piece is the part of a chunk that lies together in the file.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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


class Piece(NamedTuple):
    """``length`` bytes that lie at ``start`` in a chunk's buffer and at ``offset`` in the file."""

    start: int
    offset: int
    length: int


@dataclass(frozen=True)
class Layout:
    """A file of ``size`` bytes whose data lies in ``extents``, to travel in chunks of ``chunk``."""

    size: int
    chunk: int
    extents: tuple[Extent, ...]

    def __post_init__(self) -> None:
        # Where in the stream each extent ends.
        ends = tuple(accumulate(extent.length for extent in self.extents))
        object.__setattr__(self, "_ends", ends)

    @classmethod
    def dense(cls, size: int, chunk: int) -> Layout:
        """The layout of a file without holes."""
        return cls(size, chunk, (Extent(0, size),) if size else ())

    @property
    def data(self) -> int:
        """Bytes that travel."""
        return self._stream_ends[-1] if self.extents else 0

    @property
    def count(self) -> int:
        """Number of chunks."""
        return -(-self.data // self.chunk)

    def length(self, index: int) -> int:
        """Bytes of chunk ``index``."""
        return min(self.chunk, self.data - index * self.chunk)

    def pieces(self, index: int) -> Iterator[Piece]:
        """The pieces of chunk ``index``, in order; together they fill it."""
        ends = self._stream_ends
        begin = at = index * self.chunk
        end = begin + self.length(index)
        number = bisect_right(ends, at)
        while at < end:
            extent = self.extents[number]
            within = at - (ends[number] - extent.length)
            length = min(end - at, extent.length - within)
            yield Piece(at - begin, extent.offset + within, length)
            at += length
            number += 1

    @property
    def _stream_ends(self) -> tuple[int, ...]:
        ends: tuple[int, ...] = self.__dict__["_ends"]
        return ends


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
