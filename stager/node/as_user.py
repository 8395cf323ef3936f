"""Run a program as another user, with limits on its time and its output, and read numbers from it.

Everything else that it may write is refused.
"""

from __future__ import annotations

import math
import os
import pwd
from typing import TYPE_CHECKING

from stager.base.child import NO_GROUP, answer_as

if TYPE_CHECKING:
    from collections.abc import Sequence

_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
#: Bytes of the largest file that the program may write: the record of a copy, see `store.cache`.
_FILE_LIMIT = 64 * 1024


def groups_of(uid: int) -> tuple[int, list[int]]:
    """Return the user's primary group and all groups; nogroup and none for an unknown user."""
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return NO_GROUP, []
    return user.pw_gid, os.getgrouplist(user.pw_name, user.pw_gid)


def run_as(
    uid: int,
    gid: int,
    groups: Sequence[int],
    command: Sequence[str],
    limit: float,
    held: int | None = None,
) -> bytes:
    """Run ``command`` as that user and return its output, cut off at the limit of `answer_as`.

    The program gets nothing of root's environment, and no descriptor but ``held``. Raise
    TimeoutError if it does not end within ``limit`` seconds, OSError if it cannot be started.
    """

    def run(_: int) -> None:
        os.chdir("/")
        os.umask(0o077)
        os.execve(command[0], [*command], _ENVIRONMENT)  # noqa: S606 - no shell is wanted

    return answer_as(uid, gid, groups, run, limit, held, file_size=_FILE_LIMIT)


#: No number counts further.
MOST = 1e15


def as_number(value: object) -> float:
    """Return a number from 0 to `MOST`. Raise ValueError for anything else."""
    try:
        number = float(value) if isinstance(value, bytes | int | float) else math.nan
    except OverflowError:
        number = math.inf
    if not 0 <= number <= MOST:
        raise ValueError("not a number in the range that counts")
    return number


def or_zero(value: object) -> float:
    """Return a number from 0 to `MOST`, or 0 for anything else."""
    try:
        return as_number(value)
    except ValueError:
        return 0.0
