"""TODO."""

from __future__ import annotations

import xxhash

#: What a hole is hashed as, in pieces.
_ZEROS = bytes(1 << 20)


class Digest:
    """The xxh3-128 of a file that is told its data in order; what is left out is zeros."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._at = 0

    def update(self, data: memoryview, offset: int) -> None:
        """Take the ``data`` at ``offset`` bytes."""
        self._skip(offset)
        self._hash.update(data)
        self._at += len(data)

    def hexdigest(self, size: int) -> str:
        """The digest of the whole file, in hexadecimal."""
        self._skip(size)
        return self._hash.hexdigest()

    def _skip(self, offset: int) -> None:
        while self._at < offset:
            length = min(len(_ZEROS), offset - self._at)
            self._hash.update(_ZEROS if length == len(_ZEROS) else _ZEROS[:length])
            self._at += length
