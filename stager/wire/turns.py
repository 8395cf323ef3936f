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
#: at least so many. In the model of tests/mpi/test_pump.py far fewer are late if the network is
#: what is slow, and nearly all if reading is.
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
        """Let more ranks read from chunk ``first`` on, which no rank can have begun yet.

        The chunk that tells the ranks so must not be before the previous ``first``: chunks may
        arrive in another order, and all ranks must grow in the same one.
        """
        self._starts.append(first)

    def reader(self, index: int) -> int:
        """Return the rank that reads the chunk."""
        return index % self._readers_of(index)

    def turn(self, index: int) -> int:
        """Return the chunk's number among its reader's, counted as if it had read from chunk 0."""
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

    ``ahead`` is the number of chunks for which there are buffers. Those that joined have read so
    many before their first one is sent: with these, the rate would seem too high. Times are in
    seconds.
    """

    def __init__(self, turns: Turns, ahead: int, now: float) -> None:
        self._turns = turns
        self._ahead = ahead
        #: The time of this rank's last own chunk, and how long it had waited for reading by then.
        self._own = now, 0.0
        #: Where the trial began that is under way: its first chunk and its time. None before.
        self._from: tuple[int, float] | None = (0, now)
        #: The chunks of the trial that were late.
        self._late = 0
        #: The readers whose successors were called for last, and their chunks a second.
        self._called, self._before = 0, 0.0

    def is_late(self, now: float, waited: float, *, is_held_up: bool) -> bool:
        """Return whether an own chunk is late. Call it at each.

        ``waited`` is for how long in all this rank has waited for its reader, ``is_held_up``
        whether that waits for buffers: then something else is slow.
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
        if self._turns.rank or not self._turns.can_grow or self._turns.readers == self._called:
            return False
        if self._from is None:
            if index >= self._turns.first + self._ahead:
                self._from, self._late = (index, now), 0
            return False
        first, begun = self._from
        chunks = index - first
        if chunks < max(_LEAST_TRIAL, _TRIAL * self._turns.readers) or now <= begun:
            return False
        rate, late = chunks / (now - begun), self._late
        self._from, self._late = (index, now), 0  # a source may become slow later on
        if late < _LATE_CHUNKS * chunks or rate < _WORTH * self._before:
            return False
        self._called, self._before, self._from = self._turns.readers, rate, None
        return True
