"""Runs tests/mpi under mpiexec, one pytest a rank, at several sizes of the world."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stager.launch.environment import RANK
from stager.launch.mpiexec import folder_of_launcher, mpiexec_argv, mpiexec_environment

TESTS = Path(__file__).parent / "mpi"
#: What depends on how many nodes there are: seven ranks, which take long on two cores, run no more.
TRANSFER = ("test_channel", "test_pump", "test_transfer")
#: What two ranks run besides: the rest of each by itself, as three do that together.
ALONE = ["-k", " or ".join((*TRANSFER, "SELF"))]

#: Seconds for one size, several times what it takes beside other tests on two cores; a rank that
#: fails leaves the others waiting for it.
TIMEOUT = 1800


@pytest.mark.parametrize(
    ("size", "chosen"),
    [(2, ALONE), pytest.param(2, [], marks=pytest.mark.nightly), (3, []), (7, [])],
    ids=["2", "2, all", "3", "7"],
)
def test_in_a_world_of(size: int, chosen: list[str]) -> None:
    files = [path for path in sorted(TESTS.glob("test_*.py")) if size < 7 or path.stem in TRANSFER]
    launcher = mpiexec_argv(size)[: -len(RANK)]
    rank = [sys.executable, "-m", "mpi4py", "-m", "pytest", "--in-mpi", "-x", "-q"]
    with folder_of_launcher(is_shared_memory=True) as folder:
        environment = {**mpiexec_environment(folder), "OMPI_MCA_mpi_yield_when_idle": "1"}
        done = subprocess.run(
            [*launcher, *rank, "-p", "no:cacheprovider", "--color=no", *chosen, *files],
            env={**os.environ, **environment},
            capture_output=True, text=True, timeout=TIMEOUT, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.findall(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert len(passed) == size
    assert len(set(passed)) == 1
