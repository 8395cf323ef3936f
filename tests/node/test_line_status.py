"""Those who run one line on all nodes take the end of its stage on their node, each run its own."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from stager.node.job_state import hold_line, wait_for_line
from tests.support.disks import fill_up, modes_beneath
from tests.support.users import on_tmpfs

if TYPE_CHECKING:
    from pathlib import Path

UID = os.getuid()


def stage(root: Path, code: int, line: str = "a") -> None:
    """Do what the rank of a stage does here."""
    with hold_line(line, str(root), UID, by_user=True) as tell:
        tell(code)


def waited(root: Path, task: str = "1", line: str = "a", patience: float = 0.3) -> int | None:
    return wait_for_line(line, str(root), UID, task, patience)


def test_the_code_is_waited_for_while_the_stage_works(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(waited, tmp_path, str(task), patience=30) for task in range(2)]
        with hold_line("a", str(tmp_path), UID, by_user=True) as tell:
            time.sleep(0.1)
            assert not any(one.done() for one in waiting)
            tell(4)
        assert [one.result(30) for one in waiting] == [4, 4]


def test_a_stage_that_has_just_ended_counts_once_for_each_who_waits(tmp_path: Path) -> None:
    assert waited(tmp_path) is None
    stage(tmp_path, 0)
    assert waited(tmp_path, patience=30) == 0
    assert waited(tmp_path, "2", patience=30) == 0
    # The same line again: the old status is not its own, the next one is.
    assert waited(tmp_path) is None
    assert waited(tmp_path, "2") is None
    stage(tmp_path, 6)
    assert waited(tmp_path, patience=30) == 6
    assert waited(tmp_path, "3", "b") is None


def test_a_stage_that_ended_longer_before_does_not_count(tmp_path: Path) -> None:
    stage(tmp_path, 0)
    [status] = (tmp_path / f".slurm-stage/{UID}/lines").iterdir()
    then = time.time() - 31
    os.utime(status, (then, then))
    assert wait_for_line("a", str(tmp_path), UID, "1", 0.1) is None


def test_a_stage_that_was_killed_has_no_code(tmp_path: Path) -> None:
    with hold_line("a", str(tmp_path), UID, by_user=True):
        pass
    assert waited(tmp_path) is None


def test_only_the_user_sees_who_waits(tmp_path: Path) -> None:
    stage(tmp_path, 0)
    assert modes_beneath(tmp_path / f".slurm-stage/{UID}")["lines"] == "drwx------"


@pytest.mark.root
def test_a_full_disk_is_no_reason_not_to_stage(tmp_path: Path) -> None:
    def act() -> int | None:
        stage(tmp_path, 0, "b")
        fill_up(tmp_path)
        stage(tmp_path, 0)
        return waited(tmp_path)

    assert on_tmpfs(tmp_path, "size=64k", act) is None
