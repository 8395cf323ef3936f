"""A copy is never open to more users than the way to its source."""

from __future__ import annotations

import os
import struct
from itertools import product
from typing import TYPE_CHECKING

import pytest

from stager.base.options import Share
from stager.disk.permissions import beneath_mode
from stager.source.permitted import permitted
from stager.source.posix import look_at_source
from stager.source.way import is_mode_alone, reach
from stager.tree.walk import walk

if TYPE_CHECKING:
    from pathlib import Path

OTHER = 4711


def set_acl(path: Path, name: str = "access") -> None:
    """Set an access control list that denies a user all that others may do."""
    nobody = 0xFFFFFFFF
    entries = [(1, 7, nobody), (2, 0, OTHER), (4, 5, nobody), (16, 5, nobody), (32, 5, nobody)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(path, f"system.posix_acl_{name}", acl)


def mode_of(path: Path) -> tuple[int, str]:
    source = look_at_source(str(path))
    return source.mode, source.closed_by


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that everybody may read, in a folder that everybody may enter."""
    (tmp_path / "above").mkdir()
    path = tmp_path / "above/file"
    path.touch()
    path.chmod(0o754)
    return path


def test_nothing_is_lost_where_everybody_may_pass(file: Path) -> None:
    assert mode_of(file) == (0o754, "")
    assert mode_of(file.parent) == (0o755, "")


@pytest.mark.parametrize(
    ("above", "left"), [(0o700, 0o700), (0o750, 0o750), (0o711, 0o754), (0o705, 0o704)], ids=oct
)
def test_a_closed_folder_closes_the_copy_to_those_whom_it_keeps_out(
    file: Path, above: int, left: int
) -> None:
    file.parent.chmod(above)
    assert mode_of(file) == (left, "" if left == 0o754 else str(file.parent))


def test_a_right_that_the_source_does_not_give_is_not_lost(file: Path) -> None:
    file.chmod(0o600)
    file.parent.chmod(0o700)
    assert mode_of(file) == (0o600, "")


@pytest.mark.root
@pytest.mark.parametrize(
    ("above", "left"), [(0o750, 0o700), (0o751, 0o754), (0o701, 0o700), (0o705, 0o700)], ids=oct
)
def test_the_members_of_another_group_may_be_anybody(file: Path, above: int, left: int) -> None:
    os.chown(file.parent, -1, OTHER)
    file.parent.chmod(above)
    assert mode_of(file)[0] == left


def test_who_passes_is_who_could_pass_whatever_their_groups_are() -> None:
    """Try each user, as the kernel does: a member of a group has the rights of the group alone."""

    def rights(mode: int, *, member: bool) -> int:
        return (mode >> 3 if member else mode) & 0o7

    for mode, folder, same in product(range(0o100), range(0o100), (True, False)):
        left = beneath_mode(mode, 1, folder, 1 if same else 2)
        assert left & ~mode == 0
        for in_group, in_folders in product((True, False), repeat=2):
            if same and in_group != in_folders:
                continue
            passes = rights(folder, member=in_folders) & 1
            had = rights(mode, member=in_group) if passes else 0
            assert rights(left, member=in_group) & ~had == 0


def test_the_folders_of_the_real_path_count_and_not_those_of_a_link(
    file: Path, tmp_path: Path
) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "closed/link").symlink_to(file)
    (tmp_path / "closed/folder").symlink_to(file.parent)
    for path in ("link", "folder/file"):
        assert mode_of(tmp_path / "closed" / path) == (0o754, "")
    (tmp_path / "closed/file").touch()
    (tmp_path / "open").symlink_to("closed")
    (tmp_path / "link").symlink_to("open/file")
    assert mode_of(tmp_path / "link") == (0o600, str(tmp_path / "closed"))


def test_each_folder_above_counts(tmp_path: Path) -> None:
    deep = tmp_path / "a/b/c"
    deep.mkdir(parents=True)
    for folder in (tmp_path / "a", tmp_path / "a/b"):
        folder.chmod(0o700)
        assert mode_of(deep) == (0o700, str(folder))
        folder.chmod(0o755)


def test_the_root_folder_has_none_above() -> None:
    descriptor = os.open("/", os.O_PATH)
    assert reach(descriptor) == (os.stat("/").st_mode & 0o7777, "")
    os.close(descriptor)


@pytest.mark.root
def test_an_access_control_list_closes_the_copy_to_all_but_its_owner(file: Path) -> None:
    for place in (file, file.parent, file.parent.parent):
        before = place.stat().st_mode & 0o7777
        set_acl(place)
        assert mode_of(file) == (0o700, str(place))
        os.removexattr(place, "system.posix_acl_access")
        place.chmod(before)
    assert mode_of(file) == (0o754, "")


@pytest.mark.root
def test_the_list_that_new_files_get_says_nothing_of_a_folder(file: Path) -> None:
    set_acl(file.parent, "default")
    assert mode_of(file) == (0o754, "")
    assert mode_of(file.parent) == (0o755, "")


def test_a_file_that_was_moved_is_for_its_owner_alone(file: Path) -> None:
    """A race that the attacker wins: what the kernel says of its path is not true any more."""
    descriptor = os.open(file, os.O_PATH)
    file.unlink()
    assert reach(descriptor) == (0o700, f"{file} (deleted)")
    os.close(descriptor)


def ace(who: bytes, length: int | None = None) -> bytes:
    """An entry of a list of NFS version 4, as it travels."""
    size = len(who) if length is None else length
    return struct.pack(">IIII", 0, 0, 0x1601A9, size) + who.ljust(-(-len(who) // 4) * 4, b"\0")


@pytest.mark.parametrize(
    ("entries", "alone"),
    [
        ([ace(b"OWNER@"), ace(b"GROUP@"), ace(b"EVERYONE@")], True),
        ([], True),
        ([ace(b"OWNER@"), ace(b"carol@example.org"), ace(b"EVERYONE@")], False),
        ([ace(b"GROUP@", 4711)], False),
        ([b"\0"], False),
    ],
)
def test_a_list_of_nfs_that_says_what_the_mode_says_closes_nothing(
    entries: list[bytes], *, alone: bool
) -> None:
    acl = struct.pack(">I", len(entries)) + b"".join(entries)
    assert is_mode_alone(acl) is alone
    assert not is_mode_alone(acl + b"more")
    assert not is_mode_alone(struct.pack(">I", 0xFFFFFFFF) + acl[4:])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files and folders of several modes; one of each has a list."""
    for name, mode in {"a": 0o755, "b": 0o700, "lists": 0o755}.items():
        (tmp_path / "set" / name).mkdir(parents=True)
        for number, file_mode in enumerate((0o644, 0o600, 0o755)):
            path = tmp_path / f"set/{name}/{number}"
            path.touch()
            path.chmod(file_mode)
        (tmp_path / "set" / name).chmod(mode)
    set_acl(tmp_path / "set/lists")
    set_acl(tmp_path / "set/a/0")
    return tmp_path / "set"


@pytest.mark.root
@pytest.mark.parametrize("many", [True, False], ids=["many threads", "one"])
def test_what_has_a_list_in_a_folder_is_for_the_owner_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, many: bool
) -> None:
    monkeypatch.setattr("stager.tree.walk._SLOW", 0.0 if many else 1e9)
    monkeypatch.setattr("stager.tree.walk._TRIAL", 1)
    listing = walk(str(folder))
    found = permitted(str(folder), listing, 0o755, Share.SOURCE)
    closed = {b"lists": 0o700, b"a/0": 0o700}
    assert [*found.modes] == [
        closed.get(path, mode) for path, mode in zip(listing.paths, listing.modes, strict=True)
    ]
    # If nobody else may enter it, it does not matter what is in it.
    assert [*permitted(str(folder), listing, 0o700, Share.SOURCE).modes][1:] == [*listing.modes][1:]


@pytest.mark.root
def test_a_users_own_word_opens_all_of_a_folder(folder: Path) -> None:
    listing = walk(str(folder))
    everybody = permitted(str(folder), listing, 0o755, Share.ALL)
    assert [oct(mode) for mode in everybody.modes] == [
        "0o755", "0o755", "0o755", "0o644", "0o755", "0o755", "0o644", "0o644", "0o755", "0o755",
        "0o644", "0o644", "0o755",
    ]  # fmt: skip
    group = permitted(str(folder), listing, 0o750, Share.GROUP)
    modes = dict(zip(group.paths, group.modes, strict=True))
    assert (modes[b""], modes[b"b"], modes[b"b/1"]) == (0o750, 0o750, 0o640)
    assert (modes[b"a/0"], modes[b"lists"]) == (0o750, 0o750)
