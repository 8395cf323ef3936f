"""A file's data extents in, its Layout out: which bytes travel in which chunk. Pure.

Holes do not travel. The data of all extents is one stream, cut into chunks of equal length but for
the last; a piece is the part of a chunk that lies together in the file.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from stager.base.extents import Extent

if TYPE_CHECKING:
    from collections.abc import Iterator


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
