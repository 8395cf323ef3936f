"""Rounded extents lose no byte, and keep the holes that are worth it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given

from stager.base.extents import ALIGNMENT, MOST_EXTENTS, SMALLEST_HOLE, Extent, rounded
from tests.support.extents import extents


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
