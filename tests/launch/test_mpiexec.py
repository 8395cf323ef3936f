"""The arguments of mpiexec."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from stager.launch.mpiexec import mpiexec_argv

if TYPE_CHECKING:
    from pathlib import Path

#: What every launcher starts.
RANK = [sys.executable, "-I", "-m", "stager.rank"]


@pytest.fixture(autouse=True)
def _user(monkeypatch: pytest.MonkeyPatch) -> None:
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
