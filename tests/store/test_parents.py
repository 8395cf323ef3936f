"""Folders above a copy are made, noted, and removed again when they are empty."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import DestinationError, SpaceError
from stager.store.cache import open_cache
from stager.store.parents import made_parents, remove_parents
from tests.support.disks import OLD, modes_beneath
from tests.support.users import USER, on_tmpfs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stager.store.cache import Cache


def beneath(disk: Path) -> set[str]:
    """What is on the disk, but the records."""
    return {name for name in modes_beneath(disk) if not name.startswith(".slurm-stage")}


def notes(cache: Cache) -> int:
    return len(os.listdir(f"{cache.folder}/made"))


def publish(cache: Cache, *names: str) -> None:
    for name in names:
        path = f"{cache.root}/{name}"
        with made_parents(cache, path), open(path, "xb"):
            pass


def withdraw(cache: Cache, name: str, *in_use: str) -> None:
    os.unlink(f"{cache.root}/{name}")
    remove_parents(cache, f"{cache.root}/{name}", [f"{cache.root}/{one}" for one in in_use])


def test_folders_above_a_destination_are_made_and_stay(cache: Cache, disk: Path) -> None:
    with made_parents(cache, f"{disk}/a/b/file"):
        assert beneath(disk) == {"a", "a/b"}
    assert beneath(disk) == {"a", "a/b"}


def test_missing_folders_are_never_open_to_all(cache: Cache, disk: Path) -> None:
    old = os.umask(0)
    try:
        with made_parents(cache, f"{disk}/a/b/file"):
            pass
    finally:
        os.umask(old)
    modes = modes_beneath(disk)
    assert [modes["a"], modes["a/b"]] == ["drwxr-xr-x", "drwxr-xr-x"]


@pytest.mark.parametrize("error", [SpaceError("full"), KeyboardInterrupt()])
def test_made_folders_are_removed_on_a_failure_and_no_others(
    cache: Cache, disk: Path, error: BaseException
) -> None:
    (disk / "there").mkdir()
    with pytest.raises(type(error)), made_parents(cache, f"{disk}/there/a/b/file"):
        raise error
    assert (beneath(disk), notes(cache)) == ({"there"}, 0)


def test_a_made_folder_that_others_use_by_now_stays_on_a_failure(cache: Cache, disk: Path) -> None:
    def fail() -> None:
        with made_parents(cache, f"{disk}/a/b/c/file"):
            (disk / "a/b/others").write_bytes(OLD)
            raise SpaceError("full")

    with pytest.raises(SpaceError):
        fail()
    assert beneath(disk) == {"a", "a/b", "a/b/others"}


def test_a_folder_that_cannot_be_made_is_named_and_those_above_it_are_removed(
    cache: Cache, disk: Path
) -> None:
    endless = "x" * 300
    with (
        pytest.raises(DestinationError) as caught,
        made_parents(cache, f"{disk}/a/b/{endless}/file"),
    ):
        pass
    assert str(caught.value) == f"{disk}/a/b/{endless}: File name too long"
    assert (beneath(disk), notes(cache)) == (set(), 0)


def test_a_file_in_place_of_a_folder_is_named(cache: Cache, disk: Path) -> None:
    (disk / "a").write_bytes(OLD)
    with pytest.raises(DestinationError) as caught, made_parents(cache, f"{disk}/a/b/file"):
        pass
    assert str(caught.value) == f"{disk}/a/b: Not a directory"


@pytest.mark.root
def test_a_folder_that_cannot_be_noted_is_not_made(disk: Path) -> None:
    def act() -> tuple[str, set[str]]:
        cache = open_cache(str(disk), os.getuid())
        (disk / "own").mkdir()
        os.mkdir(f"{cache.folder}/made")
        free = os.statvfs(disk).f_favail
        for number in range(free - 1):  # one is left, for the folder
            (disk / f"own/{number}").touch()
        with pytest.raises(SpaceError) as caught, made_parents(cache, f"{disk}/a/file"):
            pass
        return str(caught.value), {name for name in beneath(disk) if "/" not in name}

    message, names = on_tmpfs(disk, "mode=755,nr_inodes=30", act)
    assert message.startswith(f"{disk}: the disk is full: it holds 30 files and folders, ")
    assert names == {"own"}


def test_made_folders_go_with_the_last_copy_in_them(cache: Cache, disk: Path) -> None:
    publish(cache, "a/b/first", "a/b/second", "a/third")
    withdraw(cache, "a/b/first")  # which had them made
    assert beneath(disk) == {"a", "a/b", "a/b/second", "a/third"}
    withdraw(cache, "a/b/second")
    assert beneath(disk) == {"a", "a/third"}
    withdraw(cache, "a/third")
    assert (beneath(disk), notes(cache)) == (set(), 0)
    remove_parents(cache, f"{disk}/file")
    assert disk.is_dir()


def _by_the_user(folder: Path) -> None:
    folder.rename(folder.with_name("old"))
    folder.mkdir()


def _by_a_link(folder: Path) -> None:
    folder.rename(folder.with_name("old"))
    folder.symlink_to("old")


def _by_another_user(folder: Path) -> None:
    os.chown(folder, USER, -1)


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.chmod(0o700),
        _by_the_user,
        _by_a_link,
        pytest.param(_by_another_user, marks=pytest.mark.root),
    ],
)
def test_a_folder_that_the_user_made_or_changed_stays(
    cache: Cache, disk: Path, change: Callable[[Path], object]
) -> None:
    publish(cache, "a/b/file")
    os.unlink(disk / "a/b/file")
    change(disk / "a/b")
    before = beneath(disk)
    remove_parents(cache, f"{disk}/a/b/file")
    assert beneath(disk) == before


def test_a_folder_above_one_that_the_user_removed_goes(cache: Cache, disk: Path) -> None:
    publish(cache, "a/b/file")
    os.unlink(disk / "a/b/file")
    (disk / "a/b").rmdir()
    remove_parents(cache, f"{disk}/a/b/file")
    assert (beneath(disk), notes(cache)) == (set(), 0)


def test_a_folder_above_what_a_running_job_uses_stays(cache: Cache, disk: Path) -> None:
    publish(cache, "a/b/file")
    withdraw(cache, "a/b/file", "a/b/file", "a/other")
    assert beneath(disk) == {"a"}


def test_a_folder_into_which_a_stage_is_to_publish_stays(cache: Cache, disk: Path) -> None:
    publish(cache, "a/b/file")
    with made_parents(cache, f"{disk}/a/b/new"):
        withdraw(cache, "a/b/file")
        assert beneath(disk) == {"a", "a/b"}
        with pytest.raises(SpaceError), made_parents(cache, f"{disk}/a/b/newer"):
            raise SpaceError("full")
        (disk / "a/b/new").touch()
    assert beneath(disk) == {"a", "a/b", "a/b/new"}
    withdraw(cache, "a/b/new")
    assert beneath(disk) == set()


def test_stages_and_evictions_in_one_folder_do_not_meet(cache: Cache, disk: Path) -> None:
    def turns(name: str) -> None:
        for _ in range(100):
            publish(cache, f"a/b/{name}")
            withdraw(cache, f"a/b/{name}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(turns, "1234"))
    assert (beneath(disk), notes(cache)) == (set(), 0)


def test_without_notes_nothing_is_removed(cache: Cache, disk: Path) -> None:
    (disk / "a").mkdir()
    remove_parents(cache, f"{disk}/a/file")
    assert beneath(disk) == {"a"}
