"""Define how a transfer is tuned.

Decide which bytes of a file travel in which chunk. Pure.

Holes do not travel. The data of all extents is one stream. It is cut into chunks of equal length;
only the last may be shorter. A piece is a part of a chunk whose bytes are contiguous in the file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from stager.base.extents import Extent, Spans

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Bytes of the key by which the ranks of one stage know each other.
KEY_SIZE = 32


class Algorithm(StrEnum):
    """The way of chunks from their reader to all other ranks."""

    AUTO = "auto"
    #: The MPI library's own broadcast of each chunk: one at a time, or several at once.
    BCAST = "bcast"
    IBCAST = "ibcast"
    #: From each rank to the next: full rate; the number of hops grows with the number of ranks.
    CHAIN = "chain"
    #: Along two binary trees, where the inner ranks of one are the leaves of the other: full rate;
    #: the number of hops grows with the logarithm of the number of ranks.
    TREE = "tree"


@dataclass(frozen=True, slots=True)
class Settings:
    """How bytes move. A number 0 lets the ranks choose."""

    #: Bytes of a message.
    chunk: int = 2 << 20
    #: Chunks for which a rank has buffers.
    depth: int = 0
    #: Ranks that take turns in reading: so many at first, and the next number where these are too
    #: slow. Empty lets the ranks choose.
    readers: tuple[int, ...] = ()
    #: Threads that write on each rank.
    writers: int = 0
    algorithm: Algorithm = Algorithm.AUTO
    #: Reads that each of these ranks has under way at once.
    requests: int = 1
    #: Whether copies are written past the page cache.
    direct: bool = True


#: The settings of a site that sets none.
DEFAULT_SETTINGS = Settings()


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

    def part(self, begin: int, end: int) -> Layout:
        """Return the layout of what is between two offsets of the file."""
        cut = ((max(begin, one.offset), min(end, one.end)) for one in self.extents)
        return replace(self, extents=tuple(Extent(at, to - at) for at, to in cut if at < to))

    @cached_property
    def _spans(self) -> Spans:
        return Spans(extent.length for extent in self.extents)
