"""The arguments of mpiexec."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from stager.launch.mpiexec import mpiexec_argv

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

#: What every launcher starts.
RANK = [sys.executable, "-I", "-m", "stager.rank"]


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
