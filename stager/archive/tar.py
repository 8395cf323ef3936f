"""A tar's bytes in, as they come, its members out, one after the other.

It is read here and not by the library, whose tarfile takes what it cannot read for the end, keeps
all members in memory, and can be made to take any amount of that and of time. What a tar holds
besides the data of its files is bounded here, and what cannot be read is damage.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from stager.archive.decompress import DamagedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_UNIT = 512
_ZEROS = bytes(_UNIT)
#: Kinds of members: files, of which one has holes, and folders, of which one has a list of names.
FILES, _SPARSE, FOLDERS, _DUMPED = (b"0", b"\0", b"7", b"S"), b"S", (b"5", b"D"), b"D"
LINK, HARD_LINK, _LABEL = b"2", b"1", b"V"
#: Members that describe others: one, or all that follow; by long names, or by records.
_RECORDS, _GLOBAL, _LONG = (b"x", b"X"), b"g", {b"L": b"path", b"K": b"linkpath"}
_DESCRIBING = (*_RECORDS, _GLOBAL, *_LONG, _LABEL)
#: The most bytes of such a member, and of the list of a file's holes.
_LONGEST_HEADER, _LONGEST_MAP = 64 << 10, 1 << 20
#: Bytes that a tar may hold besides the data of its files: for each member, and in all.
_FOR_EACH, _BESIDES = 4096, 64 << 20
#: The records that matter here. Those of a file's holes come in several ways.
_MAP, _REAL_SIZES = b"GNU.sparse.map", (b"GNU.sparse.realsize", b"GNU.sparse.size")
_HOLES = (b"GNU.sparse.offset", b"GNU.sparse.numbytes")
_KNOWN = frozenset(
    {b"path", b"linkpath", b"size", b"mtime", b"GNU.sparse.name", b"GNU.sparse.major", _MAP}
    | {*_REAL_SIZES}
)
_NO_NUMBER = "a header with a number that is none"
_TIME = re.compile(rb"(-?)(\d{1,20})(?:\.(\d*))?")

#: Where a file has data: pairs of offset and length.
Extents = list[tuple[int, int]]


class TarStream:
    """The bytes of a tar, from the first to the last."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._block = b""
        self._view = memoryview(b"")
        self._at = 0
        #: Bytes that may still come besides the data of files.
        self._besides = _BESIDES

    def _next(self) -> bool:
        """Go on to the next block; whether there is one."""
        self._block, self._at = next(self._blocks, b""), 0
        self._view = memoryview(self._block)
        return bool(self._block)

    def pieces(self, size: int) -> Iterator[memoryview]:
        """The next ``size`` bytes, as they come."""
        while size:
            if self._at == len(self._block) and not self._next():
                raise DamagedError("it ends early")
            piece = self._view[self._at : self._at + size]
            self._at += len(piece)
            size -= len(piece)
            yield piece

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes, which are no file's data."""
        self._count(size)
        end = self._at + size
        if end > len(self._block):
            return b"".join(self.pieces(size))
        found, self._at = self._block[self._at : end], end
        return found

    def skip(self, size: int) -> None:
        """Pass over as many."""
        self._count(size)
        for _ in self.pieces(size):
            pass

    def allow_for_member(self) -> None:
        """Let there be some bytes more, for there is one more member."""
        self._besides += _FOR_EACH

    def _count(self, size: int) -> None:
        self._besides -= size
        if self._besides < 0:
            raise DamagedError("too much of it is no data of files; make it again")

    def end(self) -> None:
        """Read what is behind the first mark of the end: a second, zeros, a digest of the whole."""
        if self._at < len(self._block) or self._next():
            rest = self._block[self._at : self._at + _UNIT]
            if rest.strip(b"\0"):
                raise DamagedError("something stands behind a single mark of its end")
            self._count(len(self._block) - self._at)
        while self._next():
            self._count(len(self._block))


class Member(NamedTuple):
    """A member of a tar; ``stored`` are the bytes of data that follow, ``size`` those of its file.

    Of a file with holes, ``extents`` are where it has data. The time is in nanoseconds since 1970.
    """

    name: bytes
    kind: bytes
    mode: int
    mtime: int | None
    target: bytes
    size: int
    stored: int
    extents: Extents | None


def members(tar: TarStream) -> Iterator[Member]:
    """The members, one at a time. Of a file all of its data has to be read."""
    common: dict[bytes, bytes] = {}
    while member := _next_member(tar, common):
        tar.allow_for_member()
        yield member
        if member.kind not in FILES:
            tar.skip(member.stored)
        tar.skip(-member.stored % _UNIT)


def _next_member(tar: TarStream, common: dict[bytes, bytes]) -> Member | None:
    own: dict[bytes, bytes] = {}
    while True:
        header = tar.take(_UNIT)
        if header == _ZEROS:
            if own:
                raise DamagedError("it ends behind the description of a member")
            return None
        _check_sum(header)
        kind = header[156:157]
        if kind not in _DESCRIBING:
            return _member(tar, header, {**common, **own})
        text = _description(tar, header)
        if kind == _GLOBAL:
            common.update(_records(text))
        elif kind in _RECORDS:
            own.update(_records(text))
        elif kind in _LONG:
            own[_LONG[kind]] = _text(text)


def _check_sum(header: bytes) -> None:
    told = _number(header[148:156])
    found = sum(header) - sum(header[148:156]) + 8 * 0x20  # as if it had blanks in its place
    if told != found and told != found - 256 * sum(
        byte > 127 for byte in header[:148] + header[156:]
    ):
        raise DamagedError("there is no member where one should be; it is damaged, or no tar")


def _description(tar: TarStream, header: bytes) -> bytes:
    size = _number(header[124:136])
    if not 0 <= size <= _LONGEST_HEADER:
        raise DamagedError(f"a header of {size} bytes")
    text = tar.take(size)
    tar.skip(-size % _UNIT)
    return text


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _number(field: bytes) -> int:
    """What a header's field tells: octal digits, or a number of two's complement."""
    digits = _text(field).strip(b" ")
    if digits.isdigit():  # which no sign is
        try:
            return int(digits, 8)
        except ValueError:  # an 8 or a 9
            raise DamagedError(_NO_NUMBER) from None
    if field[0] in (0o200, 0o377):
        number = int.from_bytes(field[1:], "big")
        return number - (1 << 8 * (len(field) - 1)) if field[0] == 0o377 else number
    if digits:
        raise DamagedError(_NO_NUMBER)
    return 0


def _decimal(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 20:
        raise DamagedError(_NO_NUMBER)
    return int(digits)


def _records(text: bytes) -> dict[bytes, bytes]:
    """The known ones of the records "LENGTH KEYWORD=VALUE" and a newline."""
    found: dict[bytes, bytes] = {}
    holes: list[bytes] = []
    at = 0
    while at < len(text):
        blank = text.find(b" ", at, at + 7)
        end = at + _decimal(text[at : max(at, blank)])
        keyword, _, value = text[blank + 1 : end].partition(b"=")
        if end > len(text) or not value.endswith(b"\n"):
            raise DamagedError("a header with a record that is none")
        if keyword in _KNOWN:
            found[keyword] = value[:-1]
        elif keyword in _HOLES:
            holes.append(value[:-1])
        at = end
    if holes:
        found[_MAP] = b",".join(holes)
    return found


def _member(tar: TarStream, header: bytes, said: dict[bytes, bytes]) -> Member:
    """The member with that ``header``, and of which ``said`` are the records."""
    kind = header[156:157]
    name = said.get(b"GNU.sparse.name") or said.get(b"path") or _name(header)
    if name.endswith(b"/") and kind in (*FILES, *FOLDERS):
        kind, name = _DUMPED if kind == _DUMPED else b"5", name.rstrip(b"/") or name
    told = _decimal(said[b"size"]) if b"size" in said else _number(header[124:136])
    # A folder and a link may have a size, but no data.
    stored = told if kind in FILES or kind in (_DUMPED, HARD_LINK) else 0
    size, extents = told, None
    if kind == _SPARSE:
        size, extents = _number(header[483:495]), _old_holes(tar, header)
    elif kind in FILES and (sizes := [said[key] for key in _REAL_SIZES if key in said]):
        size = _decimal(sizes[0])
        extents, stored = _holes(tar, said, stored)
    mtime = _time(said[b"mtime"]) if b"mtime" in said else _number(header[136:148]) * 10**9
    target = said.get(b"linkpath") or _text(header[157:257])
    return Member(name, kind, _number(header[100:108]), mtime, target, size, stored, extents)


def _name(header: bytes) -> bytes:
    name, before = _text(header[:100]), b""
    if header[257:263] == b"ustar\0":  # others have something else in this place
        before = _text(header[345:500])
    return before + b"/" + name if before else name


def _time(text: bytes) -> int | None:
    found = _TIME.fullmatch(text)
    if not found:
        return None
    sign, seconds, part = found.groups(b"")
    nanoseconds = int(seconds) * 10**9 + int(part[:9].ljust(9, b"0"))
    return -nanoseconds if sign else nanoseconds


def _old_holes(tar: TarStream, header: bytes) -> Extents:
    """Where a file has data as GNU tar's own format tells it: here, and in blocks that follow."""
    found = _pairs_of_numbers(header[386:482])
    more, length = header[482], 0
    while more:
        block = tar.take(_UNIT)
        length += _UNIT
        if length > _LONGEST_MAP:
            raise DamagedError("a file with too many holes")
        found += _pairs_of_numbers(block[:504])
        more = block[504]
    return found


def _pairs_of_numbers(fields: bytes) -> Extents:
    pairs = (fields[at : at + 24] for at in range(0, len(fields), 24))
    return [(_number(pair[:12]), _number(pair[12:])) for pair in pairs if pair[0]]


def _holes(tar: TarStream, said: dict[bytes, bytes], stored: int) -> tuple[Extents, int]:
    """Where a file has data as records tell it, and how many bytes of data follow."""
    if said.get(b"GNU.sparse.major") != b"1":
        return _pairs(said.get(_MAP, b"").split(b",") if said.get(_MAP) else []), stored
    # The list stands before the data.
    text, lines, wanted = b"", 0, 1
    while lines < wanted:
        block = tar.take(_UNIT)
        if len(text) >= _LONGEST_MAP:
            raise DamagedError("a file with too many holes")
        if not text:
            wanted += 2 * _decimal(block.partition(b"\n")[0])
        lines += block.count(b"\n")
        text += block
    numbers = text.split(b"\n", wanted)[1:wanted]
    if len(text) > stored:
        raise DamagedError("a file with a list of holes that is longer than its data")
    return _pairs(numbers), stored - len(text)


def _pairs(numbers: list[bytes]) -> Extents:
    values = list(map(_decimal, numbers))
    if len(values) % 2:
        raise DamagedError("a file with half a hole")
    return list(zip(values[::2], values[1::2], strict=True))


def with_holes(tar: TarStream, member: Member) -> Iterator[memoryview | int]:
    """The data of a file, and the lengths of the holes before, between and behind it."""
    at, left = 0, member.stored
    for offset, length in member.extents or ():
        if not (at <= offset and 0 <= length <= left and offset + length <= member.size):
            raise DamagedError("a file with holes in impossible places")
        yield offset - at
        yield from tar.pieces(length)
        at, left = offset + length, left - length
    if left:
        raise DamagedError("a file with more data than it has places for")
    yield member.size - at
