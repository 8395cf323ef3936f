"""TODO."""

from __future__ import annotations

import os
import stat


def give_group(descriptor: int, group: int, mode: int) -> int:
    """Give a file or folder its ``group``; of the ``mode`` that it is to have what is right then.

    A group that its user is not in cannot be given, and another may do no more than all others.
    Raises OSError.
    """
    try:
        if os.fstat(descriptor).st_gid != group:
            os.fchown(descriptor, -1, group)
    except PermissionError:
        return mode & (~(stat.S_IRWXG | stat.S_ISGID) | (mode & stat.S_IRWXO) << 3)
    return mode
