"""Files on real disks."""

from __future__ import annotations

from tests.support.caches import cache, disk, home, naming, nothing_left_open

__all__ = ["cache", "disk", "home", "naming", "nothing_left_open"]
