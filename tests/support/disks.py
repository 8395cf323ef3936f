"""Write files to a cache as a rank does, and look at what is on the disk then.

Mount real filesystems for a test, which nobody else sees and which are gone at the end. Needs root.
"""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from stager.base.extents import Extent
from stager.fs.partial_file import Partial

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from stager.fs.files import CopyFacts
    from stager.store.cache import Cache

    #: A disk for a ``with`` block.
    Disk = AbstractContextManager[Path]

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


@contextmanager
def private_mounts() -> Iterator[None]:
    """Have what this thread, and the processes that it starts, mount or unmount undone at the end.

    The kernel does so when the process is killed, too.
    """
    new_mounts = 0x00020000  # CLONE_NEWNS
    here, before = (os.open(path, os.O_RDONLY) for path in (".", "/proc/thread-self/ns/mnt"))
    try:
        _call("unshare", new_mounts)
        try:
            subprocess.run(["mount", "--make-rprivate", "/"], check=True)
            yield
        finally:
            _call("setns", before, new_mounts)
            os.fchdir(here)
    finally:
        os.close(here)
        os.close(before)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc[name](*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


@contextmanager
def _mounted(size: str, make: str, *mount: str) -> Iterator[Path]:
    """Mount a new filesystem of ``size``, as truncate(1) reads it, in which all users may write."""
    with tempfile.TemporaryDirectory() as name, private_mounts():
        Path(name).chmod(0o755)
        image, folder = Path(name, "image"), Path(name, "disk")
        folder.mkdir()
        if make:
            subprocess.run(["truncate", f"--size={size}", image], check=True)
            subprocess.run([*make.split(), image], check=True)
        subprocess.run(["mount", *mount, image, folder], check=True)
        folder.chmod(0o1777)
        yield folder


def xfs(size: str = "300M", make: str = "-m reflink=1", mount: str = "loop") -> Disk:
    """Mount a new XFS, which has 300 MB at least, with more options to make and to mount it."""
    return _mounted(size, f"mkfs.xfs -q {make}", "-o", mount)


def btrfs(size: str = "110M", mount: str = "loop") -> Disk:
    """Mount a new btrfs, which has 109 MB at least."""
    return _mounted(size, "mkfs.btrfs -q", "-o", mount)


def ext4(size: str = "32M", make: str = "", mount: str = "loop") -> Disk:
    """Mount a new ext4."""
    return _mounted(size, f"mkfs.ext4 -q -m0 {make}", "-o", mount)


def tmpfs(size: str = "32M") -> Disk:
    """Mount a new tmpfs."""
    return _mounted(size, "", "-t", "tmpfs", "-o", f"size={size}")


@contextmanager
def bound(folder: Path) -> Iterator[Path]:
    """Mount ``folder`` a second time."""
    with tempfile.TemporaryDirectory() as name, private_mounts():
        subprocess.run(["mount", "--bind", folder, name], check=True)
        yield Path(name)
