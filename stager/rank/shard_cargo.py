"""Stage one part of a folder on each node, for mode=shard: each reads its files from the source."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import xxhash

from stager.base.errors import UsageError
from stager.base.paths import SHARD_LIST
from stager.rank.cargo import Opened
from stager.rank.publication import Reuse, read_marks
from stager.rank.tree_cargo import TreeCargo
from stager.tree.listing import pack, unpack
from stager.tree.shard import (
    NO_NODE,
    balanced,
    by_number,
    list_row,
    list_text,
    part_of,
    split_name,
    with_hard_links,
)
from stager.tree.stream import place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stager.base.outcome import Counts
    from stager.rank.task import Task
    from stager.tree.listing import Listing
    from stager.wire.layout import Layout


@dataclass(frozen=True, slots=True)
class Split:
    """Which node gets which file: ``owners`` has the rank of each row of the listing.

    ``text`` is that as the list for the user; ``name`` identifies the split in records.
    """

    owners: array[int]
    text: bytes
    name: str

    def to_bytes(self) -> bytes:
        """Serialize the split for `from_bytes`."""
        return pack(self.owners.tobytes(), self.text, self.name.encode())

    @classmethod
    def from_bytes(cls, text: bytes | memoryview, rows: int, nodes: int) -> Self:
        """Return the split that `to_bytes` serialized, of so many ``rows`` on so many ``nodes``.

        Raise ValueError if ``text`` is none.
        """
        parts = unpack(memoryview(text), 3)
        if len(parts) != 3 or len(parts[0]) != 8 * rows:
            raise ValueError("it is no split of this folder")
        owners = array("q", bytes(parts[0]))
        if min(owners) < NO_NODE or max(owners) >= nodes:
            raise ValueError("it names a node that the job does not have")
        return cls(owners, bytes(parts[1]), str(parts[2], "ascii"))


def split(
    task: Task, listing: Listing, held: Sequence[bytes | memoryview], names: Sequence[str]
) -> Split:
    """Assign the files of a folder to the nodes of these ``names``. Pure.

    ``held`` has the `Reuse.marks` of each node: a file stays where it is, if the loads allow it.
    Raise UsageError if the folder has a file in the place of the list, or one without a number.
    """
    if os.fsencode(SHARD_LIST) in listing.paths:
        raise UsageError(
            f"mode=shard writes a list to {task.item.destination}/{SHARD_LIST}, but the source has "
            f"a file of that name; leave it out with exclude=/{SHARD_LIST}"
        )
    if task.item.options.by:
        owners = by_number(listing, task.item.source, task.item.options.by, len(names))
    else:
        owners = balanced(listing, [read_marks(one, len(listing)) for one in held])
    owners = with_hard_links(listing, owners)
    text = list_text(listing, owners, names)
    return Split(owners, text, split_name(text, len(names)))


class ShardCargo(TreeCargo):
    """This node's part of a folder, and the list of all parts, which is a file in each of them."""

    def __init__(self, task: Task, listing: Listing, whole: Split, reuse: Reuse) -> None:
        rows = part_of(listing, whole.owners, task.rank)
        part = listing.part(rows, list_row(whole.text, task.source.facts.mtime_ns, listing))
        self._list_row = bisect_left(part.paths, os.fsencode(SHARD_LIST))
        reused_rows = array("q", (reuse.rows[row] for row in rows))
        reused_rows.insert(self._list_row, -1)
        # The counts of all parts are added up. A file deleted from whole copies counts once.
        deleted = reuse.deleted if reuse.is_part or not task.rank else 0
        super().__init__(task, part, replace(reuse, rows=reused_rows, deleted=deleted))
        self._split = whole.name
        self._text = whole.text

    def open(self) -> Opened:
        super().open()
        self._lacks[self._list_row] = 0  # `seal` writes it
        return Opened()

    def layout(self, opened: Sequence[Opened]) -> Layout:
        return self._layout_of(self._lacks)

    def seal(self) -> None:
        if self._tree:
            with self._tree.writing():
                self._tree.create(self._list_row, self._text)
        super().seal()

    def _all_digests(self) -> bytearray:
        digests = super()._all_digests()
        digests[place(self._list_row)] = xxhash.xxh3_128_digest(self._text)
        return digests

    def _counts(self) -> Counts:
        counts = super()._counts()
        size = self._listing.size - len(self._text)
        return replace(counts, files=counts.files - 1, parts=(size,))
