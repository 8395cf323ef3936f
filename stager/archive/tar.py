"""How are the members of a tar read, of whatever format, as its bytes come?

Python's tarfile is not used: it takes what it cannot read for the end of the archive, keeps all
members in memory, and can be made to use any amount of memory and time. Here everything besides
the data of files is bounded (`TarStream`), and what cannot be read is damage.

The layout of a header is that of POSIX ustar, which the older and the GNU formats share as far as
it is read here; owner, group and device numbers are left out, as whoever unpacks an archive owns
its files. Where a sparse file has data is written in one of four ways: in GNU tar's own header and
the blocks behind it, in records of versions 0.0 and 0.1, and, in version 1.0, as a list before the
data.
"""

from __future__ import annotations

import re
import struct
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from stager.archive.damage import DamagedError
from stager.base.extents import Extent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    #: Values by keyword.
    Records = dict[bytes, bytes]

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
_SPARSE_HEADER = struct.Struct("386x 96s B 12s 17x")
#: Such a block: 21 pairs, and whether another follows.
_MORE = struct.Struct("504s B 7x")
_PAIR = struct.Struct("12s 12s")


def extents_of_header(tar: TarStream, block: bytes) -> tuple[list[Extent], int]:
    """Return the extents and the size of a file that has GNU tar's own header, ``block``."""
    pairs, more, size = _SPARSE_HEADER.unpack(block)
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


_ZEROS = bytes(BLOCK_SIZE)
#: The most bytes of records or of a long name. PATH_MAX is 4096; attributes take some more.
_LONGEST_DESCRIPTION = 64 << 10
#: Digits of a record's own length, which stands before it; five suffice for the longest.
_DIGITS_OF_LENGTH = 7
#: The records that are read.
_KNOWN = frozenset(
    {b"path", b"linkpath", b"size", b"mtime", b"GNU.sparse.name", MAJOR, MAP, *SIZES}
)
_TIME = re.compile(rb"(-?)(\d{1,20})(?:\.(\d*))?")
_SECOND = 10**9


class MemberKind(Enum):
    """What a member is; OTHER is refused."""

    FILE = auto()
    FOLDER = auto()
    LINK = auto()
    HARD_LINK = auto()
    OTHER = auto()


_KINDS = {
    TypeFlag.FILE: MemberKind.FILE,
    TypeFlag.FILE_OF_V7: MemberKind.FILE,
    TypeFlag.CONTIGUOUS_FILE: MemberKind.FILE,
    TypeFlag.SPARSE_FILE: MemberKind.FILE,
    TypeFlag.FOLDER: MemberKind.FOLDER,
    TypeFlag.DUMPED_FOLDER: MemberKind.FOLDER,
    TypeFlag.LINK: MemberKind.LINK,
    TypeFlag.HARD_LINK: MemberKind.HARD_LINK,
    TypeFlag.OTHER: MemberKind.OTHER,
}
#: Records that the long names of GNU tar stand for.
_LONG = {TypeFlag.LONG_NAME: b"path", TypeFlag.LONG_TARGET: b"linkpath"}


class Member(NamedTuple):
    """A member of a tar. ``mtime`` is in nanoseconds since 1970, None if it cannot be read.

    ``size`` counts the bytes of the file, ``stored`` those that follow in the tar: fewer for a
    sparse file, whose ``extents`` say where in the file they belong.
    """

    name: bytes
    kind: MemberKind
    mode: int
    mtime: int | None
    target: bytes
    size: int
    stored: int
    extents: list[Extent] | None


def members(tar: TarStream) -> Iterator[Member]:
    """Yield the members. All data of a file must be read before the next. Raise DamagedError."""
    common: Records = {}
    while member := _next_member(tar, common):
        tar.allow_for_member()
        yield member
        if member.kind is not MemberKind.FILE:
            tar.skip(member.stored)
        tar.skip(-member.stored % BLOCK_SIZE)


def _next_member(tar: TarStream, common: Records) -> Member | None:
    """Return the next member, or None at the end; ``common`` are the global records so far."""
    own: Records = {}
    while (block := tar.take(BLOCK_SIZE)) != _ZEROS:
        header = decode_header(block)
        flag = header.type
        if flag in _KINDS:
            return _member(tar, block, header, {**common, **own})
        description = _description(tar, header)
        if flag is TypeFlag.GLOBAL_RECORDS:
            common.update(_records(description))
        elif flag in _LONG:
            own[_LONG[flag]] = text(description)
        elif flag is not TypeFlag.VOLUME_LABEL:
            own.update(_records(description))
    if own:
        raise DamagedError("it ends after an extended header, without its member")
    return None


def _description(tar: TarStream, header: Header) -> bytes:
    """Return the data of a header that describes other members."""
    size = number(header.size)
    if not 0 <= size <= _LONGEST_DESCRIPTION:
        raise DamagedError(
            f"an extended header has {size} bytes; at most {_LONGEST_DESCRIPTION} are allowed"
        )
    description = tar.take(size)
    tar.skip(-size % BLOCK_SIZE)
    return description


def _records(description: bytes) -> Records:
    """Return the known ones of the records ``LENGTH KEYWORD=VALUE``, each ended by a newline."""
    found: Records = {}
    pieces: list[bytes] = []
    at = 0
    while at < len(description):
        blank = description.find(b" ", at, at + _DIGITS_OF_LENGTH)
        end = at + decimal(description[at : max(at, blank)])
        keyword, _, value = description[blank + 1 : end].partition(b"=")
        if end > len(description) or not value.endswith(b"\n"):
            raise DamagedError("an extended header has a record that cannot be read")
        if keyword in _KNOWN:
            found[keyword] = value[:-1]
        elif keyword in OFFSET_AND_LENGTH:
            pieces.append(value[:-1])
        at = end
    if pieces:
        found[MAP] = b",".join(pieces)
    return found


def _member(tar: TarStream, block: bytes, header: Header, records: Records) -> Member:
    """Return the member of a ``header`` and the ``records`` before it, which take precedence."""
    flag = header.type
    kind = _KINDS[flag]
    name = records.get(b"GNU.sparse.name") or records.get(b"path") or header.path
    if name.endswith(b"/") and kind in (MemberKind.FILE, MemberKind.FOLDER):
        # The oldest format has no flag for folders.
        kind, name = MemberKind.FOLDER, name.rstrip(b"/") or name
    size = decimal(records[b"size"]) if b"size" in records else number(header.size)
    has_data = kind in (MemberKind.FILE, MemberKind.HARD_LINK) or flag is TypeFlag.DUMPED_FOLDER
    # The size of any other folder, and of a link, means nothing.
    stored, extents = size if has_data else 0, None
    if kind is MemberKind.FILE and flag is TypeFlag.SPARSE_FILE:
        extents, size = extents_of_header(tar, block)
    elif kind is MemberKind.FILE and (sizes := [records[key] for key in SIZES if key in records]):
        size = decimal(sizes[0])
        extents, stored = extents_of_records(tar, records, stored)
    mode, target = number(header.mode), records.get(b"linkpath") or text(header.target)
    mtime = _time(records[b"mtime"]) if b"mtime" in records else number(header.mtime) * _SECOND
    # Keywords would take twice as long here.
    return Member(name, kind, mode, mtime, target, size, stored, extents)


def _time(seconds: bytes) -> int | None:
    """Return a record's decimal ``seconds`` in nanoseconds, or None."""
    found = _TIME.fullmatch(seconds)
    if not found:
        return None
    sign, whole, part = found.groups(b"")
    nanoseconds = int(whole) * _SECOND + int(part[:9].ljust(9, b"0"))
    return -nanoseconds if sign else nanoseconds
