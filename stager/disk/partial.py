"""TODO."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import IO, TYPE_CHECKING

from stager.base.extents import ALIGNMENT
from stager.disk.files import opened_beneath, read_back, stage_errors, sync_folder, write_all
from stager.disk.permissions import file_mode, give_permissions
from stager.disk.record import CopyFacts
from stager.disk.unnamed import UnnamedFile

if TYPE_CHECKING:
    from stager.disk.cache import Cache
    from stager.wire.layout import Layout


class Partial:
    """A copy being written beneath ``cache``; nobody sees it until `publish`.

    Where ``direct``, data goes past the page cache if the filesystem lets it: at the disk's own
    rate, without a copy, and with nothing left for fsync. Raises SpaceError or DestinationError.
    """

    def __init__(self, cache: Cache, *, direct: bool) -> None:
        self._root = cache.root
        self._folder = f"{cache.folder}/partial"
        self._direct: int | None = None
        with stage_errors(self._folder):
            self._file = UnnamedFile(self._folder)
        if direct:
            with suppress(OSError):  # not on this filesystem
                self._direct = self._open_again(os.O_WRONLY | os.O_DIRECT)
        self._is_direct = self._direct is not None

    def allocate(self, layout: Layout) -> None:
        """Give the file its size, and its data their place on the disk."""
        with stage_errors(self._folder):
            os.ftruncate(self._file.descriptor, layout.size)
            for offset, length in layout.extents:
                # Which reads the file where the filesystem has no such call of its own.
                os.posix_fallocate(self._file.descriptor, offset, length)

    def write(self, data: memoryview, offset: int) -> None:
        """Put ``data`` at ``offset`` bytes."""
        with stage_errors(self._folder):
            done = self._write_direct(data, offset)
            write_all(self._file.descriptor, data[done:], offset + done)

    def _write_direct(self, data: memoryview, offset: int) -> int:
        """Write what is aligned, and tell how many bytes that was."""
        length = len(data) // ALIGNMENT * ALIGNMENT
        if self._direct is None or not self._is_direct or offset % ALIGNMENT:
            return 0
        try:
            write_all(self._direct, data[:length], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._is_direct = False  # this disk wants another alignment
            return 0
        return length

    def _open_again(self, flags: int) -> int:
        return os.open(f"/proc/self/fd/{self._file.descriptor}", flags | os.O_CLOEXEC)

    def read_back(self) -> str:
        """The xxh3-128 of what is on the disk, in hexadecimal, past the page cache."""
        with stage_errors(self._folder):
            return read_back(f"/proc/self/fd/{self._file.descriptor}", 0)  # a link of the kernel's

    def opened(self) -> IO[bytes]:
        """What was written so far, for reading from its beginning."""
        return open(self._open_again(os.O_RDONLY), "rb")

    def seal(self, mode: int, group: int, mtime_ns: int) -> None:
        """Give the file its permissions and time, and write all of it to the disk."""
        with stage_errors(self._folder):
            give_permissions(self._file.descriptor, file_mode(mode), group)
            os.utime(self._file.descriptor, ns=(mtime_ns, mtime_ns))
            os.fsync(self._file.descriptor)

    def publish(self, path: str) -> CopyFacts:
        """Put the sealed file at ``path`` in one step, in place of what is there."""
        above, name = os.path.split(path)
        with stage_errors(path), opened_beneath(self._root, above) as folder:
            self._file.rename(name, folder)
            sync_folder(folder)
            facts = os.fstat(self._file.descriptor)
        return CopyFacts(facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_uid)

    def close(self) -> None:
        """Let go of the file; unless it was published, its bytes are gone."""
        if self._direct is not None:
            os.close(self._direct)
        self._file.close()
