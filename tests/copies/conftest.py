"""A disk with a cache."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.support.copies import Node

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def _jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A /run of the test's own, where root marks jobs."""
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(tmp_path / "run"))
    monkeypatch.setattr("stager.base.paths.JOBS_FOLDER", str(tmp_path / "run/jobs"))
    (tmp_path / f"run/{os.getuid()}").mkdir(parents=True)
    (tmp_path / "run/jobs").mkdir()


@pytest.fixture
def node(tmp_path: Path, _jobs: None) -> Node:
    (tmp_path / "disk").mkdir()
    return Node(tmp_path / "disk")
