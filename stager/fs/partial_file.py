"""Create files and folders under construction, which `Cache.sweep` removes if their writer dies.

A file has no name until it is complete, where the filesystem allows that. What has a name holds a
lock as long as its writer runs.

Write the copy of one file out of sight, then publish it in one step.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING

from stager.base import linux
from stager.base.extents import ALIGNMENT, Extent
from stager.fs.files import (
    CREATE,
    OPEN_FOLDER,
    READ_FILE,
    CopyFacts,
    give_permissions,
    opened,
    opened_beneath,
    read_back,
    stage_errors,
    sync_folder,
    write_all,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from stager.store.cache import Cache

#: What the name of a partial folder's lock has at its end.
LOCK = ".lock"
#: With what a filesystem refuses O_TMPFILE if it does not have it.
NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


class UnnamedFile:
    """A new file in ``folder``, without a name if the filesystem has O_TMPFILE.

    Without a name, even a killed writer leaves nothing. With one, `Cache.sweep` removes the file
    once its lock is gone. All methods raise OSError.
    """

    def __init__(self, folder: str, *, is_named: bool = False, suffix: str = "") -> None:
        self._folder = folder
        self._name = ""
        if is_named:
            self._open_named(suffix)
            return
        try:
            self.descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            self._lock()
        except OSError as error:
            if error.errno not in NO_UNNAMED:
                raise
            self._open_named()

    def _open_named(self, suffix: str = "") -> None:
        with fresh_name(self._folder) as name:
            self.descriptor = os.open(name + suffix, CREATE, 0o600)
            self._name = name + suffix
            self._lock()
            if os.fstat(self.descriptor).st_nlink:
                return
        # On a filesystem that nodes share, another one has removed it before it was locked.
        os.close(self.descriptor)
        self._open_named(suffix)

    @property
    def name(self) -> str:
        """The path of the file, empty as long as it has none."""
        return self._name

    def _lock(self) -> None:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        except OSError:
            self.close()
            raise

    def rename(self, path: str, folder: int | None = None) -> None:
        """Rename the file to ``path``, relative to ``folder``, in place of any file there."""
        if not self._name:
            name = _new_name(self._folder)
            give_name(self.descriptor, name)
            self._name = name
        os.rename(self._name, path, dst_dir_fd=folder)
        self._name = ""

    def close(self) -> None:
        """Close the file. Unless it was renamed, it is gone."""
        if self._name:
            with suppress(FileNotFoundError):
                os.unlink(self._name)
        os.close(self.descriptor)


def _new_name(folder: str) -> str:
    return f"{folder}/{os.urandom(8).hex()}"


@contextmanager
def fresh_name(folder: str) -> Iterator[str]:
    """Yield an unused path in ``folder``. Until the end, `Cache.sweep` finds nothing there."""
    with opened(folder, OPEN_FOLDER) as parent:
        fcntl.flock(parent, fcntl.LOCK_SH)
        yield _new_name(folder)


def make_partial_folder(folder: str) -> tuple[str, UnnamedFile]:
    """Make a folder in ``folder``. Return its path and its lock. Raise OSError.

    The lock is a file beside it: those of folders count on one node alone, where nodes share a
    filesystem. Close it once the folder is gone.
    """
    lock = UnnamedFile(folder, is_named=True, suffix=LOCK)
    path = lock.name.removesuffix(LOCK)
    try:
        os.mkdir(path, 0o700)
    except OSError:
        lock.close()
        raise
    return path, lock


def give_name(descriptor: int, path: str) -> None:
    """Give an unnamed file the name ``path``, by way of /proc, as that needs no privilege.

    Raise OSError.
    """
    # With a folder descriptor, os.link() calls linkat(2), which can follow the link in /proc.
    with opened("/proc/self/fd", OPEN_FOLDER) as descriptors:
        os.link(str(descriptor), path, src_dir_fd=descriptors, follow_symlinks=True)


class Partial:
    """A file being written in ``cache``, which nobody sees until `publish`.

    If ``direct``, data bypasses the page cache where the filesystem allows it: that is as fast as
    the disk, and leaves nothing for fsync. One that ``is_named`` can be opened by others as
    `Joined`. All methods raise SpaceError or DestinationError.
    """

    def __init__(self, cache: Cache, *, direct: bool, is_named: bool = False) -> None:
        self._is_named = is_named
        self._root = cache.root
        self._folder = cache.partial
        self._direct: int | None = None
        with stage_errors(self._folder):
            self._file = self._make()
        if direct:
            with suppress(OSError):  # this filesystem has no direct writes
                self._direct = self._open_again(os.O_WRONLY | os.O_DIRECT)
        self._is_direct = self._direct is not None

    def _make(self) -> UnnamedFile:
        return UnnamedFile(self._folder, is_named=self._is_named)

    @property
    def name(self) -> str:
        """Where others find the file, if it has a name."""
        return self._file.name

    def sync(self) -> None:
        """Write the file to the disk."""
        with stage_errors(self._folder):
            os.fsync(self._file.descriptor)

    @property
    def descriptor(self) -> int:
        """The open file."""
        return self._file.descriptor

    def allocate(self, size: int, extents: Iterable[Extent]) -> None:
        """Give the file its size in bytes, and reserve disk space for its data."""
        with stage_errors(self._folder):
            os.ftruncate(self._file.descriptor, size)
            for offset, length in extents:
                linux.reserve(self._file.descriptor, offset, length)

    def write(self, data: memoryview, offset: int) -> None:
        """Write ``data`` at ``offset`` bytes."""
        with stage_errors(self._folder):
            done = self._write_direct(data, offset)
            write_all(self._file.descriptor, data[done:], offset + done)

    def _write_direct(self, data: memoryview, offset: int) -> int:
        """Write the aligned part of ``data`` directly and return its size in bytes."""
        length = len(data) // ALIGNMENT * ALIGNMENT
        if self._direct is None or not self._is_direct or offset % ALIGNMENT:
            return 0
        try:
            write_all(self._direct, data[:length], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._is_direct = False  # this disk requires another alignment
            return 0
        return length

    def _open_again(self, flags: int) -> int:
        return os.open(f"/proc/self/fd/{self._file.descriptor}", flags | os.O_CLOEXEC)

    def read_back(self) -> str:
        """Return the digest of what is on the disk, in hexadecimal, past the page cache."""
        with stage_errors(self._folder):
            # The entry in /proc is a link, so links must be followed.
            return read_back(f"/proc/self/fd/{self._file.descriptor}", flags=0)

    def opened(self) -> IO[bytes]:
        """Open what was written so far for reading from its beginning."""
        with stage_errors(self._folder):
            return open(self._open_again(os.O_RDONLY), "rb")

    def seal(self, mode: int, group: int, mtime_ns: int, *, durable: bool = True) -> None:
        """Give the file its permissions and time, and if ``durable`` write it to the disk."""
        with stage_errors(self._folder):
            give_permissions(self._file.descriptor, mode, group)
            os.utime(self._file.descriptor, ns=(mtime_ns, mtime_ns))
            if durable:
                os.fsync(self._file.descriptor)

    def publish(self, path: str) -> CopyFacts:
        """Rename the sealed file to ``path``, in place of any file there, and return its stat."""
        above, name = os.path.split(path)
        with stage_errors(path), opened_beneath(self._root, above) as folder:
            self._file.rename(name, folder)
            sync_folder(folder)
        return self.facts()

    def facts(self) -> CopyFacts:
        """Return what identifies the sealed file, before and after it is published."""
        with stage_errors(self._folder):
            facts = os.fstat(self._file.descriptor)
        return CopyFacts(facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_uid)

    def close(self) -> None:
        """Close the file. Unless it was published, it is gone."""
        if self._direct is not None:
            os.close(self._direct)
        self._file.close()


class Joined(Partial):
    """The partial file at ``path``, which another process makes and publishes."""

    def __init__(self, cache: Cache, path: str, *, direct: bool) -> None:
        self._path = path
        super().__init__(cache, direct=direct)

    def _make(self) -> UnnamedFile:
        return _OpenFile(self._folder, self._path, os.O_RDWR)


class Named(Partial):
    """Another name of the file at ``path``, which nobody sees until `publish`."""

    def __init__(self, cache: Cache, path: str) -> None:
        self._path = path
        super().__init__(cache, direct=False)

    def _make(self) -> UnnamedFile:
        return _OpenFile(self._folder, self._path)

    def seal(self, mode: int, group: int, mtime_ns: int, *, durable: bool = True) -> None:
        """Leave the file as it is: it has its other name, too."""


class _OpenFile(UnnamedFile):
    """The file at ``path``, which `rename` gives another name."""

    def __init__(self, folder: str, path: str, access: int = os.O_RDONLY) -> None:
        self._folder, self._name = folder, ""
        self.descriptor = os.open(path, READ_FILE | access)

    def rename(self, path: str, folder: int | None = None) -> None:
        """Give the file the name ``path``, also if it has that already: rename(2) does nothing."""
        fresh = _new_name(self._folder)
        give_name(self.descriptor, fresh)
        os.rename(fresh, path, dst_dir_fd=folder)
        with suppress(FileNotFoundError):
            os.unlink(fresh)
