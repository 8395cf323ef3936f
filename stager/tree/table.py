"""Record each file of a staged tree, and find the files that need not be sent again.

The table of a tree is a file beside the tree's record, which has the table's digest.
"""

from __future__ import annotations

import sys
from array import array
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import xxhash

from stager.tree.listing import Kind, Listing, pack, unpack
from stager.tree.stream import DIGEST_SIZE, place

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from stager.disk.cache import Cache
    from stager.disk.record import Record


@dataclass(frozen=True, slots=True)
class Table:
    """A tree as it was staged: the listing of its ``source``, and columns for the copies.

    The rows of the columns are those of the listing. Its links have their targets in the copies,
    which differ from those at the source in an environment that was relocated.
    """

    source: Listing
    modes: array[int]
    inodes: array[int]
    sizes: array[int]
    mtimes: array[int]
    #: The xxh3-128 of each copy, DIGEST_SIZE bytes a row; zeros for a row that is no file.
    digests: bytes
    #: By row: the source's data of a file that was rewritten in the copy, as `venv` does. This data
    #: is what is sent to another node.
    originals: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def load(cls, cache: Cache, record: Record | None) -> Self | None:
        """Return the table that belongs to the ``record``, or None if it cannot be read."""
        text = cache.load_table(record) if record else None
        with suppress(ValueError):  # from another version of this program
            return cls.from_bytes(text) if text is not None else None
        return None

    @classmethod
    def of(
        cls, source: Listing, copy: Listing, digests: bytes, originals: dict[int, bytes]
    ) -> Self:
        """Return the table of a tree, from the listings of its ``source`` and of its ``copy``."""
        return cls(source, copy.modes, copy.inodes, copy.sizes, copy.mtimes, digests, originals)

    def to_bytes(self) -> bytes:
        """Serialize the table for `from_bytes`."""
        columns = (self.modes, self.inodes, self.sizes, self.mtimes)
        return pack(
            self.source.to_bytes(), *(column.tobytes() for column in columns), self.digests,
            array("Q", self.originals).tobytes(), pack(*self.originals.values()),
        )  # fmt: skip

    @classmethod
    def from_bytes(cls, text: bytes) -> Self:
        """Return the table that `to_bytes` serialized. Raise ValueError if ``text`` is none."""
        parts = unpack(memoryview(text))
        source, modes, inodes, sizes, mtimes, digests, changed, originals = parts
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
        """Return the xxh3-128 of the row's copy."""
        return self.digests[place(row)]

    def sent_digest(self, row: int) -> bytes:
        """Return the xxh3-128 of the data that is sent of the row's file."""
        original = self.originals.get(row)
        return self.digest(row) if original is None else xxhash.xxh3_128_digest(original)

    def has_stat(self, row: int, there: os.stat_result) -> bool:
        """Return whether what is ``there`` is the row's copy as it was published."""
        found = there.st_ino, there.st_size, there.st_mtime_ns
        return found == (self.inodes[row], self.sizes[row], self.mtimes[row])

    def kept(self, source: Listing, copy: Listing) -> Iterator[tuple[int, int]]:
        """Yield the rows of a new listing of the ``source`` whose files the copy has already.

        Each comes with its row in this table. ``copy`` is a new listing of the copy. Neither file
        may have changed since it was staged.
        """
        in_copy = _common(source, copy)
        at, now = next(in_copy, _END)
        for row, before in _common(source, self.source):
            while at < row:
                at, now = next(in_copy, _END)
            if (
                at == row
                and source.kinds[row] == self.source.kinds[before] == copy.kinds[now] == Kind.FILE
                and _facts(source, row) == _facts(self.source, before)
                and source.modes[row] == self.source.modes[before]
                and self._is_copy(before, copy, now)
            ):
                yield row, before

    def _is_copy(self, row: int, copy: Listing, now: int) -> bool:
        """Whether the file in row ``now`` of the ``copy`` is the one that was published."""
        return (
            copy.modes[now] == self.modes[row]
            and copy.inodes[now] == self.inodes[row]
            and copy.sizes[now] == self.sizes[row]
            and copy.mtimes[now] == self.mtimes[row]
        )

    def unlike(self, copy: Listing) -> Iterator[tuple[int, int]]:
        """Yield the rows of a new listing of the ``copy`` that are not as they were staged.

        Each comes with the row of its path in this table, -1 if that has none. A folder is as it
        was staged whatever is in it. Contents are not read: a file may have its old bytes.
        """
        staged = array("q", [-1]) * len(copy)
        for now, before in _common(copy, self.source):
            staged[now] = before
        for now, before in enumerate(staged):
            if before < 0 or not self._is_as_staged(before, copy, now):
                yield now, before

    def _is_as_staged(self, row: int, copy: Listing, now: int) -> bool:
        """Whether the entry in row ``now`` of the ``copy`` is that of the ``row``, by its stat."""
        kind = copy.kinds[now]
        if kind != self.source.kinds[row]:
            return False
        if kind == Kind.FILE:
            return (
                copy.inodes[now] == self.inodes[row]
                and copy.sizes[now] == self.sizes[row]
                and copy.mtimes[now] == self.mtimes[row]
            )
        if kind == Kind.HARD_LINK:
            return copy.targets[now] == self.source.targets[row]
        return kind == Kind.FOLDER or copy.mtimes[now] == self.mtimes[row]

    def lost(self, copy: Listing) -> Iterator[int]:
        """Yield the rows of folders and links that a new listing of the ``copy`` lacks or has else.

        Files are left out: their contents tell.
        """
        there = dict(_common(self.source, copy))
        for row, kind in enumerate(self.source.kinds):
            if kind != Kind.FILE and not (row in there and self._is_there(row, copy, there)):
                yield row

    def _is_there(self, row: int, copy: Listing, there: Mapping[int, int]) -> bool:
        """Whether the folder or link of the ``row`` is in the ``copy``; ``there`` has its rows."""
        now, kind = there[row], self.source.kinds[row]
        if kind == Kind.HARD_LINK:
            # Of the names of a file, another one may be the first now.
            first = there.get(self.source.file_of(row), -1)
            return first >= 0 and copy.file_of(now) == copy.file_of(first) >= 0
        is_same = kind == copy.kinds[now]
        return is_same and (kind != Kind.LINK or self.source.targets[row] == copy.targets[now])

    def with_other_modes(self, copy: Listing) -> Iterator[int]:
        """Yield the rows of files and folders whose permissions in the ``copy`` were changed."""
        for row, now in _common(self.source, copy):
            kind = self.source.kinds[row]
            at = now if kind == copy.kinds[now] == Kind.FOLDER else copy.file_of(now)
            if kind in (Kind.FILE, Kind.FOLDER) and at >= 0 and copy.modes[at] != self.modes[row]:
                yield row

    def gone(self, source: Listing) -> int:
        """Return how many of this table's files are not in a new listing of the ``source``."""
        still = sum(
            source.kinds[row] == self.source.kinds[before] == Kind.FILE
            for row, before in _common(source, self.source)
        )
        return self.source.files - still


def as_copy(listing: Listing) -> Listing:
    """Return the listing of a copy without the times that change although its data does not.

    A program that makes and removes a file in a folder changes the folder's mtime. A hard link to a
    file in the next version of the tree changes the file's ctime.
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


#: A pair of rows after all others.
_END = (sys.maxsize, sys.maxsize)


def _common(one: Listing, other: Listing) -> Iterator[tuple[int, int]]:
    """Yield the rows of the paths that both listings have, in order. Both are sorted."""
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


def _facts(listing: Listing, row: int) -> tuple[int, int, int, int]:
    return listing.sizes[row], listing.mtimes[row], listing.ctimes[row], listing.inodes[row]
