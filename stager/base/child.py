"""Run something in a child process, if need be as another user, and wait for it only so long.

The child may wait for a filesystem that does not answer, and cannot be killed then: it is left. If
it runs as another user, that user may also stop it, trace it, or have it answer anything; so its
time, its memory and the size of its answer are limited.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base.linux import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: The descriptor to which an answer is written, standard output; and the first that is free.
_OUTPUT, _HELD = 1, 3
#: Bytes of an answer after which the process is ended.
_ANSWER_LIMIT = 1 << 20
#: Bytes read at a time.
_BLOCK = 1 << 16
#: Seconds for a killed process to end, and between two looks whether it has.
_GRACE, _PAUSE = 1.0, 0.005
#: The table of a million files takes some 200 MiB, and as much again while it is read.
_MEMORY_LIMIT = 1 << 30
#: The group of a user whom the node no longer knows, and of who needs none (nogroup).
NO_GROUP = 65534


class LateAnswerError(TimeoutError):
    """The child did not end in time; ``so_far`` is what it wrote."""

    def __init__(self, so_far: bytes) -> None:
        super().__init__(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        self.so_far = so_far


def answer_as(
    uid: int,
    gid: int,
    groups: Sequence[int],
    act: Callable[[int], object],
    limit: float,
    held: int | None = None,
    *,
    file_size: int = 0,
) -> bytes:
    """Return what ``act`` writes to the descriptor that it gets, in a child that runs as the user.

    The child writes no file of more than ``file_size`` bytes.

    The child has no other descriptors, but those that are /dev/null, and ``held``, which keeps a
    lock of the caller's as long as the child lives.

    Raise LateAnswerError if it does not end within ``limit`` seconds, OSError if it cannot be
    started.
    """

    def act_as(output: int) -> None:
        _become(uid, gid, groups, max(1, round(limit)), file_size)
        act(output)

    return answer(act_as, limit, held)


def answer(act: Callable[[int], object], limit: float, held: int | None = None) -> bytes:
    """Return what ``act`` writes, as `answer_as`, in a child that runs as this user."""
    deadline = time.monotonic() + limit
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            _let_go(writing, held)
            os.setsid()
            act(_OUTPUT)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        return _read_all(reading, deadline)
    finally:
        os.close(reading)
        _end(child)


def _let_go(output: int, held: int | None) -> None:
    """Keep ``output``, as `_OUTPUT`, and ``held``: who is left must hold nothing else of root's."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor, number in ((null, 0), (output, _OUTPUT), (null, 2)):
        os.dup2(descriptor, number)
    if held is not None:
        os.dup2(held, _HELD)
        os.set_inheritable(_HELD, True)  # dup2 does not if it is that number already
    os.closerange(_HELD if held is None else _HELD + 1, os.sysconf("SC_OPEN_MAX"))


def _become(uid: int, gid: int, groups: Sequence[int], seconds: int, file_size: int) -> None:
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    end_with_parent()
    _limit(resource.RLIMIT_AS, _MEMORY_LIMIT)
    _limit(resource.RLIMIT_CPU, seconds)
    _limit(resource.RLIMIT_FSIZE, file_size)
    _limit(resource.RLIMIT_CORE, 0)
    # It is the only process: no child of it outlives it, out of reach of Slurm's limits.
    _limit(resource.RLIMIT_NPROC, 1)


def _limit(which: int, most: int) -> None:
    _, hard = resource.getrlimit(which)
    lowest = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (lowest, lowest))


def _read_all(descriptor: int, deadline: float) -> bytes:
    answer = b""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while len(answer) < _ANSWER_LIMIT:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise LateAnswerError(answer)
        block = os.read(descriptor, _BLOCK)
        if not block:
            break
        answer += block
    return answer


def _end(child: int) -> None:
    """Kill the child and its session. Leave it if it waits for a disk: it ends when it can."""
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ProcessLookupError):  # it may have no session yet
        os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + _GRACE
    with suppress(ChildProcessError):
        while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
