"""Sources on mounted filesystems: what one look finds, and what cannot be staged."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import IntegrityError, SourceError
from stager.source import posix
from stager.source.description import Listings, Selection, Source, SourceFacts
from stager.source.posix import PosixFile, data_size, facts_of, look_at_source
from stager.tree.walk import walk
from tests.support.users import as_ordinary_user, ordinary_home

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BYTES = b"some bytes of an image\n" * 1000


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder of an ordinary user."""
    with ordinary_home() as folder:
        yield folder


def test_a_source_is_described_by_one_stat(tmp_path: Path) -> None:
    path = tmp_path / "img.sqsh"
    path.write_bytes(BYTES)
    path.chmod(0o640)
    facts = path.stat()
    assert look_at_source(str(path)) == Source(
        SourceFacts(len(BYTES), facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino),
        0o640,
        facts.st_gid,
        len(BYTES),
    )


def test_the_holes_of_a_source_are_not_allocated(tmp_path: Path) -> None:
    path = tmp_path / "img.sqsh"
    path.write_bytes(b"x" * 4096)
    os.truncate(path, 1 << 30)
    source = look_at_source(str(path))
    assert (source.facts.size, source.allocated) == (1 << 30, 4096)


def test_a_file_without_a_size_is_no_source() -> None:
    with pytest.raises(SourceError) as caught:
        look_at_source("/proc/version")
    assert str(caught.value) == (
        "/proc/version is not empty, but its size is given as 0, as of files in /proc; copy it to "
        "a plain file, and stage that"
    )


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_file_that_is_another_one_than_the_source_is_told_so(
    tmp_path: Path, *, is_folder: bool
) -> None:
    """As each node reads its own file, where the source is on the nodes' disks."""
    path = tmp_path / "img.sqsh"
    path.write_bytes(BYTES)
    source = look_at_source(str(path))
    if is_folder:  # which may get the number of the file
        path.unlink()
        path.mkdir()
    else:
        (tmp_path / "other").write_bytes(BYTES)
        (tmp_path / "other").rename(path)
    with pytest.raises(IntegrityError) as caught:
        PosixFile(str(path), source)
    assert str(caught.value) == (
        f"{path} was replaced while it was read, or each node has another one of this name; submit "
        "again when nothing replaces it, or copy it first to storage that all nodes share"
    )


def test_a_source_may_be_a_symlink_to_a_plain_file(tmp_path: Path) -> None:
    (tmp_path / "img.sqsh").write_bytes(BYTES)
    (tmp_path / "link").symlink_to("img.sqsh")
    assert look_at_source(f"{tmp_path}/link") == look_at_source(f"{tmp_path}/img.sqsh")


def test_a_folder_on_fuse_has_the_time_of_its_newest_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of its folders may be of the mount, or of the look."""
    monkeypatch.setattr(posix, "is_on_fuse", lambda _: True)
    found = []
    (tmp_path / "in").mkdir()
    for at, name in enumerate(("a", "in/b"), 1):
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (at, at))
    for time in (5, 6):
        for folder in (tmp_path, tmp_path / "in"):
            os.utime(folder, (time, time))
        listings = Listings()
        found.append(
            (look_at_source(str(tmp_path), listings=listings), listings.get(str(tmp_path)))
        )
    assert found[0] == found[1]
    source, listing = found[0]
    assert source.facts == SourceFacts(2, 2 * 10**9, 0, 0)
    assert listing
    seconds = [mtime // 10**9 for mtime in listing.mtimes]
    assert dict(zip(listing.paths, seconds, strict=True)) == {b"": 2, b"a": 1, b"in": 2, b"in/b": 2}


def test_a_missing_source_that_looks_like_a_pattern_is_told_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        look_at_source(f"{tmp_path}/*.bin")
    assert str(caught.value) == (
        f"{tmp_path}/*.bin: No such file or directory; patterns are not expanded: stage {tmp_path} "
        "with the option include=*.bin"
    )


def _bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))


NOTHING_ELSE = "only a plain file or a folder can be staged"
MISSING = (
    "No such file or directory; check the path, and that the compute nodes mount this filesystem"
)
#: Sources that cannot be staged: how to make them, and the message after the path.
NO_SOURCES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, f": {MISSING}"),
    "a dangling symlink": (lambda path: path.symlink_to("nowhere"), f": {MISSING}"),
    "a symlink to itself": (
        lambda path: path.symlink_to(path),
        ": Too many levels of symbolic links",
    ),
    "a named pipe": (os.mkfifo, f" is a named pipe; {NOTHING_ELSE}"),
    "a socket": (_bind_socket, f" is a socket; {NOTHING_ELSE}"),
    "a device": (
        lambda path: path.symlink_to("/dev/null"),
        f" is a character device; {NOTHING_ELSE}",
    ),
}


@pytest.mark.parametrize(("make", "problem"), NO_SOURCES.values(), ids=NO_SOURCES)
def test_a_source_that_cannot_be_staged_is_refused_with_its_kind(
    make: Callable[[Path], object], problem: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:  # whose path is short enough for a socket
        path = Path(folder, "source")
        make(path)
        with pytest.raises(SourceError) as caught:
            look_at_source(str(path))
    assert str(caught.value) == f"{path}{problem}"


@pytest.mark.root
def test_a_block_device_is_no_source(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(7, 0))
    with pytest.raises(SourceError) as caught:
        look_at_source(str(path))
    assert str(caught.value) == f"{path} is a block device; {NOTHING_ELSE}"


def test_a_source_beneath_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SourceError) as caught:
        look_at_source(f"{tmp_path}/file/img.sqsh")
    assert str(caught.value) == f"{tmp_path}/file/img.sqsh: Not a directory"


def test_a_source_in_a_closed_folder_is_refused(home: Path) -> None:
    home.chmod(0)

    def act() -> str:
        with pytest.raises(SourceError) as caught:
            look_at_source(f"{home}/img.sqsh")
        return str(caught.value)

    assert as_ordinary_user(act) == f"{home}/img.sqsh: Permission denied"


def test_a_folder_is_described_by_its_stat_and_its_listing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(BYTES)
    (tmp_path / "b").write_bytes(b"b")
    (tmp_path / "link").symlink_to("a")
    source, facts = look_at_source(str(tmp_path)), tmp_path.stat()
    assert source == Source(
        SourceFacts(len(BYTES) + 1, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino),
        stat.S_IMODE(facts.st_mode),
        facts.st_gid,
        walk(str(tmp_path)).allocated(),
        files=2,
        listing=walk(str(tmp_path)).digest(),
    )
    assert source.is_tree
    assert not look_at_source(f"{tmp_path}/a").is_tree


def test_a_folder_is_listed_once_for_the_same_patterns(tmp_path: Path) -> None:
    for name in ("a", "c"):
        (tmp_path / name).touch()
    path, listings = str(tmp_path), Listings()
    assert listings.get(path) is None
    look_at_source(path, listings=listings)
    look_at_source(path, Selection(exclude=("a",)), listings)
    (tmp_path / "b").touch()
    assert look_at_source(path, listings=listings).files == 2
    assert look_at_source(path, Selection(exclude=("a",)), listings).files == 1
    found = listings.get(path)
    assert found
    assert found.paths == [b"", b"a", b"c"]
    listings.clear()
    assert listings.get(path) is None
    assert look_at_source(path, listings=listings).files == 3


def test_a_source_is_identified_by_its_stat(tmp_path: Path) -> None:
    facts = tmp_path.stat()
    assert facts_of(facts) == SourceFacts(
        facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino
    )


@pytest.mark.root
def test_a_source_that_is_to_be_read_must_be_readable(home: Path) -> None:
    (home / "secret").write_bytes(BYTES)
    (home / "secret").chmod(0o600)
    os.chown(home / "secret", 0, 0)

    def act() -> str:
        with pytest.raises(SourceError) as caught:
            look_at_source(str(home / "secret"), to_be_read=True)
        return str(caught.value)

    assert as_ordinary_user(act) == f"{home}/secret: Permission denied"


@pytest.mark.parametrize("size", [0, 1, 100_000, (1 << 20) + 5])
def test_a_copy_takes_the_bytes_of_data_in_the_source(tmp_path: Path, size: int) -> None:
    source = tmp_path / "img"
    source.write_bytes(b"x" * size)
    facts = look_at_source(str(source))
    assert data_size(str(source), facts) == size
    # As on a filesystem that compresses the file or keeps it on tape.
    assert data_size(str(source), replace(facts, allocated=0)) == size
    os.truncate(source, size + (1 << 30))
    facts = look_at_source(str(source))
    assert size <= data_size(str(source), facts) <= size + 4096


def test_a_folder_of_links_that_leave_it_is_refused(tmp_path: Path) -> None:
    """As a snapshot in a hub's cache is, whose files are in the folder above."""
    snapshot = tmp_path / "models--x/snapshots/ab12"
    (snapshot / "below").mkdir(parents=True)
    (snapshot / "a").symlink_to("../../blobs/1")
    (snapshot / "below/b").symlink_to("../../../blobs/2")
    with pytest.raises(SourceError) as caught:
        look_at_source(str(snapshot))
    assert str(caught.value) == (
        f"{snapshot} has no files: all links in it lead out of it, as to ../../blobs/1; take the "
        "files that they lead to by links=follow"
    )
    (snapshot / "a").unlink()
    (snapshot / "a").symlink_to("/shared/elsewhere/a")
    with pytest.raises(SourceError) as caught:
        look_at_source(str(snapshot))
    assert str(caught.value) == (
        f"{snapshot} has no files: all links in it lead out of it, as to /shared/elsewhere/a; "
        "take the files that they lead to by links=follow"
    )
    (snapshot / "c").symlink_to("below/../d..")
    assert look_at_source(str(snapshot)).leaving == 2


def test_what_links_lead_to_is_the_source_if_they_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/ab12"
    (snapshot / "below").mkdir(parents=True)
    blobs.mkdir()
    for name in ("1", "2"):
        (blobs / name).write_bytes(BYTES)
    (snapshot / "a").symlink_to("../../blobs/1")
    (snapshot / "below/b").symlink_to("../../../blobs/2")

    def look() -> Source:
        return look_at_source(str(snapshot), Selection(follow=True))

    first = look()
    assert (first.files, first.facts.size, first.leaving) == (2, 2 * len(BYTES), 0)
    assert look() == first
    (blobs / "2").write_bytes(BYTES)  # of the same size
    second = look()
    assert second.listing != first.listing
    (snapshot / "below/b").unlink()
    (snapshot / "below/b").symlink_to("../../../blobs/1")
    assert look().listing != second.listing
