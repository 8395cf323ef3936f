"""Find out who can reach a source: what the folders above it, and access control lists, allow.

A copy lies where everybody may pass. So it may give others only what they had at the source.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from stager.base.linux import PASS_FOLDER
from stager.base.mounts import has_own_rules
from stager.disk.files import opened
from stager.disk.permissions import beneath_mode, private_mode

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What a copy can give to group and others; nobody but its owner writes to it.
READ = stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH
#: The ACL of NFS version 4, which the client shows for each file, and those whom the mode describes
#: as well. (From RFC 7530. An entry has three numbers, then a name with its length.)
_NFS_ACL = "system.nfs4_acl"
_NFS_MODE = frozenset({b"OWNER@", b"GROUP@", b"EVERYONE@"})
_NFS_NUMBER, _NFS_NUMBERS = 4, 12
#: The list that new files in a folder get. It says nothing about the folder itself.
_DEFAULT_ACL = "system.posix_acl_default"


class Reach(NamedTuple):
    """The ``mode`` that a copy may have.

    ``closed_by`` is the path of the folder or file that takes rights away which the source's own
    mode gives; empty if there is none.
    """

    mode: int
    closed_by: str = ""


def reach(descriptor: int) -> Reach:
    """Return who can reach the file or folder that is open. Raise OSError.

    Its real path counts: where it lies, and not by which links it was found. Where that cannot be
    told, because it was moved meanwhile, where there is an access control list, and on filesystems
    that decide by other rules than modes, only the owner of the copy may read it.
    """
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    facts = os.fstat(descriptor)
    mode = stat.S_IMODE(facts.st_mode)
    if _is_listed(descriptor) or has_own_rules(descriptor):
        return _closed(mode, path)
    closed_by = ""
    try:
        for folder, above, is_closed in _folders_above(descriptor, path, facts):
            if is_closed:
                return _closed(mode, closed_by or folder)
            left = beneath_mode(mode, facts.st_gid, stat.S_IMODE(above.st_mode), above.st_gid)
            if left & READ != mode & READ:
                closed_by = closed_by or folder
            mode = left
    except OSError:
        return _closed(mode, closed_by or path)
    return Reach(mode, closed_by)


def _closed(mode: int, path: str) -> Reach:
    return Reach(private_mode(mode), path if mode & READ else "")


def _folders_above(
    descriptor: int, path: str, facts: os.stat_result
) -> Iterator[tuple[str, os.stat_result, bool]]:
    """Yield path and stat of each folder above, and whether it has an access control list.

    Each is opened from the one below it, so that nobody can put another one in its place. Raise
    OSError if the first does not hold the file.
    """
    above, name = os.path.split(path)
    with ExitStack() as stack:
        if stat.S_ISDIR(facts.st_mode):
            current = stack.enter_context(opened("..", PASS_FOLDER, descriptor))
        else:
            current = stack.enter_context(opened(above, PASS_FOLDER))
            if not os.path.samestat(os.lstat(name, dir_fd=current), facts):
                raise FileNotFoundError(errno.ENOENT, "was moved")
        here = os.fstat(current)
        while not os.path.samestat(here, facts):  # the root is its own parent
            leaves = here.st_dev != facts.st_dev
            yield above, here, _is_listed(current) or (leaves and has_own_rules(current))
            current = stack.enter_context(opened("..", PASS_FOLDER, current))
            above, facts, here = os.path.dirname(above), here, os.fstat(current)


def has_acl(path: str | bytes, *, follow_symlinks: bool = False) -> bool:
    """Return whether an access control list says who may reach a file, or that cannot be told."""
    try:
        names = os.listxattr(path, follow_symlinks=follow_symlinks)
        return bool(names) and any(_restricts(path, one) for one in names if "acl" in one.lower())
    except OSError as error:
        return error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS)


def _is_listed(descriptor: int) -> bool:
    """Return the same for an open file or folder."""
    # An O_PATH descriptor itself has no attributes.
    return has_acl(f"/proc/self/fd/{descriptor}", follow_symlinks=True)


def _restricts(path: str | bytes, name: str) -> bool:
    if name == _NFS_ACL:
        return not is_mode_alone(os.getxattr(path, name))
    return name != _DEFAULT_ACL


def is_mode_alone(acl: bytes) -> bool:
    """Return whether a list of NFS version 4 names nobody whom the mode does not describe.

    Then the server has computed the mode from the list, and the mode says all of it.
    """
    view = memoryview(acl)
    count = int.from_bytes(view[:_NFS_NUMBER], "big")
    at = _NFS_NUMBER
    for _ in range(count):
        at += _NFS_NUMBERS
        length = int.from_bytes(view[at : at + _NFS_NUMBER], "big")
        at += _NFS_NUMBER
        if bytes(view[at : at + length]) not in _NFS_MODE:
            return False
        at += -(-length // _NFS_NUMBER) * _NFS_NUMBER
    return at == len(view)
