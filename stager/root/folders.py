"""Open, make and lock root's own folders and files by descriptors, which follow no link.

Users may write to some of the folders above, and could put a link in the way.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import stat
import struct
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_REMEDY = "remove this folder"
#: Where an entry of an access control list names no user: its owner, its group, the mask, others.
_NO_ID = 0xFFFFFFFF


class UnsafeError(Exception):
    """A folder that root must not use; the message says why."""


def group_of(uid: int) -> int:
    """Return the user's primary group. Raise ValueError if the node does not know the user."""
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        raise ValueError(
            f"this node knows no such user; check its user database (getent passwd {uid})"
        ) from None


def make_folder(root: str, folder: str, uid: int, gid: int, reader: int = 0) -> None:
    """Make ``root/folder`` for root, and in it the private folder ``uid`` of that user.

    The user ``reader``, if any, may read what is in it too. Raise OSError, or UnsafeError if a
    folder belongs to somebody else.
    """
    path = f"{root}/{folder}"
    with opened(root) as base, made(base, folder, 0o755) as parent:
        facts = os.fstat(parent)
        if facts.st_uid != 0:
            raise UnsafeError(f"{path} belongs to uid {facts.st_uid}, not to root; {_REMEDY}")
        if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UnsafeError(f"{path} can be written to by users other than root; {_REMEDY}")
        os.fchmod(parent, 0o755)  # users pass through it, whatever mask root ran with
        with made(parent, str(uid), 0o700) as home:
            if os.fstat(home).st_uid == 0 and uid != 0:
                # Still root's own and in root's folder: nobody had a chance to change it.
                os.fchmod(home, 0o700)
                os.fchown(home, uid, gid)
            if os.fstat(home).st_uid != uid:
                raise UnsafeError(f"{path}/{uid} does not belong to uid {uid}; {_REMEDY}")
            if reader not in (0, uid):
                _let_read(home, reader)


def _let_read(folder: int, uid: int) -> None:
    """Let this user, besides the owner, read the folder and files that are made in it.

    Without access control lists on its filesystem, nothing changes. Raise OSError.
    """
    for name, owner, reader in (("access", 7, 5), ("default", 6, 4)):
        entries = ((1, owner, _NO_ID), (2, reader, uid), (4, 0, _NO_ID), (0x10, reader, _NO_ID))
        packed = b"".join(struct.pack("<HHI", *entry) for entry in (*entries, (0x20, 0, _NO_ID)))
        try:
            os.setxattr(folder, f"system.posix_acl_{name}", struct.pack("<I", 2) + packed)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise


@contextmanager
def opened(
    name: str, folder: int | None = None, *, flags: int = OPEN_FOLDER, mode: int = 0o600
) -> Iterator[int]:
    """Open a folder, or a file with other ``flags``, and close it at the end. Raise OSError.

    ``name`` is relative to the descriptor ``folder``, if that is given.
    """
    descriptor = os.open(name, flags, mode, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def made(folder: int, name: str, mode: int) -> Iterator[int]:
    """Open the folder ``name`` in the descriptor ``folder``; make it first if it is missing."""
    with suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=folder)
    with opened(name, folder) as descriptor:
        yield descriptor


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold the lock of the file ``path``, which is made if it is missing. Raise OSError."""
    with opened(path, flags=_LOCK_FILE) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
