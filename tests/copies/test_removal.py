"""A copy is removed with its record, and what is the user's own is kept."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest

from stager.base import paths
from stager.base.errors import DestinationError, SpaceError
from stager.copies.evict import find_candidates
from stager.copies.own import HoldsOwnError, find_own
from stager.copies.removal import SetAsideError, remove
from stager.disk.cache import Cache, open_cache
from stager.disk.jobs import note_uses, remove_files
from stager.disk.locks import Locks
from stager.disk.parents import made_parents
from tests.support.copies import MIB, Node, bytes_taken, make, put_own, room_on
from tests.support.meddler import Meddler
from tests.support.trees import stage_folder
from tests.support.users import as_ordinary_user, forked, on_tmpfs, ordinary_home

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import TypeVar

    from stager.copies.reading import Reading
    from stager.disk.record import Record

    T = TypeVar("T")


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
def test_a_file_that_a_user_made_of_a_copy_is_kept_unless_forced(
    node: Node, change: Callable[[Path], object]
) -> None:
    record = node.put("a", 10)
    path = node.disk / "a"
    change(path)
    there = seen(path)
    with pytest.raises(HoldsOwnError) as caught:
        node.remove("a")
    assert str(caught.value) == (
        f"{path} is no longer what was staged there; move it elsewhere, or delete it: stagectl "
        f"evict --force {path}"
    )
    assert seen(path) == there
    assert list(node.cache.records()) == [record]
    assert node.remove("a", force=True) == record
    assert not os.path.lexists(path)
    assert list(node.cache.records()) == []


def test_a_copy_with_another_time_goes(node: Node) -> None:
    record = node.put("a", 10)
    os.utime(node.disk / "a", ns=(5, 5))
    assert node.remove("a") == record
    assert node.names() == []


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_in_the_place_of_a_copy_is_kept(node: Node, *, force: bool) -> None:
    node.put("a", 10)
    (node.disk / "a").unlink()
    (node.disk / "a").mkdir()
    assert node.remove("a", force=force) is not None
    assert (node.disk / "a").is_dir()
    assert list(node.cache.records()) == []


def test_a_staged_folder_of_which_every_file_was_changed_is_kept_unless_forced(node: Node) -> None:
    folder = node.disk / "set"
    record = stage_folder(node.cache, str(folder))
    _edit(folder / "a")
    room = room_on(node, 1, bytes_taken(node))
    with pytest.raises(SpaceError, match=r"/set \(holds files of the user's own\); "):
        room.plan()
    with pytest.raises(HoldsOwnError) as caught:
        node.remove("set")
    assert caught.value.files == ["a"]
    assert list(node.cache.records()) == [record]
    assert (folder / "a").read_bytes().startswith(b"mine")
    assert node.remove("set", force=True) == record
    assert not folder.exists()
    assert list(node.cache.records()) == []


def on_late_clock(tmp_path: Path, act: Callable[[Node], T]) -> T:
    """Return what ``act`` does of a node on a filesystem whose times are some ms behind."""
    (tmp_path / "disk").mkdir()
    return on_tmpfs(tmp_path / "disk", "mode=755", lambda: act(Node(tmp_path / "disk")), "ramfs")


def write_meanwhile(monkeypatch: pytest.MonkeyPatch, copy: Path, late: Path) -> None:
    """Have the file ``late`` written just after the ``copy`` was looked through."""

    def find_and_write(
        cache: Cache, record: Record, path: str, reading: Reading, folders: dict[int, bytes]
    ) -> list[str]:
        found = find_own(cache, record, path, reading, folders)
        if path == str(copy):
            late.write_bytes(b"mine")
        return found

    monkeypatch.setattr("stager.copies.removal.find_own", find_and_write)


@pytest.mark.root
@pytest.mark.usefixtures("_jobs")
@pytest.mark.parametrize("mode", [0o755, 0o555])
def test_what_is_written_into_a_folder_while_it_is_looked_through_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    def act(node: Node) -> tuple[list[str], bytes, int, bool, list[str]]:
        copy = node.disk / "a"
        stage_folder(node.cache, str(copy))
        copy.chmod(mode)
        write_meanwhile(monkeypatch, copy, copy / "results")
        with pytest.raises(HoldsOwnError) as caught:
            node.remove("a")
        late, left = (copy / "results").read_bytes(), os.listdir(node.cache.partial)
        is_recorded = node.cache.load(str(copy)) is not None
        return caught.value.files, late, copy.stat().st_mode & 0o777, is_recorded, left

    assert on_late_clock(tmp_path, act) == (["results"], b"mine", mode, True, [])


def look_late(monkeypatch: pytest.MonkeyPatch, copy: Path, act: Callable[[], object]) -> None:
    """Have a file written into the ``copy`` after the first look, and ``act`` done afterwards."""
    done: list[str] = []

    def find_and_act(
        cache: Cache, record: Record, path: str, reading: Reading, folders: dict[int, bytes]
    ) -> list[str]:
        found = find_own(cache, record, path, reading, folders)
        done.append(path)
        if len(done) == 1:
            (copy / "results").write_bytes(b"mine")
        else:
            act()
        return found

    monkeypatch.setattr("stager.copies.removal.find_own", find_and_act)


def test_if_the_name_of_a_copy_was_taken_meanwhile_the_new_name_is_told(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = node.disk / "a"
    aside = node.disk / "a.before-eviction-1"
    (node.disk / "a.before-eviction").write_bytes(b"another")
    stage_folder(node.cache, str(copy))
    look_late(monkeypatch, copy, lambda: copy.write_bytes(b"yet another"))
    room = room_on(node, 1, bytes_taken(node))
    with pytest.raises(DestinationError) as caught:
        make(node, room)
    assert caught.value.message == (
        f"{copy} was to be evicted, but files were written into it meanwhile, and something else "
        f"has its name now; they are in {aside}, with the rest of the copy"
    )
    assert (copy.read_bytes(), (aside / "results").read_bytes()) == (b"yet another", b"mine")
    assert list(node.cache.records()) == []
    assert os.listdir(node.cache.partial) == []


def test_if_an_eviction_is_killed_what_was_written_meanwhile_is_kept(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = node.disk / ("long name " * 25)
    stage_folder(node.cache, str(copy))
    look_late(monkeypatch, copy, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(AssertionError, match="ended with -9"):
        forked(lambda: node.remove(copy.name))
    open_cache(str(node.disk), os.getuid())
    assert (node.disk / f"{copy.name[:50]}.before-eviction/results").read_bytes() == b"mine"


def remove_and_write(
    node: Node, monkeypatch: pytest.MonkeyPatch, act: Callable[[int], object]
) -> int:
    """Have a file written into the copy that is removed, after all looks; return its folder.

    Then ``act`` is called with the descriptor of that folder.
    """
    discard = Cache.discard
    copy = os.open(node.disk / "a", os.O_RDONLY)

    def write_and_discard(
        cache: Cache, name: str, folder: int, remove: Callable[[str], object]
    ) -> None:
        os.close(os.open("results", os.O_CREAT | os.O_WRONLY, dir_fd=copy))
        act(copy)
        discard(cache, name, folder, remove)

    monkeypatch.setattr(Cache, "discard", write_and_discard)
    node.remove("a")
    return copy


def test_what_a_program_writes_into_a_folder_as_it_is_removed_is_kept(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage_folder(node.cache, str(node.disk / "a"))
    removed = remove_and_write(node, monkeypatch, lambda _: None)
    assert os.listdir(node.disk / "a") == ["results"]
    assert os.listdir(removed) == os.listdir(node.cache.partial) == []
    assert list(node.cache.records()) == []


def test_a_folder_that_a_program_makes_or_moves_there_as_the_copy_is_removed_is_kept(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "older").write_bytes(b"mine")

    def act(folder: int) -> None:
        os.rename(moved, "moved", dst_dir_fd=folder)
        os.mkdir("empty", dir_fd=folder)

    stage_folder(node.cache, str(node.disk / "a"))
    removed = remove_and_write(node, monkeypatch, act)
    assert sorted(os.listdir(node.disk / "a")) == ["empty", "moved", "results"]
    assert (node.disk / "a/moved/older").read_bytes() == b"mine"
    assert os.listdir(removed) == os.listdir(node.cache.partial) == []


def test_what_other_users_have_in_a_copy_is_put_beside_when_all_of_it_is_removed() -> None:
    def stage(home: Path) -> None:
        stage_folder(open_cache(str(home), os.getuid()), f"{home}/a")

    def evict(home: Path) -> tuple[str, list[Record], list[str]]:
        cache = open_cache(str(home), os.getuid())
        with closing(Locks(cache)) as locks, pytest.raises(SetAsideError) as caught:
            remove(cache, locks, "", f"{home}/a", force=True)
        return caught.value.message, [*cache.records()], os.listdir(cache.partial)

    with ordinary_home() as home:
        as_ordinary_user(lambda: stage(home))
        (home / "a/theirs").mkdir()
        (home / "a/theirs/results").write_text("theirs")
        (home / "a").chmod(0o755)
        message = (
            f"{home}/a was evicted, but not all that other users have in it: what they alone can "
            f"remove is in {home}/a.before-eviction"
        )
        assert as_ordinary_user(lambda: evict(home)) == (message, [], [])
        left = home / "a.before-eviction"
        assert [str(path.relative_to(left)) for path in left.rglob("*")] == [
            "theirs",
            "theirs/results",
        ]
        assert stat.S_IMODE(left.stat().st_mode) == 0o755, "they can reach it"
        assert not (home / "a").exists()


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_what_others_put_in_the_place_of_a_copy_as_it_is_removed_is_not_looked_into(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As a user may who can write in the folder above."""
    private = tmp_path / "private"
    private.mkdir()
    (private / "key").write_bytes(b"mine")
    discard = Cache.discard

    def swap_and_discard(
        cache: Cache, name: str, folder: int, remove: Callable[[str], object]
    ) -> None:
        (node.disk / name).rename(node.disk / "taken")
        if kind == "link":
            (node.disk / name).symlink_to(private)
        else:
            private.rename(node.disk / name)
        discard(cache, name, folder, remove)

    monkeypatch.setattr(Cache, "discard", swap_and_discard)
    stage_folder(node.cache, str(node.disk / "a"))
    with pytest.raises(SetAsideError):
        node.remove("a")
    assert (node.disk / "a.before-eviction/key").read_bytes() == b"mine"
    assert not (node.disk / "a").exists()


@pytest.mark.parametrize("seed", range(5))
def test_what_a_user_does_in_a_folder_while_it_is_evicted_is_kept(
    node: Node, tmp_path: Path, seed: int
) -> None:
    def fill(folder: Path) -> None:
        for above in (folder / f"{outer}/{inner}" for outer in "abcd" for inner in "xyz"):
            above.mkdir(parents=True)
            for number in range(30):
                (above / f"f{number}").write_text("staged")

    def evict() -> None:
        with suppress(HoldsOwnError, SetAsideError):
            node.remove("set")

    stage_folder(node.cache, str(node.disk / "set"), fill=fill)
    time.sleep(0.02)  # the kernel's clock for files ticks every few milliseconds
    elsewhere = tmp_path / "elsewhere"
    with (
        closing(Meddler(node.disk / "set", elsewhere, seed)) as meddler,
        ThreadPoolExecutor() as pool,
    ):
        eviction = pool.submit(evict)
        while not eviction.done():
            meddler.act()
        eviction.result()
        assert meddler.lost(node.disk, elsewhere) == set()


def test_if_that_file_has_no_place_the_rest_of_the_copy_is_told(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = node.disk / "a"
    stage_folder(node.cache, str(copy))
    with pytest.raises(DestinationError) as caught:
        remove_and_write(node, monkeypatch, lambda _: copy.write_bytes(b"another"))
    assert caught.value.message == (
        f"{copy} was to be evicted, but files were written into it meanwhile, and something else "
        f"has its name now; they are in {copy}.before-eviction, with the rest of the copy"
    )
    assert (node.disk / "a.before-eviction/results").exists()
    assert copy.read_bytes() == b"another"
    assert os.listdir(node.cache.partial) == []


@pytest.mark.root
@pytest.mark.usefixtures("_jobs")
def test_a_file_that_is_written_to_while_it_is_looked_at_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(node: Node) -> bytes:
        copy = node.disk / "a"
        node.put("a", MIB)
        write_meanwhile(monkeypatch, copy, copy)
        with pytest.raises(HoldsOwnError):
            node.remove("a")
        return copy.read_bytes()

    assert on_late_clock(tmp_path, act) == b"mine"


def test_another_folder_in_the_place_of_a_staged_one_is_kept(node: Node) -> None:
    folder = node.disk / "set"
    record = stage_folder(node.cache, str(folder))
    folder.rename(node.disk / "moved")
    folder.mkdir()
    assert node.remove("set", force=True) == record
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
    assert [one.may_go for one in find_candidates(node.cache, "")] == [False]
    assert node.remove("a") is None
    remove_files(os.getuid(), 17)
    assert [one.may_go for one in find_candidates(node.cache, "")] == [True]
    assert node.remove("a") is not None


def test_on_a_node_that_does_not_mark_jobs_nothing_is_evicted(node: Node) -> None:
    node.put("a", 10)
    os.rmdir(paths.JOBS_FOLDER)
    assert [one.may_go for one in find_candidates(node.cache, "")] == [False]


def test_a_copy_that_another_process_has_locked_is_kept(node: Node) -> None:
    node.put("a", 10)
    script = (
        "import sys; from stager.disk.cache import Cache; from stager.disk.locks import Locks; "
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
