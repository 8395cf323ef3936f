"""What a folder holds, as columns: one Listing for a source, and one for its copy. Pure.

Row 0 is the folder itself. The paths are relative to it, as bytes, sorted, so that a folder stands
before what is in it. Columns rather than objects: a million entries are to fit in some 200 MiB.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate, chain, islice, pairwise
from typing import TYPE_CHECKING, NamedTuple, Self

import xxhash

from stager.base.extents import ALIGNMENT, Extent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: First bytes of a listing's text; another version is none.
_MAGIC = b"stage listing 1\n"
#: Types of the columns of numbers, as `array` names them: 64 bits, signed where times may be.
_UNSIGNED, _SIGNED = "Q", "q"
#: The parts of a listing's text, and the types of the columns of numbers among them.
_PARTS = 14
#: Rows that become columns at a time: many, for it is fast then, and not all, which are large.
_BATCH = 4096
_TYPES = (_UNSIGNED, _UNSIGNED, _SIGNED, _SIGNED, _UNSIGNED, _UNSIGNED, _UNSIGNED)


class Kind(IntEnum):
    """What an entry is."""

    FOLDER = 0
    FILE = 1
    #: A symbolic link.
    LINK = 2
    #: A further name of a file that stands before it in the listing: a hard link.
    HARD_LINK = 3


class Row(NamedTuple):
    """One entry as it was found; times in nanoseconds since 1970.

    What says nothing of an entry's version is 0: the ``inode`` and ``ctime_ns`` of what is no file,
    all but the path of a twin. ``extents`` are those of a file with holes. ``target`` is where a
    link points, and for a twin the path of its file.
    """

    path: bytes
    kind: Kind
    mode: int = 0
    size: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    inode: int = 0
    owner: int = 0
    group: int = 0
    target: bytes = b""
    extents: tuple[Extent, ...] | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """Equal columns, one value an entry, and what few entries have, by their row."""

    paths: list[bytes]
    kinds: bytes
    modes: array[int]
    sizes: array[int]
    mtimes: array[int]
    ctimes: array[int]
    inodes: array[int]
    owners: array[int]
    groups: array[int]
    targets: dict[int, bytes] = field(default_factory=dict)
    extents: dict[int, tuple[Extent, ...]] = field(default_factory=dict)
    #: Bytes of data of the files that have ``extents``.
    lengths: dict[int, int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        found = {row: sum(one.length for one in of) for row, of in self.extents.items()}
        object.__setattr__(self, "lengths", found)

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Self:
        """The listing of ``rows``, which come in any order, and are sorted here.

        Raises OverflowError, with the path, for a time beyond some three hundred years from 1970.
        """
        paths: list[bytes] = []
        kinds = bytearray()
        columns = [array(code) for code in _TYPES]
        targets: dict[int, bytes] = {}
        extents: dict[int, tuple[Extent, ...]] = {}
        left = iter(rows)
        while batch := list(islice(left, _BATCH)):
            begin = len(paths)
            batch_paths, batch_kinds, *numbers, batch_targets, batch_extents = zip(
                *batch, strict=True
            )
            try:
                for column, values in zip(columns, numbers, strict=True):
                    column.extend(values)
            except OverflowError:
                raise OverflowError(_misfit(batch)) from None
            paths.extend(batch_paths)
            kinds.extend(batch_kinds)
            targets.update((row, one) for row, one in enumerate(batch_targets, begin) if one)
            extents.update(
                (row, one) for row, one in enumerate(batch_extents, begin) if one is not None
            )
        order = sorted(range(len(paths)), key=paths.__getitem__)
        modes, sizes, mtimes, ctimes, inodes, owners, groups = (
            array(column.typecode, map(column.__getitem__, order)) for column in columns
        )
        return cls(
            [paths[number] for number in order], bytes(map(kinds.__getitem__, order)),
            modes, sizes, mtimes, ctimes, inodes, owners, groups,
            {row: targets[number] for row, number in enumerate(order) if number in targets},
            {row: extents[number] for row, number in enumerate(order) if number in extents},
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.paths)

    def rows(self, kind: Kind) -> Iterator[int]:
        """The numbers of the rows of ``kind``, in order."""
        return (number for number, one in enumerate(self.kinds) if one == kind)

    @property
    def files(self) -> int:
        """How many files there are, whatever names they have."""
        return self.kinds.count(Kind.FILE)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes)

    def part(self, rows: Iterable[int], *more: Row) -> Self:
        """The listing of some of the ``rows``, and of what else is with them."""
        return self.of(chain(map(self._row, rows), more))

    def _row(self, number: int) -> Row:
        numbers = (column[number] for column in self._columns)
        few = self.targets.get(number, b""), self.extents.get(number)
        return Row._make((self.paths[number], Kind(self.kinds[number]), *numbers, *few))

    def data(self, number: int) -> int:
        """Bytes of the file that travel."""
        found = self.lengths.get(number)
        return self.sizes[number] if found is None else found

    def allocated(self, rows: Iterable[int] | None = None) -> int:
        """Bytes that the ``rows`` take on a disk, or all, in whole blocks."""
        some = range(len(self)) if rows is None else rows
        # A folder takes a block, and what else has no data at most that.
        return sum(max(1, -(-self.data(row) // ALIGNMENT)) * ALIGNMENT for row in some)

    def digest(self) -> str:
        """The xxh3-128 of the whole listing, in hexadecimal: that of one version of the folder."""
        return xxhash.xxh3_128_hexdigest(self.to_bytes())

    def to_bytes(self) -> bytes:
        """A text that `from_bytes` reads back."""
        numbers = array(_UNSIGNED, self.targets)
        holes = array(_UNSIGNED, self.extents)
        counts = array(_UNSIGNED, (len(found) for found in self.extents.values()))
        spans = array(_UNSIGNED, chain.from_iterable(chain(*self.extents.values())))
        return _MAGIC + pack(
            b"\0".join(self.paths), self.kinds,
            *(column.tobytes() for column in self._columns),
            numbers.tobytes(), b"\0".join(self.targets.values()),
            holes.tobytes(), counts.tobytes(), spans.tobytes(),
        )  # fmt: skip

    @classmethod
    def from_bytes(cls, text: bytes) -> Self:
        """The listing in ``text``. Raises ValueError where it is none."""
        if not text.startswith(_MAGIC):
            raise ValueError("it is no listing")
        parts = unpack(memoryview(text)[len(_MAGIC) :])
        if len(parts) != _PARTS:
            raise ValueError("it has other columns")
        modes, sizes, mtimes, ctimes, inodes, owners, groups = (
            _column(code, part) for code, part in zip(_TYPES, parts[2:9], strict=True)
        )
        numbers, targets, holes, counts, spans = parts[9:]
        listing = cls(
            bytes(parts[0]).split(b"\0"),
            bytes(parts[1]),
            modes,
            sizes,
            mtimes,
            ctimes,
            inodes,
            owners,
            groups,
            dict(zip(_column(_UNSIGNED, numbers), bytes(targets).split(b"\0"), strict=False)),
            _read_extents(*(_column(_UNSIGNED, part) for part in (holes, counts, spans))),
        )
        if any(len(column) != len(listing) for column in (listing.kinds, *listing._columns)):
            raise ValueError("its columns differ in length")
        return listing

    @property
    def _columns(self) -> tuple[array[int], ...]:
        return (
            self.modes, self.sizes, self.mtimes, self.ctimes, self.inodes, self.owners, self.groups,
        )  # fmt: skip


def _misfit(rows: Iterable[Row]) -> bytes:
    """The path of the first of the ``rows`` that has a number which is no column's."""
    for row in rows:
        for code, value in zip(_TYPES, row[2:9], strict=True):
            try:
                array(code, [value])
            except OverflowError:
                return row.path
    return b""


def pack(*parts: bytes) -> bytes:
    """The ``parts`` in one text, each behind its length."""
    return b"".join(chain.from_iterable((len(part).to_bytes(8, "big"), part) for part in parts))


def unpack(text: memoryview) -> list[memoryview]:
    """The parts that were packed. Raises ValueError where the text ends early."""
    parts: list[memoryview] = []
    at = 0
    while at < len(text):
        length = int.from_bytes(text[at : at + 8], "big")
        at += 8
        if at + length > len(text):
            raise ValueError("it ends early")
        parts.append(text[at : at + length])
        at += length
    return parts


def _column(code: str, part: memoryview) -> array[int]:
    column = array(code)
    column.frombytes(part)
    return column


def _read_extents(
    numbers: Iterable[int], counts: Iterable[int], spans: array[int]
) -> dict[int, tuple[Extent, ...]]:
    pairs = [Extent(spans[at], spans[at + 1]) for at in range(0, len(spans), 2)]
    bounds = pairwise(accumulate(counts, initial=0))
    return {
        number: tuple(pairs[begin:end])
        for number, (begin, end) in zip(numbers, bounds, strict=True)
    }


def text_of(path: bytes) -> str:
    """A path in words, as messages name it."""
    return os.fsdecode(path).encode(errors="backslashreplace").decode()
