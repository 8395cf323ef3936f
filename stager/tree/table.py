"""Record each file of a staged tree, and find the files that need not be sent again.

The table of a tree is a file beside the tree's record, which has the table's digest.
"""

from __future__ import annotations

from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from stager.base.digest import DIGEST_SIZE, digest_of_data
from stager.tree.listing import Kind, Listing, Row, pack, unpack
from stager.tree.stream import place

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from stager.store.cache import Cache
    from stager.store.record import Record


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
    #: The digest of each copy, DIGEST_SIZE bytes a row; zeros for a row that is no file.
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
    def empty(cls) -> Self:
        """Return the table of a folder in which nothing is."""
        nothing = Listing.of([Row(b"", Kind.FOLDER)])
        return cls.of(nothing, nothing, bytes(DIGEST_SIZE), {})

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
        """Return the digest of the row's copy."""
        return self.digests[place(row)]

    def sent_digest(self, row: int) -> bytes:
        """Return the digest of the data that is sent of the row's file."""
        original = self.originals.get(row)
        return self.digest(row) if original is None else digest_of_data(original)

    def has_stat(self, row: int, there: os.stat_result) -> bool:
        """Return whether what is ``there`` is the row's copy as it was published."""
        found = there.st_ino, there.st_size, there.st_mtime_ns
        return found == (self.inodes[row], self.sizes[row], self.mtimes[row])

    def kept(self, source: Listing, states: bytes) -> Iterator[tuple[int, int]]:
        """Yield the rows of a new listing of the ``source`` whose files the copy has already.

        Each comes with its row in this table; ``states`` has a `State` for each of these. Neither
        file may have changed since it was staged.
        """
        for row, before in common(source, self.source):
            if (
                not states[before]
                and source.kinds[row] == self.source.kinds[before] == Kind.FILE
                and _facts(source, row) == _facts(self.source, before)
                and source.modes[row] == self.source.modes[before]
            ):
                yield row, before

    def gone(self, source: Listing) -> int:
        """Return how many of this table's files are not in a new listing of the ``source``."""
        still = sum(
            source.kinds[row] == self.source.kinds[before] == Kind.FILE
            for row, before in common(source, self.source)
        )
        return self.source.files - still


def common(one: Listing, other: Listing) -> Iterator[tuple[int, int]]:
    """Yield the rows of the paths that both listings have, in order. Both are sorted."""
    left, right = one.paths, other.paths
    if left == right:  # mostly, and this is ten times faster
        yield from ((row, row) for row in range(len(left)))
        return
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
