"""What the store leaves on a real disk: partial files, records, locks, words and folders."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import xxhash

from stager.base.errors import DestinationError, LaunchError, SpaceError
from stager.base.extents import Extent
from stager.disk.cache import Cache, check_names, look_for_cache, open_cache
from stager.disk.files import made_parents, opened_beneath, read_back
from stager.disk.jobs import jobs_are_known, note_uses, uses, uses_of
from stager.disk.locks import Locks
from stager.disk.partial import Partial
from stager.disk.record import VERSION, CopyFacts, Record
from stager.disk.step_status import StepStatus
from stager.wire.layout import Layout
from tests.support.records import RECORD
from tests.support.users import (
    USER,
    as_ordinary_user,
    as_user,
    forked,
    on_tmpfs,
    ordinary_home,
    within,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OLD, NEW = b"old" * 1000, b"new!" * 5000
MTIME = 1_700_000_000_123_456_789


@pytest.fixture
def home() -> Iterator[Path]:
    with ordinary_home() as folder:
        yield folder


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """The cache root of a node whose disk is this user's own."""
    path = tmp_path / "disk"
    path.mkdir()
    return path


@pytest.fixture
def cache(disk: Path) -> Cache:
    return open_cache(str(disk), os.getuid())


@pytest.fixture(params=["unnamed", "named"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How partial files are made: without a name, or with one as on NFS.

    Every filesystem that can be mounted without a server has O_TMPFILE by now, so the refusal is
    the one thing here that is not real.
    """
    way: str = request.param
    if way == "named":
        real = os.open

        def refuse(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
            return real(path, flags, mode, dir_fd=dir_fd)

        monkeypatch.setattr(os, "open", refuse)
    return way


def partial_names(cache: Cache) -> list[str]:
    return os.listdir(f"{cache.folder}/partial")


def allocated(cache: Cache, size: int, *, direct: bool = True) -> Partial:
    """A partial file of ``size`` bytes without holes."""
    partial = Partial(cache, direct=direct)
    partial.allocate(Layout.dense(size, 4096))
    return partial


def write(cache: Cache, data: bytes, mode: int = 0o600) -> Partial:
    partial = allocated(cache, len(data))
    partial.write(memoryview(data), 0)
    partial.seal(mode, os.getegid(), MTIME)
    return partial


def publish(cache: Cache, data: bytes, path: Path, mode: int = 0o600) -> CopyFacts:
    partial = write(cache, data, mode)
    try:
        return partial.publish(str(path))
    finally:
        partial.close()


def tree(folder: Path) -> dict[str, str]:
    """All that lies beneath ``folder``, with its permissions as ls prints them."""
    return {
        str(path.relative_to(folder)): stat.filemode(path.lstat().st_mode)
        for path in folder.rglob("*")
    }


# Partial files


@pytest.mark.usefixtures("way")
def test_a_published_file_has_bytes_mode_and_time_of_its_source(cache: Cache, disk: Path) -> None:
    path = disk / "file"
    copy = publish(cache, NEW, path, 0o640)
    facts = path.stat()
    assert path.read_bytes() == NEW
    assert (stat.S_IMODE(facts.st_mode), facts.st_mtime_ns) == (0o640, MTIME)
    assert copy == CopyFacts(len(NEW), MTIME, facts.st_ino, os.getuid())
    assert facts.st_nlink == 1
    assert partial_names(cache) == []


@pytest.mark.usefixtures("way")
def test_an_empty_file_is_published_too(cache: Cache, disk: Path) -> None:
    publish(cache, b"", disk / "empty")
    assert (disk / "empty").read_bytes() == b""


@pytest.mark.parametrize(
    ("wanted", "given"), [(0o4755, 0o755), (0o2755, 0o755), (0o1644, 0o644), (0o444, 0o444)]
)
def test_set_id_bits_are_not_kept(cache: Cache, disk: Path, wanted: int, given: int) -> None:
    publish(cache, NEW, disk / "file", wanted)
    assert stat.S_IMODE((disk / "file").stat().st_mode) == given


def test_pieces_are_written_where_they_belong_in_any_order(cache: Cache, disk: Path) -> None:
    partial = allocated(cache, 8)
    for piece, offset in ((b"gh", 6), (b"abc", 0), (b"def", 3)):
        partial.write(memoryview(piece), offset)
    partial.publish(str(disk / "file"))
    partial.close()
    assert (disk / "file").read_bytes() == b"abcdefgh"


def cached_pages(path: Path) -> int:
    """How many pages of the file are in the page cache."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        pages = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(view)
        address, length = ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(view))
        answer = ctypes.CDLL(None).mincore(address, length, pages)
        del start  # the view cannot be closed while it is in use
        assert answer == 0
        return sum(page & 1 for page in pages)


def takes_directly(disk: Path, data: memoryview) -> bool:
    """Whether the filesystem takes this buffer past its page cache."""
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


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("direct", "rest", "cached"), [(True, 0, 0), (True, 1, 1), (False, 0, PAGES)]
)
def test_direct_writes_leave_only_an_odd_end_in_the_page_cache(
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


def test_a_piece_at_an_odd_place_does_not_end_the_direct_writes(
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
def test_pieces_at_odd_places_fit_together(
    cache: Cache, disk: Path, cut: int, direct: bool
) -> None:
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


def test_a_buffer_that_the_disk_does_not_take_directly_goes_by_the_page_cache(
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


def test_holes_take_no_room(cache: Cache, disk: Path) -> None:
    layout = Layout(1 << 30, 4096, (Extent(0, 4096), Extent(1 << 29, 8192)))
    partial = Partial(cache, direct=True)
    partial.allocate(layout)
    partial.publish(str(disk / "file"))
    partial.close()
    facts = (disk / "file").stat()
    assert facts.st_size == 1 << 30
    # 3 blocks of 4096 bytes in units of 512, and one more that the filesystem may need itself.
    assert 3 * 8 <= facts.st_blocks <= 3 * 8 + 8


@pytest.mark.usefixtures("way")
def test_a_partial_file_that_is_closed_leaves_nothing(cache: Cache, disk: Path) -> None:
    before = tree(disk)
    partial = write(cache, NEW)
    partial.close()
    assert tree(disk) == before


def test_a_writer_that_is_killed_leaves_nothing_behind(cache: Cache, disk: Path, way: str) -> None:
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
    assert (living, still_living, dead) == ((0, 0, 0) if way == "unnamed" else (1, 1, 1))
    assert partial_names(cache) == []


@pytest.mark.usefixtures("way")
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


@pytest.mark.usefixtures("way")
def test_a_publisher_that_is_killed_leaves_the_old_file_or_the_new_one(
    cache: Cache, disk: Path
) -> None:
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


@pytest.mark.usefixtures("way")
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


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("name", "problem"),
    [("nowhere/file", "No such file or directory"), ("folder", "Is a directory")],
)
def test_what_cannot_be_published_is_named_and_leaves_nothing(
    cache: Cache, disk: Path, name: str, problem: str
) -> None:
    (disk / "folder").mkdir()
    before = tree(disk)
    with pytest.raises(DestinationError) as caught:
        publish(cache, NEW, disk / name)
    assert str(caught.value) == f"{disk / name}: {problem}"
    assert tree(disk) == before


def test_a_partial_file_without_its_folder_is_a_destination_error(cache: Cache) -> None:
    os.rmdir(f"{cache.folder}/partial")
    with pytest.raises(DestinationError) as caught:
        Partial(cache, direct=True)
    assert str(caught.value) == f"{cache.folder}/partial: No such file or directory"


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
def test_a_filesystem_that_cannot_allocate_is_written_all_the_same(disk: Path) -> None:
    def act() -> tuple[bytes, int]:
        cache = open_cache(str(disk), 0)
        partial = allocated(cache, len(NEW))
        partial.write(memoryview(NEW), 0)
        partial.seal(0o600, 0, MTIME)
        partial.publish(str(disk / "file"))
        partial.close()
        return (disk / "file").read_bytes(), (disk / "file").stat().st_size

    assert on_tmpfs(disk, "mode=755", act, "ramfs") == (NEW, len(NEW))


# Full disks


def fill(cache: Cache, size: int) -> None:
    """Open a partial file of ``size`` bytes and write a mebibyte, whatever becomes of it."""
    partial = Partial(cache, direct=True)
    try:
        partial.allocate(Layout.dense(size, 4096))
        partial.write(memoryview(bytes(1 << 20)), 0)
    finally:
        partial.close()


def fill_up(folder: Path) -> None:
    """Leave no room on the filesystem of ``folder``."""
    with suppress(OSError), open(folder / "filler", "wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass


@pytest.mark.root
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [1 << 20, 0], ids=["when it is opened", "when it is written"])
def test_a_full_disk_is_a_space_error_and_the_room_is_given_back(disk: Path, size: int) -> None:
    def act() -> tuple[str, int, int]:
        cache = open_cache(str(disk), 0)
        free = os.statvfs(disk).f_bfree
        with pytest.raises(SpaceError) as caught:
            fill(cache, size)
        return str(caught.value), caught.value.code, free - os.statvfs(disk).f_bfree

    message = f"{disk}/.slurm-stage/0/partial: the disk is full; make room and submit again"
    assert on_tmpfs(disk, "size=256k", act) == (message, 5, 0)


def test_a_used_up_quota_is_called_so(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel's refusal is put on: a real quota needs a disk of one's own and quota tools.
    def refuse(_descriptor: int, _offset: int, _size: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(SpaceError) as caught:
        allocated(cache, 1)
    message = f"{cache.folder}/partial: the quota is full; make room and submit again"
    assert str(caught.value) == message


@pytest.mark.root
def test_a_record_that_meets_a_full_disk_is_a_space_error_and_the_old_one_stays(disk: Path) -> None:
    def act() -> tuple[str, list[str], Record | None]:
        cache = open_cache(str(disk), 0)
        cache.save(RECORD)
        fill_up(disk)
        with pytest.raises(SpaceError) as caught:
            cache.save(replace(RECORD, used_by_job=91))
        return str(caught.value), partial_names(cache), cache.load(RECORD.destination)

    message = f"{disk}/.slurm-stage/0/partial: the disk is full; make room and submit again"
    assert on_tmpfs(disk, "size=256k", act) == (message, [], RECORD)


# Records


@pytest.mark.parametrize(
    "destination",
    ["/nvme/img.sqsh", "/nvme/with blank\nand newline", "/nvme/größe", os.fsdecode(b"/nvme/\xff")],
)
def test_a_saved_record_is_loaded_as_it_was(cache: Cache, destination: str) -> None:
    record = replace(RECORD, destination=destination)
    cache.save(record)
    assert cache.load(destination) == record
    assert list(cache.records()) == [record]
    assert partial_names(cache) == []


def test_a_record_is_its_owners_alone(cache: Cache) -> None:
    cache.save(RECORD)
    facts = os.stat(cache.record_path(RECORD.destination))
    assert (stat.S_IMODE(facts.st_mode), facts.st_uid) == (0o600, os.getuid())


def test_the_last_record_saved_for_a_destination_is_the_one(cache: Cache) -> None:
    other = replace(RECORD, destination="/nvme/other")
    last = replace(RECORD, used_by_job=91)
    for record in (RECORD, other, last):
        cache.save(record)
    assert cache.load(RECORD.destination) == last
    assert sorted(cache.records(), key=lambda record: record.destination) == [last, other]


def test_a_forgotten_record_is_gone_and_may_be_forgotten_again(cache: Cache) -> None:
    cache.save(RECORD)
    for _ in range(2):
        cache.forget(RECORD.destination)
        assert cache.load(RECORD.destination) is None


def _link_elsewhere(path: Path) -> None:
    path.rename(path.with_suffix(".kept"))
    path.symlink_to(path.with_suffix(".kept"))


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


#: What makes a record's file one that is not taken at its word.
UNTRUSTED: dict[str, Callable[[Path], object]] = {
    "absent": lambda path: path.unlink(),
    "writable by its group": lambda path: path.chmod(0o620),
    "writable by everybody": lambda path: path.chmod(0o602),
    "with a second name": lambda path: path.with_name("second").hardlink_to(path),
    "a symlink": _link_elsewhere,
    "a folder": _as_folder,
    "a named pipe": _as_pipe,
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "too large": lambda path: path.write_bytes(path.read_bytes() + b" " * 65536),
    "not JSON": lambda path: path.write_bytes(bytes(range(256))),
    "brackets without end": lambda path: path.write_bytes(b"[" * 60000),
    "of another destination": lambda path: path.write_text(
        replace(RECORD, destination="/nvme/other").to_json()
    ),
    "of a newer version": lambda path: path.write_text(
        replace(RECORD, version=VERSION + 1).to_json()
    ),
}


@pytest.mark.parametrize("spoil", UNTRUSTED.values(), ids=UNTRUSTED)
def test_a_record_that_cannot_be_trusted_is_none(
    cache: Cache, spoil: Callable[[Path], object]
) -> None:
    cache.save(RECORD)
    spoil(Path(cache.record_path(RECORD.destination)))
    assert within(2, lambda: cache.load(RECORD.destination)) is None


@pytest.mark.root
def test_a_strangers_record_is_none_and_roots_is_as_good_as_ones_own(home: Path) -> None:
    def loaded_from(owner: int) -> Record | None:
        os.chown(path, owner, owner)
        return as_user(USER, lambda: cache.load(RECORD.destination))

    cache = as_user(USER, lambda: open_cache(str(home), USER))
    as_user(USER, lambda: cache.save(RECORD))
    path = cache.record_path(RECORD.destination)
    os.chmod(path, 0o644)
    assert [loaded_from(owner) for owner in (USER, 0, USER + 1)] == [RECORD, RECORD, None]


def test_records_that_cannot_be_trusted_are_passed_over(cache: Cache) -> None:
    for name in "abc":
        cache.save(replace(RECORD, destination=f"/nvme/{name}"))
    os.chmod(cache.record_path("/nvme/a"), 0o666)
    Path(cache.record_path("/nvme/c")).write_text("{}")
    assert list(cache.records()) == [replace(RECORD, destination="/nvme/b")]


def test_a_record_under_another_destinations_name_is_passed_over(cache: Cache) -> None:
    cache.save(RECORD)
    os.rename(cache.record_path(RECORD.destination), cache.record_path("/nvme/other"))
    assert list(cache.records()) == []
    assert cache.load("/nvme/other") is None


def test_records_are_saved_while_other_jobs_of_the_user_sweep() -> None:
    # On /dev/shm, where nothing waits for a disk, so that many meet in a short time.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        cache = open_cache(root, os.getuid())
        with sweeping(cache, jobs=3):
            failures = [str(error) for _ in range(1000) if (error := _failure_to_save(cache))]
        assert failures == []


@contextmanager
def sweeping(cache: Cache, jobs: int) -> Iterator[None]:
    """Processes that do nothing but sweep."""
    children = []
    for _ in range(jobs):
        child = os.fork()
        if not child:
            while True:
                cache.sweep()
        children.append(child)
    try:
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _failure_to_save(cache: Cache) -> OSError | None:
    try:
        cache.save(RECORD)
    except OSError as error:
        return error
    return None


# Sweeping


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o400], ids=oct)
def test_a_dead_partial_file_is_swept_whatever_its_mode(home: Path, mode: int) -> None:
    def act() -> list[str]:
        cache = open_cache(str(home), os.getuid())
        dead = Path(cache.folder, "partial", "0123456789abcdef")
        dead.write_bytes(OLD)
        dead.chmod(mode)
        cache.sweep()
        return partial_names(cache)

    assert as_ordinary_user(act) == []


def test_the_sweep_leaves_a_living_ones_partial_file(cache: Cache, disk: Path, way: str) -> None:
    partial = write(cache, NEW)
    names = partial_names(cache)
    forked(cache.sweep)
    assert partial_names(cache) == names
    assert len(names) == (0 if way == "unnamed" else 1)
    partial.publish(str(disk / "file"))
    partial.close()
    assert (disk / "file").read_bytes() == NEW


def test_the_sweep_leaves_what_a_symlink_points_to(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(OLD)
    os.symlink(tmp_path / "mine", f"{cache.folder}/partial/link")
    cache.sweep()
    assert (tmp_path / "mine").read_bytes() == OLD


# Locks


HOLDER = """
import sys
from stager.disk.cache import Cache
from stager.disk.locks import Locks
locks = Locks(Cache(sys.argv[1]))
print(all(locks.take(destination) for destination in sys.argv[2:]), flush=True)
sys.stdin.read()
"""


@contextmanager
def held(cache: Cache, *destinations: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Another job's process that has the locks of ``destinations``."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, cache.folder, *destinations],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        cwd=Path(__file__).parents[1],
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def locks(cache: Cache) -> Iterator[Locks]:
    locks = Locks(cache)
    yield locks
    locks.close()


def test_a_lock_is_had_by_one_process_and_goes_with_it_when_it_is_killed(
    cache: Cache, locks: Locks
) -> None:
    with held(cache, "/nvme/a", SLURM_JOB_ID="17") as process:
        taken = locks.take("/nvme/a")
        holder = locks.holder("/nvme/a")
        process.kill()
        process.wait()
        after = locks.take("/nvme/a")
    assert (taken, holder, after) == (False, "job 17", True)


def test_a_holder_outside_of_slurm_is_called_by_its_process_number(
    cache: Cache, locks: Locks
) -> None:
    with held(cache, "/nvme/a") as process:
        assert locks.holder("/nvme/a") == f"process {process.pid}"


def test_a_holder_that_has_just_let_go_is_another_job(locks: Locks) -> None:
    assert locks.holder("/nvme/a") == "another job"


def test_the_locks_of_destinations_are_independent(cache: Cache, locks: Locks) -> None:
    with held(cache, "/nvme/a", "/nvme/b", SLURM_JOB_ID="17"):
        assert [locks.take(f"/nvme/{name}") for name in "abc"] == [False, False, True]


def test_a_released_lock_is_to_be_had_and_the_others_stay(cache: Cache, locks: Locks) -> None:
    def try_locks() -> list[bool]:
        other = Locks(cache)
        return [other.take(f"/nvme/{name}") for name in "ab"]

    assert locks.take("/nvme/a")
    assert locks.take("/nvme/b")
    locks.release("/nvme/a")
    assert forked(try_locks) == [True, False]


def test_closed_locks_are_all_released(cache: Cache) -> None:
    mine = Locks(cache)
    assert mine.take("/nvme/a")
    mine.close()
    assert forked(lambda: Locks(cache).take("/nvme/a"))


def test_the_lock_file_stays_empty_and_is_its_owners_alone(cache: Cache, locks: Locks) -> None:
    assert locks.take("/nvme/a")
    facts = os.stat(f"{cache.folder}/lock")
    assert (facts.st_size, stat.S_IMODE(facts.st_mode)) == (0, 0o600)


def test_a_lock_file_that_is_a_symlink_is_refused(cache: Cache, tmp_path: Path) -> None:
    os.symlink(tmp_path / "elsewhere", f"{cache.folder}/lock")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        Locks(cache)
    assert not (tmp_path / "elsewhere").exists()


# The cache


def test_a_user_who_owns_the_root_gets_its_folders_made(disk: Path) -> None:
    cache = open_cache(str(disk), os.getuid())
    assert cache.folder == f"{disk}/.slurm-stage/{os.getuid()}"
    inner = f".slurm-stage/{os.getuid()}"
    assert {name: mode for name, mode in tree(disk).items() if name != ".slurm-stage"} == {
        inner: "drwx------",
        f"{inner}/records": "drwx------",
        f"{inner}/tables": "drwx------",
        f"{inner}/partial": "drwx------",
    }


def test_a_cache_that_is_opened_again_is_the_same(cache: Cache, disk: Path) -> None:
    cache.save(RECORD)
    before = tree(disk)
    assert open_cache(str(disk), os.getuid()) == cache
    assert tree(disk) == before


def test_an_opened_cache_is_free_of_dead_partial_files(cache: Cache, disk: Path) -> None:
    Path(cache.folder, "partial", "0123456789abcdef").write_bytes(OLD)
    open_cache(str(disk), os.getuid())
    assert partial_names(cache) == []


@pytest.mark.root
def test_a_root_that_root_prepared_is_opened_by_its_user_and_by_nobody_else(home: Path) -> None:
    home.chmod(0o755)
    os.chown(home, 0, 0)
    (home / ".slurm-stage").mkdir(mode=0o755)
    (home / f".slurm-stage/{USER}").mkdir(mode=0o700)
    os.chown(home / f".slurm-stage/{USER}", USER, USER)
    cache = as_user(USER, lambda: open_cache(str(home), USER))
    as_user(USER, lambda: cache.save(RECORD))
    with pytest.raises(DestinationError) as caught:
        as_user(USER + 1, lambda: open_cache(str(home), USER + 1))
    assert str(caught.value) == (
        f"{home}/.slurm-stage/{USER + 1} is missing: the site's prolog or plugin makes it; "
        "tell the administrator"
    )


@pytest.mark.root
def test_root_that_opens_its_own_cache_leaves_room_for_its_users(disk: Path) -> None:
    # `stagectl status` of an administrator may come to a node before its first job.
    open_cache(str(disk), 0)
    assert tree(disk)[".slurm-stage"] == "drwxr-xr-x"


def _refusal(root: str, uid: int) -> str:
    """The message with which an ordinary user is refused the cache of ``uid``."""

    def act() -> str:
        with pytest.raises(DestinationError) as caught:
            open_cache(root, uid)
        return str(caught.value)

    return as_ordinary_user(act)


def _ordinary_uid() -> int:
    return os.getuid() or USER


def test_a_cache_root_that_is_not_there_is_named(home: Path) -> None:
    message = f"the cache root {home}/nvme is not there: No such file or directory"
    assert _refusal(f"{home}/nvme", _ordinary_uid()) == message


def test_a_cache_root_that_was_not_prepared_names_who_can_help(home: Path) -> None:
    # A root of somebody else, as any root is that the administrator made.
    assert _refusal(str(home), _ordinary_uid() + 1) == (
        f"{home}/.slurm-stage is missing: the site's prolog or plugin makes it; "
        "tell the administrator"
    )


def test_a_cache_root_that_is_a_file_is_a_destination_error(home: Path) -> None:
    root = home / "nvme"
    root.write_bytes(b"")
    if os.getuid() == 0:
        os.chown(root, USER, USER)
    assert _refusal(str(root), _ordinary_uid()) == f"{root}/.slurm-stage: Not a directory"


def test_a_cache_root_without_permission_to_write_is_a_destination_error(home: Path) -> None:
    home.chmod(0o500)
    assert _refusal(str(home), _ordinary_uid()) == f"{home}/.slurm-stage: Permission denied"


def test_a_folder_of_caches_that_may_not_be_entered_is_a_destination_error(home: Path) -> None:
    def act() -> None:
        (home / ".slurm-stage").mkdir()
        (home / ".slurm-stage").chmod(0)

    as_ordinary_user(act)
    stranger = _ordinary_uid()
    assert _refusal(str(home), stranger) == f"{home}/.slurm-stage/{stranger}: Permission denied"


def _as_file(path: Path) -> None:
    path.rmdir()
    path.write_bytes(b"")


#: What an ordinary user may find in place of a folder that root and he alone may write in.
INSECURE: dict[str, Callable[[Path], None]] = {
    "writable by its group": lambda path: path.chmod(0o720),
    "writable by everybody": lambda path: path.chmod(0o702),
    "a file": _as_file,
    "a symlink to a folder": _link_elsewhere,
}


@pytest.mark.parametrize("spoil", INSECURE.values(), ids=INSECURE)
@pytest.mark.parametrize("inner", [False, True], ids=["parent", "own folder"])
def test_a_folder_that_others_may_lead_astray_is_refused(
    home: Path, spoil: Callable[[Path], None], *, inner: bool
) -> None:
    uid = _ordinary_uid()
    parent = home / ".slurm-stage"
    path = parent / str(uid) if inner else parent

    def act() -> None:
        path.mkdir(parents=True)
        spoil(path)

    as_ordinary_user(act)
    owners = f"uid {uid}" if inner else f"uid 0 or uid {uid}"
    assert _refusal(str(home), uid) == (
        f"{path} is not a folder of {owners} alone; tell the administrator"
    )


@pytest.mark.root
@pytest.mark.parametrize("inner", [False, True], ids=["parent", "own folder"])
def test_a_strangers_folder_is_refused(home: Path, *, inner: bool) -> None:
    parent = home / ".slurm-stage"
    path = parent / str(USER) if inner else parent
    path.mkdir(parents=True)
    parent.chmod(0o755)
    os.chown(path, USER + 1, USER + 1)
    owners = f"uid {USER}" if inner else f"uid 0 or uid {USER}"
    assert _refusal(str(home), USER) == (
        f"{path} is not a folder of {owners} alone; tell the administrator"
    )


# The folders above a destination


def test_folders_above_a_destination_are_made_and_stay(tmp_path: Path) -> None:
    with made_parents(str(tmp_path / "a/b/file")):
        assert tree(tmp_path).keys() == {"a", "a/b"}
    assert tree(tmp_path).keys() == {"a", "a/b"}


@pytest.mark.parametrize("error", [SpaceError("full"), KeyboardInterrupt()])
def test_made_folders_are_taken_away_on_a_failure_and_no_others(
    tmp_path: Path, error: BaseException
) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(type(error)), made_parents(str(tmp_path / "there/a/b/file")):
        raise error
    assert tree(tmp_path).keys() == {"there"}


def test_a_made_folder_that_others_use_by_now_stays_on_a_failure(tmp_path: Path) -> None:
    def fail() -> None:
        with made_parents(str(tmp_path / "a/b/c/file")):
            (tmp_path / "a/b/others").write_bytes(OLD)
            raise SpaceError("full")

    with pytest.raises(SpaceError):
        fail()
    assert tree(tmp_path).keys() == {"a", "a/b", "a/b/others"}


def test_a_folder_that_cannot_be_made_is_named_and_those_above_it_are_taken_away(
    tmp_path: Path,
) -> None:
    endless = "x" * 300
    with pytest.raises(DestinationError) as caught, made_parents(f"{tmp_path}/a/b/{endless}/file"):
        pass
    assert str(caught.value) == f"{tmp_path}/a/b/{endless}: File name too long"
    assert tree(tmp_path) == {}


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(OLD)
    with pytest.raises(DestinationError) as caught, made_parents(f"{tmp_path}/a/b/file"):
        pass
    assert str(caught.value) == f"{tmp_path}/a/b: Not a directory"


# The word to the tasks that wait


@pytest.fixture
def words_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's folder of words; elsewhere than in /run, where a cluster may be at work."""
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(tmp_path))
    folder = tmp_path / str(os.getuid())
    folder.mkdir()
    return folder


def _is_held(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_tasks_wait_while_the_word_is_held_and_read_it_then(words_folder: Path) -> None:
    path = words_folder / "17.0.4"
    words = StepStatus(os.getuid())
    words.hold("17.0", "4")
    before = (_is_held(path), path.read_bytes())
    words.say(0, "/a:/b")
    said = (_is_held(path), path.read_bytes())
    words.close()
    after = (_is_held(path), path.read_bytes())
    assert before == (True, b"")
    assert said == (True, b"0\n")
    assert after == (False, b"0\n")


def test_what_was_done_is_noted_for_later_steps_and_what_failed_is_not(words_folder: Path) -> None:
    for step, code, directives in (("4", 0, "/a:/b"), ("5", 7, "/c:/d"), ("6", 0, "/e:/f")):
        words = StepStatus(os.getuid())
        words.hold("17.0", step)
        words.say(code, directives)
        words.close()
    assert (words_folder / "17.0").read_text() == "/a:/b\n/e:/f\n"
    assert (words_folder / "17.0.5").read_text() == "7\n"


LATIN = os.fsdecode(bytes([0xE9]))


def test_the_lists_of_what_is_spread_are_noted_for_the_jobs_tasks(words_folder: Path) -> None:
    for step, code, lists in (
        ("4", 0, ["/nvme/a/.stage-shards.tsv", "/nvme/b/.stage-shards.tsv"]),
        ("5", 7, ["/nvme/c/.stage-shards.tsv"]),
        ("6", 0, []),
        ("7", 0, ["/nvme/a/.stage-shards.tsv", f"/nvme/{LATIN}/.stage-shards.tsv"]),
    ):
        words = StepStatus(os.getuid())
        words.hold("17.0", step)
        words.say(code, "/a:/b", lists)
        words.close()
    assert (words_folder / "17.0.shards").read_bytes() == (
        b"/nvme/a/.stage-shards.tsv\n/nvme/b/.stage-shards.tsv\n/nvme/\xe9/.stage-shards.tsv\n"
    )
    assert tree(words_folder)["17.0.shards"] == "-rw-------"


def test_a_job_that_spreads_nothing_has_no_lists(words_folder: Path) -> None:
    words = StepStatus(os.getuid())
    words.hold("17.0", "4")
    words.say(0, "/a:/b", [])
    words.close()
    assert sorted(path.name for path in words_folder.iterdir()) == ["17.0", "17.0.4"]


@pytest.mark.root
@pytest.mark.parametrize(("mode", "given"), [(0o644, 0o644), (0o640, 0o600), (0o755, 0o755)])
def test_a_group_that_the_user_is_not_in_gives_its_right_to_nobody(mode: int, given: int) -> None:
    def act() -> int:
        with tempfile.TemporaryDirectory() as folder:
            partial = Partial(open_cache(folder, os.getuid()), direct=True)
            partial.seal(mode, 4242, 0)
            path = Path(folder) / "file"
            partial.publish(str(path))
            partial.close()
            return stat.S_IMODE(path.stat().st_mode)

    assert as_user(USER, act) == given


def test_words_of_jobs_that_must_be_over_are_swept(words_folder: Path) -> None:
    for name, days in (("1.0", 31), ("1.0.0", 31), ("2.0", 29)):
        (words_folder / name).write_text("0\n")
        then = time.time() - days * 24 * 3600
        os.utime(words_folder / name, (then, then))
    words = StepStatus(os.getuid())
    words.hold("17.0", "4")
    words.close()
    assert sorted(path.name for path in words_folder.iterdir()) == ["17.0.4", "2.0"]


def test_an_older_word_of_the_same_name_is_taken_back(words_folder: Path) -> None:
    (words_folder / "17.0.4").write_text("6\nan older and longer word\n")
    words = StepStatus(os.getuid())
    words.hold("17.0", "4")
    words.close()
    assert (words_folder / "17.0.4").read_bytes() == b""


def test_a_word_about_a_path_that_is_not_utf8_is_said_byte_for_byte(words_folder: Path) -> None:
    words = StepStatus(os.getuid())
    words.hold("17.0", "4")
    words.say(0, f"{os.fsdecode(b'/data/caf' + bytes([0xE9]))}:/b")
    words.close()
    assert (words_folder / "17.0").read_bytes() == b"/data/caf\xe9:/b\n"


def test_a_word_is_its_owners_alone(words_folder: Path) -> None:
    words = StepStatus(os.getuid())
    words.hold("17.0", "4")
    words.say(0, "/a:/b")
    words.close()
    assert tree(words_folder) == {"17.0": "-rw-------", "17.0.4": "-rw-------"}


def test_a_word_that_was_never_held_is_closed_without_complaint() -> None:
    StepStatus(os.getuid()).close()


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda path: path.parent.rmdir(), "No such file or directory"),
        (lambda path: path.symlink_to("elsewhere"), "Too many levels of symbolic links"),
        (lambda path: path.mkdir(), "Is a directory"),
    ],
    ids=["no folder", "a symlink", "a folder"],
)
def test_a_word_that_cannot_be_held_is_a_launch_error(
    words_folder: Path, spoil: Callable[[Path], None], problem: str
) -> None:
    path = words_folder / "17.0.4"
    spoil(path)
    with pytest.raises(LaunchError) as caught:
        StepStatus(os.getuid()).hold("17.0", "4")
    assert str(caught.value) == (
        f"{path}: {problem}: the plugin prepares its folder; tell the administrator"
    )


# What jobs use


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /run/slurm-stage, where root marks jobs."""
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(tmp_path))
    monkeypatch.setattr("stager.base.paths.JOBS_FOLDER", str(tmp_path / "jobs"))
    for name in ("jobs", "5001", "5002"):
        (tmp_path / name).mkdir()
    return tmp_path


AWKWARD_NAMES = ["/nvme/a", "/nvme/new\nline", "/nvme/\udcff", "/nvme/é"]


def test_what_running_jobs_use_is_known_to_their_user_and_to_root(run: Path) -> None:
    for name in AWKWARD_NAMES:
        note_uses(5001, 17, [name])
    note_uses(5001, 18, ["/nvme/ended"])
    note_uses(5002, 19, ["/nvme/others"])
    for mark in ("17.5001", "19.5002"):
        (run / "jobs" / mark).touch()
    assert uses(5001) == frozenset(AWKWARD_NAMES)
    assert uses(5002) == {"/nvme/others"}
    assert uses(None) == {*AWKWARD_NAMES, "/nvme/others"}
    assert uses_of(5001, 18) == {"/nvme/ended"}
    assert uses(5003) == frozenset()


def test_a_mark_of_another_users_job_keeps_nothing_of_ones_own(run: Path) -> None:
    note_uses(5001, 19, ["/nvme/a"])
    (run / "jobs/19.5002").touch()
    assert uses(5001) == frozenset()


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        lambda path: path.mkdir(),
        lambda path: path.symlink_to("/etc/passwd"),
        lambda path: path.write_bytes(b"cut short"),
    ],
    ids=["a pipe", "a folder", "a symlink", "no end"],
)
def test_what_is_no_list_of_uses_names_none(run: Path, make: Callable[[Path], object]) -> None:
    (run / "jobs/17.5001").touch()
    make(run / "5001/17.uses")
    assert uses(5001) == uses(None) == frozenset()


def test_an_endless_list_is_read_so_far_and_no_further(run: Path) -> None:
    (run / "jobs/17.5001").touch()
    (run / "5001/17.uses").write_bytes(b"/nvme/a\0" * 300_000)
    assert uses(5001) == {"/nvme/a"}


def test_without_roots_part_there_is_nothing_to_note_it_in(run: Path) -> None:
    note_uses(5003, 17, ["/nvme/a"])
    assert sorted(path.name for path in run.iterdir()) == ["5001", "5002", "jobs"]
    assert jobs_are_known()
    (run / "jobs").rmdir()
    assert not jobs_are_known()
    assert uses(5001) == uses(None) == frozenset()


# Root's for all


@pytest.mark.root
def test_what_root_keeps_for_all_can_be_read_by_all(disk: Path) -> None:
    cache = open_cache(str(disk), 0, shared=True)
    cache.save(RECORD)
    assert cache.root == str(disk)
    assert stat.filemode(os.stat(cache.folder).st_mode) == "drwxr-xr-x"
    assert stat.filemode(os.stat(cache.record_path(RECORD.destination)).st_mode) == "-rw-r--r--"
    disk.chmod(0o777)
    with pytest.raises(DestinationError) as caught:
        open_cache(str(disk), USER, shared=True)
    message = f"{disk} is not a folder of uid 0 alone; tell the administrator"
    assert str(caught.value) == message


@pytest.mark.root
def test_where_root_has_staged_nothing_yet_nothing_is_found(disk: Path) -> None:
    cache = open_cache(str(disk), USER, shared=True)
    assert cache.load("/nvme/img") is None
    assert list(disk.iterdir()) == []


@pytest.mark.root
@pytest.mark.parametrize(("owner", "mode"), [(USER, 0o755), (0, 0o775), (0, 0o757)])
def test_a_root_for_all_that_others_could_write_in_is_refused(
    disk: Path, owner: int, mode: int
) -> None:
    open_cache(str(disk), 0, shared=True)
    os.chown(disk, owner, owner)
    disk.chmod(mode)
    for uid in (0, USER):
        with pytest.raises(DestinationError) as caught:
            look_for_cache(str(disk), uid, shared=True)
        assert str(caught.value) == (
            f"{disk} is not a folder of uid 0 alone; tell the administrator"
        )


@pytest.mark.root
def test_a_folder_that_was_roots_own_is_opened_to_all(disk: Path) -> None:
    private = open_cache(str(disk), 0)
    assert stat.S_IMODE(os.stat(private.folder).st_mode) == 0o700
    private.save(RECORD)
    other = replace(RECORD, destination="/nvme/for all")
    open_cache(str(disk), 0, shared=True).save(other)
    shared = look_for_cache(str(disk), USER, shared=True)
    folders = ("", "/records", "/partial")
    modes = [stat.S_IMODE(os.stat(f"{shared.folder}{folder}").st_mode) for folder in folders]
    assert modes == [0o755, 0o755, 0o700]
    # What was not meant for all stays root's.
    assert stat.S_IMODE(os.stat(shared.record_path(RECORD.destination)).st_mode) == 0o600


@pytest.mark.root
def test_what_root_staged_for_all_is_found_by_a_user(home: Path) -> None:
    os.chown(home, 0, 0)
    home.chmod(0o755)
    open_cache(str(home), 0, shared=True).save(RECORD)
    assert as_user(
        USER, lambda: open_cache(str(home), USER, shared=True).load("/nvme/img.sqsh")
    ) == (RECORD)


# The way to a folder


def test_each_folder_on_the_way_is_opened(disk: Path) -> None:
    (disk / "a/b").mkdir(parents=True)
    with opened_beneath(str(disk), f"{disk}/a//b") as folder:
        assert os.fstat(folder).st_ino == (disk / "a/b").stat().st_ino
    with opened_beneath(str(disk), str(disk)) as folder:
        assert os.fstat(folder).st_ino == disk.stat().st_ino


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda path: path.symlink_to(path.parent), "a symbolic link"),
        (lambda path: path.write_text("in the way"), "a plain file"),
        (os.mkfifo, "a named pipe"),
    ],
    ids=["a link", "a file", "a pipe"],
)
def test_what_is_no_folder_ends_the_way(
    disk: Path, make: Callable[[Path], object], kind: str
) -> None:
    (disk / "a").mkdir()
    make(disk / "a/b")
    with pytest.raises(DestinationError) as caught, opened_beneath(str(disk), f"{disk}/a/b/c"):
        pass
    assert str(caught.value) == f"{disk}/a/b is {kind}, not a folder"


def test_a_way_that_is_not_there_is_told_as_such(disk: Path) -> None:
    with pytest.raises(FileNotFoundError), opened_beneath(str(disk), f"{disk}/a/b"):
        pass


@pytest.mark.root
def test_no_way_leads_through_a_strangers_folder(disk: Path) -> None:
    (disk / "a/b").mkdir(parents=True)
    os.chown(disk / "a", USER, USER)
    with pytest.raises(DestinationError) as caught, opened_beneath(str(disk), f"{disk}/a/b"):
        pass
    assert str(caught.value) == (
        f"{disk}/a belongs to uid {USER}, who could replace what is staged there; "
        "choose another destination"
    )


def test_a_parent_that_became_a_link_leads_no_copy_elsewhere(
    cache: Cache, disk: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (disk / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DestinationError) as caught:
        publish(cache, NEW, disk / "sub/file")
    assert str(caught.value) == f"{disk}/sub is a symbolic link, not a folder"
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert partial_names(cache) == []


@pytest.mark.root
def test_no_use_is_written_by_way_of_a_link(run: Path) -> None:
    victim = run / "victim"
    victim.write_text("mine")
    (run / "5001/17.uses").symlink_to(victim)
    with pytest.raises(DestinationError) as caught:
        note_uses(5001, 17, ["/nvme/a"])
    assert str(caught.value) == f"{run}/5001/17.uses: Too many levels of symbolic links"
    assert victim.read_text() == "mine"


# Names


def test_a_disk_has_room_for_so_many_names_only(cache: Cache, disk: Path) -> None:
    check_names(cache, 1)
    room = os.statvfs(disk).f_favail
    with pytest.raises(SpaceError) as told:
        check_names(cache, 1 << 60)
    text = str(told.value)
    assert text.startswith(
        f"{disk}: {1 << 60} files and folders are needed, and there is room for "
    )
    assert text.endswith(" more, whatever their size; make room, or stage an archive as it is")
    assert room


def test_what_is_read_back_is_a_plain_file(disk: Path) -> None:
    os.mkfifo(disk / "pipe")
    (disk / "link").symlink_to("pipe")
    (disk / "file").write_bytes(NEW)
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match=r"is no plain file|symbolic links"):
            read_back(f"{disk}/{name}")
    assert read_back(f"{disk}/file") == xxhash.xxh3_128_hexdigest(NEW)
