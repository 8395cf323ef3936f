"""What is written into a folder while it is staged again is kept."""

from __future__ import annotations

import itertools
import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stager.base import linux
from stager.tree.late import Before, _Removal, late, remove_but_late, remove_old, was_touched
from tests.support.users import OWNER, USER, as_ordinary_user, as_user, ordinary_home

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def make(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def inodes(folder: Path) -> dict[int, int]:
    """The numbers of files in the folder, which were made until now."""
    return {path.lstat().st_ino: time.time_ns() for path in folder.rglob("*")}


def folders_in(folder: Path) -> dict[int, bytes]:
    """The paths of the folder and of all folders in it, by number."""
    found = {path.lstat().st_ino: bytes(path.relative_to(folder)) for path in folder.rglob("*/")}
    return {**found, folder.lstat().st_ino: b""}


def content(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A folder that was staged, and some time later."""
    make(tmp_path / "old", a="1", sub__b="2", gone__c="3")
    time.sleep(0.02)  # the kernel's clock for files has ticks of up to 10 ms
    return tmp_path / "old"


@pytest.fixture
def new(tmp_path: Path) -> Path:
    make(tmp_path / "new", a="1 anew", sub__b="2 anew")
    return tmp_path / "new"


def test_new_files_move_over_and_an_edited_one_stands_beside_the_staged(
    old: Path, new: Path
) -> None:
    since = time.time_ns()
    time.sleep(0.02)
    make(old, result="r", sub__deep__result="s", gone__result="t", a="mine")
    os.symlink("a", old / "link")
    moved = remove_old(str(old), str(new), Before(since, inodes(new)))
    assert sorted(moved) == ["a.before-staging", "gone/result", "link", "result", "sub/deep/result"]
    assert content(new) == {
        "a": "1 anew", "a.before-staging": "mine", "gone/result": "t", "link": "1 anew",
        "result": "r", "sub/b": "2 anew", "sub/deep/result": "s",
    }  # fmt: skip
    assert os.readlink(new / "link") == "a"


def test_folders_in_one_that_could_not_be_read_were_there(
    tmp_path: Path, old: Path, new: Path
) -> None:
    make(old, closed__in__x="x", closed__y="y")
    make(tmp_path / "mine", z="z")
    closed = (old / "closed").lstat().st_ino
    time.sleep(0.02)
    known = {inode: path for inode, path in folders_in(old).items() if path != b"closed/in"}
    before = Before(time.time_ns(), inodes(new), folders={**known, closed: b"closed/"})
    (tmp_path / "mine").rename(old / "mine")
    assert remove_old(str(old), str(new), before) == ["mine"]
    assert content(new) == {"a": "1 anew", "mine/z": "z", "sub/b": "2 anew"}
    assert not old.exists()


def test_a_folder_that_is_moved_there_moves_over_with_all_that_is_in_it(
    tmp_path: Path, old: Path, new: Path
) -> None:
    make(tmp_path, tree__f="1", tree__deep__g="2", sub2__h="3")
    (tmp_path / "empty").mkdir()
    time.sleep(0.02)
    since = time.time_ns()
    known = folders_in(old)
    time.sleep(0.02)
    for name, place in {"tree": "tree", "empty": "sub/empty", "sub2": "gone/sub"}.items():
        (tmp_path / name).rename(old / place)
    make(old, tree__deep__late="5", gone__late="6")
    make(old / "__pycache__", x="compiled")
    (old / "gone").rename(old / "renamed")
    make(new, renamed__sub__other="7")
    remove_old(str(old), str(new), Before(since, inodes(new), folders=known))
    assert content(new) == {
        "a": "1 anew", "renamed/c": "3", "renamed/late": "6", "renamed/sub/h": "3",
        "renamed/sub/other": "7",
        "sub/b": "2 anew", "tree/deep/g": "2", "tree/deep/late": "5", "tree/f": "1",
    }  # fmt: skip
    assert (new / "sub/empty").is_dir()
    assert not old.exists()


def test_what_its_user_moves_away_meanwhile_is_no_error(
    tmp_path: Path, old: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    since = time.time_ns()
    time.sleep(0.02)
    make(old, sub__late="1", gone__late="2", later="3")

    def find(folder: str, before: Before, folders: Iterable[str]) -> Iterator[str]:
        found = late(folder, before, folders)
        yield from (next(found), next(found))
        for name in ("later", "sub", "gone"):
            (Path(folder) / name).rename(tmp_path / name)
        yield from found

    monkeypatch.setattr("stager.tree.late.late", find)
    remove_old(str(old), str(new), Before(since, inodes(new)))
    assert content(new) == {"a": "1 anew", "sub/b": "2 anew"}
    assert (tmp_path / "later").read_text() == "3"
    assert content(tmp_path / "sub") == {"b": "2", "late": "1"}
    assert content(tmp_path / "gone") == {"c": "3", "late": "2"}
    assert not old.exists()


def test_another_name_of_a_file_that_the_new_folder_shares_moves_over(old: Path, new: Path) -> None:
    os.link(old / "a", old / "twin")
    known = frozenset({b"", b"a", b"twin", b"sub", b"sub/b", b"gone", b"gone/c"})
    since = time.time_ns()
    time.sleep(0.02)
    for name in ("sub/b", "twin"):  # as the new folder has it, in which `a` is no more
        os.link(old / name, new / f"shared-{Path(name).name}")
    os.link(old / "sub/b", old / "copied")
    (old / "twin").rename(old / "renamed")
    (new / "a").unlink()
    remove_old(str(old), str(new), Before(since, inodes(new), known))
    assert content(new) == {
        "copied": "2", "renamed": "1", "shared-b": "2", "shared-twin": "1", "sub/b": "2 anew"
    }  # fmt: skip


def test_a_folder_that_is_moved_there_is_told_from_one_that_was_there(
    tmp_path: Path, old: Path
) -> None:
    make(tmp_path, tree__f="1")
    time.sleep(0.02)
    since = time.time_ns()
    assert not was_touched(str(old), since)
    time.sleep(0.02)
    (tmp_path / "tree").rename(old / "tree")
    assert was_touched(str(old), since)


def test_a_folder_that_is_put_in_the_place_moves_over_with_all_that_is_in_it(
    tmp_path: Path, old: Path, new: Path
) -> None:
    """Its files are older than the stage, and in the new folder some have the same names."""
    since = time.time_ns()
    time.sleep(0.02)
    (tmp_path / "copy").mkdir()
    known = folders_in(tmp_path / "copy")
    remove_old(str(old), str(new), Before(since, inodes(new), folders=known))
    assert content(new) == {
        "a": "1 anew", "a.before-staging": "1", "gone/c": "3", "sub/b": "2 anew",
        "sub/b.before-staging": "2",
    }  # fmt: skip
    assert not old.exists()


def test_what_was_not_written_since_and_what_python_compiles_stay_behind(
    old: Path, new: Path
) -> None:
    since = time.time_ns()
    time.sleep(0.02)
    make(old / "__pycache__", x="compiled")
    os.link(old / "sub/b", new / "taken")
    os.replace(new / "taken", new / "sub/b")  # a file that the new folder took over
    os.link(old / "sub/b", old / "twin")
    remove_old(str(old), str(new), Before(since, inodes(new)))
    assert content(new) == {"a": "1 anew", "sub/b": "2"}


def test_what_a_program_writes_by_relative_paths_is_kept_until_it_fails(
    old: Path, new: Path
) -> None:
    """The program's working folder is the old one, and one in that, while they are removed."""
    make(old, **{f"file{number}": "" for number in range(2000)})
    time.sleep(0.02)
    written: list[str] = []
    begun, done = threading.Barrier(3), threading.Event()

    def write(folder: str) -> None:
        descriptor = os.open(old / folder, os.O_RDONLY)
        begun.wait()
        with suppress(FileNotFoundError):
            for number in itertools.takewhile(lambda _: not done.is_set(), itertools.count()):
                if number == 20:
                    os.mkdir(f"made-{folder or 'top'}", dir_fd=descriptor)
                name = f"made-{folder or 'top'}/x" if number == 21 else f"{folder}-{number}"
                os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, dir_fd=descriptor))
                written.append(f"{folder}/{name}".lstrip("/"))
                time.sleep(0.0002)
        os.close(descriptor)

    since = time.time_ns()
    time.sleep(0.02)
    writers = [threading.Thread(target=write, args=(folder,)) for folder in ("", "sub")]
    for writer in writers:
        writer.start()
    begun.wait()
    remove_old(str(old), str(new), Before(since, inodes(new)))
    done.set()
    for writer in writers:
        writer.join()
    # A folder that was filled too fast is there as a whole.
    aside = {**content(new), **content(old)}
    found = [path.replace("sub.before-staging/", "sub/") for path in aside]
    assert sorted(found) == sorted(["a", "sub/b", *written])


def test_a_folder_whose_place_is_named_by_a_descriptor_keeps_its_mode(
    old: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stager.tree.late._TRIES", 0)
    above = os.open(new.parent, os.O_PATH)
    mode = new.parent.stat().st_mode
    remove_but_late(str(old), f"/proc/self/fd/{above}/kept", Before(0))
    os.close(above)
    assert (new.parent.stat().st_mode, old.exists()) == (mode, False)
    assert content(new.parent / "kept.before-staging") == {"a": "1"}
    assert content(new.parent / "kept") == {"gone/c": "3", "sub/b": "2"}


def test_a_folder_that_is_filled_faster_than_emptied_is_moved_whole(
    old: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stager.tree.late._TRIES", 0)
    (new / "sub").chmod(0o500)
    remove_old(str(old), str(new), Before(time.time_ns(), inodes(new)))
    assert content(new) == {
        "a": "1 anew", "gone/c": "3", "sub/b": "2 anew", "sub.before-staging/b": "2"
    }  # fmt: skip
    assert content(old) == {"a": "1"}


def test_folders_in_folders_that_forbid_writing_are_removed() -> None:
    def act(home: Path) -> tuple[list[str], dict[str, str]]:
        make(home, old__a__b__c="1", old__a__d="2", new__a="1 anew")
        for folder in ("old/a/b", "old/a", "old"):
            (home / folder).chmod(0o555)
        before = Before(time.time_ns() + 10**9)
        time.sleep(0.02)
        remove_old(str(home / "old"), str(home / "new"), before)
        return sorted(os.listdir(home)), content(home / "new")

    with ordinary_home() as home:
        assert as_ordinary_user(lambda: act(home)) == (["new"], {"a": "1 anew"})


def test_a_folder_of_another_user_that_cannot_be_removed_is_told() -> None:
    with ordinary_home() as home:
        make(home, old__a="1", old__theirs__b="2", new__a="1 anew")
        for path in (home / "old", home / "old/a", home / "new"):
            os.chown(path, home.stat().st_uid, -1)
        before = Before(time.time_ns() + 10**9)
        with pytest.raises(PermissionError):
            as_ordinary_user(lambda: remove_old(str(home / "old"), str(home / "new"), before))
        assert content(home / "old") == {"theirs/b": "2"}


def test_all_but_a_folder_of_another_user_goes_or_moves_and_they_still_reach_it() -> None:
    """Others may enter the old folder, and one of them works in a folder of his own there."""

    def remove(old: str, new: str, since: int) -> None:
        with suppress(PermissionError):
            remove_old(old, new, Before(since))

    with ordinary_home() as home:
        as_ordinary_user(lambda: make(home, old__a="1", old__way__b="2", new__a="1 anew"))
        for folder in ("old", "old/way"):
            (home / folder).chmod(0o755)
        since = time.time_ns()
        time.sleep(0.02)
        as_ordinary_user(lambda: make(home, old__result="r", old__way__result="s"))
        (home / "old/way/theirs").mkdir()
        make(home, old__way__theirs__c="t")
        as_ordinary_user(lambda: remove(f"{home}/old", f"{home}/new", since))
        assert content(home / "new") == {"a": "1 anew", "result": "r", "way/result": "s"}
        assert content(home / "old") == {"way/theirs/c": "t"}
        assert [stat.S_IMODE((home / one).stat().st_mode) for one in ("old", "old/way")] == [
            0o755,
            0o755,
        ]


@pytest.mark.root
@pytest.mark.parametrize("removes", [remove_old, remove_but_late])
def test_what_another_user_puts_there_just_then_leads_to_no_other_files(
    monkeypatch: pytest.MonkeyPatch, removes: Callable[[str, str, Before], None]
) -> None:
    """They may write in ``shared``, own ``theirs``, and hold both open; they put links there."""
    swaps = {"shared/__pycache__": "x", "theirs/__pycache__": "x", "shared": "deep"}
    ready, go, done = os.pipe(), os.pipe(), os.pipe()

    def attack(old: Path, private: Path) -> None:
        folders: dict[str, int] = {}
        with suppress(OSError):
            folders |= {name: os.open(old / name, os.O_RDONLY) for name in swaps}
        os.write(ready[1], b".")
        os.read(go[0], 1)
        for name, folder in folders.items():
            with suppress(PermissionError):
                os.rename(swaps[name], "away", src_dir_fd=folder, dst_dir_fd=folder)
                os.symlink(private, swaps[name], dir_fd=folder)
        os.write(done[1], b".")
        assert len(folders) == len(swaps)

    def finish(removal: _Removal) -> None:
        os.write(go[1], b".")
        os.read(done[0], 1)
        original(removal)

    def remove(home: Path) -> None:
        with suppress(PermissionError):
            removes(f"{home}/old", f"{home}/new", Before(time.time_ns() + 10**9))

    original = _Removal.finish
    monkeypatch.setattr(_Removal, "finish", finish)
    with ordinary_home() as home, ThreadPoolExecutor() as pool:
        home.chmod(0o755)
        make(home, new__a="1", private__inner__key="k")
        for name in ("shared/deep", "shared/__pycache__/x", "theirs/__pycache__/x"):
            make(home / "old" / name, inner__key="1")
        for path in (home, *home.rglob("*")):
            os.chown(path, OWNER if "theirs" in path.parts else USER, -1)
        for path in (home / "old").rglob("*/"):
            path.chmod(0o777)
        (home / "private").chmod(0o700)
        attacker = pool.submit(as_user, OWNER, lambda: attack(home / "old", home / "private"))
        os.read(ready[0], 1)
        as_ordinary_user(lambda: remove(home))
        attacker.result()
        assert content(home / "private") == {"inner/key": "k"}
        assert stat.S_IMODE((home / "private").stat().st_mode) == 0o700
        assert content(home / "new") == {"a": "1"}
        assert os.listdir(home / "old") == ["theirs"]


def test_a_link_that_its_user_puts_in_the_place_of_a_folder_just_then_is_not_followed(
    tmp_path: Path, old: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    make(results, precious="r")
    results.chmod(0o750)
    before = Before(time.time_ns(), folders=folders_in(old))
    time.sleep(0.02)
    finish = _Removal.finish

    def swap_and_finish(removal: _Removal) -> None:
        (old / "sub").rename(tmp_path / "sub")
        (old / "sub").symlink_to(results)
        finish(removal)

    monkeypatch.setattr(_Removal, "finish", swap_and_finish)
    remove_old(str(old), str(new), before)
    assert content(results) == {"precious": "r"}
    assert stat.S_IMODE(results.stat().st_mode) == 0o750
    assert content(tmp_path / "sub") == {"b": "2"}
    assert os.readlink(new / "sub.before-staging") == str(results)
    assert not old.exists()


@pytest.mark.root
def test_what_is_late_gets_into_no_folder_of_another_user() -> None:
    """Who may write in the folder above takes the copy's name while that is removed."""

    def evict(home: Path, since: int) -> None:
        remove_but_late(f"{home}/old", f"{home}/new", Before(since))

    with ordinary_home() as home:
        as_ordinary_user(lambda: make(home, old__a="1"))
        since = time.time_ns()
        time.sleep(0.02)
        as_ordinary_user(lambda: make(home, old__late="mine"))
        (home / "new").mkdir()
        (home / "new").chmod(0o777)
        with pytest.raises(NotADirectoryError):
            as_ordinary_user(lambda: evict(home, since))
        assert content(home / "old")["late"] == "mine"
        assert content(home / "new") == {}


def test_hard_links_within_the_old_folder_are_not_late(old: Path, new: Path) -> None:
    os.link(old / "gone/c", old / "c")
    time.sleep(0.02)
    since = time.time_ns()
    time.sleep(0.02)
    remove_old(str(old), str(new), Before(since, inodes(new)))
    assert content(new) == {"a": "1 anew", "sub/b": "2 anew"}


def test_a_new_file_that_gets_the_number_of_a_removed_link_is_late(
    old: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.link(old / "gone/c", old / "gone/d")
    time.sleep(0.02)
    since = time.time_ns()
    time.sleep(0.02)
    unlink = os.unlink

    def unlink_and_write(path: str) -> None:
        folder = os.path.realpath(os.path.dirname(path))
        unlink(path)
        names = list((old / "gone").iterdir()) if (old / "gone").exists() else []
        if folder.endswith("/gone") and not path.endswith("result") and not names:
            (old / "gone/result").write_text("r")  # ext4 gives it that number

    monkeypatch.setattr("stager.tree.late.os.unlink", unlink_and_write)
    remove_old(str(old), str(new), Before(since, inodes(new)))
    assert content(new)["gone/result"] == "r"


def test_a_new_file_that_gets_the_number_of_a_file_deleted_in_the_new_folder_is_late(
    old: Path, new: Path
) -> None:
    since = time.time_ns()
    time.sleep(0.02)
    make(old, gone__result="r")
    os.link(old / "sub/b", old / "twin")  # time and number say no more of this one
    numbers = {(old / name).stat().st_ino: since for name in ("gone/result", "sub/b")}
    remove_old(str(old), str(new), Before(since, inodes(new) | numbers))
    assert content(new) == {"a": "1 anew", "gone/result": "r", "sub/b": "2 anew"}


def test_folders_that_forbid_writing_keep_their_mode(old: Path, new: Path) -> None:
    since = time.time_ns()
    time.sleep(0.02)
    make(old, sub__result="r")
    for folder in (old, new):
        (folder / "sub").chmod(0o500)
    remove_old(str(old), str(new), Before(since, inodes(new)))
    assert content(new)["sub/result"] == "r"
    assert (new / "sub").stat().st_mode & 0o777 == 0o500


def test_what_was_written_where_the_new_version_has_no_folder_stands_beside(
    tmp_path: Path, old: Path, new: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (new / "gone").symlink_to(tmp_path / "elsewhere")
    (new / "sub/b").unlink()
    (new / "sub").rmdir()
    (new / "sub").write_text("a file now")
    since = time.time_ns()
    time.sleep(0.02)
    make(old, gone__result="r", gone__deep__more="m", sub__result="s")
    remove_old(str(old), str(new), Before(since, inodes(new)))
    assert content(new) == {
        "a": "1 anew", "gone.before-staging/deep/more": "m", "gone.before-staging/result": "r",
        "sub": "a file now", "sub.before-staging/result": "s",
    }  # fmt: skip
    assert content(tmp_path / "elsewhere") == {}


def test_a_file_as_deep_as_paths_can_be_moves_over(old: Path, new: Path) -> None:
    since = time.time_ns()
    time.sleep(0.02)
    deep = "d/" * 900
    (old / deep).mkdir(parents=True)
    (old / deep / "result").write_text("mine")
    remove_old(str(old), str(new), Before(since, inodes(new)))
    assert (new / deep / "result").read_text() == "mine"


def test_a_file_that_a_program_makes_in_the_new_version_just_then_is_not_overwritten(
    old: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    since = time.time_ns()
    time.sleep(0.02)
    make(old, log="line 1")
    rename = linux.rename

    def make_and_rename(path: str, name: str, flag: linux.Rename, *, new_folder: int) -> None:
        if name == "log":
            make(new, log="line 2")
        rename(path, name, flag, new_folder=new_folder)

    monkeypatch.setattr(linux, "rename", make_and_rename)
    remove_old(str(old), str(new), Before(since, inodes(new)))
    assert (content(new)["log"], content(new)["log.before-staging"]) == ("line 2", "line 1")


def test_another_name_for_a_staged_file_gets_bytes_of_its_own(old: Path, new: Path) -> None:
    names = {b"a", b"sub/b", b"gone/c"}
    known = folders_in(old)
    os.link(old / "gone/c", new / "c")
    os.link(old / "sub/b", new / "sub/c")
    since = time.time_ns()
    time.sleep(0.02)
    (old / "gone/c").rename(old / "mine")
    (old / "mine").chmod(0o640)
    (old / "sub").rename(old / "mine.d")
    times = [(old / name).stat().st_mtime_ns for name in ("mine", "mine.d/b")]
    remove_old(str(old), str(new), Before(since, inodes(new), names, known))
    assert [(new / name).stat().st_mtime_ns for name in ("mine", "mine.d/b")] == times
    assert (new / "mine").stat().st_mode & 0o777 == 0o640
    for name in ("mine", "mine.d/b"):
        with (new / name).open("a") as file:
            file.write(", and more")
    assert content(new) == {
        "a": "1 anew", "c": "3", "mine": "3, and more", "mine.d/b": "2, and more",
        "sub/b": "2 anew", "sub/c": "2",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127])
def test_a_late_file_with_the_longest_name_stands_beside_the_staged_one_by_a_shorter(
    old: Path, new: Path, name: str
) -> None:
    since = time.time_ns()
    time.sleep(0.02)
    make(old, **{name: "mine"})
    make(new, **{name: "anew"})
    remove_old(str(old), str(new), Before(since, inodes(new)))
    assert content(new)[name] == "anew"
    assert content(new)[f"{name[:50]}.before-staging"] == "mine"


def test_a_folder_of_the_users_that_forbids_writing_moves_over_with_its_mode() -> None:
    def act(home: Path) -> tuple[dict[str, str], int]:
        old, new = home / "old", home / "new"
        for folder in (old, new):
            make(folder, a="1")
        known = folders_in(old)
        make(old, mine__result="r")
        (old / "mine").chmod(0o500)
        remove_old(str(old), str(new), Before(time.time_ns(), folders=known))
        return content(new), (new / "mine").stat().st_mode & 0o777

    with ordinary_home() as home:
        assert as_ordinary_user(lambda: act(home)) == ({"a": "1", "mine/result": "r"}, 0o500)
