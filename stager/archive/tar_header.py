"""Decode the 512-byte header of a tar member. Pure.

The layout is that of POSIX ustar, which the older and the GNU formats share as far as it is read
here. Owner, group and device numbers are left out: whoever unpacks an archive owns its files.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import NamedTuple

from stager.archive.damage import DamagedError

#: Bytes of a header. Data is padded to a multiple of it, and two such blocks of zeros end a tar.
BLOCK_SIZE = 512
#: Name, mode, size, time, checksum, type, link target, magic and prefix of the name.
_HEADER = struct.Struct("100s 8s 16x 12s 12s 8s c 100s 6s 82x 155s 12x")
#: The magic of the formats whose names may have a prefix; GNU tar uses that field otherwise.
_USTAR = b"ustar\0"
#: What a checksum counts in place of its own eight bytes: blanks.
_BLANK_CHECKSUM = 8 * ord(" ")
#: First bytes of a number in two's complement, positive and negative, which GNU tar writes where
#: octal digits do not suffice.
_POSITIVE, _NEGATIVE = 0o200, 0o377
#: Digits of a decimal number: enough for 64 bits, few enough to be converted in no time.
_MOST_DIGITS = 20
_BAD_NUMBER = "a header has a number that cannot be read"


class TypeFlag(bytes, Enum):
    """What a header stands for."""

    FILE = b"0"
    FILE_OF_V7 = b"\0"
    CONTIGUOUS_FILE = b"7"
    #: A file with holes, in GNU tar's own format.
    SPARSE_FILE = b"S"
    HARD_LINK = b"1"
    LINK = b"2"
    FOLDER = b"5"
    #: A folder of an incremental backup by GNU tar: its data is a list of names.
    DUMPED_FOLDER = b"D"
    VOLUME_LABEL = b"V"
    #: Records about the next member, as POSIX and as Solaris mark them.
    RECORDS = b"x"
    SOLARIS_RECORDS = b"X"
    #: Records about all members that follow.
    GLOBAL_RECORDS = b"g"
    #: The name and the link target of the next member.
    LONG_NAME = b"L"
    LONG_TARGET = b"K"
    #: All others: devices, pipes, and what no format defines.
    OTHER = b""


_FLAGS = {flag.value: flag for flag in TypeFlag}


class Header(NamedTuple):
    """The fields of a header as they are written; see `number` and `text`."""

    name: bytes
    mode: bytes
    size: bytes
    mtime: bytes
    checksum: bytes
    flag: bytes
    target: bytes
    magic: bytes
    prefix: bytes

    @property
    def type(self) -> TypeFlag:
        """What the header stands for."""
        return _FLAGS.get(self.flag, TypeFlag.OTHER)

    @property
    def path(self) -> bytes:
        """The name with its prefix."""
        name = text(self.name)
        prefix = text(self.prefix) if self.magic == _USTAR else b""
        return prefix + b"/" + name if prefix else name


def decode_header(block: bytes) -> Header:
    """Return the header that ``block`` holds. Raise DamagedError if its checksum is wrong."""
    header = Header._make(_HEADER.unpack(block))
    expected = number(header.checksum)
    # Most bytes are zeros, and to leave them out is three times as fast as to add them.
    found = sum(block.translate(None, b"\0")) - sum(header.checksum) + _BLANK_CHECKSUM
    if expected != found and expected != _signed(found, block, header.checksum):
        raise DamagedError("a member's header is not valid, or it is not a tar archive")
    return header


def _signed(found: int, block: bytes, checksum: bytes) -> int:
    """Return the sum that tools ``found`` which add up signed bytes."""
    high = sum(byte > 127 for byte in block) - sum(byte > 127 for byte in checksum)
    return found - 256 * high


def text(field: bytes) -> bytes:
    """Return what stands before the first NUL of a field."""
    return field.partition(b"\0")[0]


def number(field: bytes) -> int:
    """Return the number in a field: octal digits, or two's complement. Raise DamagedError."""
    digits = text(field).strip(b" ")
    if digits.isdigit():  # no sign
        try:
            return int(digits, 8)
        except ValueError:  # an 8 or a 9
            raise DamagedError(_BAD_NUMBER) from None
    if field[0] in (_POSITIVE, _NEGATIVE):
        value = int.from_bytes(field[1:], "big")
        return value - (1 << 8 * (len(field) - 1)) if field[0] == _NEGATIVE else value
    if digits:
        raise DamagedError(_BAD_NUMBER)
    return 0


def decimal(digits: bytes) -> int:
    """Return the number that a record's ``digits`` write. Raise DamagedError."""
    if not digits.isdigit() or len(digits) > _MOST_DIGITS:
        raise DamagedError(_BAD_NUMBER)
    return int(digits)
