"""Write files to a cache as a rank does, and look at what is on the disk then."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base.extents import Extent
from stager.fs.partial_file import Partial

if TYPE_CHECKING:
    from pathlib import Path

    from stager.fs.files import CopyFacts
    from stager.store.cache import Cache


OLD, NEW = b"old" * 1000, b"new!" * 5000
MTIME = 1_700_000_000_123_456_789


def partial_names(cache: Cache) -> list[str]:
    return os.listdir(cache.partial)


def allocated(cache: Cache, size: int, *, direct: bool = True) -> Partial:
    """Make a partial file of ``size`` bytes without holes."""
    partial = Partial(cache, direct=direct)
    partial.allocate(size, [Extent(0, size)] if size else [])
    return partial


def write(cache: Cache, data: bytes, mode: int = 0o600) -> Partial:
    partial = allocated(cache, len(data))
    partial.write(memoryview(data), 0)
    partial.seal(mode, os.getegid(), MTIME)
    return partial


def publish(cache: Cache, data: bytes, path: Path, mode: int = 0o600) -> CopyFacts:
    partial = write(cache, data, mode)
    try:
        return partial.publish(str(path))
    finally:
        partial.close()


def modes_beneath(folder: Path) -> dict[str, str]:
    """Return all paths beneath ``folder`` with their permissions as ls prints them."""
    return {
        str(path.relative_to(folder)): stat.filemode(path.lstat().st_mode)
        for path in folder.rglob("*")
    }


def fill_up(folder: Path) -> None:
    """Fill the filesystem of ``folder``."""
    with suppress(OSError), open(folder / "filler", "wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass


def owners(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Return all paths beneath ``folder`` with uid, gid and permissions as ls prints them."""
    return {
        str(path.relative_to(folder)): (
            (facts := path.lstat()).st_uid, facts.st_gid, stat.filemode(facts.st_mode),
        )
        for path in sorted(folder.rglob("*"))
    }  # fmt: skip
