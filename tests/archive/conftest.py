"""Folders to pack and to unpack into."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.support.archives import WHEN

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    out.mkdir()
    return out


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with what an archive may hold."""
    source = tmp_path / "source"
    (source / "a/closed").mkdir(parents=True)
    (source / "empty").mkdir()
    (source / "a/program").write_bytes(b"#!/bin/sh\n" * 100)
    (source / "a/closed/large").write_bytes(os.urandom(3 << 20))
    (source / "zero").touch()
    (source / "a/link").symlink_to("../zero")
    (source / "up").symlink_to("a/closed/../program")
    (source / os.fsdecode(b"\xff name")).write_bytes(b"x")
    (source / "a/program").chmod(0o755)
    (source / "a/second").hardlink_to(source / "a/program")
    (source / "a/closed").chmod(0o555)
    for path in (source, *source.rglob("*")):
        os.utime(path, (WHEN, WHEN), follow_symlinks=False)
    return source
