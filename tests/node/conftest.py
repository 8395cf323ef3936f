"""A cache root as sites make it, and a node with a cache."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.support.caches import cache, disk, home, jobs_folder, naming, node
from tests.support.users import ordinary_home

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def root() -> Iterator[Path]:
    """A cache root of the site, to which every user may write."""
    with ordinary_home() as folder:
        os.chown(folder, 0, 0)
        folder.chmod(0o1777)
        yield folder


__all__ = ["cache", "disk", "home", "jobs_folder", "naming", "node", "root"]
