"""Trees on a real disk: built out of sight, published in one step, removed if not published."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import signal
import socket
import stat
import subprocess
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from stager.base import linux
from stager.base.errors import DestinationError, SpaceError
from stager.disk.cache import Cache, open_cache
from stager.disk.files import remove_tree
from stager.tree import partial as module
from stager.tree.late import Before
from stager.tree.listing import Kind, Listing, Row
from stager.tree.partial import PartialTree
from stager.tree.table import as_copy
from stager.tree.walk import walk
from tests.support.users import forked

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WHEN = 1_700_000_000_123_456_789


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    disk = tmp_path / "nvme"
    disk.mkdir()
    return disk


@pytest.fixture
def cache(disk: Path) -> Cache:
    return open_cache(str(disk), os.getuid())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with entries of every kind, and modes that forbid much."""
    source = tmp_path / "source"
    (source / "closed/empty").mkdir(parents=True)
    (source / "closed/file").write_bytes(b"closed")
    (source / "closed/second").hardlink_to(source / "closed/file")
    (source / "program").write_bytes(b"#!/bin/sh\n")
    (source / "nothing").touch()
    (source / "link").symlink_to("closed/file")
    with (source / "sparse").open("wb") as file:
        file.truncate(3 << 20)
        file.seek(1 << 20)
        file.write(b"data")
    (source / "program").chmod(0o755)
    (source / "nothing").chmod(0o640)
    (source / "closed").chmod(0o555)
    for path in (source / "link", source / "program", source / "closed"):
        os.utime(path, ns=(WHEN, WHEN), follow_symlinks=False)
    source.chmod(0o555)
    return source


def build(cache: Cache, source: Path, listing: Listing) -> PartialTree:
    """Return a sealed tree with the data of ``source``."""
    tree = PartialTree(cache, listing)
    tree.lay_out()
    for row in listing.rows(Kind.FILE):
        data = (source / os.fsdecode(listing.paths[row])).read_bytes()
        if not listing.data(row):
            tree.create(row)
            continue
        for offset, length in listing.extents.get(row, [(0, len(data))]):
            part = memoryview(data)[offset : offset + length]
            tree.write(row, part, offset)
    tree.seal()
    return tree


def seen(folder: Path) -> list[tuple[object, ...]]:
    """Return all that a user sees of a tree, without inodes."""
    listing = walk(str(folder))
    return [
        (
            path, listing.kinds[row], listing.modes[row], listing.sizes[row], listing.mtimes[row],
            listing.groups[row], listing.targets.get(row), listing.extents.get(row),
            (folder / os.fsdecode(path)).read_bytes() if listing.kinds[row] == Kind.FILE else b"",
        )
        for row, path in enumerate(listing.paths)
    ]  # fmt: skip


def partial_names(cache: Cache) -> list[str]:
    return os.listdir(cache.partial)


def test_a_published_tree_equals_its_source(cache: Cache, source: Path, disk: Path) -> None:
    tree = build(cache, source, walk(str(source)))
    assert not (disk / "tree").exists()
    tree.publish(f"{disk}/tree")
    facts = tree.facts()
    tree.close()
    assert seen(disk / "tree") == seen(source)
    assert as_copy(tree.copy) == as_copy(walk(f"{disk}/tree", holes=False))
    inodes = [(disk / "tree/closed" / name).stat().st_ino for name in ("file", "second")]
    assert inodes[0] == inodes[1]
    assert (disk / "tree/sparse").stat().st_blocks * 512 < 1 << 20
    there = (disk / "tree").stat()
    assert (facts.inode, facts.owner, facts.size) == (
        there.st_ino, os.getuid(), walk(str(source)).size,
    )  # fmt: skip
    assert partial_names(cache) == []


def test_what_a_tree_takes_on_the_disk_is_counted_without_holes(
    cache: Cache, source: Path, disk: Path
) -> None:
    staged = build(cache, source, walk(str(source)))
    unpacked = PartialTree(cache, Listing.of([Row(b"", Kind.FOLDER)]))
    copying = ["cp", "--archive", "--sparse=always", f"{source}/.", unpacked.path]
    subprocess.run(copying, check=True)
    unpacked.adopt()
    for tree, name in ((staged, "staged"), (unpacked, "unpacked")):
        tree.publish(f"{disk}/{name}")
        taken = sum(path.lstat().st_blocks for path in (disk / name).rglob("*")) * 512
        assert (disk / name / "sparse").stat().st_size == 3 << 20
        # An empty file or a link counts as a block.
        assert taken <= tree.allocated < taken + (64 << 10), name
        assert as_copy(tree.copy) == as_copy(walk(f"{disk}/{name}", holes=False))
        tree.close()


def make_closed(path: Path) -> None:
    (path / "closed").mkdir(parents=True)
    (path / "closed/file").touch()
    (path / "closed").chmod(0o500)
    path.chmod(0o500)


BEFORE: dict[str, Callable[[Path], object]] = {
    "a tree": make_closed,
    "an empty folder": lambda path: path.mkdir(),
    "a file": lambda path: path.write_bytes(b"old"),
    "a link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("make", BEFORE.values(), ids=BEFORE)
@pytest.mark.parametrize("able", [True, False], ids=["in one step", "in two"])
def test_whatever_was_there_is_replaced_and_removed(
    cache: Cache, source: Path, disk: Path, make: Callable[[Path], object], *, able: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    make(disk / "tree")
    if not able:
        monkeypatch.setattr(linux, "rename", _refuse)
    tree = build(cache, source, walk(str(source)))
    tree.publish(f"{disk}/tree")
    tree.close()
    assert seen(disk / "tree") == seen(source)
    assert partial_names(cache) == []
    assert sorted(os.listdir(disk)) == [".slurm-stage", "tree"]


def _refuse(*_: object, **__: object) -> None:
    """Fail as renameat2 does on a filesystem that does not support its flags."""
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_at_every_moment_there_is_the_old_tree_or_the_new_one(
    cache: Cache, tmp_path: Path, disk: Path
) -> None:
    sides = [tmp_path / "even", tmp_path / "odd"]
    for number, side in enumerate(sides):
        side.mkdir()
        for name in ("a", "b"):
            (side / name).write_bytes(b"%d" % number)
    torn: list[set[bytes]] = []
    looks: list[None] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            folder = os.open(disk / "tree", os.O_RDONLY | os.O_DIRECTORY)
            found: set[bytes] = set()
            with suppress(FileNotFoundError):  # of a tree that is being removed
                for name in ("a", "b"):
                    descriptor = os.open(name, os.O_RDONLY, dir_fd=folder)
                    found.add(os.read(descriptor, 1))
                    os.close(descriptor)
                looks.append(None)
            if len(found) > 1:
                torn.append(found)
            os.close(folder)

    build(cache, sides[0], walk(str(sides[0]))).publish(f"{disk}/tree")
    watcher = threading.Thread(target=look)
    watcher.start()
    for number in range(1, 60):
        side = sides[number % 2]
        tree = build(cache, side, walk(str(side)))
        tree.publish(f"{disk}/tree")
        tree.close()
        assert {(disk / "tree" / name).read_bytes() for name in "ab"} == {b"%d" % (number % 2)}
    over.set()
    watcher.join()
    assert looks
    assert torn == []


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_file_or_link_that_was_put_there_meanwhile_is_kept_beside(
    cache: Cache, source: Path, disk: Path, tmp_path: Path, kind: str
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "precious").write_text("mine")
    since = time.time_ns()
    tree = build(cache, source, walk(str(source)))
    time.sleep(0.02)  # the kernel's clock for files has ticks of up to 10 ms
    if kind == "link":
        (disk / "tree").symlink_to(results)
    else:
        (disk / "tree").write_text("mine")
    beside = disk / "tree.before-staging"
    assert tree.publish(f"{disk}/tree", Before(since)) == [str(beside)]
    tree.close()
    assert (results / "precious").read_text() == "mine"
    assert beside.is_symlink() if kind == "link" else beside.read_text() == "mine"
    assert partial_names(cache) == []


def test_a_folder_that_a_program_fills_faster_than_it_is_emptied_is_named(
    cache: Cache, source: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_list(folder: int) -> list[str]:
        names = listdir(folder)
        with open(f"more{next(numbers)}", "x", opener=partial(os.open, dir_fd=here)):
            return names

    first = build(cache, source, walk(str(source)))
    first.publish(f"{disk}/tree")
    first.close()
    tree = build(cache, source, walk(str(source)))
    here, listdir, numbers = os.open(disk / "tree", os.O_RDONLY), os.listdir, itertools.count()
    before = Before(time.time_ns())
    with monkeypatch.context() as patch:
        patch.setattr("stager.tree.late.os.listdir", write_and_list)
        named = tree.publish(f"{disk}/tree", before)
    os.close(here)
    tree.close()
    assert named[-1] == f"{disk}/tree.before-staging"
    left = {path.name for path in (disk / "tree.before-staging").iterdir()}
    assert left
    assert left.isdisjoint(named)


@pytest.mark.parametrize("step", ["late", "_Moves.move"])
def test_what_a_killed_process_has_not_moved_over_yet_is_beside_the_new_version(
    cache: Cache, source: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(f"stager.tree.late.{step}", lambda *_: os.kill(os.getpid(), signal.SIGKILL))

    def replace_it() -> None:
        tree.publish(f"{disk}/tree", Before(since))

    first = build(cache, source, walk(str(source)))
    first.publish(f"{disk}/tree")
    first.close()
    since = time.time_ns()
    tree = build(cache, source, walk(str(source)))
    time.sleep(0.02)  # the kernel's clock for files has ticks of up to 10 ms
    (disk / "tree/result").write_text("mine")
    with pytest.raises(AssertionError, match="the child ended with -9"):
        forked(replace_it)
    tree.close()
    cache.sweep()
    assert partial_names(cache) == []
    assert sorted(os.listdir(disk)) == [".slurm-stage", "tree", "tree.before-staging"]
    assert (disk / "tree.before-staging/result").read_text() == "mine"
    copies = [walk(f"{disk}/{name}") for name in ("tree", "tree.before-staging")]
    assert {*copies[1].paths} - {*copies[0].paths} == {b"result"}


def test_what_was_written_into_the_old_version_before_a_kill_is_beside_the_new_one(
    cache: Cache, source: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_die(_: object) -> None:
        with open("result", "x", opener=partial(os.open, dir_fd=here)) as file:
            file.write("mine")
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr("stager.tree.late._Removal.finish", write_and_die)
    first = build(cache, source, walk(str(source)))
    first.publish(f"{disk}/tree")
    first.close()
    tree = build(cache, source, walk(str(source)))
    here = os.open(disk / "tree", os.O_RDONLY)  # as a program whose working folder it is
    with pytest.raises(AssertionError, match="the child ended with -9"):
        forked(lambda: tree.publish(f"{disk}/tree", Before(time.time_ns())))
    os.close(here)
    tree.close()
    cache.sweep()
    assert partial_names(cache) == []
    assert (disk / "tree.before-staging/result").read_text() == "mine"


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_process_that_is_killed_as_it_publishes_leaves_the_old_version(
    cache: Cache, source: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, *, exchanges: bool
) -> None:
    def rename(old: str, new: str, flag: linux.Rename, *, new_folder: int) -> None:
        if flag == linux.Rename.EXCHANGE and exchanges:
            os.kill(os.getpid(), signal.SIGKILL)
        if flag == linux.Rename.EXCHANGE:
            monkeypatch.setattr(os, "rename", rename_once)
            raise OSError(errno.EINVAL, "cannot exchange")
        real(old, new, flag, new_folder=new_folder)

    def rename_once(old: str, new: str, *, src_dir_fd: int) -> None:
        move(old, new, src_dir_fd=src_dir_fd)
        os.kill(os.getpid(), signal.SIGKILL)  # there is neither version now

    real, move = linux.rename, os.rename
    first = build(cache, source, walk(str(source)))
    first.publish(f"{disk}/tree")
    first.close()
    old = os.stat(disk / "tree").st_ino
    tree = build(cache, source, walk(str(source)))
    monkeypatch.setattr(linux, "rename", rename)
    with pytest.raises(AssertionError, match="the child ended with -9"):
        forked(lambda: tree.publish(f"{disk}/tree", Before(time.time_ns())))
    monkeypatch.undo()
    tree.close()
    cache.sweep()
    assert partial_names(cache) == []
    assert sorted(os.listdir(disk)) == [".slurm-stage", "tree"]
    assert os.stat(disk / "tree").st_ino == old


def test_files_that_cannot_be_moved_over_are_beside_the_new_version(
    cache: Cache, source: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    first = build(cache, source, walk(str(source)))
    first.publish(f"{disk}/tree")
    first.close()
    (disk / "tree/result").write_text("mine")
    monkeypatch.setattr(module, "remove_old", fail)
    tree = build(cache, source, walk(str(source)))
    with pytest.raises(DestinationError) as caught:
        tree.publish(f"{disk}/tree", Before(time.time_ns()))
    tree.close()
    assert caught.value.message == (
        f"{disk}/tree was staged, but not all of the old version could be removed, or moved over "
        f"(No space left on device); the rest is in {disk}/tree.before-staging"
    )
    assert (disk / "tree.before-staging/result").read_text() == "mine"
    assert partial_names(cache) == []


def _publish(cache: Cache, source: Path, path: Path, since: int | None = None) -> None:
    """Publish at ``path``; keep what was written there ``since`` then."""
    tree = build(cache, source, walk(str(source)))
    try:
        tree.publish(str(path), Before(since) if since else None)
    finally:
        tree.close()


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("gone", ["moved", "removed"])
def test_if_the_folder_above_is_gone_the_old_version_gets_to_the_next_one(
    cache: Cache,
    source: Path,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    gone: str,
    *,
    killed: bool,
) -> None:
    def end(*_: object) -> None:
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        lose()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def lose() -> None:
        if gone == "moved":
            (disk / "deep/er").rename(disk / "deep/moved")
        else:
            remove_tree(str(disk / "deep"))

    path = disk / "deep/er/tree"
    path.parent.mkdir(parents=True)
    _publish(cache, source, path)
    (path / "result").write_text("mine")
    monkeypatch.setattr(module, "remove_old", end)
    message = "ended with -9" if killed else "the rest is in "
    with pytest.raises((AssertionError, DestinationError), match=message):
        forked(lambda: _publish(cache, source, path, time.time_ns()))
    if killed:
        lose()
    cache.sweep()
    above = disk / "deep" if gone == "moved" else disk
    assert (above / "tree.before-staging/result").read_text() == "mine"
    assert partial_names(cache) == []


def test_after_a_kill_the_old_version_is_beside_also_if_the_new_one_is_removed(
    cache: Cache, source: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _publish(cache, source, disk / "tree")
    monkeypatch.setattr(module, "remove_old", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(AssertionError, match="ended with -9"):
        forked(lambda: _publish(cache, source, disk / "tree", time.time_ns()))
    remove_tree(str(disk / "tree"))
    cache.sweep()
    assert sorted(os.listdir(disk)) == [".slurm-stage", "tree.before-staging"]


def test_an_error_just_after_the_exchange_leaves_the_old_version_beside(
    cache: Cache, source: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(old: str, new: str, **folders: int) -> None:
        if new.endswith("/old"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(old, new, **folders)

    rename = os.rename
    _publish(cache, source, disk / "tree")
    (disk / "tree/result").write_text("mine")
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(DestinationError):
        _publish(cache, source, disk / "tree", time.time_ns())
    assert (disk / "tree.before-staging/result").read_text() == "mine"
    assert partial_names(cache) == []


@pytest.mark.parametrize("change", ["written", "replaced", "made"])
def test_a_file_that_is_put_there_just_before_the_exchange_is_kept_beside(
    cache: Cache, source: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    def write_and_exchange(tree: PartialTree, name: str, *rest: Any) -> None:
        if change == "replaced":
            (disk / "tree").unlink()
        (disk / "tree").write_text("mine")
        exchange(tree, name, *rest)

    def lstat(name: str, folder: int) -> os.stat_result | None:
        there = look(name, folder)
        if change == "made":
            (disk / "tree").unlink()
        return None if change == "made" else there

    exchange, look = PartialTree._exchange, module._lstat_or_none
    (disk / "tree").write_text("old")
    time.sleep(0.02)  # the kernel's clock for files has ticks of up to 10 ms
    since = time.time_ns()
    monkeypatch.setattr(PartialTree, "_exchange", write_and_exchange)
    monkeypatch.setattr(module, "_lstat_or_none", lstat)
    tree = build(cache, source, walk(str(source)))
    tree.publish(f"{disk}/tree", Before(since))
    tree.close()
    assert (disk / "tree.before-staging").read_text() == "mine"


def test_a_file_that_is_written_to_just_before_it_is_cloned_is_not_taken_over(
    cache: Cache, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clone(target: int, request: int, source: int) -> int:
        with old.open("r+b") as file:
            file.write(b"MINE")
        return os.sendfile(target, source, 0, 1 << 20)

    old = disk / "old"
    old.write_bytes(b"data")
    os.utime(old, ns=(WHEN, WHEN))
    staged = old.stat()
    monkeypatch.setattr(fcntl, "ioctl", clone)
    tree = _tree_of_one(cache)
    assert not tree.take_over(1, os.fsencode(old), lambda there: _is_same(there, staged))
    assert os.listdir(tree.path) == []
    tree.close()


def test_a_hard_link_to_a_file_that_is_written_to_is_dropped(cache: Cache, disk: Path) -> None:
    old = disk / "old"
    old.write_bytes(b"data")
    tree = _tree_of_one(cache)
    assert tree.take_over(1, os.fsencode(old), lambda _: True)
    assert tree.drop_changed() == []
    old.write_bytes(b"mine")
    assert tree.drop_changed() == [1]
    assert os.listdir(tree.path) == []
    tree.close()


def test_a_socket_in_the_place_of_a_file_is_not_taken_over(cache: Cache, disk: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(disk / "old"))
        tree = _tree_of_one(cache)
        assert not tree.take_over(1, os.fsencode(disk / "old"), lambda _: False)
        tree.close()


def _tree_of_one(cache: Cache) -> PartialTree:
    """A tree that is to have one file, in row 1."""
    rows = [Row(b"", Kind.FOLDER, 0o755), Row(b"new", Kind.FILE, 0o644, 4, WHEN)]
    tree = PartialTree(cache, Listing.of(rows))
    tree.lay_out()
    return tree


def _is_same(there: os.stat_result, staged: os.stat_result) -> bool:
    return (there.st_size, there.st_mtime_ns) == (staged.st_size, staged.st_mtime_ns)


def test_no_other_process_sweeps_a_tree_that_is_being_removed(
    cache: Cache, source: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        tree = build(cache, source, walk(str(source)))
        tree.publish(f"{disk}/tree", Before(time.time_ns()))
        tree.close()
        monkeypatch.setattr(module, "remove_old", sweep_and_look)
    folder = os.open(disk, os.O_RDONLY)
    cache.discard("tree", folder, sweep_and_look)
    os.close(folder)
    assert partial_names(cache) == []


def sweep_and_look(path: str, *_: object) -> None:
    """Sweep as another process would, and see that a folder is still there; then remove it."""
    before = os.listdir(path)
    above = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(path))))
    assert before
    forked(lambda: open_cache(above, os.getuid()).sweep())
    assert os.listdir(path) == before
    remove_tree(path)


def test_a_tree_that_is_not_published_leaves_nothing(
    cache: Cache, source: Path, disk: Path
) -> None:
    tree = build(cache, source, walk(str(source)))
    assert partial_names(cache) != []
    tree.close()
    assert partial_names(cache) == []
    assert os.listdir(disk) == [".slurm-stage"]


def test_a_file_of_which_a_part_was_written_leaves_nothing(cache: Cache) -> None:
    rows = [Row(b"", Kind.FOLDER, 0o755), Row(b"large", Kind.FILE, 0o644, 8)]
    tree = PartialTree(cache, Listing.of(rows))
    tree.lay_out()
    tree.write(1, memoryview(b"half"), 4)
    tree.close()
    assert partial_names(cache) == []


def test_the_parts_of_a_file_may_come_from_many_threads_in_any_order(
    cache: Cache, disk: Path
) -> None:
    size = 64
    rows = [
        Row(b"", Kind.FOLDER, 0o755),
        *(Row(b"%03d" % number, Kind.FILE, 0o600, size, WHEN) for number in range(50)),
    ]
    tree = PartialTree(cache, Listing.of(rows))
    tree.lay_out()
    data = bytes(range(size))

    def write(offset: int) -> None:
        for row in range(1, 51):
            tree.write(row, memoryview(data)[offset : offset + 8], offset)

    threads = [threading.Thread(target=write, args=(offset,)) for offset in range(0, size, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tree.seal()
    tree.publish(f"{disk}/tree")
    tree.close()
    for number in range(50):
        path = disk / f"tree/{number:03}"
        assert path.read_bytes() == data
        assert path.stat().st_mtime_ns == WHEN


def test_a_tree_is_swept_only_after_its_writer_has_ended(cache: Cache, source: Path) -> None:
    tree = build(cache, source, walk(str(source)))
    cache.sweep()
    assert len(partial_names(cache)) == 1
    os.close(tree._descriptor)  # as the end of its process would
    cache.sweep()
    assert partial_names(cache) == []


def test_setuid_bits_and_write_permission_of_others_are_not_copied(
    cache: Cache, disk: Path
) -> None:
    rows = [
        Row(b"", Kind.FOLDER, 0o755),
        Row(b"program", Kind.FILE, 0o6777, 1),
        Row(b"spool", Kind.FOLDER, 0o3777),
    ]
    tree = PartialTree(cache, Listing.of(rows))
    tree.lay_out()
    tree.write(1, memoryview(b"x"), 0)
    tree.seal()
    tree.publish(f"{disk}/tree")
    tree.close()
    modes = {
        name: stat.S_IMODE((disk / "tree" / name).stat().st_mode) for name in ("program", "spool")
    }
    assert modes == {"program": 0o755, "spool": 0o3755}


@pytest.mark.parametrize("clones", [True, False], ids=["cloned", "linked"])
def test_a_file_on_the_disk_is_taken_over(
    cache: Cache, disk: Path, monkeypatch: pytest.MonkeyPatch, *, clones: bool
) -> None:
    old = disk / "old"
    old.write_bytes(b"data")
    os.utime(old, ns=(WHEN, WHEN))
    if clones:  # as a filesystem that can
        monkeypatch.setattr(fcntl, "ioctl", _clone)
    rows = [Row(b"", Kind.FOLDER, 0o755), Row(b"new", Kind.FILE, 0o644, 4, WHEN)]
    tree = PartialTree(cache, Listing.of(rows))
    tree.lay_out()
    assert tree.take_over(1, os.fsencode(old), lambda _: True)
    tree.seal()
    tree.publish(f"{disk}/tree")
    tree.close()
    new = disk / "tree/new"
    assert (new.read_bytes(), new.stat().st_mtime_ns) == (b"data", WHEN)
    assert (new.stat().st_ino == old.stat().st_ino) == (not clones)


@pytest.mark.parametrize("clones", [True, False], ids=["cloned", "linked"])
@pytest.mark.parametrize("what", ["file", "folder", "link", "nothing", "file above"])
def test_what_a_user_has_put_in_the_place_of_a_file_is_not_taken_over(
    cache: Cache, disk: Path, monkeypatch: pytest.MonkeyPatch, what: str, *, clones: bool
) -> None:
    old = disk / "above/old"
    if what == "file above":
        old.parent.write_bytes(b"mine")
    else:
        old.parent.mkdir()
    if what == "file":
        old.write_bytes(b"mine")
    elif what == "folder":
        old.mkdir()
    elif what == "link":
        old.symlink_to(__file__)
    if clones:  # as a filesystem that can
        monkeypatch.setattr(fcntl, "ioctl", _clone)
    rows = [Row(b"", Kind.FOLDER, 0o755), Row(b"new", Kind.FILE, 0o644, 4, WHEN)]
    tree = PartialTree(cache, Listing.of(rows))
    tree.lay_out()
    assert not tree.take_over(1, os.fsencode(old), lambda there: there.st_ino == 1)
    assert os.listdir(tree.path) == []
    tree.close()


def _clone(descriptor: int, request: int, source: int) -> int:
    assert request == module._FICLONE
    return os.sendfile(descriptor, source, 0, 1 << 20)


def test_a_full_disk_is_reported(
    cache: Cache, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = PartialTree(cache, walk(str(source)))
    tree.lay_out()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("stager.tree.partial.write_all", full)
    with pytest.raises(SpaceError) as caught, tree.writing():
        tree.write(3, memoryview(b"closed"), 0)
    tree.close()
    root = re.escape(cache.root)
    end = r"are free; free space there \(stagectl evict\) and try again"
    assert re.fullmatch(rf"{root}: the disk is too full: .+ of .+ {end}", str(caught.value))
    assert partial_names(cache) == []
