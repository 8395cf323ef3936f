"""A path in, its bytes and its data extents out: what a sender reads."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from stager.base.errors import IntegrityError, SourceError
from stager.base.extents import Extent

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Unit of a stat's st_blocks, in bytes.
BLOCK = 512
#: What a filesystem answers that knows nothing of holes.
_NO_HOLES = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)


class FileReader:
    """Reads an open file, and counts the bytes that it took from the filesystem.

    Raises SourceError.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.bytes_read = 0
        try:
            # Should somebody have put a named pipe there, not to wait for its other end.
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}") from None

    def extents(self, size: int) -> Iterator[Extent]:
        """Where in its first ``size`` bytes the file has data, in order; the rest is holes."""
        try:
            if os.fstat(self.descriptor).st_blocks * BLOCK < size:
                yield from self._seek_extents(size)
            elif size:
                yield Extent(0, size)
        except OSError as error:
            raise SourceError(f"{self._path}: {error.strerror}") from None

    def _seek_extents(self, size: int) -> Iterator[Extent]:
        end = 0
        while end < size:
            try:
                begin = os.lseek(self.descriptor, end, os.SEEK_DATA)
                hole = min(size, os.lseek(self.descriptor, begin, os.SEEK_HOLE))
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                    return
                if error.errno not in _NO_HOLES:
                    raise
                begin, hole = end, size
            if begin < hole:
                yield Extent(begin, hole - begin)
            end = hole

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer``. Raises IntegrityError where the file ends early, SourceError on EIO."""
        while buffer:
            try:
                count = os.preadv(self.descriptor, [buffer], offset)
            except OSError as error:
                raise SourceError(f"{self._path}: {error.strerror}") from None
            if not count:
                raise IntegrityError(f"{self._path} became shorter while it was read")
            self.bytes_read += count
            buffer = buffer[count:]
            offset += count

    def close(self) -> None:
        """Let go of the file."""
        os.close(self.descriptor)
