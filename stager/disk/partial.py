"""Write the copy of one file out of sight, then publish it in one step."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import IO, TYPE_CHECKING

from stager.base.extents import ALIGNMENT, Extent
from stager.disk.files import opened_beneath, read_back, stage_errors, sync_folder, write_all
from stager.disk.permissions import give_permissions
from stager.disk.record import CopyFacts
from stager.disk.unnamed import UnnamedFile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stager.disk.cache import Cache


class Partial:
    """A file being written in ``cache``, which nobody sees until `publish`.

    If ``direct``, data bypasses the page cache where the filesystem allows it: that is as fast as
    the disk, and leaves nothing for fsync. All methods raise SpaceError or DestinationError.
    """

    def __init__(self, cache: Cache, *, direct: bool) -> None:
        self._root = cache.root
        self._folder = cache.partial
        self._direct: int | None = None
        with stage_errors(self._folder):
            self._file = UnnamedFile(self._folder)
        if direct:
            with suppress(OSError):  # this filesystem has no direct writes
                self._direct = self._open_again(os.O_WRONLY | os.O_DIRECT)
        self._is_direct = self._direct is not None

    def allocate(self, size: int, extents: Iterable[Extent]) -> None:
        """Give the file its size in bytes, and reserve disk space for its data."""
        with stage_errors(self._folder):
            os.ftruncate(self._file.descriptor, size)
            for offset, length in extents:
                # On filesystems without this call, glibc reads and writes each block instead.
                os.posix_fallocate(self._file.descriptor, offset, length)

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
        """Return the xxh3-128 of what is on the disk, in hexadecimal, past the page cache."""
        with stage_errors(self._folder):
            # The entry in /proc is a link, so links must be followed.
            return read_back(f"/proc/self/fd/{self._file.descriptor}", flags=0)

    def opened(self) -> IO[bytes]:
        """Open what was written so far for reading from its beginning."""
        with stage_errors(self._folder):
            return open(self._open_again(os.O_RDONLY), "rb")

    def seal(self, mode: int, group: int, mtime_ns: int) -> None:
        """Give the file its permissions and time, and write all of it to the disk."""
        with stage_errors(self._folder):
            give_permissions(self._file.descriptor, mode, group)
            os.utime(self._file.descriptor, ns=(mtime_ns, mtime_ns))
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
