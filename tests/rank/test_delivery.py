"""What counts as progress while a chunk is read."""

from __future__ import annotations

import pytest

from stager.rank.delivery import _so_far
from stager.wire.layout import Layout


@pytest.mark.parametrize(
    ("sent", "read", "counted"),
    [(0, 0, 0), (0, 4, 4), (10, 4, 10), (10, 14, 14), (10, 25, 19), (20, 25, 24), (25, 25, 25)],
)
def test_what_is_read_of_the_next_chunk_is_progress(sent: int, read: int, counted: int) -> None:
    """And no more than that: only what was sent makes a chunk, or the whole, complete."""
    assert _so_far(sent, read, Layout.dense(25, 10)) == counted
