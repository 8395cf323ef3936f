"""Yield the members of a tar one after the other, as its bytes come.

Python's tarfile is not used: it takes what it cannot read for the end of the archive, keeps all
members in memory, and can be made to use any amount of memory and time. Here everything besides
the data of files is bounded, and what cannot be read is damage.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from stager.archive.damage import DamagedError
from stager.archive.tar_header import (
    BLOCK_SIZE,
    TypeFlag,
    decimal,
    decode_header,
    number,
    text,
)
from stager.archive.tar_sparse import (
    MAJOR,
    MAP,
    OFFSET_AND_LENGTH,
    SIZES,
    extents_of_header,
    extents_of_records,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stager.archive.tar_header import Header
    from stager.archive.tar_stream import TarStream
    from stager.base.extents import Extent

    #: Values by keyword.
    Records = dict[bytes, bytes]

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
