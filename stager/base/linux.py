"""Call the Linux system calls that Python's os module lacks. Each raises OSError on failure."""

from __future__ import annotations

import ctypes
import os
import struct
from enum import IntEnum

#: Resolve relative paths from the current folder (AT_FDCWD of fcntl.h).
_CURRENT_FOLDER = -100
#: The option of prctl(2) that decides whether other processes of the user may trace this one.
_PR_SET_DUMPABLE = 4
#: openat2(2): its number on all architectures, its struct open_how (flags, mode, resolve), and the
#: ways to resolve: in the same mount, through no link, and not above the folder.
_OPENAT2 = 437
_OPEN_HOW = struct.Struct("QQQ")
_RESOLVE_HERE = 0x01 | 0x04 | 0x08
_libc = ctypes.CDLL(None, use_errno=True)


class Rename(IntEnum):
    """The flags of renameat2(2)."""

    #: Fail with EEXIST where the new name exists.
    NO_REPLACE = 1
    #: Swap the two names in one step.
    EXCHANGE = 2


def rename(old: str, new: str, flag: Rename, *, new_folder: int) -> None:
    """Rename ``old`` to ``new``, which is relative to the descriptor ``new_folder``.

    Raise OSError with EINVAL if the filesystem does not support the flag.
    """
    _check(
        _libc.renameat2(_CURRENT_FOLDER, os.fsencode(old), new_folder, os.fsencode(new), flag.value)
    )


def sync_filesystem(descriptor: int) -> None:
    """Write all that is cached of the descriptor's filesystem to its disk."""
    _check(_libc.syncfs(descriptor))


def set_dumpable(dumpable: bool) -> None:
    """Choose whether other processes of this user may trace this process and read its memory."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, int(dumpable), 0, 0, 0))


def open_here(path: str, folder: int, flags: int) -> int:
    """Open ``path`` beneath the descriptor ``folder``, on its filesystem and through no link.

    Raise OSError: with EXDEV if the path leads to another filesystem, which is not asked for
    anything, and with ENOSYS before Linux 5.6.
    """
    how = _OPEN_HOW.pack(flags, 0, _RESOLVE_HERE)
    return _check(_libc.syscall(_OPENAT2, folder, os.fsencode(path), how, _OPEN_HOW.size))


def _check(result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
