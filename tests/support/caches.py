"""Fixtures of several packages: caches on real disks, and a node with one."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from stager.store.cache import Cache, open_cache
from tests.support.copies import Node
from tests.support.users import ordinary_home

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    """Fail a test after which this process has descriptors or threads that it had not before."""
    files, threads = open_files(), {*threading.enumerate()}
    yield
    assert open_files().items() <= files.items()
    assert {*threading.enumerate()} <= threads


def open_files() -> dict[int, str]:
    """Return this process's descriptors and what they are open for."""
    files = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor that lists the folder
            files[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return files


@pytest.fixture
def home() -> Iterator[Path]:
    with ordinary_home() as folder:
        yield folder


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """The cache root of a node whose disk is this user's own."""
    path = tmp_path / "disk"
    path.mkdir()
    return path


@pytest.fixture
def cache(disk: Path) -> Cache:
    return open_cache(str(disk), os.getuid(), disk=str(disk))


@pytest.fixture(params=["unnamed", "named"])
def naming(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make partial files without a name, or with one as on NFS.

    Every filesystem that can be mounted without a server has O_TMPFILE, so its refusal
    is simulated.
    """
    naming: str = request.param
    if naming == "named":
        real = os.open

        def refuse(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
            return real(path, flags, mode, dir_fd=dir_fd)

        monkeypatch.setattr(os, "open", refuse)
    return naming


@pytest.fixture
def jobs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A /run of the test's own, where root marks jobs."""
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(tmp_path / "run"))
    monkeypatch.setattr("stager.base.paths.JOBS_FOLDER", str(tmp_path / "run/jobs"))
    (tmp_path / f"run/{os.getuid()}").mkdir(parents=True)
    (tmp_path / "run/jobs").mkdir()


@pytest.fixture
def node(tmp_path: Path, jobs_folder: None) -> Node:
    (tmp_path / "disk").mkdir()
    return Node(tmp_path / "disk")
