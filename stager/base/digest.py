"""Compute the xxh3-128 of a file whose data arrives in order, without its holes."""

from __future__ import annotations

import xxhash

from stager.base.progress import count

#: A hole is hashed as zeros, at most so many at a time.
_ZEROS = bytes(1 << 20)


class Digest:
    """The xxh3-128 of a file. Bytes that are passed over count as zeros."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._at = 0

    def update(self, data: memoryview, offset: int) -> None:
        """Add the ``data`` at ``offset`` bytes, which is behind all that was added before."""
        self._skip(offset)
        self._hash.update(data)
        self._at += len(data)

    def hexdigest(self, size: int) -> str:
        """Return the digest of the whole file of ``size`` bytes in hexadecimal."""
        self._skip(size)
        return self._hash.hexdigest()

    def _skip(self, offset: int) -> None:
        if self._at < offset:
            add_zeros(self._hash, offset - self._at)
            self._at = offset


def add_zeros(digest: xxhash.xxh3_128, length: int) -> None:
    """Add ``length`` bytes of zeros, which stand for a hole, to a ``digest``."""
    while length > 0:
        size = min(len(_ZEROS), length)
        digest.update(_ZEROS if size == len(_ZEROS) else _ZEROS[:size])
        length -= size
        count()
