"""Decide the permissions of a copy: its owner's alone, unless the user shares it."""

from __future__ import annotations

import os
import stat

from stager.base.options import Share


def copy_mode(mode: int, share: Share = Share.NONE, *, is_folder: bool = False) -> int:
    """Return the permissions for the copy of a file or folder that has ``mode``. Pure.

    Its owner has the owner's rights, and may always read it, because they could read the source.
    Those to whom it is shared may read what the owner may read, and enter or run what the owner
    may.

    >>> oct(copy_mode(0o4277)), oct(copy_mode(0o755, Share.GROUP)), oct(copy_mode(0o600, Share.ALL))
    ('0o600', '0o750', '0o644')
    """
    always = stat.S_IRUSR | (stat.S_IXUSR if is_folder else 0)
    mode = mode & stat.S_IRWXU | always
    rights = mode & (stat.S_IRUSR | stat.S_IXUSR)
    if share is not Share.NONE:
        mode |= rights >> 3
    return mode | rights >> 6 if share is Share.ALL else mode


def give_permissions(
    descriptor: int, mode: int, group: int, *, current_group: int | None = None
) -> None:
    """Give an open file or folder its permissions and group.

    Pass ``current_group`` where it is known, to save a system call. Raise OSError.
    """
    if current_group is None:
        current_group = os.fstat(descriptor).st_gid
    if group != current_group:
        os.fchown(descriptor, -1, group)
    os.fchmod(descriptor, mode)
