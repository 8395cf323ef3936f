"""A large file that all nodes see is dealt to the ranks in whole pieces."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from stager.base.digest import PIECE
from stager.base.extents import Extent, rounded
from stager.rank.shared import shares
from stager.wire.layout import Layout

CHUNK = 2 << 20
PLACES = st.integers(0, 100 * CHUNK)


@given(
    st.lists(st.tuples(PLACES, PLACES)),
    PLACES,
    st.integers(1, 9),
    st.sampled_from([CHUNK, 1 << 30]),
)
@example([(0, 64 * PIECE)], 64 * PIECE, 4, 1 << 30)
@example([], 5 * PIECE, 4, CHUNK)
def test_each_byte_is_of_one_rank(
    data: list[tuple[int, int]], size: int, ranks: int, chunk: int
) -> None:
    extents = (Extent(min(pair), max(pair) - min(pair)) for pair in data)
    within = (one for one in sorted(extents) if one.length and one.end <= size)
    whole = Layout(size, chunk, rounded(within, size))
    places = [(begin, end) for begin, end in shares(whole, ranks) if begin < end]
    assert [begin for begin, _ in places] == [0, *(end for _, end in places)][: len(places)]
    assert not size or places[-1][1] == size
    assert all(begin % PIECE == 0 for begin, _ in places)
    parts = [whole.part(begin, end) for begin, end in places]
    assert sum(part.data for part in parts) == whole.data
    assert all(part.data <= whole.data / ranks + PIECE + min(chunk, PIECE) for part in parts)
    if ranks == 1:
        assert parts == [whole][: len(parts)]
