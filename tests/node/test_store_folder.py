"""Root makes the folder of the store, on the node's own disk and where nobody else could."""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stager.node.folders import UnsafeError, make_store
from stager.node.prolog import prepare
from tests.support.disks import owners, tmpfs
from tests.support.users import USER, as_user, on_tmpfs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.root
#: A user that every system knows.
KNOWN = 65534
#: What `make_store` makes.
ROOTS = (0, 0, "drwxr-xr-x")


@pytest.fixture
def disk() -> Iterator[Path]:
    """A node's disk, to which all users may write."""
    with tmpfs() as folder:
        folder.parent.chmod(0o755)
        yield folder


@pytest.mark.parametrize("mask", [0o000, 0o777], ids=oct)
def test_all_that_is_missing_is_roots_under_any_mask(disk: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        for _ in range(2):
            make_store(f"{disk}/a/b")
            assert owners(disk) == {"a": ROOTS, "a/b": ROOTS}
    finally:
        os.umask(before)


def test_a_store_may_be_the_disk_itself_or_a_link_of_roots(disk: Path) -> None:
    make_store(str(disk))
    (disk / "closed").mkdir()
    (disk / "closed/link").symlink_to("../closed/./other")
    (disk / "closed/other").symlink_to(disk / "closed")
    make_store(f"{disk}/closed/link/store")
    assert owners(disk)["closed/store"] == ROOTS


def test_nothing_is_made_on_the_filesystem_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        make_store(f"{tmp_path}/store")
    assert [*tmp_path.iterdir()] == []


def test_links_that_lead_in_a_circle_are_refused(disk: Path) -> None:
    disk.chmod(0o755)
    (disk / "one").symlink_to("two")
    (disk / "two").symlink_to("one")
    with pytest.raises(UnsafeError, match="too many symbolic links"):
        make_store(f"{disk}/one/store")


def _own_folder(disk: Path) -> None:
    (disk / "a").mkdir()


def _own_open_folder(disk: Path) -> None:
    (disk / "a").mkdir()
    (disk / "a").chmod(0o1777)


def _own_inner_folder(disk: Path) -> None:
    (disk / "a").mkdir()
    (disk / "a/b").mkdir()


def _link(disk: Path) -> None:
    (disk / "a").symlink_to(disk / "roots")


def _relative_link(disk: Path) -> None:
    (disk / "a").symlink_to("roots")


def _link_to_system(disk: Path) -> None:
    (disk / "a").symlink_to("/etc")


def _file(disk: Path) -> None:
    (disk / "a").touch()


def _fifo(disk: Path) -> None:
    os.mkfifo(disk / "a")


@pytest.mark.parametrize(
    "squat",
    [
        _own_folder, _own_open_folder, _own_inner_folder, _link, _relative_link, _link_to_system,
        _file, _fifo,
    ],
)  # fmt: skip
def test_a_name_that_a_user_took_first_is_refused(
    disk: Path, squat: Callable[[Path], object]
) -> None:
    (disk / "roots").mkdir()
    as_user(USER, lambda: squat(disk))
    before = owners(disk)
    with pytest.raises(UnsafeError, match=rf"others than root own .*/a \(uid {USER}, mode"):
        make_store(f"{disk}/a/b")
    assert owners(disk) == before


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757], ids=oct)
def test_a_folder_of_roots_where_others_could_replace_the_store_is_refused(
    disk: Path, mode: int
) -> None:
    (disk / "a").mkdir()
    (disk / "a").chmod(mode)
    with pytest.raises(UnsafeError, match=f"mode {mode:04o}"):
        make_store(f"{disk}/a/b")
    assert owners(disk / "a") == {}


def test_a_link_of_roots_is_refused_where_a_user_may_have_renamed_it(disk: Path) -> None:
    """Without fs.protected_hardlinks, users can give a second name to a link of root's."""
    (disk / "closed").mkdir()
    (disk / "closed/link").symlink_to("/etc")
    os.link(disk / "closed/link", disk / "a", follow_symlinks=False)
    with pytest.raises(UnsafeError, match=r"others than root own .*, or can replace"):
        make_store(f"{disk}/a/b")
    assert not Path("/etc/b").exists()


def test_what_a_user_mounted_there_is_not_asked_for_anything(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_store(f"{disk}/a")
    numbers: list[int] = []

    def is_strange(descriptor: int) -> int:
        numbers.append(os.fstat(descriptor).st_ino)
        return USER * (numbers[-1] == (disk / "a").stat().st_ino)

    monkeypatch.setattr("stager.node.folders.mounted_by_stranger", is_strange)
    with pytest.raises(UnsafeError, match=f"uid {USER} mounted a filesystem at .*/a; unmount it"):
        make_store(f"{disk}/a/b")
    assert owners(disk) == {"a": ROOTS}


def test_root_is_led_nowhere_by_a_user_who_changes_names_meanwhile(disk: Path) -> None:
    (disk / "roots").mkdir()
    loop = "ln -s roots a; rm a; mkdir a; mv a b; ln -s roots a; mv -T b a; rm -rf a b"
    command = [
        "setpriv",
        f"--reuid={USER}",
        "--clear-groups",
        "sh",
        "-c",
        f"while :; do {loop}; done",
    ]
    with subprocess.Popen(command, cwd=disk, stderr=subprocess.DEVNULL) as user:
        try:
            for _ in range(300):
                with suppress(UnsafeError, OSError):
                    make_store(f"{disk}/a/b")
                    break  # root was first
        finally:
            user.kill()
    found = owners(disk)
    assert "roots/b" not in found
    assert found.get("a/b", ROOTS) == ROOTS


# Root's part as a whole


def prepared(disk: Path, store: str, uid: int | None = KNOWN) -> tuple[int, list[str], list[str]]:
    """Return the code and the complaints of `prepare`, and the paths that its note names."""
    (disk / "jobs").mkdir(exist_ok=True)
    config = disk.parent / "stage.toml"
    config.write_text(f'roots = ["{disk}/jobs/%j"]\n[cache]\nstore = "{store}"\n')

    def act() -> tuple[int, list[str], list[str]]:
        complaints: list[str] = []
        code = prepare(str(config), uid, complaints.append)
        note = Path(f"/run/slurm-stage/{KNOWN}.prepared")
        return code, complaints, note.read_text().split("\n")[1:-1] if note.exists() else []

    return on_tmpfs(Path("/run"), "mode=755", act)


def test_a_user_gets_a_folder_in_the_store_and_none_in_that_of_a_job(disk: Path) -> None:
    store = f"{disk}/store"
    assert prepared(disk, store, None) == (0, [], [])
    assert owners(Path(store)) == {".slurm-stage": ROOTS}
    assert prepared(disk, store) == (0, [], [f"{store}/.slurm-stage"])
    assert owners(disk) == {
        "jobs": ROOTS,
        "store": ROOTS,
        "store/.slurm-stage": ROOTS,
        f"store/.slurm-stage/{KNOWN}": (KNOWN, KNOWN, "drwx------"),
    }


def test_a_node_without_the_disk_has_no_store(tmp_path: Path) -> None:
    assert prepared(tmp_path, f"{tmp_path}/absent/store") == (0, [], [])
    assert not (tmp_path / "absent").exists()


def test_a_store_that_a_user_made_first_is_told_in_one_line(disk: Path) -> None:
    as_user(USER, (disk / "store").mkdir)
    code, complaints, noted = prepared(disk, f"{disk}/store")
    assert (code, noted, [*(disk / "store").iterdir()]) == (1, [], [])
    [line] = complaints
    assert re.fullmatch(rf"store {disk}/store: others than root own .*make it root's", line)


@pytest.mark.parametrize("moved", ["store", "store/.slurm-stage", "store/.slurm-stage/65534"])
def test_no_other_user_can_move_or_remove_the_store(disk: Path, moved: str) -> None:
    prepared(disk, f"{disk}/store")

    def attack() -> list[int]:
        path = f"{disk}/{moved}"
        tries = (
            ["mv", path, f"{disk}/mine"],
            ["rm", "-r", path],
            ["ln", "-s", "/etc", f"{path}/x"],
        )
        return [subprocess.run(one, capture_output=True, check=False).returncode for one in tries]

    before = owners(disk)
    assert 0 not in as_user(USER, attack)
    assert owners(disk) == before


def test_a_root_that_is_the_store_too_is_the_sites_to_make(disk: Path) -> None:
    """Another account's may be, as it may without a store."""
    root = disk / "root"
    root.mkdir()
    os.chown(root, USER, USER)
    config = disk.parent / "stage.toml"
    config.write_text(f'roots = ["{root}"]\n[cache]\nstore = "{root}"\n')
    complaints: list[str] = []
    code = on_tmpfs(
        Path("/run"), "mode=755", lambda: prepare(str(config), KNOWN, complaints.append)
    )
    assert (code, complaints) == (0, [])
    assert owners(root)[f".slurm-stage/{KNOWN}"][0] == KNOWN
