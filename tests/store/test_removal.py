"""A copy is removed with its record, and what is the user's own is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from stager.base import paths
from stager.base.errors import DestinationError
from stager.store.leases import note_uses, remove_files
from stager.store.parents import made_parents
from stager.store.space import find_candidates
from tests.support.copies import Node, bytes_taken, put_own
from tests.support.trees import stage_folder
from tests.support.users import as_ordinary_user, ordinary_home

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_copy_goes_with_its_record(node: Node) -> None:
    record = node.put("a", 10)
    assert node.remove("a") == record
    assert node.names() == []
    assert list(node.cache.records()) == []
    assert node.remove("a") is None


def test_folders_that_stages_made_go_with_the_last_copy_in_them(node: Node) -> None:
    for name in ("of/alice/a", "of/alice/b"):
        with made_parents(node.cache, f"{node.disk}/{name}"):
            node.put(name, 10)
    note_uses(os.getuid(), 17, [f"{node.disk}/of/later"])
    assert node.remove("of/alice/a")
    assert (node.disk / "of/alice/b").exists()
    assert node.remove("of/alice/b")
    assert not (node.disk / "of/alice").exists()
    assert (node.disk / "of").exists()  # until that job has ended


def _edit(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"mine")
    os.utime(path, ns=(1, 1))


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def seen(path: Path) -> tuple[int, int, int, int]:
    """All of its stat that a reader does not change."""
    there = path.lstat()
    return there.st_mode, there.st_ino, there.st_size, there.st_mtime_ns


def _take_inode(path: Path) -> None:
    """Another file gets the copy's inode number, as a filesystem gives it away again at once."""
    inode = path.stat().st_ino
    path.write_bytes(b"quite mine")
    os.utime(path, ns=(5, 5))
    assert path.stat().st_ino == inode


@pytest.mark.parametrize("change", [put_own, _edit, _link, _take_inode])
def test_a_file_that_a_user_made_of_a_copy_is_kept(
    node: Node, change: Callable[[Path], object]
) -> None:
    record = node.put("a", 10)
    path = node.disk / "a"
    change(path)
    there = seen(path)
    assert node.remove("a") == record
    assert seen(path) == there
    assert list(node.cache.records()) == []


def test_a_folder_in_the_place_of_a_copy_is_kept(node: Node) -> None:
    node.put("a", 10)
    (node.disk / "a").unlink()
    (node.disk / "a").mkdir()
    assert node.remove("a") is not None
    assert (node.disk / "a").is_dir()
    assert list(node.cache.records()) == []


def fill(folder: Path) -> None:
    (folder / "sub/empty").mkdir(parents=True)
    for name in ("a", "b", "sub/c"):
        (folder / name).write_text(name)
    (folder / "link").symlink_to("a")
    (folder / "twin").hardlink_to(folder / "a")
    (folder / "sub").chmod(0o500)


def test_a_staged_folder_goes_as_a_whole(node: Node) -> None:
    record = stage_folder(node.cache, str(node.disk / "set"), fill=fill)
    assert node.remove("set") == record
    assert not (node.disk / "set").exists()
    assert list(node.cache.records()) == []


def test_what_was_added_or_changed_in_a_folder_stays_with_the_record_of_an_empty_copy() -> None:
    """Else the next stage would find a folder there that nobody staged."""

    def act(home: Path) -> list[str]:
        node = Node(home)
        folder = home / "set"
        stage_folder(node.cache, str(folder), fill=fill)
        _edit(folder / "b")
        (folder / "sub").chmod(0o700)
        (folder / "sub/results").mkdir()
        (folder / "sub/results/1").write_text("mine")
        (folder / "sub/results").chmod(0)
        assert node.remove("set")
        left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        (record,) = node.cache.records()
        assert record.tree
        assert (record.tree.files, record.copy_facts.size, bytes_taken(node)) == (0, 0, 0)
        assert node.remove("set")
        (folder / "sub/results").chmod(0o700)
        assert (folder / "sub/results/1").read_text() == "mine"
        (folder / "b").unlink()
        (folder / "sub/results/1").unlink()
        (folder / "sub/results").rmdir()
        assert node.remove("set")
        assert list(node.cache.records()) == []
        assert not folder.exists()
        return left

    with ordinary_home() as home:
        left = as_ordinary_user(lambda: act(home))
    assert left == ["b", "sub", "sub/results"]


def test_a_folder_that_its_user_closed_goes_all_the_same() -> None:
    def act(home: Path) -> bool:
        node = Node(home)
        stage_folder(node.cache, f"{home}/set", fill=fill)
        (home / "set").chmod(0)
        return bool(node.remove("set")) and not (home / "set").exists()

    with ordinary_home() as home:
        assert as_ordinary_user(lambda: act(home))


def test_another_folder_in_the_place_of_a_staged_one_is_kept(node: Node) -> None:
    folder = node.disk / "set"
    record = stage_folder(node.cache, str(folder))
    folder.rename(node.disk / "moved")
    folder.mkdir()
    assert node.remove("set") == record
    assert folder.is_dir()
    assert list(node.cache.records()) == []


def test_a_record_whose_copy_is_gone_is_removed(node: Node) -> None:
    node.put("a", 10)
    (node.disk / "a").unlink()
    assert node.remove("a") is not None
    assert list(node.cache.records()) == []


def test_a_record_whose_copy_lay_in_what_is_now_a_file_is_removed(node: Node) -> None:
    (node.disk / "sub").mkdir()
    record = node.put("sub/a", 10)
    (node.disk / "sub/a").unlink()
    (node.disk / "sub").rmdir()
    (node.disk / "sub").write_bytes(b"mine")
    assert node.remove("sub/a") == record
    assert list(node.cache.records()) == []
    assert (node.disk / "sub").read_bytes() == b"mine"


def test_a_pinned_copy_is_kept(node: Node) -> None:
    node.put("a", 10, pinned=True)
    assert node.remove("a") is None
    assert node.names() == ["a"]


def test_a_copy_that_a_job_uses_is_kept_as_long_as_the_job_runs(node: Node) -> None:
    node.put("a", 10)
    note_uses(os.getuid(), 17, [str(node.disk / "a")])
    assert [one.may_go for one in find_candidates(node.cache)] == [False]
    assert node.remove("a") is None
    remove_files(os.getuid(), 17)
    assert [one.may_go for one in find_candidates(node.cache)] == [True]
    assert node.remove("a") is not None


def test_on_a_node_that_does_not_mark_jobs_nothing_is_evicted(node: Node) -> None:
    node.put("a", 10)
    os.rmdir(paths.JOBS_FOLDER)
    assert [one.may_go for one in find_candidates(node.cache)] == [False]


def test_a_copy_that_another_process_has_locked_is_kept(node: Node) -> None:
    node.put("a", 10)
    script = (
        "import sys; from stager.store.cache import Cache; from stager.store.locks import Locks; "
        "print(Locks(Cache(sys.argv[1])).take(sys.argv[2]), flush=True); sys.stdin.read()"
    )
    line = [sys.executable, "-c", script, node.cache.folder, f"{node.disk}/a"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(line, text=True, **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout.readline() == "True\n"
        assert node.remove("a") is None
        other.stdin.close()
    assert node.remove("a") is not None


def test_a_folder_that_became_a_link_is_not_followed(node: Node, tmp_path: Path) -> None:
    (node.disk / "sub").mkdir()
    node.put("sub/a", 10)
    (node.disk / "sub").rename(tmp_path / "elsewhere")
    (node.disk / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DestinationError, match="sub is a symbolic link, not a folder"):
        node.remove("sub/a")
    assert (tmp_path / "elsewhere/a").exists()
