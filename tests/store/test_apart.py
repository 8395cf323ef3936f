"""Whether source and destination are or contain each other by other names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stager.base.errors import DestinationError
from stager.store.validity import check_apart

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A disk with a folder, a file in it, and other names of both."""
    disk = tmp_path / "disk"
    (disk / "set/deep").mkdir(parents=True)
    (disk / "set/own").write_bytes(b"mine")
    (disk / "hard").hardlink_to(disk / "set/own")
    (tmp_path / "link").symlink_to(disk / "set")
    (tmp_path / "to_own").symlink_to(disk / "set/own")
    return disk


@pytest.mark.parametrize(
    ("source", "destination", "relation"),
    [
        ("disk/set/../set/own", "set/own", "is the source itself"),
        ("link/own", "set/own", "is the source itself"),
        ("to_own", "set/own", "is the source itself"),
        ("to_own", "hard", "is the source itself"),
        ("link", "set", "is the source itself"),
        ("link", "set/copy", "is in the source, {}/set"),
        ("link", "set/new/folders/copy", "is in the source, {}/set"),
        ("link/own", "set", "contains the source, {}/set/own"),
        ("link/deep", "set", "contains the source, {}/set/deep"),
    ],
)
def test_what_is_not_apart_is_refused(
    disk: Path, source: str, destination: str, relation: str
) -> None:
    source = f"{disk.parent}/{source}"
    with pytest.raises(DestinationError) as caught:
        check_apart(source, f"{disk}/{destination}")
    assert str(caught.value) == (
        f"{disk}/{destination} {relation.format(disk)}, to which {source} leads; choose another "
        "destination"
    )


def test_a_source_by_its_own_name_is_named_once(disk: Path) -> None:
    with pytest.raises(DestinationError) as caught:
        check_apart(f"{disk}/set", f"{disk}/set/copy")
    assert str(caught.value) == (
        f"{disk}/set/copy is in the source, {disk}/set; choose another destination"
    )


def test_the_root_of_all_files_contains_every_destination(disk: Path) -> None:
    with pytest.raises(DestinationError, match="/copy is in the source, /, to which /proc/self/"):
        check_apart("/proc/self/root", f"{disk}/copy")


def test_what_is_apart_is_accepted(disk: Path) -> None:
    (disk / "current").write_bytes(b"mine")
    (disk / "to_own").symlink_to("set/own")  # this link would be replaced, not what it leads to
    for name in ("current", "to_own", "new", "other/new"):
        check_apart(f"{disk.parent}/link/own", f"{disk}/{name}")
    check_apart(f"{disk}/gone", f"{disk}/set/own")
