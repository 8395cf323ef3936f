"""The tasks of a job wait for the exit code of its stage and find what was staged before."""

from __future__ import annotations

import fcntl
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import LaunchError, SpaceError
from stager.node.job_state import StepStatus, wait_for_code
from tests.support.disks import fill_up, modes_beneath
from tests.support.users import on_tmpfs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def status_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's folder of status files; not in /run, where a test cluster may be running."""
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(tmp_path))
    folder = tmp_path / str(os.getuid())
    folder.mkdir()
    return folder


def _is_held(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_tasks_wait_while_the_status_is_held_and_read_it_then(status_folder: Path) -> None:
    path = status_folder / "17.0.4"
    status = StepStatus(os.getuid())
    status.hold("17.0", "4")
    before = (_is_held(path), path.read_bytes())
    status.write(0)
    written = (_is_held(path), path.read_bytes())
    status.close()
    after = (_is_held(path), path.read_bytes())
    assert before == (True, b"\n")
    assert written == (True, b"0\n\n")
    assert after == (False, b"0\n\n")


LATIN = os.fsdecode(bytes([0xE9]))


def test_the_variables_follow_the_code_and_the_place(status_folder: Path) -> None:
    for step, code in (("4", 0), ("5", 7)):
        status = StepStatus(os.getuid())
        status.hold("17.0", step)
        status.write(code, "/nvme/a", {"STAGE_w": f"/nvme/{LATIN} b", "STAGE_SHARDS": "/c:/d"})
        status.close()
    assert (status_folder / "17.0.4").read_bytes() == (
        b"0\n/nvme/a\nexport STAGE_w=/nvme/\xe9 b\nexport STAGE_SHARDS=/c:/d\n"
    )
    assert (status_folder / "17.0.5").read_text() == "7\n"


def test_the_status_of_jobs_that_must_have_ended_is_removed(status_folder: Path) -> None:
    for name, days in (("1.0", 31), ("1.0.0", 31), ("2.0", 29)):
        (status_folder / name).write_text("0\n")
        then = time.time() - days * 24 * 3600
        os.utime(status_folder / name, (then, then))
    status = StepStatus(os.getuid())
    status.hold("17.0", "4")
    status.close()
    assert sorted(path.name for path in status_folder.iterdir()) == ["17.0.4", "2.0"]


def test_an_older_status_of_the_same_name_is_erased(status_folder: Path) -> None:
    (status_folder / "17.0.4").write_text("6\nan older and longer text\n")
    status = StepStatus(os.getuid())
    status.hold("17.0", "4")
    status.close()
    assert (status_folder / "17.0.4").read_bytes() == b"\n"


def test_a_path_that_is_not_utf8_is_written_byte_for_byte(status_folder: Path) -> None:
    status = StepStatus(os.getuid())
    status.hold("17.0", "4")
    status.write(0, f"/nvme/{LATIN}")
    status.close()
    assert (status_folder / "17.0.4").read_bytes() == b"0\n/nvme/\xe9\n"


def test_only_its_owner_may_read_a_status(status_folder: Path) -> None:
    status = StepStatus(os.getuid())
    status.hold("17.0", "4")
    status.write(0)
    status.close()
    assert modes_beneath(status_folder) == {"17.0.4": "-rw-------"}


def test_a_status_that_was_never_held_can_be_closed() -> None:
    StepStatus(os.getuid()).close()


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (
            lambda path: path.parent.rmdir(),
            (
                "No such file or directory; slurm-stage could not make this folder; tell the "
                "administrator (slurmd's log there says why)"
            ),
        ),
        (
            lambda path: path.symlink_to("elsewhere"),
            "Too many levels of symbolic links; tell the administrator to check this folder",
        ),
        (
            lambda path: path.mkdir(),
            "Is a directory; tell the administrator to check this folder",
        ),
    ],
    ids=["no folder", "a symlink", "a folder"],
)
def test_a_status_that_cannot_be_held_is_a_launch_error(
    status_folder: Path, spoil: Callable[[Path], None], problem: str
) -> None:
    path = status_folder / "17.0.4"
    spoil(path)
    with pytest.raises(LaunchError) as caught:
        StepStatus(os.getuid()).hold("17.0", "4")
    assert str(caught.value) == f"{path}: {problem}"


@pytest.mark.root
def test_a_full_room_is_named_and_then_a_failure_is_told(status_folder: Path) -> None:
    def act() -> tuple[str, int, str]:
        (status_folder.parent / str(os.getuid())).mkdir()
        status = StepStatus(os.getuid())
        status.hold("17.0", "4")
        fill_up(status_folder.parent)
        with pytest.raises(SpaceError) as caught:
            status.write(0, "", {"STAGE_SHARDS": "/a" * 4000})
        assert not (status_folder / "17.0.4").read_text().startswith("0")
        status.write(5)
        return str(caught.value), caught.value.code, (status_folder / "17.0.4").read_text()

    run_folder = status_folder.parent
    message = (
        f"{run_folder}/{os.getuid()}/17.0.4: your folder {run_folder}/{os.getuid()} is full, "
        "which holds what your jobs stage; delete the files that you put there, and submit again"
    )
    assert on_tmpfs(run_folder, "size=64k", act) == (message, 5, "5\n")


@pytest.mark.parametrize("patience", [0, 0.2])
def test_a_process_waits_for_the_code_as_tasks_do(status_folder: Path, patience: float) -> None:
    status = StepStatus(os.getuid())
    status.hold("17.0", "4")
    with ThreadPoolExecutor() as pool:
        # Longer than it may wait for a rank: this one works.
        waiting = pool.submit(wait_for_code, os.getuid(), ["16.0", "17.0"], "4", patience)
        time.sleep(0.4)
        assert not waiting.done()
        status.write(0, "/nvme/a")
        status.close()
        assert waiting.result(timeout=10) == (0, "/nvme/a")


@pytest.mark.parametrize("left", [None, "\n", "text\n"], ids=["no file", "no code", "no number"])
def test_without_a_rank_the_wait_ends(status_folder: Path, left: str | None) -> None:
    if left is not None:
        (status_folder / "17.0.4").write_text(left)
    for patience in (0, 0.2):
        assert wait_for_code(os.getuid(), ["17.0"], "4", patience) is None
