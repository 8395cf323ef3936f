"""What of a copy is a user's own, and what can be made again."""

from __future__ import annotations

import os
import shutil
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import SourceError
from stager.copies.own import HoldsOwnError, find_own, has_new_caches_alone, is_copy
from stager.copies.reading import Reading
from stager.disk.cache import open_cache
from stager.tree.walk import _Found, _Walker
from tests.support.trees import stage_folder
from tests.support.users import as_ordinary_user, ordinary_home

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stager.disk.record import Record

SIGNATURE = "Signature: 8a477f597d28d172789f06886806bc55\n# made by a test\n"


def _fill(folder: Path) -> None:
    for name in ("a", "m", "sub/b", "sub/__pycache__/b.pyc", "tagged/CACHEDIR.TAG"):
        file = folder / name
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(SIGNATURE if file.name == "CACHEDIR.TAG" else f"staged {name}")
    (folder / "twin").hardlink_to(folder / "m")
    (folder / "link").symlink_to("a")
    (folder / "empty").mkdir()


class Node:
    """A disk with a staged folder."""

    def __init__(self, disk: Path) -> None:
        self.path = disk / "set"
        self.cache = open_cache(str(disk), os.getuid())

    def stage(self) -> Record:
        """Stage files, a hard link, a symbolic link and an empty folder."""
        return stage_folder(self.cache, str(self.path), fill=_fill)

    def own(self, record: Record) -> list[str]:
        return find_own(self.cache, record, str(self.path))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def _write(name: str, text: str = "mine") -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    return write


def _edit_by_a_new_file(folder: Path) -> None:
    (folder / "new").write_text("mine")
    (folder / "new").rename(folder / "a")


def _replace_by_the_same(folder: Path) -> None:
    shutil.copy(folder / "a", folder / "new")
    (folder / "new").rename(folder / "a")


def _link_elsewhere(folder: Path) -> None:
    (folder / "link").unlink()
    (folder / "link").symlink_to("m")


def _link_again(folder: Path) -> None:
    (folder / "link").unlink()
    (folder / "link").symlink_to("a")


def _make_socket(folder: Path) -> None:
    before = os.getcwd()
    os.chdir(folder)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("sock")
    finally:
        os.chdir(before)


def _file_for_folder(folder: Path) -> None:
    (folder / "empty").rmdir()
    (folder / "empty").write_text("mine")


def _folder_for_file(folder: Path) -> None:
    (folder / "a").unlink()
    _write("a/x")(folder)


OWN: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a new file": (_write("sub/results"), ["sub/results"]),
    "files in new folders": (_write("out/1/x"), ["out/1/x"]),
    "an empty folder": (lambda folder: (folder / "out/1").mkdir(parents=True), ["out/1/"]),
    "a link": (lambda folder: (folder / "new").symlink_to("a"), ["new"]),
    "a link to elsewhere": (_link_elsewhere, ["link"]),
    "a file of other length": (_write("a"), ["a"]),
    "a file of the same length": (_write("a", "STAGED a"), ["a"]),
    "a file edited by way of another": (_edit_by_a_new_file, ["a"]),
    "a file with two names": (_write("m"), ["m"]),
    "a file for a folder": (_file_for_folder, ["empty"]),
    "a folder for a file": (_folder_for_file, ["a/x"]),
    "a folder with compiled files alone": (_write("new/in/__pycache__/x.pyc"), ["new/in/"]),
    "a folder with a cache alone": (_write("new/x/CACHEDIR.TAG", SIGNATURE), ["new/"]),
    "a file named as compiled files' folder": (_write("__pycache__"), ["__pycache__"]),
    "a tag without its signature": (_write("x/CACHEDIR.TAG"), ["x/CACHEDIR.TAG"]),
    "a tag of the whole folder": (_write("CACHEDIR.TAG", SIGNATURE), ["CACHEDIR.TAG"]),
}


@pytest.mark.parametrize(("change", "names"), OWN.values(), ids=OWN)
def test_what_a_user_made_is_found(
    node: Node, change: Callable[[Path], object], names: list[str]
) -> None:
    record = node.stage()
    change(node.path)
    assert node.own(record) == names


NOTHING: dict[str, Callable[[Path], object]] = {
    "unchanged": lambda folder: folder,
    "another time": lambda folder: os.utime(folder / "a", ns=(5, 5)),
    "another time of a file with two names": lambda folder: os.utime(folder / "m", ns=(5, 5)),
    "another mode": lambda folder: (folder / "a").chmod(0o600),
    "removed": lambda folder: shutil.rmtree(folder / "sub"),
    "the first of two names removed": lambda folder: (folder / "m").unlink(),
    "the same contents": _replace_by_the_same,
    "the same link": _link_again,
    "compiled": _write("sub/__pycache__/x/y.pyc"),
    "compiled anew": _write("sub/__pycache__/b.pyc"),
    "no file compiled": lambda folder: (folder / "__pycache__").mkdir(),
    "in a folder with a tag": _write("tagged/sub/x"),
    "a new folder with a tag": lambda folder: [
        _write("x/CACHEDIR.TAG", SIGNATURE)(folder), _write("x/v/results")(folder)
    ],
}  # fmt: skip


@pytest.mark.parametrize("change", NOTHING.values(), ids=NOTHING)
def test_what_can_be_made_again_is_not_a_users_own(
    node: Node, change: Callable[[Path], object]
) -> None:
    record = node.stage()
    change(node.path)
    assert node.own(record) == []


#: Of `NOTHING`, what leaves the copy current.
CACHES = {
    "unchanged", "compiled", "no file compiled", "in a folder with a tag",
    "a new folder with a tag",
}  # fmt: skip


@pytest.mark.parametrize("what", [*OWN, *NOTHING])
def test_only_what_programs_added_in_caches_leaves_a_copy_as_it_was(node: Node, what: str) -> None:
    record = node.stage()
    change = NOTHING[what] if what in NOTHING else OWN[what][0]
    change(node.path)
    assert has_new_caches_alone(node.cache, record, str(node.path)) is (what in CACHES)


def test_what_the_disk_damaged_is_not_a_users_own(node: Node) -> None:
    record = node.stage()
    facts = (node.path / "a").stat()
    (node.path / "a").write_text("STAGED a")
    os.utime(node.path / "a", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert node.own(record) == node.own(record.as_damaged()) == []
    _write("results")(node.path)
    assert node.own(record.as_damaged()) == ["results"]


def test_what_may_not_be_read_may_be_a_users_own(node: Node) -> None:
    record = node.stage()
    for name in ("a", "m"):
        os.utime(node.path / name, ns=(1, 1))
    assert node.own(record) == []
    size = (node.path / "a").stat().st_size  # of both
    found = find_own(node.cache, record, str(node.path), Reading(2 * size - 1))
    assert found == ["m"]


def test_a_folder_that_cannot_be_read_is_a_users_own_and_hides_no_others() -> None:
    def act(home: Path) -> tuple[list[bool], list[str]]:
        node = Node(home)
        record = node.stage()
        is_current = []
        for name in ("closed", "tagged/closed", "new/__pycache__"):
            (node.path / name).mkdir(parents=True)
            (node.path / name).chmod(0)
            is_current.append(has_new_caches_alone(node.cache, record, str(node.path)))
            if name != "tagged/closed":
                (node.path / name).rmdir()
        (node.path / "new").rmdir()
        (node.path / "own").write_text("mine")
        for name in ("secret", "sub"):
            (node.path / name).mkdir(exist_ok=True)
            (node.path / name).chmod(0)
        return is_current, node.own(record)

    with ordinary_home() as home:
        assert as_ordinary_user(lambda: act(home)) == (
            [False, True, False],
            ["own", "secret/", "sub/"],
        )


def test_a_file_that_is_dated_late_is_a_users_own(node: Node) -> None:
    record = node.stage()
    (node.path / "a").write_text("mine now")
    os.utime(node.path / "a", (10**10, 10**10))  # in 2286
    assert node.own(record) == ["a"]


def test_what_cannot_be_listed_may_be_a_users_own(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = node.stage()

    def fail(path: str) -> None:
        raise SourceError(f"{path}/a: Input/output error; tell the administrator")

    monkeypatch.setattr("stager.copies.own._list", fail)
    with pytest.raises(HoldsOwnError) as caught:
        node.own(record)
    assert caught.value.unread == f"{node.path}/a: Input/output error"
    assert caught.value.message == (
        f"{record.destination} cannot be looked through for files of the user's own: "
        f"{caught.value.unread}; tell the administrator, or delete the whole copy: "
        f"stagectl evict --force {record.destination}"
    )


@pytest.mark.parametrize("removals", [2, 3])
def test_a_copy_from_which_a_program_removes_something_meanwhile_is_listed_up_to_three_times(
    node: Node, monkeypatch: pytest.MonkeyPatch, removals: int
) -> None:
    record = node.stage()
    gone = node.path / "gone"
    look = _Walker._look
    looks: list[bytes] = []

    def look_and_remove(walker: _Walker, path: bytes) -> _Found:
        looks.extend([path] * (path == b""))
        if path or len(looks) > removals:
            return look(walker, path)
        gone.mkdir()
        found = look(walker, path)
        gone.rmdir()
        return found

    monkeypatch.setattr(_Walker, "_look", look_and_remove)
    if removals == 3:
        with pytest.raises(HoldsOwnError) as caught:
            node.own(record)
        assert caught.value.unread == f"{gone} was removed while its folder was listed"
    else:
        assert node.own(record) == []
    assert len(looks) == 3


def test_a_socket_is_a_users_own(node: Node) -> None:
    record = node.stage()
    _make_socket(node.path)
    assert node.own(record) == ["sock"]


def test_without_the_list_of_its_files_all_of_a_changed_folder_may_be_a_users_own(
    node: Node,
) -> None:
    record = node.stage()
    os.unlink(node.cache.table_path(str(node.path)))
    assert node.own(record) == []
    _write("__pycache__/x")(node.path)
    files = ["a", "empty/", "link", "m", "sub/b", "twin"]
    assert node.own(record) == files


def test_a_folder_in_the_place_of_a_copy_is_a_users_own_however_old(node: Node) -> None:
    old = node.path.with_name("old")
    _write("results")(old)
    record = replace(node.stage(), staged_at=(old / "results").stat().st_ctime_ns // 10**9 + 9)
    node.path.rename(node.path.with_name("moved"))
    old.rename(node.path)
    assert node.own(record) == ["results"]


def test_what_is_in_the_place_of_a_folder_or_of_a_file_is_a_users_own(node: Node) -> None:
    record = node.stage()
    shutil.rmtree(node.path)
    node.path.write_text("mine")
    assert node.own(record) == ["set"]
    node.path.unlink()
    _write("results/1")(node.path)
    assert node.own(replace(record, tree=None)) == ["results/1"]


def test_a_copy_that_is_gone_holds_nothing(node: Node) -> None:
    record = node.stage()
    shutil.rmtree(node.path)
    assert node.own(record) == []


def test_the_command_that_deletes_a_copy_can_be_pasted_into_a_shell(node: Node) -> None:
    record = replace(node.stage(), destination="/nvme/my set;x")
    assert str(HoldsOwnError(record, ["a"])) == (
        "/nvme/my set;x holds 1 file that was added or changed after staging: a; move it "
        "elsewhere, or delete the whole copy: stagectl evict --force '/nvme/my set;x'"
    )


@pytest.mark.parametrize("name", ["results", "__pycache__/x.pyc", "a"])
def test_a_new_folder_with_the_inode_number_of_the_copy_is_not_the_copy(
    node: Node, name: str
) -> None:
    record = node.stage()
    time.sleep(0.02)  # the kernel's clock for files ticks every few milliseconds
    shutil.rmtree(node.path)
    _write(name)(node.path)
    there = node.path.stat()
    again = replace(record, copy_facts=replace(record.copy_facts, inode=there.st_ino))
    assert not is_copy(node.cache, again, str(node.path), there)


def test_a_copy_is_one_whatever_its_user_changed_and_the_clock_said(node: Node) -> None:
    record = node.stage()
    table = node.cache.table_path(record.destination)
    then = os.stat(table).st_mtime_ns
    os.utime(table, ns=(then, then - 9 * 10**9))  # the clock was set back meanwhile
    assert is_copy(node.cache, record, str(node.path), node.path.stat())
    os.utime(table, ns=(then, then))
    for name in ("a", "m", "sub/b", "sub/__pycache__/b.pyc", "tagged/CACHEDIR.TAG"):
        _write(name)(node.path)
    assert is_copy(node.cache, record, str(node.path), node.path.stat())
    assert not is_copy(node.cache, record, str(node.path), os.stat(node.path.parent))
