"""The folders that play the disks of simulated nodes; `test_stage` stages to them."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import UsageError
from stager.launch.targets import make_disk
from tests.support.users import USER, as_user, ordinary_home

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

REMEDY = "choose another --local-root"


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder that every user can reach."""
    with ordinary_home() as folder:
        folder.chmod(0o1777)
        yield folder


def test_the_folders_are_made_for_their_user_alone(tmp_path: Path) -> None:
    make_disk(f"{tmp_path}/new/nodes", "/node1/nvme")
    make_disk(f"{tmp_path}/new/nodes", "/node1/nvme")
    made = [tmp_path / name for name in ("new", "new/nodes", "new/nodes/node1/nvme")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}


def _give_away(path: Path) -> None:
    path.mkdir()
    os.chown(path, USER, USER)


def _open_to_group(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)
    os.chown(path, -1, USER)


def _open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


OTHERS = [
    (_give_away, f"uid {USER} could replace what is in it"),
    (_open_to_group, f"all members of the group gid {USER} could replace what is in it"),
    (_open_to_all, "all users could replace what is in it"),
]


@pytest.mark.root
@pytest.mark.parametrize(
    "name", ["work", "work/nodes", "work/nodes/node1", "work/nodes/node1/nvme"]
)
@pytest.mark.parametrize(("make", "why"), OTHERS, ids=["another's", "a group's", "everybody's"])
def test_nothing_is_made_where_others_could_replace_it(
    tmp_path: Path, name: str, make: Callable[[Path], None], why: str
) -> None:
    place = tmp_path / name
    place.parent.mkdir(parents=True, exist_ok=True)
    make(place)
    with pytest.raises(UsageError) as caught:
        make_disk(f"{tmp_path}/work/nodes", "/node1/nvme")
    assert str(caught.value) == f"{place}: {why}; {REMEDY}"
    assert not any(place.iterdir())


@pytest.mark.root
def test_a_user_may_work_in_a_folder_of_a_groups(root: Path) -> None:
    place = root / "project"
    place.mkdir()
    place.chmod(0o2770)
    os.chown(place, USER, USER + 1)
    as_user(USER, lambda: make_disk(f"{place}/nodes", "/node1/nvme"))
    assert stat.S_IMODE((place / "nodes/node1/nvme").stat().st_mode) & 0o777 == 0o700


@pytest.mark.parametrize("name", ["nodes", "nodes/node1", "nodes/node1/nvme"])
def test_no_link_beneath_the_current_folder_is_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError) as caught:
        make_disk(f"{tmp_path}/nodes", "/node1/nvme")
    assert str(caught.value) == f"{link} is a symbolic link, which is not followed; {REMEDY}"
    assert not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.root
def test_a_link_above_the_local_root_is_followed_unless_it_is_another_users(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    make_disk(f"{tmp_path}/link/nodes", "/node1/nvme")
    assert (tmp_path / "disk/nodes/node1/nvme").is_dir()
    os.chown(tmp_path / "link", USER, USER, follow_symlinks=False)
    with pytest.raises(UsageError) as caught:
        make_disk(f"{tmp_path}/link/nodes", "/node1/nvme")
    assert str(caught.value) == f"{tmp_path}/link: uid {USER} could replace what is in it; {REMEDY}"


@pytest.mark.root
def test_a_sticky_folder_and_a_users_own_group_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "sticky").mkdir()
    (tmp_path / "sticky").chmod(0o1777)
    make_disk(f"{tmp_path}/sticky/nodes", "/node1/nvme")
    own = grp.getgrnam(pwd.getpwuid(os.getuid()).pw_name)
    (tmp_path / "own").mkdir()
    os.chown(tmp_path / "own", -1, own.gr_gid)
    (tmp_path / "own").chmod(0o775)
    make_disk(f"{tmp_path}/own/nodes", "/node1/nvme")
