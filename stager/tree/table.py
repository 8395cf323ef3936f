"""A node's record of each file of a staged tree, and what of it need not move again. Pure.

The tree's record says which table belongs to it; the table is a file beside the records.
"""

from __future__ import annotations

import os
import sys
from array import array
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import xxhash

from stager.base.errors import StageError
from stager.tree.listing import Kind, Listing, pack, unpack
from stager.tree.stream import DIGEST_SIZE, place
from stager.tree.walk import walk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stager.disk.cache import Cache
    from stager.disk.record import Record


@dataclass(frozen=True, slots=True)
class Table:
    """The ``source`` as it was listed; of each copy its mode, inode, bytes, time and xxh3-128."""

    source: Listing
    modes: array[int]
    inodes: array[int]
    sizes: array[int]
    mtimes: array[int]
    digests: bytes
    #: What the files held that were changed for their place: these bytes are what travels.
    originals: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def load(cls, cache: Cache, record: Record | None) -> Self | None:
        """The table of the tree that is recorded, if there is one that can be read."""
        text = cache.load_table(record) if record else None
        with suppress(ValueError):  # of another version
            return cls.from_bytes(text) if text is not None else None
        return None

    @classmethod
    def of(
        cls, source: Listing, copy: Listing, digests: bytes, originals: dict[int, bytes]
    ) -> Self:
        """The table of a tree, whose ``copy`` has the same paths as its ``source``."""
        return cls(source, copy.modes, copy.inodes, copy.sizes, copy.mtimes, digests, originals)

    def to_bytes(self) -> bytes:
        """A text that `from_bytes` reads back."""
        columns = (self.modes, self.inodes, self.sizes, self.mtimes)
        return pack(
            self.source.to_bytes(), *(column.tobytes() for column in columns), self.digests,
            array("Q", self.originals).tobytes(), pack(*self.originals.values()),
        )  # fmt: skip

    @classmethod
    def from_bytes(cls, text: bytes) -> Self:
        """The table in ``text``. Raises ValueError where it is none."""
        source, modes, inodes, sizes, mtimes, digests, changed, originals = unpack(
            memoryview(text)
        )  # fmt: skip
        table = cls(
            Listing.from_bytes(bytes(source)), array("Q", bytes(modes)), array("Q", bytes(inodes)),
            array("Q", bytes(sizes)), array("q", bytes(mtimes)), bytes(digests),
            dict(zip(array("Q", bytes(changed)), map(bytes, unpack(originals)), strict=True)),
        )  # fmt: skip
        columns = (table.modes, table.inodes, table.sizes, table.mtimes)
        rows = len(table.source)
        if any(len(column) != rows for column in columns) or len(digests) != rows * DIGEST_SIZE:
            raise ValueError("its columns differ in length")
        return table

    def digest(self, row: int) -> bytes:
        """The xxh3-128 of the row's file."""
        return self.digests[place(row)]

    def sent_digest(self, row: int) -> bytes:
        """The xxh3-128 of what of the row's file travels."""
        original = self.originals.get(row)
        return self.digest(row) if original is None else xxhash.xxh3_128_digest(original)

    def is_at(self, folder: str) -> bool:
        """Whether any of the files is in ``folder`` as it was published; of a tree that has none,
        whether nothing else is there than was.
        """
        if not self.source.files:
            with suppress(OSError, StageError):
                return walk(folder, holes=False).paths == self.source.paths
            return False
        above = os.fsencode(folder) + b"/"
        for row in _files(self.source):
            with suppress(OSError):
                there = os.lstat(above + self.source.paths[row])
                now = there.st_ino, there.st_size, there.st_mtime_ns
                if now == (self.inodes[row], self.sizes[row], self.mtimes[row]):
                    return True
        return False

    def kept(self, source: Listing, copy: Listing) -> Iterator[tuple[int, int]]:
        """The rows of a new listing of the ``source`` whose files are in the ``copy`` already, as
        it is found now; each with its row in this table.
        """
        there = _common(source, copy)
        at, now = next(there, _NONE)
        for row, before in _common(source, self.source):
            while at < row:
                at, now = next(there, _NONE)
            if (
                at == row
                and source.kinds[row] == self.source.kinds[before] == copy.kinds[now] == Kind.FILE
                and _facts(source, row) == _facts(self.source, before)
                and self._is_copy(before, copy, now)
            ):
                yield row, before

    def _is_copy(self, row: int, copy: Listing, now: int) -> bool:
        """Whether the file in the ``copy`` is the one that was published."""
        return (
            copy.modes[now] == self.modes[row]
            and copy.inodes[now] == self.inodes[row]
            and copy.sizes[now] == self.sizes[row]
            and copy.mtimes[now] == self.mtimes[row]
        )

    def gone(self, source: Listing) -> int:
        """How many of the files that were there are not in a new listing of the ``source``."""
        still = sum(
            source.kinds[row] == self.source.kinds[before] == Kind.FILE
            for row, before in _common(source, self.source)
        )
        return self.source.files - still


def is_our_tree(cache: Cache, record: Record, path: str) -> bool:
    """Whether the folder at ``path``, which has a recorded inode, is the tree that was published.

    An inode's number may be given away again: to a folder that its user has made.
    """
    there = os.lstat(path)
    if record.tree and there.st_ino == record.tree.before:
        return True
    table = Table.load(cache, record)
    if table is None:
        return there.st_mtime_ns == record.copy_facts.mtime_ns
    return table.is_at(path)


def as_copy(listing: Listing) -> Listing:
    """The part of a copy's listing that stays as it is until somebody changes the copy.

    Jobs of its user may leave traces in a folder's times; and whoever takes a file over into the
    next version of the tree changes that file's ctime.
    """
    return replace(
        listing,
        ctimes=array("q", bytes(8 * len(listing))),
        mtimes=array(
            "q",
            (
                0 if kind == Kind.FOLDER else mtime
                for kind, mtime in zip(listing.kinds, listing.mtimes, strict=True)
            ),
        ),
    )


#: Behind all rows.
_NONE = (sys.maxsize, sys.maxsize)


def _common(one: Listing, other: Listing) -> Iterator[tuple[int, int]]:
    """The rows of the paths that are in both, in order: both are sorted."""
    left, right = one.paths, other.paths
    number = at = 0
    while number < len(left) and at < len(right):
        if left[number] == right[at]:
            yield number, at
            number += 1
            at += 1
        elif left[number] < right[at]:
            number += 1
        else:
            at += 1


def _files(listing: Listing) -> Iterator[int]:
    return listing.rows(Kind.FILE)


def _facts(listing: Listing, row: int) -> tuple[int, int, int, int]:
    return listing.sizes[row], listing.mtimes[row], listing.ctimes[row], listing.inodes[row]
