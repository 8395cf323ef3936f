"""Find the files of a new folder that this node's old copy has, and split a folder over nodes."""

from __future__ import annotations

import os
import zlib
from array import array
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from stager.base.errors import LaunchError, UsageError
from stager.base.options import Validate
from stager.base.paths import SHARD_LIST
from stager.fs.files import digest_of, read_back
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

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stager.rank.plan import Task
    from stager.tree.listing import Listing
    from stager.tree.table import Table


@dataclass(frozen=True, slots=True)
class Reuse:
    """The files of a new tree that this node has: by row of its listing, as ``rows[row]``.

    That is the file's row in the ``table`` of the old copy, or -1. ``deleted`` counts the files of
    the old copy that the new tree lacks. ``is_part``: the old copy is a part of a spread folder.
    """

    rows: array[int]
    table: Table | None = None
    deleted: int = 0
    is_part: bool = False

    def has(self, row: int) -> bool:
        """Whether this node has the file of a row."""
        return self.rows[row] >= 0

    def marks(self) -> bytes:
        """Return a byte for each row, 1 if this node has its file; compressed by zlib."""
        return zlib.compress(bytes(before >= 0 for before in self.rows), 1)


def read_marks(text: bytes | memoryview, rows: int) -> bytes:
    """Return the byte for each of the ``rows`` that `zlib.compress` made ``text`` of.

    Raise LaunchError if there are more or fewer.
    """
    stream = zlib.decompressobj()
    marks = b""
    with suppress(zlib.error):
        marks = stream.decompress(text, rows + 1)
    if len(marks) != rows or not stream.eof:
        raise LaunchError(
            "the answer of a node about its files cannot be read; tell the administrator to check "
            "that all nodes have the same version of slurm-stage"
        )
    return marks


def find_reusable(task: Task, listing: Listing) -> Reuse:
    """Compare the listing of the source with this node's copy.

    Files are compared by their stat; with validate=checksum, and in a copy that is known to be
    damaged, those of the copy are also read.
    """
    rows = array("q", [-1]) * len(listing)
    record = task.cache.load(task.item.destination)
    if not (task.receives and task.standing and record and record.tree):
        return Reuse(rows)
    _, table, states = task.standing
    validate = task.item.options.validate
    if validate is Validate.ALWAYS or record.tree.relocation != task.source.relocation:
        return Reuse(rows)
    read = read_back if record.is_damaged else digest_of  # a page in memory may be sound
    checked = record.is_damaged or validate is Validate.CHECKSUM
    for row, before in table.kept(listing, states):
        path = f"{task.path}/{os.fsdecode(listing.paths[row])}"
        if not checked or _has_digest(read, path, table.digest(before)):
            rows[row] = before
    is_part = bool(record.tree.split)
    # The list of all parts is a file of the old copy only; it is not deleted from the source.
    return Reuse(rows, table, table.gone(listing) - is_part, is_part)


def _has_digest(read: Callable[[str], str], path: str, digest: bytes) -> bool:
    with suppress(OSError):
        return bytes.fromhex(read(path)) == digest
    return False


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


def part_for(
    task: Task, listing: Listing, whole: Split, reuse: Reuse
) -> tuple[Listing, Reuse, dict[int, bytes]]:
    """Return the part of a folder that this rank gets, and what it has of that.

    The list of all parts is a file in each of them: its row is returned, and its text.
    """
    rows = part_of(listing, whole.owners, task.rank)
    part = listing.part(rows, list_row(whole.text, task.source.facts.mtime_ns, listing))
    row = bisect_left(part.paths, os.fsencode(SHARD_LIST))
    reused = array("q", (reuse.rows[row] for row in rows))
    reused.insert(row, -1)
    # The counts of all parts are added up. A file deleted from whole copies counts once.
    deleted = reuse.deleted if reuse.is_part or not task.rank else 0
    return part, replace(reuse, rows=reused, deleted=deleted), {row: whole.text}
