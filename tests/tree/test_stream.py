"""Streams: the data of files of any sizes as one, in chunks of any size."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.base.digest import DIGEST_SIZE
from stager.base.errors import IntegrityError, SourceError
from stager.base.extents import Extent
from stager.tree import stream as module
from stager.tree.listing import Kind, Listing, Row
from stager.tree.stream import Part, Stream, StreamDigest, StreamReader, StreamWriter
from stager.tree.walk import walk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

SIZES = st.lists(st.integers(0, 300), max_size=20)


def listing_of(sizes: list[int], holes: dict[int, tuple[Extent, ...]] | None = None) -> Listing:
    rows = [
        Row(f"{number:03}".encode(), Kind.FILE, size=size, extents=(holes or {}).get(number))
        for number, size in enumerate(sizes)
    ]
    return Listing.of([Row(b"", Kind.FOLDER), *rows])


def everything(listing: Listing) -> bytes:
    return b"\1" * len(listing)


def cuts(size: int, chunk: int) -> Iterator[tuple[int, int]]:
    return ((at, min(chunk, size - at)) for at in range(0, size, chunk))


class Memory:
    """A tree in memory, as a StreamWriter sees it."""

    def __init__(self, listing: Listing) -> None:
        self.files = {row: bytearray(listing.sizes[row]) for row in listing.rows(Kind.FILE)}
        self.left = {row: listing.data(row) for row in self.files}

    def writing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def write(self, row: int, data: memoryview, offset: int) -> None:
        self.left[row] -= len(data)
        self.files[row][offset : offset + len(data)] = data


@given(SIZES, st.lists(st.booleans(), min_size=20, max_size=20), st.integers(1, 500))
def test_the_parts_of_the_chunks_are_the_needed_files_in_order(
    sizes: list[int], wanted: list[bool], chunk: int
) -> None:
    listing = listing_of(sizes)
    needed = bytes([0, *wanted])
    stream = Stream(listing, needed)
    rows = [row for row in listing.rows(Kind.FILE) if needed[row]]
    assert list(stream.rows) == rows
    assert list(stream.without_data) == [row for row in rows if not listing.sizes[row]]
    assert stream.size == sum(listing.sizes[row] for row in rows)
    sent = dict.fromkeys(rows, 0)
    last = 0
    for offset, length in cuts(stream.size, chunk):
        at = 0
        for part in stream.parts(offset, length):
            assert part.row >= last
            assert (part.start, part.offset) == (at, sent[part.row])
            assert part.length > 0
            last = part.row
            at += part.length
            sent[part.row] += part.length
        assert at == length
    assert sent == {row: listing.sizes[row] for row in rows}


def test_holes_are_not_part_of_a_stream() -> None:
    holes = {1: (Extent(0, 10), Extent(100, 10)), 2: ()}
    stream = Stream(listing_of([5, 200, 50, 7], holes), b"\1" * 5)
    assert stream.size == 5 + 20 + 7
    assert list(stream.without_data) == [3]
    assert list(stream.parts(0, 32)) == [
        Part(1, 0, 0, 5), Part(2, 5, 0, 10), Part(2, 15, 100, 10), Part(4, 25, 0, 7),
    ]  # fmt: skip
    assert list(stream.parts(10, 10)) == [Part(2, 0, 5, 5), Part(2, 5, 100, 5)]


@pytest.mark.parametrize("threads", [False, True], ids=["one thread", "many"])
@settings(max_examples=50, deadline=None)
@given(sizes=SIZES, chunk=st.integers(1, 500), seed=st.integers(0, 255))
def test_what_is_read_is_what_is_written(
    threads: bool, sizes: list[int], chunk: int, seed: int
) -> None:
    slow, module._SLOW = module._SLOW, -1.0 if threads else 1e9
    with tempfile.TemporaryDirectory() as folder:
        contents: dict[int, bytes] = {}
        for number, size in enumerate(sizes):
            contents[number + 1] = bytes((seed + number + i) % 256 for i in range(size))
            Path(folder, f"{number:03}").write_bytes(contents[number + 1])
        listing = walk(folder)
        stream = Stream(listing, everything(listing))
        reader = StreamReader(folder, stream, source=os.stat(folder).st_ino)
        digest, memory = StreamDigest(stream), Memory(listing)
        writer = StreamWriter(memory, stream, everything(listing))
        for offset, length in cuts(stream.size, chunk):
            buffer = memoryview(bytearray(length))
            reader.read_into(buffer, offset)
            digest.update(buffer, offset)
            writer.write(buffer, offset)
        reader.close()
        assert reader.bytes_read == stream.size
    module._SLOW = slow
    assert {row: bytes(data) for row, data in memory.files.items()} == contents
    assert set(memory.left.values()) <= {0}
    whole = digest.hexdigest(stream.size)
    expected = b"".join(xxhash.xxh3_128_digest(contents[row]) for row in sorted(contents))
    assert bytes(digest.digests) == bytes(DIGEST_SIZE) + expected
    assert whole == xxhash.xxh3_128_hexdigest(digest.digests)


def test_the_digest_of_a_file_with_holes_is_that_of_all_its_bytes(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(3 << 20)
        file.seek(1 << 20)
        file.write(b"data")
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 20)
    listing = walk(str(tmp_path))
    stream = Stream(listing, everything(listing))
    assert stream.size == 4096
    reader, digest = (
        StreamReader(str(tmp_path), stream, source=tmp_path.stat().st_ino),
        StreamDigest(stream),
    )
    buffer = memoryview(bytearray(stream.size))
    reader.read_into(buffer, 0)
    digest.update(buffer, 0)
    digest.hexdigest(stream.size)
    reader.close()
    for row, name in ((1, "hole"), (2, "sparse")):
        found = digest.digests[row * DIGEST_SIZE : (row + 1) * DIGEST_SIZE]
        assert found == xxhash.xxh3_128_digest((tmp_path / name).read_bytes())


def test_files_that_a_node_has_already_are_not_written() -> None:
    listing = listing_of([1, 2, 3])
    memory, stream = Memory(listing), Stream(listing, b"\1" * 4)
    StreamWriter(memory, stream, b"\0\1\0\1").write(memoryview(b"abbccc"), 0)
    assert {row: bytes(data) for row, data in memory.files.items()} == {
        1: b"a", 2: b"\0\0", 3: b"ccc",
    }  # fmt: skip


def read_all(
    folder: Path, listing: Listing, *, is_source: bool = True, follow: bool = False
) -> bytes:
    stream = Stream(listing, everything(listing))
    source = folder.stat().st_ino if is_source else None
    reader = StreamReader(str(folder), stream, source=source, follow=follow)
    buffer = bytearray(stream.size)
    try:
        reader.read_into(memoryview(buffer), 0)
    finally:
        reader.close()
    return bytes(buffer)


@pytest.mark.parametrize("names", [("a",), ("a", "b")], ids=["a large file", "small ones"])
def test_what_links_lead_to_is_read_unless_it_is_no_longer_what_was_listed(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    source, blobs = tmp_path / "source", tmp_path / "blobs"
    for folder in (source, blobs):
        folder.mkdir()
    for name in names:
        (blobs / name).write_bytes(b"before")
        (source / name).symlink_to(f"../blobs/{name}")
    listing = walk(str(source), follow=True)
    assert read_all(source, listing, follow=True) == b"before" * len(names)
    with pytest.raises(IntegrityError):
        read_all(source, listing)
    (blobs / "other").write_bytes(b"before")
    os.utime(blobs / "other", ns=2 * ((blobs / "a").stat().st_mtime_ns,))
    (source / "a").unlink()
    (source / "a").symlink_to("../blobs/other")
    with pytest.raises(IntegrityError, match=f"^{source}/a was replaced while it was read"):
        read_all(source, listing, follow=True)


@pytest.mark.parametrize("names", [("a",), ("a", "b")], ids=["a large file", "small ones"])
def test_a_file_that_changed_since_it_was_listed_is_named(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"before")
    listing = walk(str(tmp_path))
    changed = f"{tmp_path}/a changed while it was read; submit again when nothing writes to it"
    for act in (
        lambda path: os.utime(path, ns=(0, 0)),
        lambda path: path.write_bytes(b"be"),
        lambda path: path.unlink(),
    ):
        act(tmp_path / "a")
        with pytest.raises(IntegrityError) as caught:
            read_all(tmp_path, listing)
        assert str(caught.value) == changed


def test_a_file_that_cannot_be_looked_at_while_it_is_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a server, or the program of a FUSE filesystem, has ended."""
    (tmp_path / "a").write_bytes(b"data")
    listing = walk(str(tmp_path))
    fstat = os.fstat

    def gone(descriptor: int) -> os.stat_result:
        there = fstat(descriptor)
        if stat.S_ISREG(there.st_mode):
            raise OSError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))
        return there

    with monkeypatch.context() as patch:  # pytest itself calls it
        patch.setattr(os, "fstat", gone)
        with pytest.raises(SourceError) as caught:
            read_all(tmp_path, listing)
    assert str(caught.value) == f"{tmp_path}/a: Software caused connection abort"


def test_a_folder_in_the_place_of_a_file_is_a_change(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"data")
    listing = walk(str(tmp_path))
    (tmp_path / "a").unlink()
    (tmp_path / "a").mkdir()
    with pytest.raises(IntegrityError) as caught:
        read_all(tmp_path, listing, is_source=True)
    assert str(caught.value) == (
        f"{tmp_path}/a was replaced while it was read, or each node has another one of this name; "
        "submit again when nothing replaces it, or copy it first to storage that all nodes share"
    )


def test_a_copy_is_not_compared_with_the_listing_of_its_source(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"data")
    listing = walk(str(tmp_path))
    os.utime(tmp_path / "a", ns=(0, 0))
    assert read_all(tmp_path, listing, is_source=False) == b"data"


@pytest.mark.parametrize("swapped", ["a", "a/sub", "a/sub/file", ""])
@pytest.mark.parametrize("is_link", [True, False])
def test_what_was_put_in_the_place_of_what_was_listed_is_not_sent(
    tmp_path: Path, swapped: str, *, is_link: bool
) -> None:
    """The other folder has the same names, and files of the same sizes and times."""
    for top in ("source", "private"):
        (tmp_path / top / "a/sub").mkdir(parents=True)
        (tmp_path / top / "a/sub/file").write_text(top[:6])
        os.utime(tmp_path / top / "a/sub/file", ns=(0, 0))
    source, private = tmp_path / "source", tmp_path / "private"
    listing = walk(str(source))
    stream = Stream(listing, everything(listing))
    reader = StreamReader(str(source), stream, source=source.stat().st_ino)
    (source / swapped).rename(tmp_path / "away")
    if is_link:
        (source / swapped).symlink_to(private / swapped)
    else:
        (private / swapped).rename(source / swapped)
    with pytest.raises(IntegrityError) as caught:
        reader.read_into(memoryview(bytearray(stream.size)), 0)
    reader.close()
    named = source / "a/sub/file" if swapped else source
    if is_link and swapped:  # which is not followed
        assert str(caught.value) == (
            f"{named} changed while it was read; submit again when nothing writes to it"
        )
    else:
        assert str(caught.value) == (
            f"{named} was replaced while it was read, or each node has another one of this name; "
            "submit again when nothing replaces it, or copy it first to storage that all nodes "
            "share"
        )
