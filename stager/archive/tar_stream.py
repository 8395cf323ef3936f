"""Take the bytes of a tar from first to last, and bound those that are not data of files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stager.archive.damage import DamagedError
from stager.archive.tar_header import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: Bytes besides files' data that a tar may hold for each member: its header, its records and
#: padding. Long names and lists of holes make up for members that need less.
_PER_MEMBER = 4096
#: Bytes besides files' data that a tar may hold in all, so that a few bytes of zeros, well
#: compressed, cannot occupy a node for hours.
_IN_ALL = 64 << 20


class TarStream:
    """The bytes of a tar, from the first to the last. Raises DamagedError where they end early."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._block = b""
        self._view = memoryview(b"")
        self._at = 0
        #: Bytes that may still come besides the data of files.
        self._allowance = _IN_ALL

    def _next(self) -> bool:
        """Go on to the next block. Return whether there is one."""
        self._block, self._at = next(self._blocks, b""), 0
        self._view = memoryview(self._block)
        return bool(self._block)

    def pieces(self, size: int) -> Iterator[memoryview]:
        """Yield the next ``size`` bytes, a file's data, in pieces."""
        while size:
            if self._at == len(self._block) and not self._next():
                raise DamagedError("it ends early")
            piece = self._view[self._at : self._at + size]
            self._at += len(piece)
            size -= len(piece)
            yield piece

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes, which are not a file's data."""
        self._count(size)
        end = self._at + size
        if end > len(self._block):
            return b"".join(self.pieces(size))
        found, self._at = self._block[self._at : end], end
        return found

    def skip(self, size: int) -> None:
        """Skip the next ``size`` bytes, which are not a file's data."""
        self._count(size)
        for _ in self.pieces(size):
            pass

    def allow_for_member(self) -> None:
        """Allow for one more member."""
        self._allowance += _PER_MEMBER

    def _count(self, size: int) -> None:
        self._allowance -= size
        if self._allowance < 0:
            raise DamagedError("it has far more headers and padding than its files need")

    def end(self) -> None:
        """Read what follows the first block of zeros: a second one, and zeros as padding.

        The rest is read to the end, where the decompressor compares the digest of the whole.
        """
        if self._at < len(self._block) or self._next():
            rest = self._block[self._at : self._at + BLOCK_SIZE]
            if rest.strip(b"\0"):
                raise DamagedError("a block of zeros, which marks the end, has data behind it")
            self._count(len(self._block) - self._at)
        while self._next():
            self._count(len(self._block))
