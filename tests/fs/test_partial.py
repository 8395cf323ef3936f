"""A partial file is invisible until it is published, and replaces what was there in one step."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import signal
import stat
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest
import xxhash

from stager.base import linux
from stager.base.errors import DestinationError, SpaceError
from stager.base.extents import Extent
from stager.fs.files import CopyFacts
from stager.fs.partial_file import Partial
from stager.store.cache import Cache, open_cache
from stager.wire.layout import Layout
from tests.support.disks import (
    MTIME,
    NEW,
    OLD,
    allocated,
    modes_beneath,
    partial_names,
    publish,
    write,
)
from tests.support.users import as_ordinary_user, forked, on_tmpfs

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.usefixtures("naming")
def test_a_published_file_has_bytes_mode_and_time_of_its_source(cache: Cache, disk: Path) -> None:
    path = disk / "file"
    copy = publish(cache, NEW, path, 0o640)
    facts = path.stat()
    assert path.read_bytes() == NEW
    assert (stat.S_IMODE(facts.st_mode), facts.st_mtime_ns) == (0o640, MTIME)
    assert copy == CopyFacts(len(NEW), MTIME, facts.st_ino, os.getuid())
    assert facts.st_nlink == 1
    assert partial_names(cache) == []


@pytest.mark.usefixtures("naming")
def test_an_empty_file_is_published_too(cache: Cache, disk: Path) -> None:
    publish(cache, b"", disk / "empty")
    assert (disk / "empty").read_bytes() == b""


def test_pieces_may_be_written_in_any_order(cache: Cache, disk: Path) -> None:
    partial = allocated(cache, 8)
    for piece, offset in ((b"gh", 6), (b"abc", 0), (b"def", 3)):
        partial.write(memoryview(piece), offset)
    partial.publish(str(disk / "file"))
    partial.close()
    assert (disk / "file").read_bytes() == b"abcdefgh"


def cached_pages(path: Path) -> int:
    """Return how many pages of the file are in the page cache."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        pages = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(view)
        address, length = ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(view))
        answer = ctypes.CDLL(None).mincore(address, length, pages)
        del start  # the view cannot be closed while it is in use
        assert answer == 0
        return sum(page & 1 for page in pages)


def takes_directly(disk: Path, data: memoryview) -> bool:
    """Return whether the filesystem writes this buffer directly."""
    with suppress(OSError):
        descriptor = os.open(disk / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        try:
            return os.pwrite(descriptor, data, 0) == len(data)
        finally:
            os.close(descriptor)
    return False


#: Pages that a test writes.
PAGES = 16


@pytest.fixture
def aligned() -> memoryview:
    """A buffer of some pages and one byte more, as the ring's begins at a page."""
    return memoryview(mmap.mmap(-1, PAGES * mmap.PAGESIZE + 1))


@pytest.mark.usefixtures("naming")
@pytest.mark.parametrize(
    ("direct", "rest", "cached"), [(True, 0, 0), (True, 1, 1), (False, 0, PAGES)]
)
def test_direct_writes_leave_only_an_unaligned_end_in_the_page_cache(
    cache: Cache, disk: Path, aligned: memoryview, direct: bool, rest: int, cached: int
) -> None:
    data = aligned[: PAGES * mmap.PAGESIZE + rest]
    if not takes_directly(disk, data[: mmap.PAGESIZE]):
        pytest.skip("this filesystem has no direct writes")
    partial = allocated(cache, len(data), direct=direct)
    partial.write(data, 0)
    partial.publish(str(disk / "file"))
    partial.close()
    assert cached_pages(disk / "file") == cached


def test_an_unaligned_piece_does_not_end_the_direct_writes(
    cache: Cache, disk: Path, aligned: memoryview
) -> None:
    if not takes_directly(disk, aligned[:-1]):
        pytest.skip("this filesystem has no direct writes")
    partial = allocated(cache, (PAGES + 2) * mmap.PAGESIZE)
    # One page after another: the odd pieces, and then what has a page's offset.
    partial.write(aligned[: mmap.PAGESIZE], 1)
    partial.write(aligned[:-1], 2 * mmap.PAGESIZE)
    partial.publish(str(disk / "file"))
    partial.close()
    assert cached_pages(disk / "file") == 2


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("cut", [1, 100, 4095, 4097, 8192 + 17])
def test_unaligned_pieces_fit_together(cache: Cache, disk: Path, cut: int, direct: bool) -> None:
    data = os.urandom(20_000)
    partial = allocated(cache, len(data), direct=direct)
    buffer = memoryview(mmap.mmap(-1, len(data)))
    buffer[:] = data
    partial.write(buffer[cut:], cut)
    partial.write(buffer[:cut], 0)
    partial.seal(0o600, os.getegid(), MTIME)
    assert partial.read_back() == xxhash.xxh3_128_hexdigest(data)
    partial.publish(str(disk / "file"))
    partial.close()
    assert (disk / "file").read_bytes() == data


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, (5 << 20) + 3])
def test_what_is_written_is_read_back(cache: Cache, disk: Path, size: int, direct: bool) -> None:
    data = os.urandom(size)
    partial = allocated(cache, size, direct=direct)
    buffer = memoryview(mmap.mmap(-1, size + 1))
    buffer[:size] = data
    cut = size // 8192 * 4096
    partial.write(buffer[cut:size], cut)
    partial.write(buffer[:cut], 0)
    partial.seal(0o600, os.getegid(), MTIME)
    assert partial.read_back() == xxhash.xxh3_128_hexdigest(data)
    partial.publish(str(disk / "file"))
    partial.close()
    assert (disk / "file").read_bytes() == data


def test_a_buffer_that_cannot_be_written_directly_goes_by_the_page_cache(
    cache: Cache, disk: Path, aligned: memoryview
) -> None:
    odd = aligned[1:]  # where in memory, O_DIRECT does care
    if not takes_directly(disk, aligned[:-1]) or takes_directly(disk, odd):
        pytest.skip("this filesystem takes any buffer directly, or none")
    data = os.urandom(len(odd))
    odd[:] = data
    partial = allocated(cache, 2 * len(data), direct=True)
    partial.write(odd, 0)
    # And it is not asked again.
    partial.write(aligned[:-1], len(data))
    partial.publish(str(disk / "file"))
    partial.close()
    assert cached_pages(disk / "file") == 2 * PAGES
    assert (disk / "file").read_bytes() == data + aligned[:-1]


def test_holes_take_no_disk_space(cache: Cache, disk: Path) -> None:
    layout = Layout(1 << 30, 4096, (Extent(0, 4096), Extent(1 << 29, 8192)))
    partial = Partial(cache, direct=True)
    partial.allocate(layout.size, layout.extents)
    partial.publish(str(disk / "file"))
    partial.close()
    facts = (disk / "file").stat()
    assert facts.st_size == 1 << 30
    # 3 blocks of 4096 bytes in units of 512, and one more that the filesystem may need itself.
    assert 3 * 8 <= facts.st_blocks <= 3 * 8 + 8


@pytest.mark.usefixtures("naming")
def test_a_partial_file_that_is_closed_leaves_nothing(cache: Cache, disk: Path) -> None:
    before = modes_beneath(disk)
    partial = write(cache, NEW)
    partial.close()
    assert modes_beneath(disk) == before


def test_a_killed_writer_leaves_nothing_once_it_is_swept(
    cache: Cache, disk: Path, naming: str
) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        partial = allocated(cache, len(NEW))
        partial.write(memoryview(NEW[: len(NEW) // 2]), 0)
        os.write(writing, b"half")
        time.sleep(60)
        os._exit(1)
    assert os.read(reading, 4) == b"half"
    living = len(partial_names(cache))
    open_cache(str(disk), os.getuid())
    still_living = len(partial_names(cache))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    dead = len(partial_names(cache))
    open_cache(str(disk), os.getuid())
    # Only where it needed a name is there something to sweep.
    assert (living, still_living, dead) == ((0, 0, 0) if naming == "unnamed" else (1, 1, 1))
    assert partial_names(cache) == []


@pytest.mark.usefixtures("naming")
def test_a_reader_sees_the_old_file_or_the_new_one_whole(cache: Cache, disk: Path) -> None:
    path = disk / "file"
    publish(cache, OLD, path)
    child = os.fork()
    if not child:
        for _ in range(60):
            publish(cache, NEW, path)
            publish(cache, OLD, path)
        publish(cache, NEW, path)
        os._exit(0)
    seen = {OLD}
    while not os.waitpid(child, os.WNOHANG)[0]:
        seen.add(path.read_bytes())
    assert seen | {path.read_bytes()} == {OLD, NEW}


@pytest.mark.usefixtures("naming")
def test_a_killed_publisher_leaves_the_old_file_or_the_new_one(cache: Cache, disk: Path) -> None:
    path = disk / "file"
    for pause in (0.0, 0.001, 0.002, 0.004, 0.008):
        publish(cache, OLD, path)
        child = os.fork()
        if not child:
            while True:
                publish(cache, NEW, path)
                publish(cache, OLD, path)
        time.sleep(pause)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert path.read_bytes() in (OLD, NEW)
        cache.sweep()
        assert partial_names(cache) == []


@pytest.mark.usefixtures("naming")
def test_a_symlink_is_replaced_and_its_target_left_alone(
    cache: Cache, disk: Path, tmp_path: Path
) -> None:
    target, path = tmp_path / "target", disk / "link"
    target.write_bytes(OLD)
    path.symlink_to(target)
    publish(cache, NEW, path)
    assert not path.is_symlink()
    assert (path.read_bytes(), target.read_bytes()) == (NEW, OLD)


def test_the_other_name_of_a_hard_linked_file_keeps_the_old_bytes(cache: Cache, disk: Path) -> None:
    (disk / "kept").write_bytes(OLD)
    (disk / "file").hardlink_to(disk / "kept")
    publish(cache, NEW, disk / "file")
    assert ((disk / "file").read_bytes(), (disk / "kept").read_bytes()) == (NEW, OLD)


@pytest.mark.usefixtures("naming")
@pytest.mark.parametrize(
    ("name", "problem"),
    [("nowhere/file", "No such file or directory"), ("folder", "Is a directory")],
)
def test_what_cannot_be_published_is_named_and_leaves_nothing(
    cache: Cache, disk: Path, name: str, problem: str
) -> None:
    (disk / "folder").mkdir()
    before = modes_beneath(disk)
    with pytest.raises(DestinationError) as caught:
        publish(cache, NEW, disk / name)
    assert str(caught.value) == f"{disk / name}: {problem}"
    assert modes_beneath(disk) == before


def test_a_partial_file_without_its_folder_is_a_destination_error(cache: Cache) -> None:
    os.rmdir(f"{cache.folder}/partial")
    with pytest.raises(DestinationError) as caught:
        Partial(cache, direct=True)
    assert str(caught.value) == f"{cache.folder}/partial: No such file or directory"


def test_what_cannot_be_opened_again_is_a_destination_error(cache: Cache) -> None:
    def act() -> str:
        with closing(Partial(cache, direct=False)) as partial:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
            with pytest.raises(DestinationError) as caught:
                partial.opened()
        return str(caught.value)

    assert forked(act) == f"{cache.folder}/partial: Too many open files"


def test_an_ordinary_user_publishes_by_way_of_proc(home: Path) -> None:
    as_ordinary_user(lambda: publish(open_cache(str(home), os.getuid()), NEW, home / "file", 0o444))
    assert (home / "file").read_bytes() == NEW


def test_a_folder_that_may_be_written_but_not_read_can_be_published_into(home: Path) -> None:
    # Sites give their scratch disks such permissions, so that users cannot list each other's files.
    def act() -> None:
        cache = open_cache(str(home), os.getuid())
        (home / "dropbox").mkdir()
        (home / "dropbox").chmod(0o300)
        publish(cache, NEW, home / "dropbox/file")

    as_ordinary_user(act)
    (home / "dropbox").chmod(0o700)
    assert (home / "dropbox/file").read_bytes() == NEW


@pytest.mark.root
def test_a_filesystem_that_cannot_allocate_can_be_written(disk: Path) -> None:
    def act() -> tuple[bytes, int]:
        cache = open_cache(str(disk), 0)
        partial = allocated(cache, len(NEW))
        partial.write(memoryview(NEW), 0)
        partial.seal(0o600, 0, MTIME)
        partial.publish(str(disk / "file"))
        partial.close()
        return (disk / "file").read_bytes(), (disk / "file").stat().st_size

    assert on_tmpfs(disk, "mode=755", act, "ramfs") == (NEW, len(NEW))


def fill(cache: Cache, size: int) -> None:
    """Open a partial file of ``size`` bytes and try to write a mebibyte."""
    partial = Partial(cache, direct=True)
    try:
        partial.allocate(size, [Extent(0, size)] if size else [])
        partial.write(memoryview(bytes(1 << 20)), 0)
    finally:
        partial.close()


@pytest.mark.root
@pytest.mark.usefixtures("naming")
@pytest.mark.parametrize("size", [1 << 20, 0], ids=["when it is opened", "when it is written"])
def test_a_full_disk_is_a_space_error_and_its_space_is_freed_again(disk: Path, size: int) -> None:
    def act() -> tuple[str, int, int]:
        cache = open_cache(str(disk), 0)
        free = os.statvfs(disk).f_bfree
        with pytest.raises(SpaceError) as caught:
            fill(cache, size)
        return str(caught.value), caught.value.code, free - os.statvfs(disk).f_bfree

    free = "0 B" if not size else "256.0 KiB"
    message = (
        f"{disk}: the disk is too full: {free} of 256.0 KiB are free; free space there (stagectl "
        "evict) and try again"
    )
    assert on_tmpfs(disk, "size=256k", act) == (message, 5, 0)


def test_a_full_quota_is_not_called_a_full_disk(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel's refusal is put on: a real quota needs a disk of one's own and quota tools.
    def refuse(_descriptor: int, _offset: int, _size: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(linux, "reserve", refuse)
    with pytest.raises(SpaceError) as caught:
        fill(cache, 1)
    message = f"{cache.root}: the quota is full; free space there (stagectl evict) and try again"
    assert str(caught.value) == message


def test_no_copy_is_published_through_a_parent_that_became_a_link(
    cache: Cache, disk: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (disk / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DestinationError) as caught:
        publish(cache, NEW, disk / "sub/file")
    assert str(caught.value) == (
        f"{disk}/sub is a symbolic link, not a folder; links are not followed: remove it, or "
        "write the path that it leads to in the destination"
    )
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert partial_names(cache) == []
