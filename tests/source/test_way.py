"""What some users cannot read at its source does not become a copy for all."""

from __future__ import annotations

import os
import struct
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from stager.base import mounts
from stager.base.errors import SourceError
from stager.source.posix import PosixFile, closed_by, look_at_source

if TYPE_CHECKING:
    from pathlib import Path


def set_acl(path: Path, name: str = "access") -> None:
    """Set an access control list that denies a user all that others may do."""
    nobody = 0xFFFFFFFF
    entries = [(1, 7, nobody), (2, 0, 4711), (4, 5, nobody), (16, 5, nobody), (32, 5, nobody)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(path, f"system.posix_acl_{name}", acl)


def closing_place(path: Path) -> str:
    with path.open("rb") as file:
        return closed_by(file.fileno())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that everybody may read, in a folder that everybody may enter."""
    (tmp_path / "above/inner").mkdir(parents=True)
    path = tmp_path / "above/inner/file"
    path.touch()
    path.chmod(0o644)
    return path


def test_a_file_that_all_can_reach_is_open(file: Path) -> None:
    assert closing_place(file) == ""
    for folder in (file.parent, file.parent.parent):
        folder.chmod(0o711)
    assert closing_place(file) == ""
    os.symlink("/", file.parent / "root")
    assert closing_place(file.parent / f"root{file}") == ""


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o600, 0o711], ids=oct)
def test_a_file_that_some_cannot_read_is_closed(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert closing_place(file) == str(file)


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o744], ids=oct)
def test_each_folder_above_closes_what_is_beneath(file: Path, mode: int) -> None:
    for folder in (file.parent, file.parent.parent):
        folder.chmod(mode)
        assert closing_place(file) == str(folder)
        folder.chmod(0o755)


def test_where_the_file_lies_counts_and_not_where_a_link_to_it_lies(
    file: Path, tmp_path: Path
) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "closed/link").symlink_to(file)
    assert closing_place(tmp_path / "closed/link") == ""
    (tmp_path / "closed/file").touch(0o644)
    (tmp_path / "open").symlink_to("closed/file")
    assert closing_place(tmp_path / "open") == str(tmp_path / "closed")


@pytest.mark.root
def test_an_access_control_list_closes_a_file_but_not_the_list_that_new_files_get(
    file: Path,
) -> None:
    set_acl(file.parent, "default")
    assert closing_place(file) == ""
    for place in (file, file.parent, file.parent.parent):
        set_acl(place)
        assert closing_place(file) == str(place)
        os.removexattr(place, "system.posix_acl_access")


def test_a_filesystem_with_rules_of_its_own_closes_a_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands for CIFS, or AFS."""
    with file.open("rb") as opened:
        mount = mounts.mount_of(opened.fileno())
    assert mount
    monkeypatch.setattr(mounts, "_OWN_RULES", frozenset({mount.kind}))
    assert closing_place(file) == str(file)


def test_a_file_that_was_moved_is_closed(file: Path) -> None:
    """A race that the attacker wins: what the kernel says of its path is not true any more."""
    with file.open("rb") as opened:
        file.rename(file.with_name("moved"))
        file.with_name("moved").unlink()
        assert closed_by(opened.fileno()) == f"{file.with_name('moved')} (deleted)"


def test_only_what_is_read_for_all_must_be_open_to_all(file: Path) -> None:
    file.parent.chmod(0o750)
    source = look_at_source(str(file))
    with closing(PosixFile(str(file), source)):
        pass
    with pytest.raises(SourceError) as caught:
        PosixFile(str(file), source, for_all=True)
    assert str(caught.value) == (
        f"{file}: a copy there would be for all users, and {file.parent} is not open to all: chmod "
        "go+rX, or share=all, which opens the copy all the same"
    )
