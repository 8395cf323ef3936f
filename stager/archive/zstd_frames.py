"""Follow the frames of a zstd stream while it is read, to know whether it ends where one ends.

The library says neither that its input ended in the middle of a frame, nor that less than the
beginning of another one follows. The format is that of RFC 8878, section 3.1.
"""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from stager.archive.damage import DamagedError

if TYPE_CHECKING:
    from collections.abc import Callable

_MAGIC = 0xFD2FB528
#: The first of the 16 magic numbers of frames that are skipped.
_SKIPPED = 0x184D2A50
_MAGICS = [number.to_bytes(4, "little") for number in (_MAGIC, *range(_SKIPPED, _SKIPPED + 16))]
#: What is wrong with a file whose end is not that of what is compressed in it.
SOMETHING_ELSE = "something else follows the compressed data"
#: Bytes of a magic number, of a skipped frame's length, of a block's header, of a checksum.
_MAGIC_SIZE, _LENGTH_SIZE, _BLOCK_HEADER, _CHECKSUM = 4, 4, 3, 4
#: Bytes of a dictionary's number and of the content's size, by the flags for them.
_DICTIONARY_SIZES, _CONTENT_SIZES = (0, 1, 2, 4), (0, 2, 4, 8)
#: The type of a block that is one byte, repeated.
_RUN = 1


class ZstdFrames:
    """Reads a ``file`` of zstd frames on behalf of the library. Raises DamagedError."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        #: Bytes to pass over; then those of the next field, and what takes it.
        self._skip, self._wanted = 0, _MAGIC_SIZE
        self._take: Callable[[int], None] = self._take_magic
        self._field = b""
        self._has_frame = False
        self._checksum = 0

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes of the file."""
        data = self._file.read(size)
        self._follow(data)
        return data

    def end(self) -> None:
        """Raise DamagedError unless what was read so far ends where a frame ends."""
        self.check_last_bytes()
        if not self._is_between_frames() or self._skip or self._field:
            raise DamagedError("it ends early")

    def check_last_bytes(self) -> None:
        """Raise DamagedError if a frame is followed by what cannot be the beginning of another."""
        if self._is_between_frames() and not any(one.startswith(self._field) for one in _MAGICS):
            raise DamagedError(SOMETHING_ELSE)

    def _is_between_frames(self) -> bool:
        return self._has_frame and self._take == self._take_magic

    def _follow(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            if self._skip:
                passed = min(self._skip, len(data) - at)
                self._skip -= passed
                at += passed
                continue
            piece = data[at : at + self._wanted - len(self._field)]
            at += len(piece)
            self._field += piece
            if len(self._field) == self._wanted:
                number, self._field = int.from_bytes(self._field, "little"), b""
                self._take(number)

    def _take_magic(self, number: int) -> None:
        if number == _MAGIC:
            self._wanted, self._take = 1, self._take_descriptor
        elif number & ~0xF == _SKIPPED:
            self._wanted, self._take = _LENGTH_SIZE, self._take_length
        else:
            raise DamagedError(
                SOMETHING_ELSE if self._has_frame else "it is not in the format of zstd"
            )
        self._has_frame = True

    def _take_length(self, length: int) -> None:
        self._skip = length
        self._wanted, self._take = _MAGIC_SIZE, self._take_magic

    def _take_descriptor(self, flags: int) -> None:
        is_single_segment, self._checksum = bool(flags & 0x20), _CHECKSUM * bool(flags & 4)
        content = _CONTENT_SIZES[flags >> 6] or int(is_single_segment)
        self._skip = int(not is_single_segment) + _DICTIONARY_SIZES[flags & 3] + content
        self._wanted, self._take = _BLOCK_HEADER, self._take_block

    def _take_block(self, header: int) -> None:
        is_last, kind, size = header & 1, header >> 1 & 3, header >> 3
        self._skip = 1 if kind == _RUN else size
        if is_last:
            self._skip += self._checksum
            self._wanted, self._take = _MAGIC_SIZE, self._take_magic
