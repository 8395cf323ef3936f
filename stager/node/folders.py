"""Open, make and lock root's own folders and files by descriptors, which follow no link.

Users may write to some of the folders above, and could put a link in the way.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import stat
import time
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING

from stager.base import linux, paths
from stager.base.mounts import mounted_by_stranger, stranger_at

if TYPE_CHECKING:
    from collections.abc import Iterator

OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Not to be written: a user can take the lock's descriptor from a process that runs as that user
#: (pidfd_getfd), and could fill /run by it.
_LOCK_FILE = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
#: To look at what is there, which asks nothing of a user's filesystem.
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
REPLACE_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
#: Seconds to wait for another process of root's that makes the same folder.
_LIMIT = 5.0
#: Names in a folder of records that root looks at, while a job waits.
_MOST_USERS = 1000
#: Names that are followed on the way to the store, of which some may be symbolic links.
_MOST_STEPS = 100
#: Others than the owner may write.
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
#: Seconds between two attempts to get a lock.
_PAUSE = 0.01


class UnsafeError(Exception):
    """A folder that root must not use; the message says why."""


def group_of(uid: int) -> int:
    """Return the user's primary group. Raise ValueError if the node does not know the user."""
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        raise ValueError(
            f"this node knows no such user; check its user database (getent passwd {uid})"
        ) from None


def make_folder(root: str, folder: str, uid: int | None = None, gid: int = 0) -> str:
    """Make ``root/folder`` for root, and in it the private folder ``uid`` of that user, if any.

    Return what was moved out of the way, if a user made it first, as administrators are told. Raise
    OSError, or UnsafeError if a folder belongs to somebody else.
    """
    path = f"{root}/{folder}"
    stranger = stranger_at(root or "/")
    if stranger:
        raise UnsafeError(f"uid {stranger} mounted a filesystem at {root}; unmount it (umount -l)")
    with opened(linux.without_own_link(root)) as base:
        moved = _take_name(base, path)
        _make_in(base, path, uid, gid)
    return moved


def make_store(path: str) -> None:
    """Make what is missing of the store's folder ``path``, for root and with mode 0755.

    Raise FileNotFoundError where that would be on the filesystem of ``/``, as where the node's disk
    is missing; UnsafeError if others than root could replace a folder on the way; or OSError.
    """
    names = path.split("/")[:0:-1]
    with ExitStack() as stack:
        folder = top = stack.enter_context(opened("/", flags=_LOOK))
        for _ in range(_MOST_STEPS):
            if not names:
                return
            name = names.pop() or "."
            try:
                there = stack.enter_context(opened(name, folder, flags=_LOOK))
            except FileNotFoundError:
                if os.fstat(folder).st_dev == os.fstat(top).st_dev:
                    raise
                there = stack.enter_context(made(folder, name, 0o755))
                if os.fstat(there).st_uid == 0:
                    os.fchmod(there, 0o755)  # whatever mask root ran with
            if target := _link_of_root(there, folder, path):
                names += target.split("/")[::-1]
                folder = top if target.startswith("/") else folder
            else:
                folder = there
        raise UnsafeError(f"store {path}: too many symbolic links lead there; name its own path")


def _link_of_root(there: int, folder: int, path: str) -> str:
    """Return where a symbolic link in ``folder`` leads, on the way to the store; empty for what is
    none.

    Raise UnsafeError unless it is root's alone, and nobody else can replace what is in it.
    """
    at = _path_of(there)
    if stranger := mounted_by_stranger(there):  # before that filesystem is asked for anything
        raise UnsafeError(f"uid {stranger} mounted a filesystem at {at}; unmount it (umount -l)")
    facts = os.fstat(there)
    is_link = stat.S_ISLNK(facts.st_mode)
    mode = os.fstat(folder).st_mode if is_link else facts.st_mode
    # With a second name for a link of root's, a user could lead root anywhere.
    is_open = mode & _OTHERS and (is_link or not mode & stat.S_ISVTX)
    if facts.st_uid != 0 or is_open:
        raise UnsafeError(
            f"store {path}: others than root own {at} (uid {facts.st_uid}, mode "
            f"{stat.S_IMODE(facts.st_mode):04o}), or can replace what is there; make it root's"
        )
    return os.readlink("", dir_fd=there) if is_link else ""


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _make_in(base: int, path: str, uid: int | None, gid: int) -> None:
    """Make the folder ``path``, in the descriptor ``base``, and the user's in it, if any."""
    with made(base, os.path.basename(path), 0o755, enter_mounts=False) as parent:
        facts = os.fstat(parent)
        if facts.st_uid != 0:
            raise UnsafeError(
                f"{path} belongs to uid {facts.st_uid}, not to root; if it has folders of several "
                f"users, it has the records of all copies: chown root {path}; else remove it"
            )
        if facts.st_mode & _OTHERS:
            raise UnsafeError(
                f"{path} can be written to by users other than root; make it root's alone: "
                f"chmod 0755 {path}"
            )
        os.fchmod(parent, 0o755)  # users pass through it, whatever mask root ran with
        if uid is None:
            return
        with made(parent, str(uid), 0o700, enter_mounts=False) as home:
            if os.fstat(home).st_uid == 0 and uid != 0:
                # Still root's own and in root's folder: nobody had a chance to change it.
                os.fchmod(home, 0o700)
                os.fchown(home, uid, gid)
            if os.fstat(home).st_uid != uid:
                raise UnsafeError(f"{path}/{uid} does not belong to uid {uid}; remove this folder")


def _take_name(base: int, path: str) -> str:
    """Move what a user made first at ``path``, in the descriptor ``base``, aside, and say so.

    The user's own folder in it stays in use.
    """
    folder = os.path.basename(path)
    with made(base, folder, 0o755, enter_mounts=False) as there:
        if os.fstat(there).st_uid == 0:
            return ""
    with (
        opened(paths.RUN) as run,
        made(run, paths.RUN_NAME, 0o755),
        locked(f"{paths.RUN_FOLDER}/taken.lock", _LIMIT),
        made(base, folder, 0o755, enter_mounts=False) as there,  # perhaps root's by now
    ):
        owner = os.fstat(there).st_uid
        if owner == 0 or not _has_only_own(there):
            return ""
        aside = f"{folder}.of-{owner}-{os.urandom(4).hex()}"
        os.rename(folder, aside, src_dir_fd=base, dst_dir_fd=base)
        with made(base, folder, 0o755, enter_mounts=False) as fresh, suppress(OSError):
            if os.fstat(fresh).st_uid == 0:
                os.rename(str(owner), str(owner), src_dir_fd=there, dst_dir_fd=fresh)
    return f"{path} belonged to uid {owner}; it was moved to {os.path.dirname(path)}/{aside}"


def _has_only_own(folder: int) -> bool:
    """Whether the descriptor ``folder`` has no other user's folder: else it was root's.

    Nor was it if it has more names than a node has users of it.
    """
    owner = os.fstat(folder).st_uid
    with os.scandir(folder) as entries:
        names = [entry.name for entry in islice(entries, _MOST_USERS + 1)]
    return len(names) > _MOST_USERS or not any(
        _is_users(folder, name) for name in names if name != str(owner)
    )


def _is_users(folder: int, name: str) -> bool:
    """Whether a name in ``folder`` is a user's, as root makes it; that user is known here."""
    with suppress(OSError, ValueError, KeyError):  # as of what is mounted there
        path = os.fsencode(name)
        there = linux.open_beneath(folder, path, os.O_PATH | os.O_DIRECTORY, same_mount=True)
        try:
            return name == str(pwd.getpwuid(os.fstat(there).st_uid).pw_uid)
        finally:
            os.close(there)
    return False


@contextmanager
def opened(
    name: str, folder: int | None = None, *, flags: int = OPEN_FOLDER, mode: int = 0o600
) -> Iterator[int]:
    """Open a folder, or a file with other ``flags``, and close it at the end. Raise OSError.

    ``name`` is relative to the descriptor ``folder``, if that is given.
    """
    descriptor = os.open(name, flags, mode, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def made(folder: int, name: str, mode: int, *, enter_mounts: bool = True) -> Iterator[int]:
    """Open the folder ``name`` in the descriptor ``folder``; make it first if it is missing.

    Do not ``enter_mounts`` where a user may have mounted a filesystem that does not answer.
    """
    with suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=folder)
    descriptor = (
        os.open(name, OPEN_FOLDER, dir_fd=folder) if enter_mounts else _open_here(name, folder)
    )
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_here(name: str, folder: int) -> int:
    """Open a folder of the same filesystem. Raise UnsafeError if something is mounted there."""
    try:
        return linux.open_beneath(folder, os.fsencode(name), OPEN_FOLDER, same_mount=True)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise OSError(error.errno, error.strerror, name) from None
        path = f"{_path_of(folder)}/{name}"
        raise UnsafeError(f"a filesystem is mounted at {path}; unmount it (umount -l)") from None


@contextmanager
def locked(path: str, limit: float) -> Iterator[int]:
    """Hold the lock of the file ``path``, which is made if it is missing; yield its descriptor.

    Raise TimeoutError if another process has it for longer than ``limit`` seconds, or OSError.
    """
    deadline = time.monotonic() + limit
    with opened(path, flags=_LOCK_FILE) as descriptor:
        while not _lock(descriptor):
            if time.monotonic() > deadline:
                text = f"another process has this lock for longer than {limit} s"
                raise TimeoutError(errno.ETIMEDOUT, text, path)
            time.sleep(_PAUSE)
        yield descriptor


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def replace_file(path: str, text: str, mode: int) -> None:
    """Write a file of root's with this mode in one step, in place of one at ``path``."""
    fresh = f"{path}.{os.getpid()}"  # not a name that node_exporter reads
    with opened(fresh, flags=REPLACE_FILE, mode=mode) as descriptor:
        os.fchmod(descriptor, mode)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(text.encode("utf-8", "surrogateescape"))
    os.rename(fresh, path)
