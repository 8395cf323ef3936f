"""Listings: any names are read back as they were written; damaged text is refused."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.base.extents import ALIGNMENT, Extent
from stager.tree.listing import Kind, Listing, Row, pack, text_of, unpack

PARTS = st.binary(min_size=1, max_size=6).map(
    lambda name: name.replace(b"\0", b"?").replace(b"/", b"!").replace(b".", b". ")
)
NAMES = st.lists(PARTS, min_size=1, max_size=3).map(b"/".join)
NUMBERS = st.integers(0, 2**64 - 1)
TIMES = st.integers(-(2**63), 2**63 - 1)
EXTENTS = st.lists(st.builds(Extent, st.integers(0, 2**40), st.integers(1, 2**40)), max_size=3)
ROWS = st.builds(
    Row,
    path=NAMES,
    kind=st.sampled_from(Kind),
    mode=NUMBERS,
    size=NUMBERS,
    mtime_ns=TIMES,
    ctime_ns=TIMES,
    inode=NUMBERS,
    owner=NUMBERS,
    group=NUMBERS,
    target=st.just(b"") | NAMES,
    extents=st.none() | EXTENTS.map(tuple),
)
ROOT = Row(b"", Kind.FOLDER, 0o755)
LISTINGS = st.lists(ROWS, max_size=8, unique_by=lambda row: row.path).map(
    lambda rows: Listing.of([*rows, ROOT])
)


def a_file(path: bytes, size: int, extents: tuple[Extent, ...] | None = None) -> Row:
    return Row(path, Kind.FILE, 0o644, size, extents=extents)


@given(LISTINGS)
def test_a_listing_is_read_as_it_was_written(listing: Listing) -> None:
    assert Listing.from_bytes(listing.to_bytes()) == listing


@given(LISTINGS)
def test_a_listing_that_is_cut_is_refused(listing: Listing) -> None:
    text = listing.to_bytes()
    for length in range(0, len(text), 7):
        with pytest.raises(ValueError, match=r"^it (is no listing|ends early|has other columns)$"):
            Listing.from_bytes(text[:length])


def test_columns_of_different_length_are_refused() -> None:
    text = Listing.of([ROOT]).to_bytes()
    magic = text[: text.index(b"\n") + 1]
    parts = [bytes(part) for part in unpack(memoryview(text)[len(magic) :])]
    parts[4] = b""
    with pytest.raises(ValueError, match=r"^its columns differ in length$"):
        Listing.from_bytes(magic + pack(*parts))


def with_part(listing: Listing, number: int, part: bytes) -> bytes:
    """Return the text of a listing in which one part is another one."""
    text = listing.to_bytes()
    magic = text[: text.index(b"\n") + 1]
    parts = [bytes(part) for part in unpack(memoryview(text)[len(magic) :])]
    parts[number] = part
    return magic + pack(*parts)


@pytest.mark.parametrize(
    ("number", "part", "problem"),
    [
        (0, b"\0../x\0a", "a path does not lead into the folder"),
        (0, b"\0a\0b/../../x", "a path does not lead into the folder"),
        (0, b"\0./a\0b", "a path does not lead into the folder"),
        (0, b"\0/etc/passwd\0b", "a path does not lead into the folder"),
        (0, b"\0a/\0b", "a path does not lead into the folder"),
        (0, b"\0a//b\0c", "a path does not lead into the folder"),
        (0, b"\0\0a", "its paths are not sorted"),
        (0, b"\0b\0a", "its paths are not sorted"),
        (0, b"\0a\0a", "its paths are not sorted"),
        (0, b"\0a", "its columns differ in length"),
        (1, b"\0\1\4", "it has an entry of an unknown kind"),
        (1, b"\0\1", "its columns differ in length"),
        (3, bytes(23), "bytes length not a multiple of item size"),
        (9, bytes(16), "its columns differ in length"),
        (10, b"a\0b", "its columns differ in length"),
        (9, b"\3" + bytes(7), "it describes a row that it does not have"),
        (11, bytes(8), "its columns differ in length"),
        (12, bytes(8), "its columns differ in length"),
        (13, bytes(8), "its columns differ in length"),
        (13, bytes(16), "its columns differ in length"),
    ],
)
def test_a_listing_that_no_folder_has_is_refused(number: int, part: bytes, problem: str) -> None:
    listing = Listing.of([ROOT, a_file(b"a", 1), a_file(b"b", 2)])
    text = with_part(listing, number, part)
    with pytest.raises(ValueError, match=f"^{problem}$"):
        Listing.from_bytes(text)


@given(LISTINGS, st.data())
def test_hostile_bytes_are_no_listing_and_take_no_memory(
    listing: Listing, data: st.DataObject
) -> None:
    """Random text in place of some bytes of a listing: it is a listing still, or is refused."""
    text = bytearray(listing.to_bytes())
    at = data.draw(st.integers(0, len(text) - 1))
    junk = data.draw(st.binary(min_size=1, max_size=64) | st.just(b"\xff" * 8) | st.just(bytes(8)))
    text[at : at + len(junk)] = junk
    tracemalloc.start()
    with suppress(ValueError):
        Listing.from_bytes(bytes(text))
    assert tracemalloc.get_traced_memory()[1] < 50 * len(text) + 20_000
    tracemalloc.stop()


def test_many_empty_parts_are_not_taken_apart() -> None:
    text = Listing.of([ROOT]).to_bytes()
    hostile = text[: text.index(b"\n") + 1] + bytes(8_000_000)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"^it has other columns$"):
        Listing.from_bytes(hostile)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_folders_come_before_their_contents_in_whatever_order_they_were_found() -> None:
    rows = [a_file(b"a/b", 1), a_file(b"a-b", 2), Row(b"a", Kind.FOLDER), ROOT]
    listing = Listing.of(rows)
    assert listing.paths == [b"", b"a", b"a-b", b"a/b"]
    assert listing == Listing.of(rows[::-1])
    assert listing.digest() == Listing.of(rows[::-1]).digest()
    assert list(listing.rows(Kind.FILE)) == [2, 3]
    assert (listing.files, listing.size) == (2, 3)


@pytest.mark.parametrize(
    "other",
    [
        a_file(b"b", 1),
        a_file(b"a", 2),
        Row(b"a", Kind.LINK, 0o644, 1),
        Row(b"a", Kind.FILE, 0o600, 1),
        Row(b"a", Kind.FILE, 0o644, 1, mtime_ns=1),
        Row(b"a", Kind.FILE, 0o644, 1, ctime_ns=1),
        Row(b"a", Kind.FILE, 0o644, 1, inode=1),
        Row(b"a", Kind.FILE, 0o644, 1, group=1),
        Row(b"a", Kind.FILE, 0o644, 1, target=b"t"),
    ],
)
def test_any_difference_makes_another_version(other: Row) -> None:
    assert Listing.of([ROOT, a_file(b"a", 1)]).digest() != Listing.of([ROOT, other]).digest()


def test_the_bytes_that_are_sent_and_those_on_a_disk() -> None:
    holes = (Extent(0, 4096), Extent(1 << 20, 8192))
    listing = Listing.of(
        [ROOT, a_file(b"empty", 0), a_file(b"f", 5000), a_file(b"h", 1 << 30, holes)]
    )
    assert [listing.data(row) for row in range(4)] == [0, 0, 5000, 12288]
    assert listing.extents == {3: holes}
    assert listing.allocated() == (1 + 1 + 2 + 3) * ALIGNMENT
    assert listing.allocated([2]) == 2 * ALIGNMENT


def test_a_path_of_any_bytes_can_be_shown() -> None:
    assert text_of(b"a/\xff\xc3\xa9") == "a/\\xff\N{LATIN SMALL LETTER E WITH ACUTE}"


def test_a_time_that_fits_in_no_column_becomes_the_nearest_one() -> None:
    times = [5, 1 << 63, -(1 << 70), 6]
    rows = [Row(b"%d" % number, Kind.FILE, mtime_ns=when) for number, when in enumerate(times)]
    assert list(Listing.of([ROOT, *rows]).mtimes) == [0, 5, (1 << 63) - 1, -(1 << 63), 6]


@given(LISTINGS, st.data())
def test_a_part_of_a_listing_has_its_rows_as_they_were(
    listing: Listing, data: st.DataObject
) -> None:
    rows = data.draw(st.lists(st.sampled_from(range(len(listing))), unique=True))
    part = listing.part(rows)
    assert part == listing.part(sorted(rows, reverse=True))
    assert part.paths == sorted(listing.paths[row] for row in rows)
    for number, row in enumerate(sorted(rows)):
        assert part.kinds[number] == listing.kinds[row]
        assert part.sizes[number] == listing.sizes[row]
        assert part.mtimes[number] == listing.mtimes[row]
        assert part.targets.get(number) == listing.targets.get(row)
        assert part.extents.get(number) == listing.extents.get(row)


@given(LISTINGS)
def test_all_rows_of_a_listing_are_that_listing(listing: Listing) -> None:
    assert listing.part(range(len(listing))) == listing
    assert listing.part(range(len(listing))).digest() == listing.digest()


def test_a_row_that_is_added_to_a_part_is_sorted_in() -> None:
    listing = Listing.of([ROOT, a_file(b"a", 1), a_file(b"c", 2, (Extent(0, 1),)), a_file(b"d", 3)])
    part = listing.part([0, 2, 3], a_file(b"b", 4))
    assert (part.paths, list(part.sizes)) == ([b"", b"b", b"c", b"d"], [0, 4, 2, 3])
    assert part.extents == {2: (Extent(0, 1),)}
    assert listing.part([], a_file(b"b", 4)) == Listing.of([a_file(b"b", 4)])
