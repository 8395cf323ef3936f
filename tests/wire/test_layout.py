"""Layouts: every byte of data in one piece of one chunk, and no hole but what is worth it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stager.base.extents import ALIGNMENT, MOST_EXTENTS, SMALLEST_HOLE, Extent, rounded
from stager.wire.layout import Layout, Piece

K = 1024


@st.composite
def extents(draw: st.DrawFn) -> tuple[int, list[Extent]]:
    """A file's size and its data, in order and apart."""
    found: list[Extent] = []
    end = 0
    for hole, length in draw(st.lists(st.tuples(st.integers(1, 300_000), st.integers(1, 90_000)))):
        found.append(Extent(end + hole, length))
        end = found[-1].end
    return end + draw(st.integers(0, 100_000)), found


@given(file=extents(), chunk=st.integers(1, 100_000))
def test_pieces_are_the_data_in_order(file: tuple[int, list[Extent]], chunk: int) -> None:
    size, data = file
    chunk = max(chunk, size // 1000)
    layout = Layout(size, chunk, tuple(data))
    seen: list[Extent] = []
    for index in range(layout.count):
        at = 0
        for piece in layout.pieces(index):
            assert piece.start == at
            at += piece.length
            if seen and seen[-1].end == piece.offset:
                seen[-1] = Extent(seen[-1].offset, seen[-1].length + piece.length)
            else:
                seen.append(Extent(piece.offset, piece.length))
        assert 0 < at == layout.length(index) <= chunk
    assert seen == data
    assert layout.data == sum(extent.length for extent in data)


@given(extents())
def test_rounding_loses_no_byte_and_keeps_large_holes(file: tuple[int, list[Extent]]) -> None:
    size, data = file
    found = rounded(data, size)
    for extent in data:
        assert any(wide.offset <= extent.offset and extent.end <= wide.end for wide in found)
    for wide in found:
        assert wide.offset % ALIGNMENT == 0
        assert wide.end % ALIGNMENT == 0 or wide.end == size
    for before, after in pairwise(found):
        assert after.offset - before.end >= SMALLEST_HOLE
    holes = sum(
        max(0, after.offset - before.end - SMALLEST_HOLE - 2 * ALIGNMENT)
        for before, after in pairwise(data)
    )
    assert sum(extent.length for extent in found) <= size - holes


def test_a_chunk_spans_extents() -> None:
    layout = Layout(100, 10, (Extent(0, 4), Extent(50, 13)))
    assert layout.count == 2
    assert list(layout.pieces(0)) == [Piece(0, 0, 4), Piece(4, 50, 6)]
    assert list(layout.pieces(1)) == [Piece(0, 56, 7)]


def test_a_dense_file_is_one_extent() -> None:
    layout = Layout.dense(10 * K + 1, 4 * K)
    assert [list(layout.pieces(index)) for index in range(layout.count)] == [
        [Piece(0, 0, 4 * K)], [Piece(0, 4 * K, 4 * K)], [Piece(0, 8 * K, 2 * K + 1)]
    ]  # fmt: skip
    assert Layout.dense(0, 4 * K).count == 0


def test_too_many_holes_leave_the_largest() -> None:
    stride = 2 * SMALLEST_HOLE
    many = [Extent(index * stride, 4096) for index in range(MOST_EXTENTS + 10)]
    far = Extent(many[-1].end + 10 * stride, 4096)
    found = rounded([*many, far], far.end)
    assert len(found) == MOST_EXTENTS
    assert found[-1] == far
    # Alike as they are, all but eleven holes stay.
    data = sum(extent.length for extent in found)
    assert data == 4096 * (MOST_EXTENTS + 11) + 11 * (stride - 4096)
