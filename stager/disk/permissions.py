"""Decide the permissions of a copy, so that nobody gets more rights than at its source.

The functions whose names end in ``_mode`` are pure: they turn permission bits into permission bits.
`give_permissions` alone applies them.
"""

from __future__ import annotations

import os
import stat

#: What a copied file may have at most: only its owner may write it.
_FILE = 0o755
#: The same of a folder. Its setgid and sticky bits give nobody a right.
_FOLDER = 0o3755


def file_mode(mode: int) -> int:
    """Return the permissions for the copy of a file that has ``mode``.

    Its owner may always read it, because they could read the source. Setuid and setgid are dropped.

    >>> oct(file_mode(0o4277))
    '0o655'
    """
    return mode & _FILE | stat.S_IRUSR


def folder_mode(mode: int) -> int:
    """Return the permissions for the copy of a folder that has ``mode``.

    Its owner may always list and enter it.
    """
    return mode & _FOLDER | stat.S_IRUSR | stat.S_IXUSR


def unpacked_mode(mode: int, archive_mode: int) -> int:
    """Return the permissions for the top folder of an unpacked archive.

    Only those may enter it who may read the archive, which has ``archive_mode``. ``mode`` is what
    the archive says of the folder.
    """
    mode = folder_mode(mode)
    if not archive_mode & stat.S_IRGRP:
        mode &= ~stat.S_IRWXG
    if not archive_mode & stat.S_IROTH:
        mode &= ~stat.S_IRWXO
    return mode


def private_mode(mode: int) -> int:
    """Return what ``mode`` gives to the owner alone."""
    return mode & stat.S_IRWXU


def other_group_mode(mode: int) -> int:
    """Return the permissions for a copy that cannot have the group of its source.

    The members of either group may be among all others at the other end. So the group and all
    others get only the rights that both had.
    """
    shared = mode >> 3 & mode & stat.S_IRWXO
    return mode & ~(stat.S_ISGID | stat.S_IRWXG | stat.S_IRWXO) | shared << 3 | shared


def give_permissions(
    descriptor: int, mode: int, group: int, *, current_group: int | None = None
) -> None:
    """Give an open file or folder its permissions and its source's group.

    If its user is not in that group, it gets `other_group_mode` instead of ``mode``. Pass
    ``current_group`` where it is known, to save a system call. Raise OSError.
    """
    if current_group is None:
        current_group = os.fstat(descriptor).st_gid
    if group != current_group:
        try:
            os.fchown(descriptor, -1, group)
        except PermissionError:
            mode = other_group_mode(mode)
    os.fchmod(descriptor, mode)
