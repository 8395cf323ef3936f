"""Decide which rank reads which chunk. Pure."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Turns:
    """The readers of all chunks: rank 0 before chunk ``first``, then ``readers`` ranks in turn.

    ``first`` changes when rank 0 proves too slow. All ranks learn of that at the same chunk.
    """

    #: A chunk that no file has.
    NEVER = sys.maxsize

    def __init__(self, rank: int, readers: int, first: int) -> None:
        self._rank = rank
        self._readers = readers
        self.first = first

    @property
    def has_turn(self) -> bool:
        """Whether this rank reads any chunks, as far as is known."""
        return self._rank == 0 or (self._rank < self._readers and self.first < self.NEVER)

    @property
    def can_spread(self) -> bool:
        """Whether there are other readers, and they do not take turns yet."""
        return self._readers > 1 and self.first == self.NEVER

    def reader(self, index: int) -> int:
        """Return the rank that reads the chunk."""
        return index % self._readers if index >= self.first else 0

    def turn(self, index: int) -> int:
        """Return the chunk's number among the chunks of its reader."""
        return index // self._readers if index >= self.first else index

    def is_own(self, index: int) -> bool:
        """Return whether this rank reads the chunk."""
        return self.reader(index) == self._rank

    def own(self, first: int, end: int) -> Iterator[int]:
        """Yield the chunks from ``first`` to before ``end`` that this rank reads.

        Each is decided only when it is asked for, since ``first`` of the turns may change.
        """
        return (index for index in range(first, end) if self.is_own(index))
