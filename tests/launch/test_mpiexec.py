"""The arguments of mpiexec."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest

from stager.launch import mpiexec
from stager.launch.mpiexec import folder_of_launcher, mpiexec_argv, mpiexec_environment

if TYPE_CHECKING:
    from pathlib import Path

#: What every launcher starts.
RANK = [sys.executable, "-I", "-m", "stager.rank"]


@pytest.fixture(autouse=True)
def _user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)


def test_mpiexec_is_the_one_beside_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mpiexec").touch()
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/python")
    assert mpiexec_argv(3) == [f"{tmp_path}/mpiexec", "-n", "3", *RANK]


def test_mpiexec_is_the_systems_where_none_is_beside_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/python")
    assert mpiexec_argv(3) == ["mpiexec", "-n", "3", *RANK]


def test_roots_mpiexec_is_started_in_a_network_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/python")
    alone = [*RANK[:3], "stager.launch.alone"]
    assert mpiexec_argv(3) == [*alone, "mpiexec", "-n", "3", *RANK]


def test_ranks_share_memory_only_in_the_folder_of_their_launcher() -> None:
    """Open MPI's names of such files have 16 bits: in one folder, two stages may share one."""
    told = """
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
with open("/proc/self/maps") as maps:
    print(*(line.split()[-1] for line in maps if "segment" in line), sep="\\n")
MPI.COMM_WORLD.Barrier()
"""
    with folder_of_launcher(is_shared_memory=True) as folder:
        done = subprocess.run(
            [*mpiexec_argv(2)[: -len(RANK)], sys.executable, "-I", "-c", told],
            env={**os.environ, **mpiexec_environment(folder)},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert {os.path.dirname(path) for path in done.stdout.split()} == {folder}
    assert os.path.dirname(folder) == "/dev/shm"
    assert not os.path.exists(folder)


@pytest.mark.parametrize(
    ("name", "value"), [("_SHARED_MEMORY", "/gone"), ("_LEAST_SHARED", 1 << 60)]
)
def test_without_room_for_shared_memory_the_folder_of_temporary_files_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr(mpiexec, name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with folder_of_launcher(is_shared_memory=True) as folder:
        assert os.path.dirname(folder) == str(tmp_path)
