"""Find the spans that a range of a stream touches, where spans of any length follow each other.

The extents of a file and the files of a folder travel as such streams.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

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
