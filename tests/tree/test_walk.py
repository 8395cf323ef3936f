"""List real folders: everything is found once, as it is."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import IntegrityError, SourceError
from stager.base.extents import Extent
from stager.base.telemetry import counted
from stager.fs.files import remove_tree
from stager.tree import walk as module
from stager.tree.listing import Kind, Listing
from stager.tree.patterns import Patterns
from stager.tree.walk import walk
from tests.support.users import USER, as_user, ordinary_home

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WEIRD = (b"new\nline", b"\xff\xfe", b" ", b"-rf", b"\xc3\xa9", b"*", b"a\\b")


def row(listing: Listing, path: bytes) -> int:
    return listing.paths.index(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with entries of every kind that can be staged."""
    folder = tmp_path / "source"
    (folder / "a/b/c").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "a/file").write_bytes(b"hello")
    (folder / "a/b/second").hardlink_to(folder / "a/file")
    (folder / "zero").touch()
    (folder / "link").symlink_to("a/nowhere")
    for name in WEIRD:
        (folder / os.fsdecode(name)).touch()
    return folder


def test_every_entry_is_found_as_it_is(folder: Path) -> None:
    listing = walk(str(folder))
    names = [b"a", b"a/b", b"a/b/c", b"a/b/second", b"a/file", b"empty", b"link", b"zero"]
    assert listing.paths == sorted([b"", *names, *WEIRD])
    kinds = dict(zip(listing.paths, listing.kinds, strict=True))
    assert {path for path, kind in kinds.items() if kind == Kind.FOLDER} == {
        b"", b"a", b"a/b", b"a/b/c", b"empty",
    }  # fmt: skip
    number = row(listing, b"zero")
    facts = (folder / "zero").stat()
    assert (
        listing.modes[number], listing.sizes[number], listing.mtimes[number],
        listing.ctimes[number], listing.inodes[number], listing.owners[number],
        listing.groups[number],
    ) == (
        stat.S_IMODE(facts.st_mode), 0, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino,
        facts.st_uid, facts.st_gid,
    )  # fmt: skip
    number = row(listing, b"link")
    assert (kinds[b"link"], listing.targets[number]) == (Kind.LINK, b"a/nowhere")


def test_who_may_enter_a_folder_is_part_of_its_version(folder: Path) -> None:
    """An access control list may leave its mode and its mtime as they were."""
    before = walk(str(folder))
    time.sleep(0.02)  # a tick of the clock for timestamps
    (folder / "a/b").chmod(stat.S_IMODE((folder / "a/b").stat().st_mode))
    now = walk(str(folder))
    assert (now.modes, now.mtimes) == (before.modes, before.mtimes)
    assert now.digest() != before.digest()


def test_the_second_path_of_a_file_is_a_hard_link(folder: Path) -> None:
    listing = walk(str(folder))
    first, second = row(listing, b"a/b/second"), row(listing, b"a/file")
    assert (listing.kinds[first], listing.kinds[second]) == (Kind.FILE, Kind.HARD_LINK)
    assert listing.targets[second] == b"a/b/second"
    assert listing.files == 2 + len(WEIRD)


def test_a_file_with_a_hard_link_outside_the_folder_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"x")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/file").hardlink_to(tmp_path / "elsewhere")
    assert bytes(walk(f"{tmp_path}/in").kinds) == bytes([Kind.FOLDER, Kind.FILE])


def test_many_threads_find_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(100):
        (folder / f"{number}/{number}").mkdir(parents=True)
    alone = walk(str(folder))
    monkeypatch.setattr(module, "_SLOW", 0.0)
    assert walk(str(folder)) == alone


@pytest.mark.root
def test_a_process_that_may_start_no_threads_goes_on_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_SLOW", 0.0)

    def list_alone() -> int:
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        return len(walk(str(home)))

    with ordinary_home() as home:
        for number in range(100):
            (home / f"{number}").mkdir()
        assert as_user(USER, list_alone) == 101


def test_a_folder_of_subfolders_in_memory_is_left_to_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Subfolders are entries as well: each takes half of what an entry of slow storage takes."""
    for number in range(50):
        (tmp_path / f"{number}").mkdir()
    monkeypatch.setattr(time, "monotonic", lambda: counted() * module._SLOW / 2)
    monkeypatch.setattr(ThreadPoolExecutor, "__init__", None)
    assert len(walk(str(tmp_path))) == 51


def test_the_data_of_a_file_with_holes_is_found_on_demand(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"x")
        file.truncate(4 << 20)
    number = 1
    assert walk(str(tmp_path)).extents == {number: (Extent(1 << 20, 4096),)}
    assert walk(str(tmp_path), holes=False).extents == {}


def test_a_folder_deeper_than_the_stack_is_listed_and_removed(tmp_path: Path) -> None:
    folder = f"{tmp_path}/deep"
    for _ in range(1200):
        os.mkdir(folder)
        folder += "/d"
    assert len(walk(f"{tmp_path}/deep")) == 1200
    remove_tree(f"{tmp_path}/deep")  # which pytest could not
    assert not (tmp_path / "deep").exists()


def test_an_entry_that_cannot_be_staged_is_named(folder: Path) -> None:
    os.mkfifo(folder / "a/pipe")
    with pytest.raises(SourceError) as caught:
        walk(str(folder))
    assert str(caught.value) == (
        f"{folder}/a/pipe is a named pipe, which cannot be staged; leave it out with exclude="
    )
    (folder / "a/pipe").unlink()
    with socket.socket(socket.AF_UNIX) as unix:
        os.chdir(folder)
        unix.bind("socket")
    with pytest.raises(SourceError) as caught:
        walk(str(folder))
    assert str(caught.value) == (
        f"{folder}/socket is a socket, which cannot be staged; leave it out with exclude="
    )


def _swap_for_a_link(path: Path) -> None:
    path.rename(f"{path}2")
    path.symlink_to("../private")


def _swap_for_a_file(path: Path) -> None:
    path.rename(f"{path}2")
    path.touch()


#: What happens to a subfolder when the folder above was listed, and how a message names it then.
SWAPS: dict[str, tuple[Callable[[Path], object], str]] = {
    "removed": (shutil.rmtree, "removed"),
    "a link": (_swap_for_a_link, "replaced"),
    "a file": (_swap_for_a_file, "replaced"),
}


@pytest.mark.parametrize(("swap", "what"), SWAPS.values(), ids=SWAPS)
def test_a_folder_that_is_swapped_meanwhile_is_not_entered(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    swap: Callable[[Path], object],
    what: str,
) -> None:
    (tmp_path / "source/a").mkdir(parents=True)
    (tmp_path / "private").mkdir()
    (tmp_path / "private/secret").touch()
    looked: list[bytes] = []
    look = module._Walker._look

    def look_then_swap(walker: module._Walker, path: bytes) -> module._Found:
        found = look(walker, path)
        if not looked:
            swap(tmp_path / "source/a")
        looked.append(path)
        return found

    monkeypatch.setattr(module._Walker, "_look", look_then_swap)
    with pytest.raises(IntegrityError) as caught:
        walk(f"{tmp_path}/source")
    assert looked == [b""]
    assert str(caught.value) == (
        f"{tmp_path}/source/a was {what} while its folder was listed; submit again when nothing "
        "changes the folder"
    )


def test_a_folder_is_listed_as_the_one_that_was_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody puts another folder in its place, whose files are protected by its own mode only."""
    (tmp_path / "a").mkdir(mode=0o755)
    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "closed/secret").touch()
    look = module._Walker._look

    def look_then_swap(walker: module._Walker, path: bytes) -> module._Found:
        found = look(walker, path)
        if not path:
            (tmp_path / "a").rename(tmp_path / "b")
            (tmp_path / "closed").rename(tmp_path / "a")
        return found

    monkeypatch.setattr(module._Walker, "_look", look_then_swap)
    listing = walk(str(tmp_path), patterns=Patterns((), ("closed",)))
    assert listing.paths == [b"", b"a", b"a/secret"]
    assert listing.modes[row(listing, b"a")] == 0o700


def test_the_folder_itself_must_be_the_one_that_was_looked_at(tmp_path: Path) -> None:
    for name in ("source", "private"):
        (tmp_path / name).mkdir()
    facts = (tmp_path / "source").stat()
    (tmp_path / "source").rmdir()
    (tmp_path / "source").symlink_to("private")
    with pytest.raises(IntegrityError) as caught:
        walk(f"{tmp_path}/source", facts)
    assert str(caught.value) == (
        f"{tmp_path}/source was replaced while its folder was listed; submit again when nothing "
        "changes the folder"
    )


def test_a_name_of_control_characters_is_printable_in_a_message(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x\nstage: all is well\x1b[2J")
    with pytest.raises(SourceError) as caught:
        walk(str(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path}/x?stage: all is well?[2J is a named pipe, which cannot be staged; leave it "
        "out with exclude="
    )


@pytest.mark.parametrize(
    ("include", "exclude", "found"),
    [
        ((), ("*.pyc",), "a a/b a/b/x.py a/x.py c c/d c/d/second empty link top"),
        ((), ("a/",), "c c/d c/d/second c/d/x.pyc empty link top"),
        (
            (),
            ("/x.py", "/top", "/empty/"),
            "a a/b a/b/x.py a/b/x.pyc a/x.py c c/d c/d/second c/d/x.pyc link",
        ),
        (("*.py",), (), "a a/b a/b/x.py a/x.py"),
        (("*.py",), ("b",), "a a/x.py"),
        (("/c/",), ("*.pyc",), "c c/d c/d/second"),
        (("second", "empty/"), (), "c c/d c/d/second empty"),
        (("link",), (), "link"),
        (("nothing",), (), ""),
        (("**/d/*",), (), "c c/d c/d/second c/d/x.pyc"),
    ],
)
def test_patterns_select_what_is_listed(
    tmp_path: Path, include: tuple[str, ...], exclude: tuple[str, ...], found: str
) -> None:
    for name in ("a/b", "c/d", "empty"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("a/x.py", "a/b/x.py", "a/b/x.pyc", "c/d/x.pyc", "top"):
        (tmp_path / name).touch()
    (tmp_path / "c/d/second").hardlink_to(tmp_path / "a/x.py")
    (tmp_path / "link").symlink_to("top")
    listing = walk(str(tmp_path), patterns=Patterns(include, exclude))
    assert listing.paths == [os.fsencode(path) for path in ["", *found.split()]]


def test_if_the_first_path_of_a_file_is_left_out_the_second_is_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    (tmp_path / "c").hardlink_to(tmp_path / "a")
    listing = walk(str(tmp_path), patterns=Patterns((), ("a",)))
    assert bytes(listing.kinds) == bytes([Kind.FOLDER, Kind.FILE, Kind.HARD_LINK])


def test_a_folder_that_is_left_out_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out/pipe")
    os.mkfifo(tmp_path / "pipe")
    assert walk(str(tmp_path), patterns=Patterns((), ("out/", "pipe"))).paths == [b""]


def test_a_link_that_is_followed_is_what_it_leads_to(folder: Path) -> None:
    beside = folder.parent / "beside"
    (beside / "below").mkdir(parents=True)
    (beside / "file").write_bytes(b"data")
    with (beside / "sparse").open("wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"data")
    (beside / "below/link").symlink_to("../file")
    (folder / "link").unlink()
    links: dict[str, str | Path] = {
        "one": "../beside/file", "two": beside / "file", "hole": "../beside/sparse",
        "tree": "../beside", "inner": "a/file",
    }  # fmt: skip
    for name, target in links.items():
        (folder / name).symlink_to(target)
    kept, found = walk(str(folder)), walk(str(folder), follow=True)
    assert not list(found.rows(Kind.LINK))
    copied = folder.parent / "copied"
    subprocess.run(["cp", "-rL", folder, copied], check=True)
    assert found.paths == walk(str(copied)).paths
    assert found.row(row(found, b"a/b")) == kept.row(row(kept, b"a/b"))
    for name in ("one", "two", "tree/file", "tree/below/link"):
        one = found.row(row(found, name.encode()))
        facts = (beside / "file").stat()
        assert (one.kind, one.size, one.mtime_ns, one.ctime_ns, one.inode) == (
            Kind.FILE, 4, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino,
        )  # fmt: skip
        assert one.mode == 0o644
    assert found.row(row(found, b"tree")).mode == 0o755
    assert found.data(row(found, b"hole")) == 4096
    # Two paths of one file lead to a file with two names.
    assert found.targets[row(found, b"inner")] == b"a/b/second"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere", "is a link that cannot be followed (No such file or directory)"),
        ("a/file/x", "is a link that cannot be followed (Not a directory)"),
        ("wrong", "is a link that cannot be followed (Too many levels of symbolic links)"),
    ],
)
def test_a_link_that_cannot_be_followed_is_named_and_may_be_left_out(
    folder: Path, target: str, message: str
) -> None:
    (folder / "link").unlink()
    (folder / "wrong").symlink_to(target)
    with pytest.raises(SourceError) as caught:
        walk(str(folder), follow=True)
    assert str(caught.value) == f"{folder}/wrong {message}; leave it out with exclude="
    assert walk(str(folder), patterns=Patterns((), ("wrong",)), follow=True).has(b"a/file")


@pytest.mark.parametrize(("target", "named"), [(".", "wrong"), ("..", "wrong/source")])
def test_links_that_lead_in_a_circle_are_named(folder: Path, target: str, named: str) -> None:
    (folder / "link").unlink()
    (folder / "wrong").symlink_to(target)
    with pytest.raises(SourceError) as caught:
        walk(str(folder), follow=True)
    assert str(caught.value) == (
        f"{folder}/{named}: links lead in a circle here; leave it out with exclude="
    )
    assert walk(str(folder), patterns=Patterns((), ("wrong",)), follow=True).has(b"a/file")
