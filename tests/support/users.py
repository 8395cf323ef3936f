"""TODO."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from stager.base import linux

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
#: An ordinary user that needs no entry in the system's list of users.
USER = 47110


# Processes of other users, and disks that are nobody else's.


def forked(act: Callable[[], T]) -> T:
    """What ``act`` returns, or raises, in a child process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer: object
            try:
                answer = act()
            except BaseException as error:
                answer = error
            os.write(writing, pickle.dumps(answer))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    assert said, f"the child ended with {os.waitstatus_to_exitcode(status)} and no answer"
    answer = pickle.loads(said)
    if isinstance(answer, BaseException):
        raise answer
    return cast("T", answer)


def as_user(uid: int, act: Callable[[], T]) -> T:
    """What ``act`` returns, or raises, in a child process of user ``uid``; needs root."""

    def become() -> T:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        # A program that this user starts may look into its own /proc; a child by fork may not,
        # until it says so.
        linux.set_dumpable(True)
        return act()

    return forked(become)


def as_ordinary_user(act: Callable[[], T]) -> T:
    """What ``act`` returns, or raises, where permissions count: root passes over them."""
    return as_user(USER, act) if os.getuid() == 0 else act()


def on_tmpfs(folder: Path, options: str, act: Callable[[], T], kind: str = "tmpfs") -> T:
    """What ``act`` does in a child that alone has a fresh tmpfs at ``folder``; needs root."""

    def mount() -> T:
        new_mounts = 0x00020000  # CLONE_NEWNS
        assert ctypes.CDLL(None).unshare(new_mounts) == 0
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", kind, "-o", options, "none", folder], check=True)
        return act()

    return forked(mount)


def remount_read_only(folder: Path) -> None:
    """Make the filesystem at ``folder`` read-only, as the kernel does after an I/O error."""
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)


@contextmanager
def ordinary_home(parent: str | None = None) -> Iterator[Path]:
    """A folder that an ordinary user owns and reaches."""
    with tempfile.TemporaryDirectory(dir=parent) as name:
        if os.getuid() == 0:
            os.chown(name, USER, USER)
        yield Path(name)


def within(seconds: int, act: Callable[[], T]) -> T:
    """What ``act`` returns; the child that runs it is ended by SIGALRM when it takes longer."""

    def limited() -> T:
        signal.alarm(seconds)
        return act()

    return forked(limited)
