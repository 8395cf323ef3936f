"""Decide the permissions of a copy, so that nobody gets more rights than at its source.

The functions whose names end in ``_mode`` are pure: they turn permission bits into permission bits.
`give_permissions` alone applies them.
"""

from __future__ import annotations

import os
import stat

from stager.base.options import Share

#: What a copied file may have at most: only its owner may write it.
_FILE = 0o755
#: The same of a folder. Its setgid and sticky bits give nobody a right.
_FOLDER = 0o3755
#: The rights of all but the owner.
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


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


def beneath_mode(mode: int, group: int, folder: int, folder_group: int) -> int:
    """Return what is left of ``mode`` for those who may enter the folder that it lies in.

    ``mode`` and ``group`` are those of a file or folder, ``folder`` and ``folder_group`` those of a
    folder above it. The members of another ``folder_group`` may be among all others and in
    ``group``, and in the folder they have the rights of its group alone. So unless the groups are
    equal, both the group and others pass only if the folder gives ``x`` to both.

    >>> oct(beneath_mode(0o644, 1, 0o750, 1)), oct(beneath_mode(0o644, 1, 0o750, 2))
    ('0o640', '0o600')
    """
    group_passes, others_pass = bool(folder & stat.S_IXGRP), bool(folder & stat.S_IXOTH)
    if group != folder_group:
        group_passes = others_pass = group_passes and others_pass
    if not group_passes:
        mode &= ~stat.S_IRWXG
    return mode if others_pass else mode & ~stat.S_IRWXO


def shared_mode(mode: int, share: Share) -> int:
    """Return ``mode`` with the rights that the user's own word gives to others.

    They may read what the owner may read, and enter or run what the owner may.

    >>> oct(shared_mode(0o700, Share.GROUP)), oct(shared_mode(0o600, Share.ALL))
    ('0o750', '0o644')
    """
    rights = mode & (stat.S_IRUSR | stat.S_IXUSR)
    if share is not Share.SOURCE:
        mode |= rights >> 3
    return mode | rights >> 6 if share is Share.ALL else mode


def copied_mode(mode: int, *, is_folder: bool) -> int:
    """Return `folder_mode` or `file_mode`."""
    return folder_mode(mode) if is_folder else file_mode(mode)


def corrected_mode(there: os.stat_result, mode: int, group: int, share: Share) -> int:
    """Return the permissions for a copy that is there, if a new one would get ``mode``.

    ``group`` is the source's. A right that the copy should not give is taken away. One that it does
    not give is added only if the user says so by ``share``.
    """
    allowed = mode if there.st_gid == group else other_group_mode(mode)
    found = stat.S_IMODE(there.st_mode) & (allowed | ~_OTHERS)
    return found if share is Share.SOURCE else found | allowed & _OTHERS


def is_too_open(there: os.stat_result, mode: int, group: int) -> bool:
    """Return whether `corrected_mode` would take rights away."""
    return corrected_mode(there, mode, group, Share.SOURCE) != stat.S_IMODE(there.st_mode)


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
