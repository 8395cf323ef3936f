"""Caches on real disks, and a node with one."""

from __future__ import annotations

from tests.support.caches import (
    cache,
    disk,
    home,
    jobs_folder,
    naming,
    node,
    nothing_left_open,
)

__all__ = ["cache", "disk", "home", "jobs_folder", "naming", "node", "nothing_left_open"]
