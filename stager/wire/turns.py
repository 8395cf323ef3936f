"""Decide which rank reads which chunk, and when more ranks are to read. Pure."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: A chunk of a single reader is late if it was waited for during this share of the time since the
#: last one: with a source that is hardly slower than the network, turns only cost time.
_SLOW_READER = 0.5
#: More ranks are called for if this share of the chunks is late, among so many of each reader, and
#: at least so many. In the model of tests/mpi/test_pump.py less than two thirds are late if the
#: network is what is slow, and nearly all if reading is.
_LATE_CHUNKS, _TRIAL, _LEAST_TRIAL = 0.75, 8, 16
#: They are called for again if those that came last made it faster at least by this factor.
_WORTH = 1.2


class Turns:
    """The readers of all chunks: the first ``counts[0]`` ranks in turn, and later more of them.

    Each `grow` changes to the next of ``counts``. All ranks learn of that at the same chunk.
    """

    def __init__(self, rank: int, counts: Sequence[int]) -> None:
        self.rank = rank
        self._counts = counts
        #: The first chunk that each of the counts reads, of those that were begun.
        self._starts = [0]

    @property
    def readers(self) -> int:
        """The ranks that read the last chunks, as far as is known."""
        return self._counts[len(self._starts) - 1]

    @property
    def first(self) -> int:
        """The first chunk that is read by `readers` ranks."""
        return self._starts[-1]

    @property
    def has_turn(self) -> bool:
        """Whether this rank reads any chunks, as far as is known."""
        return self.rank < self.readers

    @property
    def can_grow(self) -> bool:
        """Whether more ranks may read."""
        return len(self._starts) < len(self._counts)

    def grow(self, first: int) -> None:
        """Let more ranks read from chunk ``first`` on, of which no rank has begun any."""
        self._starts.append(first)

    def reader(self, index: int) -> int:
        """Return the rank that reads the chunk."""
        return index % self._readers_of(index)

    def turn(self, index: int) -> int:
        """Return the chunk's number among its reader's, as if there had always been as many."""
        return index // self._readers_of(index)

    def is_own(self, index: int) -> bool:
        """Return whether this rank reads the chunk."""
        return self.reader(index) == self.rank

    def own(self, first: int, end: int) -> Iterator[int]:
        """Yield the chunks from ``first`` to before ``end`` that this rank reads.

        Each is decided only when it is asked for, since more ranks may read later on.
        """
        return (index for index in range(first, end) if self.is_own(index))

    def _readers_of(self, index: int) -> int:
        return self._counts[bisect_right(self._starts, index) - 1]


class Growth:
    """Finds out whether reading is what is slow, and whether it gets faster by more readers.

    ``ahead`` is the number of chunks that may be read before they can be sent on: those that
    several readers read ahead say nothing of their rate. Times are in seconds.
    """

    def __init__(self, turns: Turns, ahead: int, now: float) -> None:
        self._turns = turns
        self._ahead = ahead
        #: The time of this rank's last own chunk, and how long it had waited for reading by then.
        self._own = now, 0.0
        #: The chunk from which on the readers that there are now are measured, and its time.
        self._from: tuple[int, float] | None = (0, now) if turns.readers == 1 else None
        self._late = 0
        #: Chunks a second with as many readers as there were before.
        self._before = 0.0

    def is_late(self, now: float, waited: float, *, is_held_up: bool) -> bool:
        """Return whether an own chunk is late. Call it at each.

        ``waited`` is for how long in all this rank has waited for its reader, ``is_held_up``
        whether that waits for a buffer: then something else is slow.
        """
        then, waited_then = self._own
        self._own = now, waited
        if self._turns.readers > 1:  # who waits for one may be waiting for another as well
            return not is_held_up
        return waited - waited_then > _SLOW_READER * (now - then)

    def count_late(self) -> None:
        """Count a chunk that was late, of any reader."""
        self._late += 1

    def is_due(self, index: int, now: float) -> bool:
        """Return whether rank 0 is to call for more readers. Call it at each own chunk."""
        if self._turns.rank or not self._turns.can_grow:
            return False
        if self._from is None:
            if index >= self._turns.first + self._ahead:
                self._from, self._late = (index, now), 0
            return False
        first, begun = self._from
        chunks = index - first
        if chunks < max(_LEAST_TRIAL, _TRIAL * self._turns.readers) or now <= begun:
            return False
        rate = chunks / (now - begun)
        if self._late < _LATE_CHUNKS * chunks or rate < _WORTH * self._before:
            return False
        self._before, self._from = rate, None
        return True
