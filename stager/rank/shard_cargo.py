"""A part of a folder as a Cargo: each node reads its own files from the source, and only those."""

from __future__ import annotations

import os
import zlib
from array import array
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import xxhash

from stager.base.errors import UsageError
from stager.base.paths import SHARD_LIST_NAME
from stager.rank.cargo import Opened, Task
from stager.rank.tree_cargo import Reuse, TreeCargo
from stager.tree.shard import (
    balanced,
    by_number,
    list_row,
    list_text,
    part_of,
    split_name,
    with_hard_links,
)
from stager.tree.stream import Stream, place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stager.base.outcome import Counts
    from stager.tree.listing import Listing
    from stager.wire.layout import Layout


@dataclass(frozen=True, slots=True)
class Split:
    """What every node is to hold: the ``owners`` of a listing's rows, and the list of that for the
    users; its ``name`` tells it from others.
    """

    owners: array[int]
    text: bytes
    name: str


def marks(kept: Reuse) -> bytes:
    """What of a folder this node holds, as `split` takes it: a byte for each row, compressed."""
    return zlib.compress(bytes(before >= 0 for before in kept.rows), 1)


def split(task: Task, listing: Listing, held: Sequence[bytes], names: Sequence[str]) -> Split:
    """Deal the files of the folder out to the nodes of those ``names``, which have ``held`` some.

    Raises UsageError for a folder that cannot be split.
    """
    if os.fsencode(SHARD_LIST_NAME) in listing.paths:
        where = f"{task.item.source}/{SHARD_LIST_NAME}"
        raise UsageError(
            f"{where} is where the list of all parts is to be; leave it out by exclude="
        )
    if task.item.options.by:
        owners = by_number(listing, task.item.source, task.item.options.by, len(names))
    else:
        owners = balanced(listing, [zlib.decompress(one) for one in held])
    owners = with_hard_links(listing, owners)
    text = list_text(listing, owners, names)
    return Split(owners, text, split_name(text, len(names)))


class ShardCargo(TreeCargo):
    """Brings this node's part of a folder, and the list of all parts, which is a file in it."""

    def __init__(self, task: Task, listing: Listing, whole: Split, kept: Reuse) -> None:
        rows = part_of(listing, whole.owners, task.rank)
        part = listing.part(rows, list_row(whole.text, task.source.facts.mtime_ns))
        self._list_row = bisect_left(part.paths, os.fsencode(SHARD_LIST_NAME))
        kept_rows = array("q", (kept.rows[row] for row in rows))
        kept_rows.insert(self._list_row, -1)
        # What each node had is gone once.
        deleted = kept.deleted if kept.part or not task.rank else 0
        super().__init__(task, part, Reuse(kept_rows, kept.table, deleted))
        self._split = whole.name
        self._text = whole.text

    def open(self) -> Opened:
        super().open()
        self._needs[self._list_row] = 0  # it does not come from the source
        return Opened()

    def layout(self, opened: Sequence[Opened]) -> Layout:
        return self._layout_of(Stream(self._listing, self._needs))

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
