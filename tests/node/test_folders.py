"""Root makes a folder for each user, and refuses what users put in its way."""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from stager.base import paths
from stager.base.users import users_of
from stager.node.folders import UnsafeError, locked, make_folder
from stager.store.cache import open_cache
from tests.support.disks import owners
from tests.support.users import USER, as_user, forked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GROUP = 47111


@pytest.fixture(autouse=True)
def _run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the locks beneath another folder than the machine's /run."""
    monkeypatch.setattr("stager.base.paths.RUN", str(tmp_path))
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", f"{tmp_path}/{paths.RUN_NAME}")


def made(root: Path) -> dict[str, tuple[int, int, str]]:
    """Make USER's folder, and return what is beneath ``root`` then."""
    make_folder(str(root), ".slurm-stage", USER, GROUP)
    return owners(root)


#: What `make_folder` makes.
WHOLE = {
    ".slurm-stage": (0, 0, "drwxr-xr-x"),
    f".slurm-stage/{USER}": (USER, GROUP, "drwx------"),
}


@pytest.mark.root
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o777], ids=oct)
def test_root_owns_the_parent_and_the_user_the_folder_under_any_mask(root: Path, mask: int) -> None:
    def act() -> dict[str, tuple[int, int, str]]:
        os.umask(mask)
        return made(root)

    assert forked(act) == WHOLE


@pytest.mark.root
def test_a_folder_is_made_once(root: Path) -> None:
    first = made(root)
    (root / f".slurm-stage/{USER}/records").mkdir()
    assert made(root) == {**first, f".slurm-stage/{USER}/records": (0, 0, "drwxr-xr-x")}


@pytest.mark.root
def test_users_have_their_folders_side_by_side(root: Path) -> None:
    make_folder(str(root), ".slurm-stage", USER, GROUP)
    make_folder(str(root), ".slurm-stage", USER + 1, GROUP)
    make_folder(str(root), ".slurm-stage", 0, 0)
    assert owners(root) == {
        **WHOLE,
        f".slurm-stage/{USER + 1}": (USER + 1, GROUP, "drwx------"),
        ".slurm-stage/0": (0, 0, "drwx------"),
    }


@pytest.mark.root
def test_the_user_can_open_what_root_made(root: Path) -> None:
    made(root)
    cache = as_user(USER, lambda: open_cache(str(root), USER))
    assert cache.folder == f"{root}/.slurm-stage/{USER}"


@pytest.mark.root
def test_a_folder_that_root_did_not_finish_is_given_to_its_user(root: Path) -> None:
    (root / f".slurm-stage/{USER}").mkdir(parents=True, mode=0o700)
    assert made(root) == WHOLE


@pytest.mark.root
def test_a_parent_that_root_made_for_itself_alone_is_opened_to_users(root: Path) -> None:
    (root / ".slurm-stage").mkdir(mode=0o700)
    assert made(root) == WHOLE


@pytest.mark.root
def test_a_root_with_an_inherited_group_is_accepted(root: Path) -> None:
    os.chown(root, 0, GROUP)
    root.chmod(0o3777)
    found = made(root)
    assert {name: (uid, mode) for name, (uid, _, mode) in found.items()} == {
        name: (uid, mode) for name, (uid, _, mode) in WHOLE.items()
    }


# What users put in root's way


def refusal(root: Path) -> str:
    """Return the message for a root that users have changed. It stays as it is."""
    before = owners(root)
    with pytest.raises((OSError, UnsafeError)) as caught:
        make_folder(str(root), ".slurm-stage", USER, GROUP)
    assert owners(root) == before
    return str(caught.value)


@pytest.mark.root
@pytest.mark.parametrize("name", [".slurm-stage", f".slurm-stage/{USER}"])
@pytest.mark.parametrize("target", ["victim", "nowhere"])
def test_a_planted_symlink_is_not_followed(root: Path, name: str, target: str) -> None:
    (root / "victim").mkdir(mode=0o700)
    link = root / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(root / target)
    assert refusal(root) == f"[Errno 20] Not a directory: '{link.name}'"


@pytest.mark.root
@pytest.mark.parametrize("name", [".slurm-stage", f".slurm-stage/{USER}"])
def test_a_planted_file_is_refused(root: Path, name: str) -> None:
    path = root / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    assert refusal(root) == f"[Errno 20] Not a directory: '{path.name}'"


def stranger(root: Path, owner: int) -> Path:
    """Make the parent as a user who comes first: with numbers of others, and a folder in use."""
    parent = root / ".slurm-stage"
    for path in (parent, parent / "5001", parent / str(owner), parent / f"{owner}/records"):
        path.mkdir()
        os.chown(path, owner, GROUP)
    return parent


@pytest.mark.root
@pytest.mark.parametrize("owner", [USER, USER + 1])
def test_a_parent_that_a_user_made_first_is_moved_aside(root: Path, owner: int) -> None:
    parent = stranger(root, owner)
    moved = make_folder(str(root), ".slurm-stage", USER, GROUP)
    [aside] = root.glob(".slurm-stage.of-*")
    assert re.fullmatch(rf"\.slurm-stage\.of-{owner}-[0-9a-f]{{8}}", aside.name)
    assert moved == f"{parent} belonged to uid {owner}; it was moved to {aside}"
    assert os.listdir(aside) == ["5001"]
    assert users_of(str(root)) == sorted({USER, owner})
    assert (parent.stat().st_uid, (parent / f"{owner}/records").is_dir()) == (0, True)
    assert make_folder(str(root), ".slurm-stage", USER, GROUP) == ""


@pytest.mark.root
def test_a_parent_with_very_many_names_is_moved_aside_at_once(root: Path) -> None:
    parent = stranger(root, USER)
    for number in range(1001):
        (parent / f"x{number}").mkdir()
    assert make_folder(str(root), ".slurm-stage", USER, GROUP)
    assert parent.stat().st_uid == 0


@pytest.mark.root
def test_who_comes_second_finds_what_root_made_meanwhile(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger(root, USER)

    @contextmanager
    def taken(path: str, limit: float) -> Iterator[int]:
        """Have another process of root's make the folder while this one waits for the lock."""
        monkeypatch.setattr("stager.node.folders.locked", locked)
        assert make_folder(str(root), ".slurm-stage", 5001, GROUP)
        with locked(path, limit) as descriptor:
            yield descriptor

    monkeypatch.setattr("stager.node.folders.locked", taken)
    assert make_folder(str(root), ".slurm-stage", USER + 1, GROUP) == ""
    assert users_of(str(root)) == sorted([5001, USER, USER + 1])


@pytest.mark.root
def test_a_parent_with_folders_of_several_users_that_is_not_roots_is_refused(root: Path) -> None:
    path = stranger(root, USER)
    nobody = pwd.getpwnam("nobody").pw_uid
    (path / str(nobody)).mkdir()
    os.chown(path / str(nobody), nobody, GROUP)
    assert refusal(root) == (
        f"{path} belongs to uid {USER}, not to root; if it has folders of several users, it has "
        f"the records of all copies: chown root {path}; else remove it"
    )


@pytest.mark.root
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777], ids=oct)
def test_a_parent_in_which_others_may_write_is_refused(root: Path, mode: int) -> None:
    (root / ".slurm-stage").mkdir()
    (root / ".slurm-stage").chmod(mode)
    path = f"{root}/.slurm-stage"
    assert refusal(root) == (
        f"{path} can be written to by users other than root; make it root's alone: "
        f"chmod 0755 {path}"
    )


@pytest.mark.root
def test_a_users_folder_that_belongs_to_another_is_refused(root: Path) -> None:
    (root / f".slurm-stage/{USER}").mkdir(parents=True)
    os.chown(root / f".slurm-stage/{USER}", USER + 1, GROUP)
    path = f"{root}/.slurm-stage/{USER}"
    assert refusal(root) == f"{path} does not belong to uid {USER}; remove this folder"


@pytest.mark.root
def test_a_cache_root_may_be_a_link_of_roots_own(root: Path) -> None:
    (root / "disk").mkdir()
    (root / "link").symlink_to("disk")
    make_folder(f"{root}/link", ".slurm-stage", USER, GROUP)
    assert (root / f"disk/.slurm-stage/{USER}").stat().st_uid == USER


@pytest.mark.root
@pytest.mark.parametrize("is_open", [False, True])
def test_a_link_that_a_user_could_have_made_or_can_replace_is_refused(
    root: Path, is_open: bool
) -> None:
    (root / "disk").mkdir()
    (root / "link").symlink_to("disk")
    if is_open:
        root.chmod(0o777)
    else:
        os.lchown(root / "link", USER, GROUP)
    with pytest.raises(NotADirectoryError):
        make_folder(f"{root}/link", ".slurm-stage", USER, GROUP)
    assert [*(root / "disk").iterdir()] == []


# Locks


def test_a_lock_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    path = f"{tmp_path}/lock"

    def is_free() -> bool:
        with open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    with locked(path, 1):
        assert not forked(is_free)
    assert forked(is_free)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_a_lock_that_is_a_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to("elsewhere")
    with (
        pytest.raises(OSError, match="Too many levels of symbolic links"),
        locked(f"{tmp_path}/lock", 1),
    ):
        pass
    assert not (tmp_path / "elsewhere").exists()
