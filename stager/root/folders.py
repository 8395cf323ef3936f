"""TODO."""

from __future__ import annotations

import os
import pwd
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class UnsafeError(Exception):
    """A folder that root will not work in, and why."""


def group_of(uid: int) -> int:
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        raise ValueError("this node knows no such user") from None


def make_folder(root: str, folder: str, uid: int, gid: int) -> None:
    """Make ``root/folder``, root's, and in it ``uid``, that user's alone.

    Every step goes by descriptors and refuses links, so that nobody who may write in ``root`` can
    lead it elsewhere. Raises OSError, or UnsafeError for a folder that somebody else made.
    """
    with opened(root, None) as base, made(base, folder, 0o755) as parent:
        facts = os.fstat(parent)
        if facts.st_uid != 0:
            raise UnsafeError(f"made by uid {facts.st_uid}, not by root alone; remove it")
        if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UnsafeError("others than root may write in it; remove it")
        os.fchmod(parent, 0o755)  # users pass through it, whatever mask root ran with
        with made(parent, str(uid), 0o700) as home:
            if os.fstat(home).st_uid == 0 and uid != 0:
                # Still root's own and in root's folder: nobody had a chance to change it.
                os.fchmod(home, 0o700)
                os.fchown(home, uid, gid)
            if os.fstat(home).st_uid != uid:
                raise UnsafeError(f"{uid} belongs to another user; remove it")


@contextmanager
def opened(name: str, folder: int | None) -> Iterator[int]:
    descriptor = os.open(name, _OPEN_FOLDER, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def made(folder: int, name: str, mode: int) -> Iterator[int]:
    with suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=folder)
    with opened(name, folder) as descriptor:
        yield descriptor
