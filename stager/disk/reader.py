"""Read the bytes of a file, and find where it has data and where holes."""

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
#: To read a file. Opening a named pipe in its place does not block.
OPEN_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
#: The errors of a filesystem that cannot tell holes from data.
_NO_HOLES = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)


class FileReader:
    """An open file that counts the bytes read from it. Raise SourceError if it cannot be read.

    It is opened at ``path``, or is open already as ``descriptor``, which `close` closes.
    """

    def __init__(self, path: str, descriptor: int = -1) -> None:
        self._path = path
        self.bytes_read = 0
        try:
            self.descriptor = os.open(path, OPEN_FILE) if descriptor < 0 else descriptor
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}") from None

    def extents(self, size: int) -> Iterator[Extent]:
        """Yield the extents with data in the first ``size`` bytes, in order; the rest is holes."""
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
                if error.errno == errno.ENXIO:  # only a hole up to the end
                    return
                if error.errno not in _NO_HOLES:
                    raise
                begin, hole = end, size
            if begin < hole:
                yield Extent(begin, hole - begin)
            end = hole

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` bytes on.

        Raise IntegrityError if the file ends before that, SourceError if it cannot be read.
        """
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
        """Close the file."""
        os.close(self.descriptor)
