"""Gather facts of the disks beneath staging roots. Nothing with a name is made there."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass

from stager.base.mounts import mount_of, mounted_by_stranger
from stager.disk.unnamed import NO_UNNAMED

#: Asks ioctl(2) to let one file share all bytes of another (linux/fs.h).
_FICLONE = 0x40049409


@dataclass(frozen=True)
class Disk:
    """The filesystem that holds a folder."""

    path: str
    #: Its type, such as ``ext4``; empty if it cannot be told.
    kind: str
    #: Its bytes, those that users may still take, and likewise files. 0 where it counts no files.
    size: int
    free: int
    files: int
    free_files: int
    #: Why this user cannot make a file in the folder; empty if nothing is known against it.
    fault: str = ""
    #: Whether files can be written past the page cache (O_DIRECT), be without a name while they
    #: are written (O_TMPFILE), and share what they have in common (reflink).
    direct: bool = True
    unnamed: bool = True
    clones: bool = False


def disk_of(path: str) -> Disk | None:
    """Return the facts of the filesystem at ``path``; None if it cannot be looked at."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if mounted_by_stranger(descriptor):  # it may never answer
                return None
            mount, room = mount_of(descriptor), os.fstatvfs(descriptor)
        finally:
            os.close(descriptor)
        fault = _try(path, 0)
        is_open = not fault or fault in NO_UNNAMED
        return Disk(
            path=path,
            kind=mount.kind if mount else "",
            size=room.f_blocks * room.f_frsize,
            free=room.f_bavail * room.f_frsize,
            files=room.f_files,
            free_files=room.f_favail,
            fault="" if is_open else os.strerror(fault),
            direct=bool(fault) or not _try(path, os.O_DIRECT),
            unnamed=fault not in NO_UNNAMED,
            clones=not fault and _can_clone(path),
        )
    return None


def _try(path: str, flags: int) -> int:
    """Open a file without a name in the folder. Return the number of the error, 0 for none."""
    try:
        os.close(_new_file(path, flags))
    except OSError as error:
        return error.errno or 0
    return 0


def _can_clone(path: str) -> bool:
    """Return whether two files in the folder can share their bytes."""
    with suppress(OSError):
        first, second = _new_file(path), _new_file(path)
        try:
            os.write(first, bytes(os.sysconf("SC_PAGESIZE")))
            fcntl.ioctl(second, _FICLONE, first)
            return True
        finally:
            os.close(first)
            os.close(second)
    return False


def _new_file(path: str, flags: int = 0) -> int:
    return os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
