"""Open, read back and remove files without following links, and explain what a disk refuses.

All other modules of this package build on these functions. An error of the disk becomes a
SpaceError or a DestinationError here.

Decide the permissions of a copy: its owner's alone, unless the user shares it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stager.base import linux
from stager.base.codec import Count, Time  # noqa: TC001 - the codec reads the types
from stager.base.digest import Digest
from stager.base.errors import DestinationError, SpaceError
from stager.base.options import Share
from stager.base.paths import RECORDS_FOLDER
from stager.base.telemetry import count
from stager.base.users import group_name, is_private_group, user_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

#: To read a plain file. Opening a named pipe in its place does not block.
READ_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
#: To write over a plain file.
OVERWRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
#: The permission bits to write.
WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
#: Bytes read at a time where a file is read back.
READ_SIZE = 4 << 20
#: Nanoseconds by which the times of files may be behind `time.time_ns`: the kernel's clock for them
#: ticks every 10 ms at least.
TICK = 100_000_000
_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class CopyFacts:
    """The copy's stat right after publication: bytes, nanoseconds since 1970, inode, uid."""

    size: Count
    mtime_ns: Time
    inode: Count
    owner: Count


def existing_folder_above(path: str) -> str:
    """Return the nearest folder above ``path`` that exists."""
    folder = os.path.dirname(path)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return folder


@contextmanager
def opened(path: str | bytes, flags: int, folder: int | None = None) -> Iterator[int]:
    """Open a file and close it at the end. Raise OSError.

    ``path`` is relative to the descriptor ``folder``, if that is given. A file that is created gets
    mode 0600.
    """
    descriptor = os.open(path, flags, 0o600, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def stage_errors(path: str) -> Iterator[None]:
    """Turn an OSError into the stage's error for ``path``, as `as_stage_error` does."""
    try:
        yield
    except OSError as error:
        raise as_stage_error(error, path) from None


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset`` bytes. Raise OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        count()
        view = view[written:]
        offset += written


def append_whole(descriptor: int, data: bytes) -> None:
    """Append all of ``data``, or nothing if the disk is full. Raise OSError."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # until it is closed
    size = os.fstat(descriptor).st_size
    try:
        write_all(descriptor, data, size)
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def remove_tree(path: str) -> None:
    """Remove ``path`` and everything beneath it, as far as permissions allow.

    Folders that stay, because of what others have in them, keep their modes.
    """
    folders = [path]
    modes: dict[str, int] = {}
    for folder in folders:  # grows while it is read
        count()
        with suppress(OSError):
            mode = os.lstat(folder).st_mode
            if not stat.S_ISDIR(mode):
                os.unlink(folder)
                continue
            os.chmod(folder, 0o700)  # a copied folder may forbid its owner to write
            modes[folder] = stat.S_IMODE(mode)
            with os.scandir(folder) as entries:
                inside = list(entries)
            for entry in inside:
                count()
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                with suppress(OSError):
                    os.unlink(entry.path)
    for folder in reversed(folders):
        try:
            os.rmdir(folder)
        except OSError:
            with suppress(OSError, KeyError):
                os.chmod(folder, modes[folder])


def read_back(path: str | bytes, flags: int = os.O_NOFOLLOW) -> str:
    """Return the digest of a file in hexadecimal, read from the disk past the page cache.

    Raise OSError if it cannot be read or is not a plain file.
    """
    digest = Digest()
    flags |= os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    with ExitStack() as stack:
        descriptor = stack.enter_context(opened(path, flags))
        size = os.fstat(descriptor).st_size
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is not a plain file")
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        with suppress(OSError):  # this filesystem has no direct reads
            descriptor = stack.enter_context(opened(path, flags | os.O_DIRECT))
        # No larger than the file: a direct read touches each page of its buffer.
        length = min(READ_SIZE, max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE)
        buffer = stack.enter_context(closing(mmap.mmap(-1, length)))
        with memoryview(buffer) as view:
            at = 0
            while at < size and (done := os.preadv(descriptor, [buffer], at)):
                digest.update(view[:done], at)
                at += done
                count()
    return digest.hexdigest(at)


def sync_folder(folder: int) -> None:
    """Write the names in the descriptor ``folder`` to the disk. Raise OSError."""
    # A folder that may be written but not read cannot be synced: the kernel does it in time.
    with suppress(PermissionError), opened(".", OPEN_FOLDER, folder) as descriptor:
        os.fsync(descriptor)


@contextmanager
def opened_beneath(root: str, folder: str, owner: int | None = None) -> Iterator[int]:
    """Open ``folder`` beneath ``root`` step by step, so that no link can lead it elsewhere.

    Every folder on the way belongs to root or to the ``owner``, by default this user. Raise
    DestinationError otherwise, FileNotFoundError if one is missing.
    """
    owners = 0, os.getuid() if owner is None else owner
    with ExitStack() as stack:
        path = root
        current = stack.enter_context(opened(root or "/", linux.PASS_FOLDER & ~os.O_NOFOLLOW))
        for name in folder[len(root) :].split("/"):
            if name:
                path = f"{path}/{name}"
                current = stack.enter_context(_opened_step(path, name, current, owners))
        yield current


def facts_beneath(root: str, path: str) -> os.stat_result:
    """Return the facts of what is at ``path``, itself if it is a link, on the filesystem of root.

    Raise OSError, with EXDEV if another filesystem is mounted on the way. Nothing is asked of that
    one: a record may name any path, and a user may have mounted there what does not answer.
    """
    return linux.facts_here(root or "/", path.removeprefix(f"{root}/"))


@contextmanager
def _opened_step(path: str, name: str, parent: int, owners: tuple[int, int]) -> Iterator[int]:
    with ExitStack() as stack:
        try:
            descriptor = stack.enter_context(opened(name, linux.PASS_FOLDER, parent))
        except NotADirectoryError:
            raise not_a_folder(path, os.lstat(name, dir_fd=parent)) from None
        except FileNotFoundError:
            raise
        except OSError as error:
            raise as_stage_error(error, path) from None
        owner = os.fstat(descriptor).st_uid
        if owner not in owners:
            raise DestinationError(
                f"{path} belongs to {name_of(owner)}, who could replace what is staged there; "
                "choose another destination"
            )
        yield descriptor


def who_could_replace(facts: os.stat_result, owners: Collection[int]) -> str:
    """Return who could replace what is in a folder, as messages name them; empty if nobody.

    ``facts`` are those of the folder, and its ``owners`` may do so.
    """
    if facts.st_uid not in owners:
        return name_of(facts.st_uid)
    if facts.st_mode & stat.S_ISVTX:
        return ""
    if facts.st_mode & stat.S_IWOTH:
        return "all users"
    is_open = facts.st_mode & stat.S_IWGRP
    if not is_open or any(is_private_group(facts.st_gid, uid) for uid in owners):
        return ""
    return f"all members of the group {group_name(facts.st_gid)}"


def name_of(uid: int) -> str:
    """Return a user as messages name it: ``alice (uid 5001)``, or without the name if unknown."""
    name = user_name(uid)
    return f"{name} (uid {uid})" if name else f"uid {uid}"


def not_a_folder(path: str, there: os.stat_result) -> DestinationError:
    """Return the error for something else that is at a ``path`` that must be a folder."""
    what = f"{path} is {kind_of(there.st_mode)}"
    if there.st_uid != os.getuid():
        return DestinationError(
            f"{what} that belongs to {name_of(there.st_uid)}, not a folder of yours; choose "
            "another destination"
        )
    remedy = "a folder is needed there: remove it, or choose another destination"
    if stat.S_ISLNK(there.st_mode):
        remedy = (
            "links are not followed: remove it, or write the path that it leads to in the "
            "destination"
        )
    return DestinationError(f"{what}, not a folder; {remedy}")


def kind_of(mode: int) -> str:
    """Return the type of a file with this mode, as messages name it."""
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
    is_named = isinstance(error.filename, (str, bytes))  # it may be a descriptor
    path = path or (os.fsdecode(error.filename) if is_named else "the disk of this node")
    if error.errno in _SPACE_ERRORS:
        root = path.partition(f"/{RECORDS_FOLDER}/")[0] or "/"
        full = "the quota is full" if error.errno == errno.EDQUOT else _full_disk(root)
        return SpaceError(f"{root}: {full}; free space there (stagectl evict) and try again")
    if error.errno == errno.EROFS:
        return DestinationError(
            f"{path}: the disk is read-only; use other nodes (--exclude) and tell the administrator"
        )
    if error.errno == errno.EACCES and (closed := _closed_by_another(path)):
        return DestinationError(f"{closed}, and is closed to you; choose another place")
    return DestinationError(f"{path}: {error.strerror or error}")


def _closed_by_another(path: str) -> str:
    """Return whose is the folder above ``path`` that this user cannot enter.

    It is empty if there is none, or if it is root's or this user's.
    """
    folder, closed = os.path.dirname(path), ""
    while folder != os.path.dirname(folder):
        if not os.access(folder, os.X_OK):
            closed = folder  # or a folder above it is
        folder = os.path.dirname(folder)
    with suppress(OSError):
        owner = os.stat(closed).st_uid
        if owner not in (0, os.getuid()):
            return f"{closed} belongs to {name_of(owner)}"
    return ""


def _full_disk(path: str) -> str:
    """Return what is full of the disk of ``path``: its space, or its number of files."""
    with suppress(OSError):
        room = os.statvfs(path if os.path.lexists(path) else os.path.dirname(path))
        if room.f_files and not room.f_favail:
            most = f"{room.f_files} files and folders"
            return f"the disk is full: it holds {most}, and can hold no more"
        from stager.base.text import bytes_text  # not needed where there is room

        free, size = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
        return f"the disk is too full: {bytes_text(free)} of {bytes_text(size)} are free"
    return "the disk is full"


def as_room_error(error: OSError, path: str) -> SpaceError | None:
    """Return the error for a full room of the user's beneath /run, None for any other error."""
    if error.errno not in _SPACE_ERRORS:
        return None
    folder = os.path.dirname(path)
    return SpaceError(
        f"{path}: your folder {folder} is full, which holds what your jobs stage; delete the files "
        "that you put there, and submit again"
    )


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


def digest_of(path: str) -> str:
    """Return the digest of a file in hexadecimal, by way of the page cache. Raise OSError."""
    digest, at = Digest(), 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(READ_SIZE):
            digest.update(memoryview(block), at)
            at += len(block)
            count()
    return digest.hexdigest(at)


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
