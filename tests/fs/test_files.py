"""Folders are opened without following links; files are read back."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

import pytest
import xxhash

from stager.base.errors import DestinationError
from stager.fs.files import CREATE, as_stage_error, name_of, opened, opened_beneath, read_back
from tests.support.disks import NEW
from tests.support.users import USER, as_user

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


READ_ONLY = "the disk is read-only; use other nodes (--exclude) and tell the administrator"


@pytest.mark.parametrize(
    ("number", "code", "text"),
    [
        (errno.ENOSPC, 5, "the disk is full; free space there (stagectl evict) and try again"),
        (errno.EDQUOT, 5, "the quota is full; free space there (stagectl evict) and try again"),
        (errno.EROFS, 6, READ_ONLY),
        (errno.EIO, 6, "Input/output error"),
    ],
    ids=["full", "quota", "read-only", "failed"],
)
def test_an_error_of_the_disk_becomes_one_of_the_stage(number: int, code: int, text: str) -> None:
    error = OSError(number, os.strerror(number), "/none/file")
    for given, named in (("", "/none/file"), ("/none/copy", "/none/copy")):
        found = as_stage_error(error, given)
        assert (found.code, str(found)) == (code, f"{named}: {text}")
    unnamed = as_stage_error(OSError(number, os.strerror(number)))
    assert str(unnamed) == f"the disk of this node: {text}"


def test_an_opened_file_is_private_and_closed_at_the_end(tmp_path: Path) -> None:
    with opened(str(tmp_path / "file"), CREATE) as descriptor:
        assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o600
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_folder_is_opened_by_each_folder_above_it(disk: Path) -> None:
    (disk / "a/b").mkdir(parents=True)
    with opened_beneath(str(disk), f"{disk}/a//b") as folder:
        assert os.fstat(folder).st_ino == (disk / "a/b").stat().st_ino
    with opened_beneath(str(disk), str(disk)) as folder:
        assert os.fstat(folder).st_ino == disk.stat().st_ino


NO_LINK = "links are not followed: remove it, or write the path that it leads to in the destination"
FOLDER_NEEDED = "a folder is needed there: remove it, or choose another destination"


@pytest.mark.parametrize(
    ("make", "kind", "remedy"),
    [
        (lambda path: path.symlink_to(path.parent), "a symbolic link", NO_LINK),
        (lambda path: path.write_text("in the way"), "a plain file", FOLDER_NEEDED),
        (os.mkfifo, "a named pipe", FOLDER_NEEDED),
    ],
    ids=["a link", "a file", "a pipe"],
)
def test_a_path_through_something_else_than_a_folder_is_refused(
    disk: Path, make: Callable[[Path], object], kind: str, remedy: str
) -> None:
    (disk / "a").mkdir()
    make(disk / "a/b")
    with pytest.raises(DestinationError) as caught, opened_beneath(str(disk), f"{disk}/a/b/c"):
        pass
    assert str(caught.value) == f"{disk}/a/b is {kind}, not a folder; {remedy}"


@pytest.mark.root
@pytest.mark.parametrize(("uid", "name"), [(2, "bin (uid 2)"), (USER, f"uid {USER}")])
def test_whose_file_is_in_the_way_is_told(disk: Path, uid: int, name: str) -> None:
    (disk / "a").write_text("in the way")
    os.chown(disk / "a", uid, uid)
    with pytest.raises(DestinationError) as caught, opened_beneath(str(disk), f"{disk}/a/b"):
        pass
    assert str(caught.value) == (
        f"{disk}/a is a plain file that belongs to {name}, not a folder of yours; choose another "
        "destination"
    )


def test_a_missing_folder_is_file_not_found(disk: Path) -> None:
    with pytest.raises(FileNotFoundError), opened_beneath(str(disk), f"{disk}/a/b"):
        pass


@pytest.mark.root
def test_a_path_through_a_folder_of_another_user_is_refused(disk: Path) -> None:
    (disk / "a/b").mkdir(parents=True)
    os.chown(disk / "a", USER, USER)
    with pytest.raises(DestinationError) as caught, opened_beneath(str(disk), f"{disk}/a/b"):
        pass
    assert str(caught.value) == (
        f"{disk}/a belongs to uid {USER}, who could replace what is staged there; "
        "choose another destination"
    )


@pytest.mark.root
def test_a_folder_that_another_user_has_closed_is_named_with_its_owner(home: Path) -> None:
    (home / "a/b").mkdir(parents=True)
    (home / "a").chmod(0o700)
    denied = PermissionError(errno.EACCES, "Permission denied")

    def message(uid: int) -> str:
        return as_user(uid, lambda: as_stage_error(denied, f"/{home}/a/b/file").message)

    os.chown(home / "a", USER + 1, USER + 1)
    whose = f"/{home}/a belongs to {name_of(USER + 1)}"
    assert message(USER) == f"{whose}, and is closed to you; choose another place"
    for owner in (0, USER):
        os.chown(home / "a", owner, owner)
        assert message(USER) == f"/{home}/a/b/file: Permission denied"


def test_only_a_plain_file_is_read_back(disk: Path) -> None:
    os.mkfifo(disk / "pipe")
    (disk / "link").symlink_to("pipe")
    (disk / "file").write_bytes(NEW)
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match=r"is not a plain file|symbolic links"):
            read_back(f"{disk}/{name}")
    assert read_back(f"{disk}/file") == xxhash.xxh3_128_hexdigest(NEW)
