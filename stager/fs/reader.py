"""Read the bytes of a file, and find where it has data and where holes."""

from __future__ import annotations

import errno
import os
import stat
import time
from typing import TYPE_CHECKING

from stager.base.errors import IntegrityError, SourceError
from stager.base.extents import Extent
from stager.base.mounts import mounted_by_stranger
from stager.base.telemetry import Kind, count, doing

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Unit of a stat's st_blocks, in bytes.
BLOCK = 512
#: To read a file. Opening a named pipe in its place does not block.
OPEN_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
#: The errors of a filesystem that cannot tell holes from data.
_NO_HOLES = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)
#: Bytes of the first read of a file and of the largest, and the seconds of a quick and a slow one.
_FIRST, _MOST, _QUICK, _SLOW = 128 << 10, 1 << 30, 0.1, 1.0


def check_mounter(descriptor: int, path: str) -> None:
    """Raise SourceError if an open file or folder is on a filesystem that another user mounted.

    That user decides what is seen there, also which file it seems to be and who may read it.
    """
    stranger = mounted_by_stranger(descriptor)
    if stranger:
        raise SourceError(
            f"{path} is on a filesystem that uid {stranger} mounted, who can pretend anything of "
            "what is seen there; copy it elsewhere first"
        )


def is_another(inode: int, now: os.stat_result) -> bool:
    """Return whether a stat is not of the source file ``inode``, which is 0 if it tells nothing.

    The number may be used again: what is no file is another in any case.
    """
    return inode not in (0, now.st_ino) or not stat.S_ISREG(now.st_mode)


def changed(path: str, *, is_another: bool = False) -> IntegrityError:
    """Return the error for a source that changed, or if ``is_another`` is not the one looked at.

    Of one on a disk of the nodes, each node has another.
    """
    if is_another:
        return IntegrityError(
            f"{path} was replaced while it was read, or each node has another one of this name; "
            "submit again when nothing replaces it, or copy it first to storage that all nodes "
            "share"
        )
    return IntegrityError(
        f"{path} changed while it was read; submit again when nothing writes to it"
    )


def data_extents(descriptor: int, size: int) -> Iterator[Extent]:
    """Yield the extents with data in the first ``size`` bytes of an open file. Raise OSError."""
    end = 0
    if os.fstat(descriptor).st_blocks * BLOCK >= size > 0:  # no hole
        yield Extent(0, size)
        end = size
    while end < size:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
            hole = min(size, os.lseek(descriptor, begin, os.SEEK_HOLE))
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole up to the end
                return
            if error.errno not in _NO_HOLES:
                raise
            begin, hole = end, size
        count()
        if begin < hole:
            yield Extent(begin, hole - begin)
        end = hole


class Pace:
    """Reads little at a time while storage is slow, so that others see that it moves."""

    def __init__(self) -> None:
        self._size = _FIRST

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """Read into the beginning of ``buffer``, and return the bytes read. Raise OSError."""
        if len(buffer) <= _FIRST:
            count()
            return os.preadv(descriptor, [buffer], offset)
        begun = time.monotonic()
        done = os.preadv(descriptor, [buffer[: self._size]], offset)
        seconds = time.monotonic() - begun
        if seconds > _SLOW:
            self._size = max(_FIRST, self._size // 2)
        elif seconds < _QUICK and done == self._size:
            self._size = min(2 * self._size, _MOST)
        count()
        return done


class FileReader:
    """An open file that counts the bytes read from it. Raise SourceError if it cannot be read.

    Nothing is repeated: ``retries`` is 0.

    It is opened at ``path``, or is open already as ``descriptor``, which `close` closes.
    """

    def __init__(self, path: str, descriptor: int = -1) -> None:
        self._path = path
        self._pace = Pace()
        self.bytes_read = self.retries = 0
        try:
            with doing(Kind.READ, path):
                self.descriptor = os.open(path, OPEN_FILE) if descriptor < 0 else descriptor
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}") from None

    def extents(self, size: int) -> Iterator[Extent]:
        """Yield the extents with data in the first ``size`` bytes, in order; the rest is holes."""
        try:
            with doing(Kind.READ, self._path):
                yield from data_extents(self.descriptor, size)
        except OSError as error:
            raise SourceError(f"{self._path}: {error.strerror}") from None

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` bytes on.

        Raise IntegrityError if the file ends before that, SourceError if it cannot be read.
        """
        with doing(Kind.READ, self._path):
            while buffer:
                try:
                    done = self._pace.read(self.descriptor, buffer, offset)
                except OSError as error:
                    raise SourceError(f"{self._path}: {error.strerror}") from None
                if not done:
                    raise IntegrityError(f"{self._path} became shorter while it was read")
                self.bytes_read += done
                buffer = buffer[done:]
                offset += done

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)
