"""Gather facts of the disks beneath staging roots. Nothing with a name is made there."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass

from stager.base.mounts import mount_of, mounted_by_stranger

#: The errors of a filesystem that makes no files without a name, which says nothing against it.
_NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


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
    #: Whether files can be written past the page cache (O_DIRECT).
    direct: bool = True


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
        return Disk(
            path=path,
            kind=mount.kind if mount else "",
            size=room.f_blocks * room.f_frsize,
            free=room.f_bavail * room.f_frsize,
            files=room.f_files,
            free_files=room.f_favail,
            fault=os.strerror(fault) if fault else "",
            direct=bool(fault) or not _try(path, os.O_DIRECT),
        )
    return None


def _try(path: str, flags: int) -> int:
    """Open a file without a name in the folder. Return the number of the error, 0 for none."""
    try:
        os.close(os.open(path, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC | flags, 0o600))
    except OSError as error:
        return 0 if not flags and error.errno in _NO_UNNAMED else error.errno or 0
    return 0
