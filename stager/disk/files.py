"""A user's folder on one node's disk: records, locks and partial files; all writing is here.

Beneath each cache root lies ``.slurm-stage``, owned by root, and in it one folder a user, mode
0700. The helper acts as that user from first to last, so whatever lies in the folder was written
by this user or by root. It is on the same filesystem as the data: a wiped disk has no records,
and publishing is one rename.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TYPE_CHECKING

import xxhash

from stager.base.errors import DestinationError, SpaceError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Not to wait for the other end of a named pipe, should somebody have put one there.
READ_ONLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# To pass through a folder, one need not be allowed to read it.
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT)


def existing_folder_above(path: str) -> str:
    """The nearest of the folders above ``path`` that is there."""
    folder = os.path.dirname(path)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return folder


@contextmanager
def opened(path: str | bytes, flags: int, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o600, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def stage_errors(path: str) -> Iterator[None]:
    """Turn the disk's errors into those of a stage."""
    try:
        yield
    except OSError as error:
        raise as_stage_error(error, path) from None


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Put all of ``data`` at ``offset`` bytes. Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written


# Partial files: without a name until every byte is in place.

#: Bytes read at a time where a file is read back.
READ_SIZE = 4 << 20


def make_movable(name: str, folder: int) -> bool:
    """Have the user be allowed to move what is at ``name``; whether there is anything."""
    try:
        there = os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(there.st_mode) and there.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        # Its own '..' is written. What has no right to be opened cannot be moved either.
        with suppress(PermissionError), opened(name, OPEN_FOLDER | os.O_NOFOLLOW, folder) as entry:
            os.fchmod(entry, stat.S_IMODE(there.st_mode) | stat.S_IRWXU)
    return True


def remove_tree(path: str) -> None:
    """Remove what is at ``path`` and all that is in it, as far as that can be removed."""
    folders = [path]
    for folder in folders:  # which grows
        with suppress(OSError):
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                os.unlink(folder)
                continue
            os.chmod(folder, 0o700)  # one may have staged what one may not change
            with os.scandir(folder) as entries:
                inside = list(entries)
            for entry in inside:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                with suppress(OSError):
                    os.unlink(entry.path)
    for folder in reversed(folders):
        with suppress(OSError):
            os.rmdir(folder)


def read_back(path: str | bytes, flags: int = os.O_NOFOLLOW) -> str:
    """The xxh3-128 of what is on the disk, in hexadecimal, past the page cache. Raises OSError."""
    digest = xxhash.xxh3_128()
    flags |= os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    with ExitStack() as stack:
        descriptor = stack.enter_context(opened(path, flags))
        size = os.fstat(descriptor).st_size
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no plain file")
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        with suppress(OSError):  # not on this filesystem
            descriptor = stack.enter_context(opened(path, flags | os.O_DIRECT))
        buffer = stack.enter_context(closing(mmap.mmap(-1, READ_SIZE)))
        with memoryview(buffer) as view:
            at = 0
            while at < size and (count := os.preadv(descriptor, [buffer], at)):
                digest.update(view[:count])
                at += count
    return digest.hexdigest()


def sync_folder(folder: int) -> None:
    """Bring the names in ``folder`` to the disk. Raises OSError."""
    # One may write in a folder and not read it; then its own time has to bring it to the disk.
    with suppress(PermissionError), opened(".", OPEN_FOLDER, folder) as descriptor:
        os.fsync(descriptor)


@contextmanager
def opened_beneath(root: str, folder: str) -> Iterator[int]:
    """A folder beneath ``root``, opened step by step, so that nobody can lead it elsewhere.

    Each folder on the way is the user's own or root's, and no link. Raises DestinationError, or
    FileNotFoundError.
    """
    with ExitStack() as stack:
        way = root
        at = stack.enter_context(opened(root or "/", _STEP & ~os.O_NOFOLLOW))
        for name in folder[len(root) :].split("/"):
            if name:
                way = f"{way}/{name}"
                at = stack.enter_context(_opened_step(way, name, at))
        yield at


@contextmanager
def _opened_step(way: str, name: str, at: int) -> Iterator[int]:
    try:
        descriptor = os.open(name, _STEP, dir_fd=at)
    except NotADirectoryError:
        kind = kind_of(os.lstat(name, dir_fd=at).st_mode)
        raise DestinationError(f"{way} is {kind}, not a folder") from None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise as_stage_error(error, way) from None
    try:
        owner = os.fstat(descriptor).st_uid
        if owner not in (0, os.getuid()):
            raise DestinationError(
                f"{way} belongs to uid {owner}, who could replace what is staged there; "
                "choose another destination"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def kind_of(mode: int) -> str:
    """What a file of this mode is, in words."""
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
        stat.S_IFLNK: "a symbolic link",
    }
    return kinds.get(stat.S_IFMT(mode), "a plain file")


def as_stage_error(error: OSError, path: str = "") -> SpaceError | DestinationError:
    """Return the stage's error for an error of this node's disk.

    The message names ``path``, or the path of ``error`` if that is empty.
    """
    path = path or str(error.filename or "input/output")
    if error.errno in _SPACE_ERRORS:
        kind = "quota" if error.errno == errno.EDQUOT else "disk"
        return SpaceError(f"{path}: the {kind} is full; make room and submit again")
    if error.errno == errno.EROFS:
        return DestinationError(
            f"{path}: the disk is read-only; submit again without this node (--exclude) and tell "
            "the administrator"
        )
    return DestinationError(f"{path}: {error.strerror or error}")


def check_disk(folder: str) -> None:
    """Raise DestinationError if the disk of ``folder`` is read-only, SpaceError if it is full.

    Call it where something is missing that another user should have made.
    """
    check_read_only(folder)
    with suppress(OSError):
        room = os.statvfs(folder)
        # Some filesystems do not count their blocks or inodes.
        if (room.f_blocks and not room.f_bavail) or (room.f_files and not room.f_favail):
            raise as_stage_error(OSError(errno.ENOSPC, ""), folder)


def check_read_only(folder: str) -> None:
    """Raise DestinationError if the disk of ``folder`` is read-only."""
    with suppress(OSError):
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            raise as_stage_error(OSError(errno.EROFS, ""), folder)


@contextmanager
def made_parents(path: str) -> Iterator[None]:
    """Make the folders above ``path`` that lack; take the empty ones away again on a failure.

    Raises DestinationError.
    """
    missing: list[str] = []
    folder = os.path.dirname(path)
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    try:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        except OSError as error:
            raise as_stage_error(error) from None
        yield
    except BaseException:
        for made in missing:
            with suppress(OSError):
                os.rmdir(made)
        raise


#: Bytes read at a time where a copy is read again.
READ_SIZE = 4 << 20


def digest_of(path: str) -> str:
    """The xxh3-128 of the file's bytes, in hexadecimal."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(READ_SIZE):
            digest.update(block)
    return digest.hexdigest()
