"""A stage to a job's folder that is killed at any step: the next finds a store that is whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from mpi4py import MPI

from tests.support.kills import Node, change
from tests.support.tree_world import files_beneath

if TYPE_CHECKING:
    from pathlib import Path

#: Of the calls of a stage that change a disk, those at which it is killed: all by night.
EVERY, EVERY_BY_NIGHT = 23, 1


def stage(folder: Path, *moment: str) -> subprocess.CompletedProcess[str]:
    """Stage in a process of its own, which is killed at a moment."""
    line = [sys.executable, "-m", "tests.support.kills", str(folder), *moment]
    return subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False, timeout=60)


@pytest.mark.parametrize("every", [EVERY, pytest.param(EVERY_BY_NIGHT, marks=pytest.mark.nightly)])
def test_a_stage_that_was_killed_leaves_no_part_in_the_store_or_in_the_jobs_folder(
    tmp_path: Path, every: int
) -> None:
    begun = prepared(tmp_path / "whole")
    calls = int(stage(begun).stdout.splitlines()[-1])
    for moment in range(1, calls, every):
        folder = prepared(tmp_path / str(moment))
        assert stage(folder, str(moment)).returncode == -signal.SIGKILL
        node = Node(MPI.COMM_SELF, folder)
        whole = [{}, *versions(folder)]
        assert files_beneath(node.seen("/job1")) in whole, moment
        node.into("/job2")
        assert files_beneath(node.seen("/job2")) == whole[-1], moment
        assert files_beneath(node.entry()) == whole[-1], moment
        left = node.disk / f"nvme/.slurm-stage/{os.getuid()}"
        assert [*(left / "partial").iterdir(), *(left / "updates").glob("*.new")] == [], moment


def prepared(folder: Path) -> Path:
    """Return a node's ``folder``, in whose store is the first version; the source is the second."""
    node = Node(MPI.COMM_SELF, folder)
    change(node.source, 1)
    node.into("/job3")
    change(node.source, 2)
    return folder


def versions(folder: Path) -> list[dict[str, bytes]]:
    """Return what is in the files of both versions."""
    now = files_beneath(folder / "source")
    before = {name: data.replace(b"of 2", b"of 1") for name, data in now.items()}
    return [before, now]
