"""Read where a sparse file of a tar has data, and yield the data with the holes between.

There are four ways to write it: in GNU tar's own header and the blocks behind it, in records of
versions 0.0 and 0.1, and, in version 1.0, as a list before the data.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from stager.archive.damage import DamagedError
from stager.archive.tar_header import BLOCK_SIZE, decimal, number
from stager.base.extents import Extent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from stager.archive.tar_stream import TarStream

#: The record of the list itself, in version 0.1.
MAP = b"GNU.sparse.map"
#: Records of version 0.0 for each piece of data, which together make that list.
OFFSET_AND_LENGTH = (b"GNU.sparse.offset", b"GNU.sparse.numbytes")
#: Records of the file's size.
SIZES = (b"GNU.sparse.realsize", b"GNU.sparse.size")
#: The record that is 1 where the list stands before the data.
MAJOR = b"GNU.sparse.major"
#: The most bytes of such a list: some 50,000 pieces of data.
_LONGEST_MAP = 1 << 20
_MAP_TOO_LONG = "the list of a sparse file's data is longer than 1 MiB"

#: GNU tar's own header: four pairs of offset and length, whether a block of more follows, and the
#: file's size.
_HEADER = struct.Struct("386x 96s B 12s 17x")
#: Such a block: 21 pairs, and whether another follows.
_MORE = struct.Struct("504s B 7x")
_PAIR = struct.Struct("12s 12s")


def extents_of_header(tar: TarStream, block: bytes) -> tuple[list[Extent], int]:
    """Return the extents and the size of a file that has GNU tar's own header, ``block``."""
    pairs, more, size = _HEADER.unpack(block)
    extents = _unpack_pairs(pairs)
    length = 0
    while more:
        length += BLOCK_SIZE
        if length > _LONGEST_MAP:
            raise DamagedError(_MAP_TOO_LONG)
        pairs, more = _MORE.unpack(tar.take(BLOCK_SIZE))
        extents += _unpack_pairs(pairs)
    return extents, number(size)


def _unpack_pairs(pairs: bytes) -> list[Extent]:
    return [
        Extent(number(offset), number(length))
        for offset, length in _PAIR.iter_unpack(pairs)
        if offset[0]
    ]


def extents_of_records(
    tar: TarStream, records: Mapping[bytes, bytes], stored: int
) -> tuple[list[Extent], int]:
    """Return the extents of a file with these ``records``, and how many bytes of data follow.

    ``stored`` is the size in the header, which includes a list that stands before the data.
    """
    if records.get(MAJOR) == b"1":
        return _listed_extents(tar, stored)
    values = records.get(MAP, b"")
    return _paired(values.split(b",") if values else []), stored


def _listed_extents(tar: TarStream, stored: int) -> tuple[list[Extent], int]:
    """Read the list before the data: a count, and offsets and lengths, a number a line."""
    text, lines, wanted = b"", 0, 1
    while lines < wanted:
        block = tar.take(BLOCK_SIZE)
        if len(text) >= _LONGEST_MAP:
            raise DamagedError(_MAP_TOO_LONG)
        if not text:
            wanted += 2 * decimal(block.partition(b"\n")[0])
        lines += block.count(b"\n")
        text += block
    if len(text) > stored:
        raise DamagedError("the list of a sparse file's data is longer than the file")
    return _paired(text.split(b"\n", wanted)[1:wanted]), stored - len(text)


def _paired(numbers: Sequence[bytes]) -> list[Extent]:
    values = list(map(decimal, numbers))
    if len(values) % 2:
        raise DamagedError("the list of a sparse file's data ends in the middle of a pair")
    return list(map(Extent, values[::2], values[1::2]))


def with_holes(
    tar: TarStream, extents: Sequence[Extent], *, size: int, stored: int
) -> Iterator[memoryview | int]:
    """Yield the data of a file of ``size`` bytes, and the length of each hole in its place.

    A hole comes before each extent and at the end, and may have no length. ``stored`` bytes follow
    in the tar. Raise DamagedError unless the extents are in order and hold exactly those.
    """
    at, left = 0, stored
    for offset, length in extents:
        if not (at <= offset and 0 <= length <= left and offset + length <= size):
            raise DamagedError("the list of a sparse file's data has an impossible position")
        yield offset - at
        yield from tar.pieces(length)
        at, left = offset + length, left - length
    if left:
        raise DamagedError("a sparse file has more data than is listed")
    yield size - at
