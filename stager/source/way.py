"""Find out whether all users can reach a source, of which a site wants to have copies for all."""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack, suppress

from stager.base.errors import SourceError
from stager.base.linux import PASS_FOLDER
from stager.base.mounts import has_own_rules
from stager.disk.files import opened

#: What all users need of a file, and of each folder above it. A group may lack what others have.
_READ = stat.S_IRGRP | stat.S_IROTH
_PASS = stat.S_IXGRP | stat.S_IXOTH


def check_open_to_all(descriptor: int, path: str) -> None:
    """Raise SourceError unless all users can read the file that was opened at ``path``."""
    closed = closed_by(descriptor)
    if closed:
        raise SourceError(
            f"{path}: a copy there would be for all users, and {closed} is not open to all: chmod "
            "go+rX, or share=all, which opens the copy all the same"
        )


def closed_by(descriptor: int) -> str:
    """Return the path of what keeps some users from an open file, or nothing. Raise OSError.

    That is the file or a folder above it. Where it really lies counts, and not by which links it
    was found. Each folder is opened from the one below it, so that nobody can put another one in
    its place.
    """
    path = _path(descriptor)
    above, name = os.path.split(path)
    with ExitStack() as stack:
        if _is_closed(descriptor, _READ):
            return path
        current = stack.enter_context(opened(above, PASS_FOLDER))
        try:
            there = os.lstat(name, dir_fd=current)
        except OSError:  # it was moved meanwhile
            return path
        if not os.path.samestat(there, os.fstat(descriptor)):
            return path
        while not _is_closed(current, _PASS):
            higher = stack.enter_context(opened("..", PASS_FOLDER, current))
            if os.path.samestat(os.fstat(higher), os.fstat(current)):  # the root folder
                return ""
            current = higher
        return _path(current)


def _path(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _is_closed(descriptor: int, needed: int) -> bool:
    """Return whether some users may lack a right; an access control list may name them."""
    if os.fstat(descriptor).st_mode & needed != needed or has_own_rules(descriptor):
        return True
    with suppress(OSError):  # not all filesystems have any; a descriptor of O_PATH has none itself
        return "system.posix_acl_access" in os.listxattr(f"/proc/self/fd/{descriptor}")
    return False
