"""Trees on a real disk: built out of sight, published in one step, removed if not published."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import DestinationError, SpaceError
from stager.store.cache import Cache, open_cache
from stager.tree.listing import Kind, Listing, Row
from stager.tree.partial_tree import PartialTree
from stager.tree.walk import walk
from tests.support.trees import as_copy

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
    "an empty folder": lambda path: path.mkdir(),
    "a closed folder": lambda path: path.mkdir(0o500),
    "a file": lambda path: path.write_bytes(b"old"),
    "a link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("make", BEFORE.values(), ids=BEFORE)
def test_what_a_tree_may_replace_is_replaced(
    cache: Cache, source: Path, disk: Path, make: Callable[[Path], object]
) -> None:
    make(disk / "tree")
    tree = build(cache, source, walk(str(source)))
    tree.publish(f"{disk}/tree")
    tree.close()
    assert seen(disk / "tree") == seen(source)
    assert partial_names(cache) == []
    assert sorted(os.listdir(disk)) == [".slurm-stage", "tree"]


def test_a_folder_with_files_is_not_replaced(cache: Cache, source: Path, disk: Path) -> None:
    (disk / "tree").mkdir()
    (disk / "tree/mine").touch()
    tree = build(cache, source, walk(str(source)))
    with pytest.raises(DestinationError):
        tree.publish(f"{disk}/tree")
    tree.close()
    assert partial_names(cache) == []
    assert os.listdir(disk / "tree") == ["mine"]


def test_what_was_handed_over_stays(cache: Cache, source: Path, disk: Path) -> None:
    tree = build(cache, source, walk(str(source)))
    tree.hand_over(f"{disk}/new")
    tree.close()
    assert partial_names(cache) == []
    assert os.listdir(disk / "new") != []


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
    name = os.path.basename(tree.path)
    assert sorted(partial_names(cache)) == [name, f"{name}.lock"]
    assert tree._held
    for descriptor in (tree._descriptor, tree._held.descriptor):
        os.close(descriptor)  # as the end of its process would
    cache.sweep()
    assert partial_names(cache) == []


def test_a_full_disk_is_reported(
    cache: Cache, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = PartialTree(cache, walk(str(source)))
    tree.lay_out()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("stager.tree.partial_tree.write_all", full)
    with pytest.raises(SpaceError) as caught, tree.writing():
        tree.write(3, memoryview(b"closed"), 0)
    tree.close()
    root = re.escape(cache.root)
    end = r"are free; free space there \(stagectl evict\) and try again"
    assert re.fullmatch(rf"{root}: the disk is too full: .+ of .+ {end}", str(caught.value))
    assert partial_names(cache) == []
