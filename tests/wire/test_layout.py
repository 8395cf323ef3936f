"""Layouts: every byte of data is in one piece of one chunk."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stager.base.extents import Extent
from stager.wire.layout import Layout, Piece
from tests.support.extents import extents

K = 1024


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
