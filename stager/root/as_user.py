"""Run a program as another user, with limits on its time and its output."""

from __future__ import annotations

import os
import pwd
import select
import signal
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Seconds that one program may take: Slurm keeps the node waiting meanwhile.
_TIME_LIMIT = 10
#: Bytes of output after which a program is ended.
_OUTPUT_LIMIT = 1 << 20
#: Bytes read at a time.
_BLOCK = 1 << 16
#: The group of a user whom the node no longer knows: nogroup.
_NOGROUP = 65534
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


def groups_of(uid: int) -> tuple[int, list[int]]:
    """Return the user's primary group and all groups; nogroup and none for an unknown user."""
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return _NOGROUP, []
    return user.pw_gid, os.getgrouplist(user.pw_name, user.pw_gid)


def run_as(uid: int, gid: int, groups: Sequence[int], command: Sequence[str]) -> bytes:
    """Run ``command`` as that user and return its output, cut off at the limits.

    The program gets nothing of root's environment. It and its children are killed at the end. Raise
    OSError if it cannot be started.
    """
    deadline = time.monotonic() + _TIME_LIMIT
    output = b""
    with subprocess.Popen(
        command, user=uid, group=gid, extra_groups=groups, env=_ENVIRONMENT, cwd="/", umask=0o077,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            while len(output) < _OUTPUT_LIMIT:
                block = _read_until(process.stdout.fileno(), deadline)
                if not block:
                    break
                output += block
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return output


def _read_until(descriptor: int, deadline: float) -> bytes:
    """Return the next bytes, or none at the end of the output or at the deadline."""
    ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
    return os.read(descriptor, _BLOCK) if ready else b""
