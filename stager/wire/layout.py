"""Decide which bytes of a file travel in which chunk. Pure.

Holes do not travel. The data of all extents is one stream. It is cut into chunks of equal length;
only the last may be shorter. A piece is a part of a chunk whose bytes are contiguous in the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from stager.base.extents import Extent
from stager.base.spans import Spans

if TYPE_CHECKING:
    from collections.abc import Iterator


class Piece(NamedTuple):
    """``length`` bytes, at ``start`` in a chunk's buffer and at ``offset`` in the file."""

    start: int
    offset: int
    length: int


@dataclass(frozen=True)
class Layout:
    """A file of ``size`` bytes, whose data is in ``extents`` and travels in chunks of ``chunk``."""

    size: int
    chunk: int
    extents: tuple[Extent, ...]

    @classmethod
    def dense(cls, size: int, chunk: int) -> Layout:
        """Return the layout of a file without holes."""
        return cls(size, chunk, (Extent(0, size),) if size else ())

    @property
    def data(self) -> int:
        """Bytes that travel."""
        return self._spans.size

    @property
    def count(self) -> int:
        """Number of chunks."""
        return -(-self.data // self.chunk)

    def length(self, index: int) -> int:
        """Bytes of chunk ``index``."""
        return min(self.chunk, self.data - index * self.chunk)

    def pieces(self, index: int) -> Iterator[Piece]:
        """Yield the pieces of chunk ``index`` in order; together they fill it."""
        begin = index * self.chunk
        for number, start, within, length in self._spans.slices(begin, begin + self.length(index)):
            yield Piece(start, self.extents[number].offset + within, length)

    @cached_property
    def _spans(self) -> Spans:
        return Spans(extent.length for extent in self.extents)
