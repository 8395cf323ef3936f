"""A cache keeps records that can be trusted, in folders that nobody else can write to."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import tempfile
import threading
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import DestinationError, SpaceError, StageError
from stager.fs.files import CopyFacts, remove_tree
from stager.fs.partial_file import Partial, make_partial_folder
from stager.node.folders import make_folder
from stager.store.cache import (
    Cache,
    RootFacts,
    check_inodes,
    look_for_cache,
    open_cache,
    plan_cache,
)
from stager.store.locks import Locks
from stager.store.record import VERSION, Record, TreeFacts
from tests.support.disks import NEW, OLD, fill_up, modes_beneath, partial_names, write
from tests.support.records import RECORD
from tests.support.users import (
    OWNER,
    USER,
    as_ordinary_user,
    as_user,
    forked,
    on_tmpfs,
    remount_read_only,
    within,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TREE = TreeFacts(1, 1, "0" * 32, "0" * 32)
COPY_FOR_ALL = replace(RECORD, copy_facts=replace(RECORD.copy_facts, owner=OWNER))


def test_a_record_that_is_being_written_over_is_read_when_that_is_done(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.save(RECORD)
    path = Path(cache.record_path(RECORD.destination))
    pinned = replace(RECORD, pinned=True, used_by_job=1234567)
    text = pinned.to_json().encode()
    with path.open("r+b", buffering=0) as file:
        file.write(text[:300])
        monkeypatch.setattr("time.sleep", lambda _: file.write(text[300:]))
        assert cache.load(RECORD.destination) == pinned


def test_a_record_that_stays_torn_is_none(cache: Cache) -> None:
    cache.save(RECORD)
    path = Path(cache.record_path(RECORD.destination))
    path.write_text(path.read_text().replace("false", "true "))
    assert cache.load(RECORD.destination) is None


def test_the_use_of_a_copy_is_noted_in_its_record_which_stays_or_is_made(cache: Cache) -> None:
    cache.note_use(RECORD)
    path = Path(cache.record_path(RECORD.destination))
    inode = path.stat().st_ino
    used = replace(RECORD, used_at=123456789, used_by_job=1)
    cache.note_use(used)
    assert (cache.load(RECORD.destination), path.stat().st_ino) == (used, inode)


@contextmanager
def _all_locked(folder: Path, uid: int) -> Iterator[int]:
    """Have a user lock all that he can open in a folder. Yield how many files and folders."""
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.setuid(uid)
        locked = 0
        for path in (folder, *folder.rglob("*")):
            with suppress(OSError):
                fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked += 1
        os.write(ready[1], bytes([locked]))
        os.close(done[1])
        os.read(done[0], 1)
        os._exit(0)
    try:
        yield os.read(ready[0], 1)[0]
    finally:
        for descriptor in (*ready, *done):
            os.close(descriptor)
        os.waitpid(child, 0)


@pytest.mark.root
def test_a_stranger_who_locks_all_that_he_can_open_delays_nobody(
    site_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stage() -> Cache:
        cache = open_cache(str(site_disk), OWNER, shared=True, disk=str(site_disk))
        cache.save(COPY_FOR_ALL)
        return cache

    def never(seconds: float) -> None:
        raise AssertionError(f"waits for {seconds} s")

    cache = as_user(OWNER, stage)
    used = replace(COPY_FOR_ALL, used_by_job=1)
    monkeypatch.setattr("time.sleep", never)
    with _all_locked(site_disk, USER) as locked:
        assert locked == 5  # the root, three folders and the record
        assert list(as_user(USER, lambda: [*cache.records()])) == [COPY_FOR_ALL]
        as_user(OWNER, lambda: cache.note_use(used))
        assert as_user(OWNER, stage) == cache
    assert cache.load(COPY_FOR_ALL.destination) == COPY_FOR_ALL


@pytest.mark.root
@pytest.mark.parametrize(
    "options", ["size=256k,nr_inodes=99", "size=1m,nr_inodes=16"], ids=["bytes", "inodes"]
)
def test_on_a_full_disk_a_record_is_written_over_the_old_one_if_it_fits(
    disk: Path, options: str
) -> None:
    short = replace(RECORD, pinned=True, used_by_job=1)
    long = replace(RECORD, source=f"/{'x' * 4000}")

    def act() -> tuple[list[Record | None], list[int], str, list[str]]:
        cache = open_cache(str(disk), 0, disk=str(disk))
        cache.save(RECORD)
        _fill(disk, names="16" in options)
        found, sizes = [], []
        for record in (short, RECORD, short):
            cache.save(record)
            found.append(cache.load(RECORD.destination))
            sizes.append(Path(cache.record_path(RECORD.destination)).stat().st_size)
        with pytest.raises(SpaceError) as caught:
            cache.save(long)
        found.append(cache.load(RECORD.destination))
        return found, sizes, str(caught.value), partial_names(cache)

    found, sizes, message, partial = on_tmpfs(disk, options, act)
    assert found == [short, RECORD, short, short]
    assert set(sizes) == {len(RECORD.to_json())}
    full = (
        "the disk is too full: 0 B of 256.0 KiB are free"
        if options == "size=256k,nr_inodes=99"
        else "the disk is full: it holds 16 files and folders, and can hold no more"
    )
    assert message == f"{disk}: {full}; free space there (stagectl evict) and try again"
    assert partial == []


@pytest.mark.root
def test_on_a_full_disk_a_long_record_is_not_written_over_in_part(disk: Path) -> None:
    long = replace(RECORD, source=f"/{'x' * (4116 - len(RECORD.to_json()))}")
    shorter = replace(long, source=long.source[:-20])

    def act() -> Record | None:
        cache = open_cache(str(disk), 0, disk=str(disk))
        cache.save(long)
        _fill(disk, names=False)
        with pytest.raises(SpaceError):
            cache.save(shorter)
        return cache.load(RECORD.destination)

    assert len(long.to_json()) > 4096 >= len(shorter.to_json())
    assert on_tmpfs(disk, "size=256k,nr_inodes=99", act) == long


def _fill(disk: Path, *, names: bool) -> None:
    """Take all bytes of a disk, or its 16 ``names``."""
    if not names:
        fill_up(disk)
    with suppress(OSError):
        for number in range(16 * names):
            (disk / str(number)).touch()


@pytest.mark.root
def test_on_a_full_disk_nothing_is_written_over_what_is_no_record_of_this_user(disk: Path) -> None:
    def act() -> tuple[list[type[Exception]], str, str]:
        cache = open_cache(str(disk), 0, disk=str(disk))
        record = Path(cache.record_path(RECORD.destination))
        raised: list[type[Exception]] = []
        for put in (_as_link, _as_second_name):
            cache.save(RECORD)
            kept = disk / put.__name__
            kept.write_text("x" * 4096)
            put(record, kept)
            fill_up(disk)
            with pytest.raises(SpaceError) as caught:
                cache.save(replace(RECORD, pinned=True))
            raised.append(type(caught.value))
            for path in (record, disk / "filler"):
                path.unlink()
        return raised, (disk / "_as_link").read_text(), (disk / "_as_second_name").read_text()

    expected = [SpaceError] * 2, "x" * 4096, "x" * 4096
    assert on_tmpfs(disk, "size=256k,nr_inodes=99", act) == expected


def _as_link(record: Path, kept: Path) -> None:
    record.unlink()
    record.symlink_to(kept)


def _as_second_name(record: Path, kept: Path) -> None:
    record.unlink()
    record.hardlink_to(kept)


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


def test_only_its_owner_may_read_a_record(cache: Cache) -> None:
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


def test_a_forgotten_record_is_gone_and_can_be_forgotten_again(cache: Cache) -> None:
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


#: What is done to a record's file so that it cannot be trusted.
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
def test_a_record_of_another_user_is_none_and_that_of_root_is_trusted(home: Path) -> None:
    def loaded_from(owner: int) -> Record | None:
        os.chown(path, owner, owner)
        return as_user(USER, lambda: cache.load(RECORD.destination))

    cache = as_user(USER, lambda: open_cache(str(home), USER, disk=str(home)))
    as_user(USER, lambda: cache.save(RECORD))
    path = cache.record_path(RECORD.destination)
    os.chmod(path, 0o644)
    assert [loaded_from(owner) for owner in (USER, 0, USER + 1)] == [RECORD, RECORD, None]


def test_records_that_cannot_be_trusted_are_skipped(cache: Cache) -> None:
    for name in "abc":
        cache.save(replace(RECORD, destination=f"/nvme/{name}"))
    os.chmod(cache.record_path("/nvme/a"), 0o666)
    Path(cache.record_path("/nvme/c")).write_text("{}")
    assert list(cache.records()) == [replace(RECORD, destination="/nvme/b")]


def test_a_record_under_the_name_of_another_is_skipped(cache: Cache) -> None:
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
def test_a_partial_file_whose_writer_has_ended_is_swept_whatever_its_mode(
    home: Path, mode: int
) -> None:
    def act() -> list[str]:
        cache = open_cache(str(home), os.getuid(), disk=str(home))
        dead = Path(cache.folder, "partial", "0123456789abcdef")
        dead.write_bytes(OLD)
        dead.chmod(mode)
        cache.sweep()
        return partial_names(cache)

    assert as_ordinary_user(act) == []


def test_the_sweep_leaves_the_partial_file_of_a_running_writer(
    cache: Cache, disk: Path, naming: str
) -> None:
    partial = write(cache, NEW)
    names = partial_names(cache)
    forked(cache.sweep)
    assert partial_names(cache) == names
    assert len(names) == (0 if naming == "unnamed" else 1)
    partial.publish(str(disk / "file"))
    partial.close()
    assert (disk / "file").read_bytes() == NEW


def test_names_can_be_made_while_a_long_sweep_removes_a_tree(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"{cache.folder}/partial"
    dead = Path(folder, "0123456789abcdef")
    dead.mkdir()
    removing, may_end = threading.Event(), threading.Event()

    def remove_slowly(path: str) -> None:
        if path == str(dead):
            removing.set()
            may_end.wait()
        remove_tree(path)

    def make_and_close() -> None:
        _, lock = make_partial_folder(folder)
        lock.close()

    monkeypatch.setattr("stager.store.cache.remove_tree", remove_slowly)
    first = _started(cache.sweep)
    try:
        assert removing.wait(timeout=10)
        made = _started(make_and_close)
        made.join(timeout=10)
        assert not made.is_alive()
        # Another sweep leaves the tree to the first, but takes what that has not seen.
        second = _started(cache.sweep)
        second.join(timeout=10)
        assert not second.is_alive()
        assert partial_names(cache) == [dead.name]
    finally:
        may_end.set()
        first.join()
    assert partial_names(cache) == []


def _started(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_the_sweep_leaves_what_a_symlink_points_to(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(OLD)
    os.symlink(tmp_path / "mine", f"{cache.folder}/partial/link")
    cache.sweep()
    assert (tmp_path / "mine").read_bytes() == OLD


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_an_announced_record_counts_once_its_folder_is_in_place(
    cache: Cache, *, published: bool, first: bool
) -> None:
    cache = replace(cache, disk="")
    path = Path(cache.root, "tree")
    path.mkdir()
    there = path.stat()
    facts = CopyFacts(0, there.st_mtime_ns, there.st_ino + (not published), there.st_uid)
    old = replace(RECORD, destination=str(path), used_by_job=1)
    if not first:
        cache.save(old)
    digest = cache.announce_table(str(path), b"a table")
    new = replace(old, copy_facts=facts, used_by_job=2, tree=replace(TREE, table_digest=digest))
    cache.announce(new)
    expected = new if published else None if first else old
    for _ in range(2):
        assert cache.load(str(path)) == expected
        assert [*cache.records()] == ([expected] if expected else [])
        if published:
            assert cache.load_table(new) == b"a table"
        cache.settle(str(path))
        assert os.listdir(f"{cache.folder}/announced") == []
    cache.forget(str(path))
    assert [*cache.records()] == []


def test_an_announced_record_of_what_is_reached_by_a_link_does_not_count(
    cache: Cache, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere/tree").mkdir(parents=True)
    Path(cache.root, "link").symlink_to(tmp_path / "elsewhere")
    path = f"{cache.root}/link/tree"
    there = os.stat(path)
    facts = CopyFacts(0, 0, there.st_ino, there.st_uid)
    cache.announce_table(path, b"")
    cache.announce(replace(RECORD, destination=path, copy_facts=facts, tree=TREE))
    assert cache.load(path) is None


def test_a_full_disk_is_opened_that_earlier_versions_wrote_to(tmp_path: Path) -> None:
    def act() -> None:
        cache = open_cache(str(tmp_path), os.getuid(), disk=str(tmp_path))
        cache.save(RECORD)
        fill_up(tmp_path)
        assert (
            open_cache(str(tmp_path), os.getuid(), disk=str(tmp_path)).load(RECORD.destination)
            == RECORD
        )

    on_tmpfs(tmp_path, "size=1m,nr_inodes=200", act)


def test_the_next_who_locks_a_destination_removes_what_was_announced_in_vain(cache: Cache) -> None:
    cache.announce_table(RECORD.destination, b"")
    with closing(Locks(cache)) as locks:
        for step in (locks.take, locks.release, locks.take):
            cache.announce(RECORD)
            step(RECORD.destination)
            assert os.listdir(f"{cache.folder}/announced") == []
        cache.announce(RECORD)
    assert os.listdir(f"{cache.folder}/announced") == []


def test_the_copy_of_a_simulated_node_is_looked_for_on_its_disk(tmp_path: Path) -> None:
    (tmp_path / "node1/nvme").mkdir(parents=True)
    cache = open_cache(f"{tmp_path}/node1/nvme", os.getuid(), disk=f"{tmp_path}/node1")
    (tmp_path / "node1/nvme/tree").mkdir()
    there = (tmp_path / "node1/nvme/tree").stat()
    facts = CopyFacts(0, 0, there.st_ino, there.st_uid)
    record = replace(RECORD, destination="/nvme/tree", copy_facts=facts, tree=TREE)
    cache.announce_table("/nvme/tree", b"")
    cache.announce(record)
    assert cache.load("/nvme/tree") == record


def test_a_user_who_owns_the_root_gets_its_folders_made(disk: Path) -> None:
    cache = open_cache(str(disk), os.getuid(), disk=str(disk))
    assert cache.folder == f"{disk}/.slurm-stage/{os.getuid()}"
    inner = f".slurm-stage/{os.getuid()}"
    assert {name: mode for name, mode in modes_beneath(disk).items() if name != ".slurm-stage"} == {
        inner: "drwx------",
        f"{inner}/records": "drwx------",
        f"{inner}/partial": "drwx------",
    }


def test_a_cache_that_is_opened_again_is_the_same(cache: Cache, disk: Path) -> None:
    cache.save(RECORD)
    before = modes_beneath(disk)
    assert open_cache(str(disk), os.getuid(), disk=str(disk)) == cache
    assert modes_beneath(disk) == before


def test_opening_a_cache_removes_the_partial_files_of_ended_writers(
    cache: Cache, disk: Path
) -> None:
    Path(cache.folder, "partial", "0123456789abcdef").write_bytes(OLD)
    open_cache(str(disk), os.getuid(), disk=str(disk))
    assert partial_names(cache) == []


@pytest.mark.root
def test_a_folder_that_root_made_is_opened_by_its_user_and_by_nobody_else(home: Path) -> None:
    home.chmod(0o755)
    os.chown(home, 0, 0)
    (home / ".slurm-stage").mkdir(mode=0o755)
    (home / f".slurm-stage/{USER}").mkdir(mode=0o700)
    os.chown(home / f".slurm-stage/{USER}", USER, USER)
    cache = as_user(USER, lambda: open_cache(str(home), USER, disk=str(home)))
    as_user(USER, lambda: cache.save(RECORD))
    with pytest.raises(DestinationError) as caught:
        as_user(USER + 1, lambda: open_cache(str(home), USER + 1, disk=str(home)))
    assert str(caught.value) == (
        f"{home}/.slurm-stage/{USER + 1} is missing: this node knows no user with uid {USER + 1}, "
        "so the site's prolog or plugin makes no folders there; tell the administrator (getent "
        f"passwd {USER + 1})"
    )


@pytest.mark.root
def test_a_cache_that_root_opens_lets_users_pass_to_theirs(disk: Path) -> None:
    # `stagectl status` of an administrator may come to a node before its first job.
    open_cache(str(disk), 0, disk=str(disk))
    assert modes_beneath(disk)[".slurm-stage"] == "drwxr-xr-x"


def _refusal(root: str, uid: int) -> str:
    """The message with which an ordinary user is refused the cache of ``uid``."""

    def act() -> str:
        with pytest.raises(DestinationError) as caught:
            open_cache(root, uid)
        return str(caught.value)

    return as_ordinary_user(act)


def _ordinary_uid() -> int:
    return os.getuid() or USER


def test_a_cache_root_that_does_not_exist_is_named(home: Path) -> None:
    message = (
        f"{home}/nvme, where this site stages, cannot be used on this node: No such file or "
        "directory; tell the administrator"
    )
    assert _refusal(f"{home}/nvme", _ordinary_uid()) == message


#: A user that every system knows.
KNOWN = 1
PREPARED = "the site's prolog or plugin makes it at the start of a job; tell the administrator"


def test_the_message_for_a_root_that_was_not_prepared_names_who_can_help(home: Path) -> None:
    # A root of somebody else, as any root is that the administrator made.
    assert _refusal(str(home), KNOWN) == f"{home}/.slurm-stage is missing: {PREPARED}"


def test_a_root_that_is_a_link_is_told_as_the_cause(home: Path) -> None:
    (home / "disk").mkdir()
    (home / "nvme").symlink_to("disk")
    assert _refusal(f"{home}/nvme", KNOWN) == (
        f"{home}/nvme/.slurm-stage is missing: {home}/nvme is a symbolic link that others than "
        "root can replace, and the site's prolog or plugin follows none of these; tell the "
        f"administrator to name {home}/disk in roots of stage.toml instead"
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


def test_a_folder_of_caches_that_cannot_be_entered_is_a_destination_error(home: Path) -> None:
    def act() -> None:
        (home / ".slurm-stage").mkdir()
        (home / ".slurm-stage").chmod(0)

    as_ordinary_user(act)
    uid = _ordinary_uid()
    assert _refusal(str(home), uid) == f"{home}/.slurm-stage/{uid}: Permission denied"


# Disks that are full or read-only


def refusal(act: Callable[[], object], error: type[StageError]) -> str:
    """The message of the error that ``act`` raises."""
    with pytest.raises(error) as caught:
        act()
    return str(caught.value)


READ_ONLY = "the disk is read-only; use other nodes (--exclude) and tell the administrator"


@pytest.mark.root
@pytest.mark.parametrize("opener", [open_cache, look_for_cache, plan_cache])
@pytest.mark.parametrize("uid", [0, USER])
def test_a_read_only_disk_that_could_not_be_prepared_is_named(
    home: Path, opener: Callable[[str, int], Cache], uid: int
) -> None:
    def act() -> str:
        remount_read_only(home)
        return as_user(uid, lambda: refusal(lambda: opener(str(home), uid), DestinationError))

    makes_it = opener is open_cache and uid == 0
    path = f"{home}/.slurm-stage" if makes_it else f"{home}"
    assert on_tmpfs(home, "mode=755", act) == f"{path}: {READ_ONLY}"


@pytest.mark.root
def test_a_read_only_disk_on_which_the_users_folder_is_missing_is_named(disk: Path) -> None:
    def act() -> str:
        open_cache(str(disk), 0, disk=str(disk))
        remount_read_only(disk)
        return refusal(lambda: look_for_cache(str(disk), USER), DestinationError)

    assert on_tmpfs(disk, "mode=755", act) == f"{disk}: {READ_ONLY}"


@pytest.mark.root
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_a_disk_that_became_read_only_is_named_by_all_that_is_written(
    disk: Path, *, shared: bool
) -> None:
    roots = replace(RECORD, copy_facts=replace(RECORD.copy_facts, owner=0))

    def act() -> tuple[Record | None, list[str]]:
        cache = open_cache(str(disk), 0, shared=shared, disk=str(disk))
        cache.save(roots)
        remount_read_only(disk)
        cache = open_cache(str(disk), 0, shared=shared, disk=str(disk))
        writers: list[Callable[[], object]] = [
            lambda: cache.save(RECORD),
            lambda: cache.announce_table(RECORD.destination, b""),
            lambda: cache.forget(RECORD.destination),
            lambda: Partial(cache, direct=True),
            lambda: Locks(cache),
        ]
        messages = [refusal(writer, DestinationError) for writer in writers]
        return cache.load(RECORD.destination), messages

    partial, announced, secret, record = (
        f"{disk}/.slurm-stage/0/{name}"
        for name in ("partial", "announced", "secret", f"records/{Path(_record_path(disk)).name}")
    )
    paths = [partial, announced, record, partial, secret]
    assert on_tmpfs(disk, "mode=755", act) == (roots, [f"{path}: {READ_ONLY}" for path in paths])


def _record_path(disk: Path) -> str:
    return Cache(f"{disk}/.slurm-stage/0").record_path(RECORD.destination)


@pytest.mark.root
def test_a_full_disk_that_could_not_be_prepared_is_named(disk: Path) -> None:
    def act() -> str:
        (disk / ".slurm-stage").mkdir()
        fill_up(disk)
        return refusal(lambda: look_for_cache(str(disk), USER), SpaceError)

    full = "the disk is too full: 0 B of 64.0 KiB are free"
    message = f"{disk}: {full}; free space there (stagectl evict) and try again"
    assert on_tmpfs(disk, "size=64k,mode=755", act) == message


@pytest.mark.root
def test_a_disk_that_does_not_count_blocks_or_inodes_is_not_full(disk: Path) -> None:
    def act() -> str:
        return refusal(lambda: look_for_cache(str(disk), KNOWN), DestinationError)

    message = f"{disk}/.slurm-stage is missing: {PREPARED}"
    assert on_tmpfs(disk, "size=0,nr_inodes=0,mode=755", act) == message


# Folders that others could change


def _as_file(path: Path) -> None:
    path.rmdir()
    path.write_bytes(b"")


#: What an ordinary user may find in place of a folder that only root and they can write to, and
#: the problem that the message names.
INSECURE: dict[str, tuple[Callable[[Path], None], str]] = {
    "writable by its group": (
        lambda path: path.chmod(0o720),
        "can be written to by users other than {owners}",
    ),
    "writable by everybody": (
        lambda path: path.chmod(0o702),
        "can be written to by users other than {owners}",
    ),
    "a file": (_as_file, "is a plain file, not a folder"),
    "a symlink to a folder": (_link_elsewhere, "is a symbolic link, not a folder"),
}


@pytest.mark.parametrize(("spoil", "problem"), INSECURE.values(), ids=INSECURE)
@pytest.mark.parametrize("inner", [False, True], ids=["parent", "own folder"])
def test_a_folder_that_others_could_replace_is_refused(
    home: Path, spoil: Callable[[Path], None], problem: str, *, inner: bool
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
        f"{path} {problem.format(owners=owners)}; tell the administrator"
    )


@pytest.mark.root
@pytest.mark.parametrize("inner", [False, True], ids=["parent", "own folder"])
def test_a_folder_of_another_user_is_refused(home: Path, *, inner: bool) -> None:
    parent = home / ".slurm-stage"
    path = parent / str(USER) if inner else parent
    path.mkdir(parents=True)
    parent.chmod(0o755)
    os.chown(path, USER + 1, USER + 1)
    owners = f"uid {USER}" if inner else f"uid 0 or uid {USER}"
    assert _refusal(str(home), USER) == (
        f"{path} belongs to uid {USER + 1}, not to {owners}; tell the administrator"
    )


@pytest.fixture
def site_disk(home: Path) -> Path:
    """A disk that belongs to the account that stages for all users."""
    os.chown(home, OWNER, OWNER)
    home.chmod(0o755)
    return home


@pytest.mark.root
def test_all_users_can_read_a_shared_cache(site_disk: Path) -> None:
    def stage() -> Cache:
        cache = open_cache(str(site_disk), OWNER, shared=True, disk=str(site_disk))
        cache.save(COPY_FOR_ALL)
        return cache

    cache = as_user(OWNER, stage)
    assert cache.root == str(site_disk)
    assert stat.filemode(os.stat(cache.folder).st_mode) == "drwxr-xr-x"
    path = cache.record_path(COPY_FOR_ALL.destination)
    assert stat.filemode(os.stat(path).st_mode) == "-rw-r--r--"
    for open_or_plan in (open_cache, plan_cache):
        seen = as_user(
            USER, partial(open_or_plan, str(site_disk), OWNER, shared=True, disk=str(site_disk))
        )
        assert seen == cache
        assert as_user(USER, partial(seen.load, COPY_FOR_ALL.destination)) == COPY_FOR_ALL
    site_disk.chmod(0o777)
    with pytest.raises(DestinationError) as caught:
        as_user(USER, lambda: open_cache(str(site_disk), OWNER, shared=True, disk=str(site_disk)))
    message = f"{site_disk} can be written to by users other than uid 0 or uid {OWNER}"
    assert str(caught.value) == f"{message}; tell the administrator"


@pytest.mark.root
@pytest.mark.parametrize("made", [False, True], ids=["no folder", "a folder of root's"])
def test_a_shared_cache_is_empty_where_its_account_has_staged_nothing(
    site_disk: Path, *, made: bool
) -> None:
    if made:
        (site_disk / ".slurm-stage").mkdir(mode=0o755)
    before = sorted(site_disk.rglob("*"))
    for open_or_plan in (open_cache, plan_cache):
        cache = as_user(
            USER, partial(open_or_plan, str(site_disk), OWNER, shared=True, disk=str(site_disk))
        )
        assert cache.load("/nvme/img") is None
    assert sorted(site_disk.rglob("*")) == before


@pytest.mark.root
@pytest.mark.parametrize(
    ("owner", "mode", "problem"),
    [
        (USER, 0o755, f"belongs to uid {USER}, not to uid 0 or uid {OWNER}"),
        (OWNER, 0o775, f"can be written to by users other than uid 0 or uid {OWNER}"),
        (OWNER, 0o757, f"can be written to by users other than uid 0 or uid {OWNER}"),
        (0, 0o757, f"can be written to by users other than uid 0 or uid {OWNER}"),
    ],
)
def test_a_shared_root_that_others_could_write_to_is_refused(
    site_disk: Path, owner: int, mode: int, problem: str
) -> None:
    as_user(OWNER, lambda: open_cache(str(site_disk), OWNER, shared=True, disk=str(site_disk)))
    os.chown(site_disk, owner, owner)
    site_disk.chmod(mode)
    for uid in (OWNER, USER):
        with pytest.raises(DestinationError) as caught:
            as_user(uid, lambda: look_for_cache(str(site_disk), OWNER, shared=True))
        assert str(caught.value) == f"{site_disk} {problem}; tell the administrator"


@pytest.mark.root
@pytest.mark.parametrize("thief", [0, USER], ids=["root", "a user"])
def test_only_records_of_its_account_are_trusted_in_a_shared_cache(
    site_disk: Path, thief: int
) -> None:
    """A copy that root staged with an older version is none of the account's either."""

    def stage(record: Record) -> Cache:
        cache = open_cache(str(site_disk), OWNER, shared=True, disk=str(site_disk))
        cache.save(record)
        return cache

    of_other = replace(COPY_FOR_ALL, copy_facts=replace(COPY_FOR_ALL.copy_facts, owner=thief))
    cache = as_user(OWNER, lambda: stage(of_other))
    assert as_user(USER, lambda: cache.load(COPY_FOR_ALL.destination)) is None
    as_user(OWNER, lambda: stage(COPY_FOR_ALL))
    assert as_user(USER, lambda: cache.load(COPY_FOR_ALL.destination)) == COPY_FOR_ALL
    os.chown(cache.record_path(COPY_FOR_ALL.destination), thief, thief)
    assert as_user(USER, lambda: cache.load(COPY_FOR_ALL.destination)) is None


@pytest.mark.root
def test_the_folder_that_root_made_for_the_account_is_opened_to_all(site_disk: Path) -> None:
    os.chown(site_disk, 0, 0)
    make_folder(str(site_disk), ".slurm-stage", OWNER, OWNER)
    cache = as_user(
        OWNER, lambda: open_cache(str(site_disk), OWNER, shared=True, disk=str(site_disk))
    )
    folders = ("", "/records", "/partial")
    modes = [stat.S_IMODE(os.stat(f"{cache.folder}{folder}").st_mode) for folder in folders]
    assert modes == [0o755, 0o755, 0o700]


# Inodes


def test_a_disk_without_inodes_for_all_files_is_a_space_error(cache: Cache, disk: Path) -> None:
    check_inodes(cache, 1)
    room = os.statvfs(disk).f_favail
    with pytest.raises(SpaceError) as caught:
        check_inodes(cache, 1 << 60)
    text = str(caught.value)
    needed = f"{disk}: {1 << 60} files and folders are needed, but the disk can hold only "
    assert text.startswith(needed)
    remedy = "delete files, or stage an archive without extract"
    assert text.endswith(f" more, whatever their size; {remedy}")
    assert room


# Nodes on which root's part does not run


def _by_user(opener: Callable[..., Cache], root: Path, uid: int = KNOWN) -> Cache:
    return as_user(uid, lambda: opener(str(root), uid, of_root=RootFacts(by_user=True)))


@pytest.fixture
def for_all(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of root's in which all may write, on a node where root marks no jobs."""
    monkeypatch.setattr("stager.base.paths.JOBS_FOLDER", "/nowhere")
    os.chown(home, 0, 0)
    home.chmod(0o1777)
    return home


@pytest.mark.root
@pytest.mark.parametrize("name", ["", "nvme"], ids=["a root", "no root"])
def test_a_user_makes_what_is_missing_where_roots_part_does_not_run(
    for_all: Path, name: str
) -> None:
    root = for_all / name
    plan = _by_user(plan_cache, root)
    assert not os.path.lexists(plan.folder)
    assert _by_user(open_cache, root) == plan
    with pytest.raises(DestinationError) as caught:
        _by_user(open_cache, root, 2)
    assert str(caught.value) == (
        f"{root}/.slurm-stage belongs to uid {KNOWN}, not to uid 0 or uid 2; tell the administrator"
    )


@pytest.mark.root
@pytest.mark.parametrize("opener", [open_cache, plan_cache])
@pytest.mark.parametrize("marks", [True, False], ids=["root's part runs", "nothing to write in"])
def test_a_user_who_may_make_nothing_is_told_what_is_missing(
    for_all: Path, monkeypatch: pytest.MonkeyPatch, opener: Callable[..., Cache], *, marks: bool
) -> None:
    if marks:
        monkeypatch.setattr("stager.base.paths.JOBS_FOLDER", "/")
    else:
        for_all.chmod(0o755)
    with pytest.raises(DestinationError) as caught:
        _by_user(opener, for_all)
    assert str(caught.value) == f"{for_all}/.slurm-stage is missing: {PREPARED}"
