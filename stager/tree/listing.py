"""Hold the entries of a folder in columns. Pure.

A source has a listing, and so has its copy. Listings are columns rather than objects so that a
million entries take some 200 MiB.
"""

from __future__ import annotations

import os
import sys
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import accumulate, chain, islice, pairwise
from operator import lt
from typing import TYPE_CHECKING, NamedTuple, Self

import xxhash

from stager.base.codec import listed_time
from stager.base.extents import ALIGNMENT, Extent
from stager.base.text import printable
from stager.fs.files import copy_mode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from stager.base.options import Share

#: The first bytes of a serialized listing, with the version of its format.
_MAGIC = b"stage listing 1\n"
#: The parts of a serialized listing.
_PARTS = 14
#: Type codes of `array` for 64 bits. Times are signed.
_UNSIGNED, _SIGNED = "Q", "q"
#: The types of the columns of numbers, from ``modes`` to ``groups``.
_TYPES = (_UNSIGNED, _UNSIGNED, _SIGNED, _SIGNED, _UNSIGNED, _UNSIGNED, _UNSIGNED)
#: Rows that are turned into columns at a time: many are fast, all at once would take much memory.
_BATCH = 4096


class Kind(IntEnum):
    """The type of an entry."""

    FOLDER = 0
    FILE = 1
    #: A symbolic link.
    LINK = 2
    #: Another path of a file. The first path of a file in the listing is its FILE.
    HARD_LINK = 3


#: What is staged.
_KINDS = bytes(Kind)
#: What no path relative to the folder has in it, with a slash before and behind it.
_NO_PATH = (b"//", b"/./", b"/../")


class Row(NamedTuple):
    """One entry of a folder: a row of a Listing, in the order of its columns."""

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
    """The entries of a folder, sorted by path. The value of a row in a column is at its index.

    Row 0 is the folder itself. A folder comes before everything in it. A number that does not
    identify the version of an entry is 0: sizes and inodes of folders and links, modes and ctimes
    of links, and all numbers of a hard link, whose file has them.
    """

    #: Paths relative to the folder; its own is empty.
    paths: list[bytes]
    #: A `Kind` each.
    kinds: bytes
    #: Permission bits.
    modes: array[int]
    #: Bytes.
    sizes: array[int]
    #: Nanoseconds since 1970.
    mtimes: array[int]
    ctimes: array[int]
    inodes: array[int]
    #: Uids and gids.
    owners: array[int]
    groups: array[int]
    #: By row: the target of a symbolic link, the path of a hard link's file, or the path at the
    #: source of a file that is decompressed, which is another one there.
    targets: dict[int, bytes] = field(default_factory=dict)
    #: By row: where a file with holes has data.
    extents: dict[int, tuple[Extent, ...]] = field(default_factory=dict)
    #: By row: the bytes of data of a file with holes.
    lengths: dict[int, int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        found = {row: sum(one.length for one in of) for row, of in self.extents.items()}
        object.__setattr__(self, "lengths", found)

    def as_copied(self, share: Share, group: int) -> Self:
        """Return the listing with the permissions and the ``group`` of copies. Pure."""
        copied = {
            (kind, mode): copy_mode(mode, share, is_folder=kind == Kind.FOLDER)
            for kind, mode in set(zip(self.kinds, self.modes, strict=True))
            if kind in (Kind.FILE, Kind.FOLDER)
        }
        modes, groups = self.modes[:], self.groups[:]
        for row, which in enumerate(zip(self.kinds, self.modes, strict=True)):
            if which in copied:
                modes[row], groups[row] = copied[which], group
        return replace(self, modes=modes, groups=groups)

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Self:
        """Return the listing of ``rows``, which may be in any order."""
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
            for column, values in zip(columns, numbers, strict=True):
                try:
                    column.extend(values)
                except OverflowError:
                    del column[begin:]
                    column.extend(map(listed_time, values))
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
        """Yield the numbers of the rows of ``kind``, in order."""
        return (number for number, one in enumerate(self.kinds) if one == kind)

    def has(self, path: bytes) -> bool:
        """Return whether there is an entry at ``path``."""
        row = bisect_left(self.paths, path)
        return row < len(self.paths) and self.paths[row] == path

    def file_of(self, row: int) -> int:
        """Return the row of the file that a hard link is, or of a file itself; -1 of any other."""
        if self.kinds[row] == Kind.HARD_LINK:
            return bisect_left(self.paths, self.targets[row])
        return row if self.kinds[row] == Kind.FILE else -1

    @property
    def files(self) -> int:
        """The number of files, hard links not counted."""
        return self.kinds.count(Kind.FILE)

    @property
    def size(self) -> int:
        """The bytes of all files together."""
        return sum(self.sizes)

    def part(self, rows: Iterable[int], *more: Row) -> Self:
        """Return the listing of some of the ``rows``, and of ``more`` rows with them."""
        return self.of(chain(map(self.row, rows), more))

    def is_decompressed(self, number: int) -> bool:
        """Whether the copy of the row's file is what is decompressed from it."""
        return number in self.targets and self.kinds[number] == Kind.FILE

    def source_path(self, number: int) -> bytes:
        """Return the path of the row's entry at the source."""
        if number in self.targets and self.is_decompressed(number):  # there are few, if any
            return self.targets[number]
        return self.paths[number]

    def row(self, number: int) -> Row:
        """Return one row."""
        numbers = (column[number] for column in self._columns)
        few = self.targets.get(number, b""), self.extents.get(number)
        return Row._make((self.paths[number], Kind(self.kinds[number]), *numbers, *few))

    def data(self, number: int) -> int:
        """Return the bytes of the row's file that are sent: its data without holes."""
        found = self.lengths.get(number)
        return self.sizes[number] if found is None else found

    def allocated(self, rows: Iterable[int] | None = None) -> int:
        """Return the bytes that the ``rows``, or all, take on a disk, in whole blocks."""
        some = range(len(self)) if rows is None else rows
        # A folder takes a block; an empty file or a link takes one at most.
        return sum(max(1, -(-self.data(row) // ALIGNMENT)) * ALIGNMENT for row in some)

    def digest(self) -> str:
        """Return the xxh3-128 of the listing, in hexadecimal.

        It identifies one version of the folder.
        """
        return xxhash.xxh3_128_hexdigest(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Serialize the listing for `from_bytes`."""
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
    def from_bytes(cls, text: bytes | memoryview) -> Self:
        """Return the listing that `to_bytes` serialized. Raise ValueError if ``text`` is none."""
        view = memoryview(text)
        if view[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it is no listing")
        parts = unpack(view[len(_MAGIC) :], _PARTS)
        if len(parts) != _PARTS:
            raise ValueError("it has other columns")
        modes, sizes, mtimes, ctimes, inodes, owners, groups = (
            _column(code, part) for code, part in zip(_TYPES, parts[2:9], strict=True)
        )
        paths, kinds = bytes(parts[0]), bytes(parts[1])
        if paths.count(0) + 1 != len(kinds):
            raise ValueError("its columns differ in length")
        linked, targets, holes, counts, spans = parts[9:]
        listing = cls(
            paths.split(b"\0"), kinds,
            modes, sizes, mtimes, ctimes, inodes, owners, groups,
            _read_targets(_column(_UNSIGNED, linked), bytes(targets)),
            _read_extents(*(_column(_UNSIGNED, part) for part in (holes, counts, spans))),
        )  # fmt: skip
        listing._check()
        return listing

    def _check(self) -> None:
        """Raise ValueError unless this can be the listing of a folder."""
        rows = len(self)
        if any(len(column) != rows for column in self._columns):
            raise ValueError("its columns differ in length")
        if self.kinds.strip(_KINDS):
            raise ValueError("it has an entry of an unknown kind")
        if any(row >= rows for row in chain(self.targets, self.extents)):
            raise ValueError("it describes a row that it does not have")
        if not all(map(lt, self.paths, islice(self.paths, 1, None))):
            raise ValueError("its paths are not sorted")
        # In one text, which is much faster than path by path. The folder itself has an empty path.
        inner = self.paths if self.paths[0] else self.paths[1:]
        text = b"/".join([b"", *inner, b""]) if inner else b""
        if any(part in text for part in _NO_PATH):
            raise ValueError("a path does not lead into the folder")

    @property
    def _columns(self) -> tuple[array[int], ...]:
        return (
            self.modes, self.sizes, self.mtimes, self.ctimes, self.inodes, self.owners, self.groups,
        )  # fmt: skip


def pack(*parts: bytes) -> bytes:
    """Return the ``parts`` in one, each behind its length in 8 bytes."""
    return b"".join(chain.from_iterable((len(part).to_bytes(8, "big"), part) for part in parts))


def unpack(text: memoryview, most: int = sys.maxsize) -> list[memoryview]:
    """Return the parts that `pack` joined, at most one more than ``most``.

    Raise ValueError if the text ends early.
    """
    parts: list[memoryview] = []
    at = 0
    while at < len(text) and len(parts) <= most:
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


def _read_targets(numbers: array[int], targets: bytes) -> dict[int, bytes]:
    if not numbers and not targets:
        return {}
    if targets.count(0) + 1 != len(numbers):
        raise ValueError("its columns differ in length")
    return dict(zip(numbers, targets.split(b"\0"), strict=True))


def _read_extents(
    numbers: array[int], counts: array[int], spans: array[int]
) -> dict[int, tuple[Extent, ...]]:
    if len(numbers) != len(counts) or 2 * sum(counts) != len(spans):
        raise ValueError("its columns differ in length")
    pairs = [Extent(spans[at], spans[at + 1]) for at in range(0, len(spans), 2)]
    bounds = pairwise(accumulate(counts, initial=0))
    return {
        number: tuple(pairs[begin:end])
        for number, (begin, end) in zip(numbers, bounds, strict=True)
    }


def text_of(path: bytes) -> str:
    """Return a ``path`` of any bytes as messages show it: on one line, and without control
    characters, since another user may have chosen the name.
    """
    return printable(os.fsdecode(path))
