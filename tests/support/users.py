"""Run functions in child processes: as other users, on other mounts, with a time limit."""

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

# Imported here, since a user may not be able to read the Python that root runs the tests with.
import stager.request.policy  # noqa: F401
from stager.base import linux

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
#: An ordinary user that needs no entry in the system's list of users.
USER = 47110
#: Another one: the account that stages for all users.
OWNER = 47111


def forked(act: Callable[[], T]) -> T:
    """Return what ``act`` returns, or raise what it raises, in a child process."""
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
        pickled = pipe.read()
    _, status = os.waitpid(child, 0)
    assert pickled, f"the child ended with {os.waitstatus_to_exitcode(status)} and no answer"
    answer = pickle.loads(pickled)
    if isinstance(answer, BaseException):
        raise answer
    return cast("T", answer)


def as_user(uid: int, act: Callable[[], T]) -> T:
    """Run ``act`` in a child process as user ``uid``. Needs root."""

    def become() -> T:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        # A forked child that changed its user can read its own /proc only when it is dumpable.
        linux.set_dumpable(True)
        return act()

    return forked(become)


def as_ordinary_user(act: Callable[[], T]) -> T:
    """Run ``act`` as a user other than root, for whom permissions do not count."""
    return as_user(USER, act) if os.getuid() == 0 else act()


def on_tmpfs(folder: Path, options: str, act: Callable[[], T], kind: str = "tmpfs") -> T:
    """Run ``act`` in a child process with a private, empty tmpfs at ``folder``. Needs root."""

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


def give_records_folder(root: Path, uid: int) -> None:
    """Make the folder of a user's records beneath ``root``, as root does. Needs root."""
    folder = root / f".slurm-stage/{uid}"
    folder.mkdir(parents=True)
    os.chown(folder, uid, uid)


@contextmanager
def ordinary_home(parent: str | None = None) -> Iterator[Path]:
    """Make a folder that an ordinary user owns and can reach."""
    with tempfile.TemporaryDirectory(dir=parent) as name:
        if os.getuid() == 0:
            os.chown(name, USER, USER)
        yield Path(name)


def within(seconds: int, act: Callable[[], T]) -> T:
    """Run ``act`` in a child process that SIGALRM ends after ``seconds``."""

    def limited() -> T:
        signal.alarm(seconds)
        return act()

    return forked(limited)
