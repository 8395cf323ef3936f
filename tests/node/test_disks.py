"""The facts of a disk are those of the filesystem, and a look at it leaves nothing there."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stager.node.probes import Disk, disk_of
from tests.support.disks import ext4, xfs
from tests.support.users import as_ordinary_user, ordinary_home

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.disks import Disk as Mounted


def test_the_facts_are_those_of_the_filesystem(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    found = disk_of(str(tmp_path))
    kind = subprocess.check_output(["stat", "-f", "-c%T", "/proc"], text=True).strip()
    proc = disk_of("/proc")
    assert found
    assert proc
    assert proc.kind == kind == "proc"
    assert (found.path, found.fault) == (str(tmp_path), "")
    assert (found.size, found.files) == (room.f_blocks * room.f_frsize, room.f_files)
    assert 0 < found.free <= found.size
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
@pytest.mark.parametrize(("mount", "clones"), [(xfs, True), (ext4, False)], ids=["XFS", "ext4"])
def test_files_share_their_bytes_where_the_filesystem_can(
    mount: Callable[[], Mounted], clones: bool
) -> None:
    with mount() as disk:
        found = disk_of(str(disk))
    assert found
    assert found.clones == clones


def test_a_filesystem_that_makes_no_files_without_a_name_is_told() -> None:
    found = disk_of("/proc")
    assert found
    assert (found.unnamed, found.fault, found.clones) == (False, "", False)


def test_a_folder_that_is_not_there_has_no_facts(tmp_path: Path) -> None:
    assert disk_of(f"{tmp_path}/absent") is None


@pytest.mark.root
def test_a_folder_that_cannot_be_written_is_told() -> None:
    with ordinary_home() as home:
        (home / "closed").mkdir()
        (home / "closed").chmod(0o555)
        found = as_ordinary_user(lambda: disk_of(f"{home}/closed"))
    assert isinstance(found, Disk)
    assert found == replace(found, fault="Permission denied", direct=True)
