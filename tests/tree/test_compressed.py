"""The listing of a folder in which files are decompressed."""

from __future__ import annotations

import pytest

from stager.base.errors import UsageError
from stager.base.extents import Extent
from stager.tree.compressed import decompressed_listing, patterns_without_effect
from stager.tree.listing import Kind, Listing, Row

FOLDER = Row(b"", Kind.FOLDER, 0o755)


def paths(listing: Listing) -> dict[bytes, bytes]:
    """Return the path at the source of each file, by its path in the copy."""
    return {listing.paths[row]: listing.source_path(row) for row in listing.rows(Kind.FILE)}


@pytest.mark.parametrize(
    ("patterns", "moved"),
    [
        (["*"], {b"a": b"a.gz", b"b/c.tar": b"b/c.tar.ZST", b"d": b"d", b".xz": b".xz"}),
        (["*.gz"], {b"a": b"a.gz", b"b/c.tar.ZST": b"b/c.tar.ZST", b"d": b"d", b".xz": b".xz"}),
        (["/b/", "d"], {b"a.gz": b"a.gz", b"b/c.tar": b"b/c.tar.ZST", b"d": b"d", b".xz": b".xz"}),
    ],
)
def test_files_that_match_lose_their_suffix(patterns: list[str], moved: dict[bytes, bytes]) -> None:
    names = [b"a.gz", b"b/c.tar.ZST", b"d", b".xz"]
    rows = [FOLDER, Row(b"b", Kind.FOLDER), *(Row(name, Kind.FILE, size=1) for name in names)]
    listing = decompressed_listing(Listing.of(rows), patterns, "/set")
    assert paths(listing) == moved
    assert Listing.from_bytes(listing.to_bytes()) == listing


def test_patterns_that_decompress_nothing_are_found() -> None:
    rows = [FOLDER, *(Row(name, Kind.FILE, size=1) for name in (b"a.gz", b"b.txt"))]
    patterns = ["*.gz", "*.xz", "*.txt"]
    listing = decompressed_listing(Listing.of(rows), patterns, "/set")
    assert patterns_without_effect(listing, patterns) == ("*.xz", "*.txt")


def test_the_rows_are_sorted_by_the_paths_of_the_copies() -> None:
    rows = [FOLDER, Row(b"a.gz", Kind.FILE, size=1), Row(b"a-b", Kind.FILE, size=2)]
    listing = decompressed_listing(Listing.of(rows), ["*"], "/set")
    assert (listing.paths, list(listing.sizes)) == ([b"", b"a", b"a-b"], [0, 1, 2])


def test_the_holes_of_a_compressed_file_are_read() -> None:
    row = Row(b"a.gz", Kind.FILE, size=100_000, extents=(Extent(0, 4096),))
    listing = decompressed_listing(Listing.of([FOLDER, row]), ["*"], "/set")
    assert (listing.data(1), listing.extents) == (100_000, {})


def test_further_paths_of_a_file_are_decompressed_with_it() -> None:
    rows = [
        FOLDER,
        Row(b"a.gz", Kind.FILE),
        Row(b"b.gz", Kind.HARD_LINK, target=b"a.gz"),
        Row(b"c", Kind.HARD_LINK, target=b"a.gz"),
        Row(b"p", Kind.FILE),
        Row(b"q.gz", Kind.HARD_LINK, target=b"p"),
    ]
    listing = decompressed_listing(Listing.of(rows), ["*"], "/set")
    links = {listing.paths[row]: listing.targets[row] for row in listing.rows(Kind.HARD_LINK)}
    assert paths(listing) == {b"a": b"a.gz", b"p": b"p"}
    assert links == {b"b": b"a", b"c": b"a", b"q.gz": b"p"}


@pytest.mark.parametrize(
    ("path", "target", "new"),
    [
        (b"latest", b"a.gz", b"a"),
        (b"b/latest", b"../a.gz", b"../a"),
        (b"b/latest", b"./c.xz", b"./c"),
        (b"latest", b"/set/a.gz", b"/set/a.gz"),
        (b"latest", b"absent.gz", b"absent.gz"),
    ],
)
def test_links_lead_to_what_was_decompressed(path: bytes, target: bytes, new: bytes) -> None:
    rows = [
        FOLDER, Row(b"b", Kind.FOLDER), Row(b"a.gz", Kind.FILE), Row(b"b/c.xz", Kind.FILE),
        Row(path, Kind.LINK, target=target),
    ]  # fmt: skip
    listing = decompressed_listing(Listing.of(rows), ["*"], "/set")
    assert listing.targets[listing.paths.index(path)] == new


@pytest.mark.parametrize(
    ("names", "taken"), [((b"a.gz", b"a"), "a.gz"), ((b"a.gz", b"a.xz"), "a.xz")]
)
def test_a_path_that_is_taken_is_refused(names: tuple[bytes, ...], taken: str) -> None:
    rows = [FOLDER, *(Row(name, Kind.FILE) for name in names)]
    with pytest.raises(UsageError) as caught:
        decompressed_listing(Listing.of(rows), ["*"], "s3://bucket/set/")
    assert str(caught.value) == (
        f"s3://bucket/set/{taken} would be decompressed to a, which is there as well; leave one of "
        "them out with exclude=, or name others with decompress="
    )
