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
#: The flag of unshare(2) for a network of its own, and what brings its loopback interface up: the
#: requests of ioctl(2) to read and to set an interface's flags, with a struct ifreq (netdevice(7)).
_NEW_NETWORK = 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1
_INTERFACE = struct.Struct("16sH14x")
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


def leave_network() -> None:
    """Give this process a network of its own, with nothing but a loopback interface. Needs root."""
    _check(_libc.unshare(_NEW_NETWORK))
    import fcntl  # only here
    import socket

    with socket.socket() as any_socket:
        request = _INTERFACE.pack(b"lo", 0)
        name, flags = _INTERFACE.unpack(fcntl.ioctl(any_socket, _GET_FLAGS, request))
        fcntl.ioctl(any_socket, _SET_FLAGS, _INTERFACE.pack(name, flags | _UP))


def is_alone() -> bool:
    """Return whether the network of this process has no interface but the loopback."""
    try:
        with open("/proc/self/net/dev", encoding="ascii") as table:
            return [line.partition(":")[0].strip() for line in table if ":" in line] == ["lo"]
    except OSError:
        return False


def _check(result: int) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
