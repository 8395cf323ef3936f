"""Spans: every byte of a range is in one slice of one span, in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.base.extents import Spans


@given(st.lists(st.integers(0, 50), max_size=20), st.data())
def test_the_slices_of_a_range_are_its_bytes_in_order(
    lengths: list[int], data: st.DataObject
) -> None:
    stream = [(number, at) for number, length in enumerate(lengths) for at in range(length)]
    begin = data.draw(st.integers(0, len(stream)))
    end = data.draw(st.integers(begin, len(stream)))
    spans = Spans(lengths)
    found: list[tuple[int, int]] = []
    for number, start, within, length in spans.slices(begin, end):
        assert length > 0
        assert start == len(found)
        found += [(number, at) for at in range(within, within + length)]
    assert found == stream[begin:end]
    assert spans.size == len(stream)


def test_a_range_may_begin_and_end_within_spans() -> None:
    assert list(Spans([4, 0, 6, 5]).slices(3, 12)) == [(0, 0, 3, 1), (2, 1, 0, 6), (3, 7, 0, 2)]


def test_an_empty_range_has_no_slices() -> None:
    assert list(Spans([4, 6]).slices(4, 4)) == []
    assert list(Spans([]).slices(0, 0)) == []
    assert Spans([]).size == 0


def test_a_range_that_leaves_the_spans_is_an_error() -> None:
    with pytest.raises(IndexError):
        list(Spans([4]).slices(0, 5))
