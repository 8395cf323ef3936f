"""Call the Linux system calls that Python's os module lacks. Each raises OSError on failure."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct
import time
from contextlib import contextmanager
from enum import IntFlag
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Options of prctl(2): send this process a signal when its parent ends, and let other processes of
#: the user trace it.
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
#: The number of openat2(2), which is the same on all machines, and its flags: stay on the mount,
#: follow no link, stay beneath the folder.
_OPENAT2 = 437
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 0x01, 0x02, 0x04, 0x08
#: What openat2 says where the kernel lacks it, or a filter of system calls forbids it.
_NO_OPENAT2 = (errno.ENOSYS, errno.EPERM)
#: The errors of `open_beneath` for a symbolic link in the path.
IS_LINK = (errno.ELOOP, errno.ENOTDIR)
#: To pass through a folder, if it is no symbolic link.
PASS_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: The flag of unshare(2) for a network of its own (CLONE_NEWNET).
_OWN_NETWORK = 0x40000000
#: What brings an interface up: the requests of ioctl(2) to read and to set its flags, and a struct
#: ifreq (netdevice(7)).
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1
_INTERFACE = struct.Struct("16sH14x")
#: The number of quotactl_fd(2), which is the same on all machines; what it is asked for, the quota
#: of a user (Q_GETQUOTA, USRQUOTA); the bytes of a block of its limits; and its answer: the two
#: limits in blocks, the bytes in use, and from when on the lower limit holds if it is passed, in
#: seconds since 1970.
_QUOTACTL_FD, _GET_QUOTA, _QUOTA_BLOCK = 443, 0x80000700, 1024
_QUOTA = struct.Struct("3Q24xQ8xI4x")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_syscall = _libc.syscall
_syscall.argtypes = (
    ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t,
)  # fmt: skip
_syscall.restype = ctypes.c_long


class _How(ctypes.Structure):
    """How openat2(2) opens: struct open_how of linux/openat2.h."""

    _fields_ = (
        ("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64),
    )  # fmt: skip


_HOW_SIZE = ctypes.sizeof(_How)


@cache
def _how(flags: int, more: int) -> tuple[_How, int]:
    """Return the structure for ``flags``, with ``more`` ways to resolve, and its address."""
    how = _How(flags, 0, _BENEATH | _NO_SYMLINKS | _NO_MAGICLINKS | more)
    return how, ctypes.addressof(how)


def open_beneath(folder: int, path: bytes, flags: int, *, same_mount: bool = False) -> int:
    """Open ``path`` beneath the descriptor ``folder``, if no part of it is a symbolic link.

    The empty path is the folder itself. Raise OSError, with ELOOP or ENOTDIR for a link. With
    ``same_mount``, raise it with EXDEV if the path leads to another mount, which is not asked for
    anything: a user may have mounted one that never answers. Before Linux 5.6 it is entered.
    """
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    _, address = _how(flags, _NO_XDEV if same_mount else 0)
    try:
        return _check(_syscall(_OPENAT2, folder, path or b".", address, _HOW_SIZE))
    except OSError as error:
        if error.errno not in _NO_OPENAT2:
            raise
    return open_step_by_step(folder, path, flags)


def open_at(folder: int, path: bytes, flags: int, *, follow: bool) -> int:
    """Open ``path`` beneath the descriptor ``folder``, or with ``follow`` where links lead."""
    if follow:
        return os.open(path or b".", flags, dir_fd=folder)
    return open_beneath(folder, path, flags)


def open_step_by_step(folder: int, path: bytes, flags: int) -> int:
    """Do the same as `open_beneath`, for which it stands in on old kernels."""
    *above, name = path.split(b"/")
    current = folder
    try:
        for part in above:
            below = os.open(part, PASS_FOLDER, dir_fd=current)
            if current != folder:
                os.close(current)
            current = below
        return os.open(name or b".", flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
    finally:
        if current != folder:
            os.close(current)


class MountFlag(IntFlag):
    """Flags of mount(2)."""

    NOSUID = 2
    NODEV = 4
    NOEXEC = 8


class UnmountFlag(IntFlag):
    """Flags of umount2(2)."""

    DETACH = 2
    NOFOLLOW = 8


def mount_tmpfs(path: str, flags: MountFlag, options: str) -> None:
    """Mount an empty filesystem in memory at ``path``. Needs root."""
    _check(_libc.mount(b"slurm-stage", os.fsencode(path), b"tmpfs", flags, options.encode()))


def unmount(path: str, flags: UnmountFlag) -> None:
    """Unmount what was mounted last at ``path``. Needs root."""
    _check(_libc.umount2(os.fsencode(path), flags))


def reserve(descriptor: int, offset: int, length: int) -> None:
    """Reserve disk space for a part of a file, where its filesystem can. Raise OSError.

    Where it cannot, glibc's posix_fallocate reads and writes each block: 10 s for 200 MB on FUSE.
    """
    try:
        _check(_libc.fallocate(descriptor, 0, offset, length))
    except InterruptedError:
        reserve(descriptor, offset, length)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise


def sync_filesystem(descriptor: int) -> None:
    """Write all that is cached of the descriptor's filesystem to its disk."""
    _check(_libc.syncfs(descriptor))


class Quota(NamedTuple):
    """The bytes that a user may have on a disk, and that he has there."""

    limit: int
    used: int


def quota_of(uid: int, path: str) -> Quota | None:
    """Return a user's quota on the disk of ``path``; None if there is no limit.

    It is known of the user who asks, on filesystems that keep quotas as ext4 and XFS do. Raise
    OSError on others.
    """
    hard, soft, used, holds_from, _ = _QUOTA.unpack(_ask_quota(uid, path))
    limits = [hard, soft if holds_from and holds_from <= time.time() else 0]
    limit = min((one for one in limits if one), default=0)
    return Quota(limit * _QUOTA_BLOCK, used) if limit else None


def _ask_quota(uid: int, path: str) -> bytes:
    answer = ctypes.create_string_buffer(_QUOTA.size)
    question = ctypes.c_int(_GET_QUOTA), ctypes.c_int(uid), answer
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check(_libc["syscall"](ctypes.c_long(_QUOTACTL_FD), descriptor, *question))
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        disk = os.fstat(descriptor).st_dev  # a kernel before 5.14 asks for the device
        device = f"/dev/block/{os.major(disk)}:{os.minor(disk)}".encode()
        _check(_libc.quotactl(question[0], device, *question[1:]))
    finally:
        os.close(descriptor)
    return answer.raw


def without_own_link(path: str) -> str:
    """Return where ``path`` leads if it is a symbolic link of root's that nobody else can replace.

    Any other path is returned as it is. Raise OSError if it is not there.
    """
    above = os.stat(os.path.dirname(path) or "/")
    is_closed = above.st_uid == 0 and (not above.st_mode & 0o022 or above.st_mode & stat.S_ISVTX)
    facts = os.lstat(path or "/")
    if stat.S_ISLNK(facts.st_mode) and facts.st_uid == 0 and is_closed:
        return os.path.realpath(path)
    return path


def set_dumpable(dumpable: bool) -> None:
    """Choose whether other processes of this user may trace this process and read its memory."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, int(dumpable), 0, 0, 0))


def end_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have this process signalled when its parent ends. A change of its user takes that back."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0))


def adopt_orphans() -> None:
    """Have this process become the parent of its descendants whose own parents end."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


@contextmanager
def untagged() -> Iterator[None]:
    """Have connections that this thread makes left alone by the library of `launch.mpi`."""
    untag = getattr(_libc, "stage_peers_untag", None)  # of the whole process, if it is preloaded
    if untag is None:
        yield
        return
    untag(1)
    try:
        yield
    finally:
        untag(0)


def leave_network() -> None:
    """Give this process a network of its own, with nothing but a loopback interface. Needs root."""
    _check(_libc.unshare(_OWN_NETWORK))
    import fcntl  # only here
    import socket

    with socket.socket() as any_socket:
        request = _INTERFACE.pack(b"lo", 0)
        name, flags = _INTERFACE.unpack(fcntl.ioctl(any_socket, _GET_FLAGS, request))
        fcntl.ioctl(any_socket, _SET_FLAGS, _INTERFACE.pack(name, flags | _UP))


def is_alone() -> bool:
    """Return whether the network of this process has no interface but the loopback."""
    try:
        with open("/proc/self/net/dev", encoding="ascii") as table:
            return [line.partition(":")[0].strip() for line in table if ":" in line] == ["lo"]
    except OSError:
        return False


def facts_here(folder: str, name: str) -> os.stat_result:
    """Return the stat of ``name`` in ``folder``, which is on the same mount. Raise OSError."""
    descriptor = _open_here(folder, name, os.O_PATH)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def open_folder_here(folder: str, name: str) -> int:
    """Open the folder ``name`` of ``folder``, on the same mount, to list it. Raise OSError."""
    return _open_here(folder, name, os.O_RDONLY | os.O_DIRECTORY)


def _open_here(folder: str, name: str, flags: int) -> int:
    parent = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return open_beneath(parent, os.fsencode(name), flags, same_mount=True)
    finally:
        os.close(parent)


def _check(result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
