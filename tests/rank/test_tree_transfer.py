"""Which files of a tree are sent, and the digests of those that are and are not."""

from __future__ import annotations

import zlib
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from hypothesis import given
from hypothesis import strategies as st

from stager.rank.reuse import Reuse
from stager.rank.tree_transfer import digests_of_all_files, needed_by_any, table_size
from stager.tree.listing import Kind, Listing, Row

if TYPE_CHECKING:
    from stager.tree.table import Table

ROWS = 5
NEEDS = st.lists(st.lists(st.integers(0, 1), min_size=ROWS, max_size=ROWS).map(bytes), max_size=4)


@given(NEEDS)
def test_a_file_is_sent_if_any_receiver_lacks_it(needs: list[bytes]) -> None:
    needed = needed_by_any({zlib.compress(one) for one in needs}, ROWS)
    assert needed == bytes(any(one[row] for one in needs) for row in range(ROWS))


def test_reused_files_keep_their_digests_and_received_ones_have_new_ones() -> None:
    kinds = [(b"", Kind.FOLDER), (b"a", Kind.FILE), (b"b", Kind.FILE), (b"c", Kind.FILE)]
    listing = Listing.of([Row(path, kind) for path, kind in kinds])
    table = cast("Table", SimpleNamespace(digest=lambda row: bytes([row]) * 16))
    # b was to be reused, but its file was gone when it was taken over.
    reuse = Reuse(array("q", [-1, 7, 8, -1]), table)
    received = b"".join(bytes([100 + row]) * 16 for row in range(4))
    digests = digests_of_all_files(listing, received, bytes([0, 0, 1, 1]), reuse)
    assert [digests[16 * row] for row in range(4)] == [100, 7, 102, 103]


def test_marks_say_which_files_a_node_has() -> None:
    reuse = Reuse(array("q", [-1, 0, 5, -1]))
    assert zlib.decompress(reuse.marks()) == bytes([0, 1, 1, 0])
    assert [reuse.has(row) for row in range(4)] == [False, True, True, False]


def test_the_table_grows_with_rows_and_with_paths() -> None:
    short = Listing.of([Row(b"", Kind.FOLDER), Row(b"a", Kind.FILE)])
    long = Listing.of([Row(b"", Kind.FOLDER), Row(b"a" * 101, Kind.FILE)])
    assert table_size(long) - table_size(short) == 100
    assert table_size(short) == 1 + 2 * (13 * 8 + 16)
