"""Find the files of a new tree that this node's old copy already has.

Verify, record and publish a partial tree: the last steps of folders and of archives.
"""

from __future__ import annotations

import os
import zlib
from array import array
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import xxhash

from stager.base.errors import LaunchError
from stager.base.options import Validate
from stager.fs.files import digest_of, read_back, stage_errors
from stager.rank.cargo import Published
from stager.store.record import TreeFacts
from stager.store.removal import updating
from stager.store.tree_validity import check_place
from stager.store.validity import own_lstat
from stager.tree.listing import text_of
from stager.tree.table import Table
from stager.tree.update import in_the_way

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from stager.base.outcome import Counts
    from stager.rank.task import Task
    from stager.store.record import Record
    from stager.tree.listing import Listing
    from stager.tree.partial_tree import PartialTree


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
class Announced:
    """The record of a sealed tree, and the table of its files."""

    record: Record
    table: Table


def verify_tree(
    task: Task, tree: PartialTree, listing: Listing, expected: Iterable[tuple[int, bytes]]
) -> None:
    """Compare files on the disk with the ``expected`` digests, given by row of the ``listing``.

    Raise IntegrityError for the first file that differs.
    """
    for row, digest in expected:
        if tree.read_back(row) != digest:
            raise task.readback_error(f"/{text_of(listing.paths[row])}")


def announce_tree(
    task: Task,
    tree: PartialTree,
    source: Listing,
    digests: bytes,
    *,
    originals: Mapping[int, bytes],
    split: str = "",
    note: str = "",
) -> Announced:
    """Announce the record of a sealed tree before it is published, and return it.

    If this process dies, the record of the tree that is at the destination then counts.
    ``source``, ``digests`` and ``originals`` are as in `Table`; ``split`` is the name of the split
    that the tree is a part of, ``note`` is for the user. Raise DestinationError if something of the
    user's own is in the way.
    """
    there = own_lstat(task.path)  # another user may have staged there meanwhile
    copy, old = tree.copy, task.standing
    table = Table.of(source, copy, digests, dict(originals))
    if old is None:
        check_place(task.item, task.path, there, task.cache)
    else:
        check_obstacles(task, table, tree.path)
    facts = TreeFacts(
        files=copy.files - bool(split),  # the list of all parts is not a file of the source
        allocated=tree.allocated,
        source_digest=task.source.listing or source.digest(),
        table_digest=task.cache.announce_table(
            task.item.destination, table.to_bytes(), update=old is not None
        ),
        relocation=task.source.relocation,
        note=note,
        split=split,
        by=task.item.options.by,
    )
    facts_of_copy = tree.facts()
    if old is not None:
        with stage_errors(task.path):
            facts_of_copy = replace(facts_of_copy, inode=os.lstat(task.path).st_ino)
    record = task.record(facts_of_copy, xxhash.xxh3_128_hexdigest(digests), facts)
    task.cache.announce(record, update=old is not None)
    return Announced(record, table)


def check_obstacles(
    task: Task, new: Table, hidden: str, arrived: Collection[bytes] | None = None
) -> None:
    """Raise DestinationError if something of the user's own is in the way of a new version.

    What is new of it lies in the folder ``hidden``, or will: then ``arrived`` has the paths.
    """
    if task.standing is None or task.item.options.replace:
        return
    old, destination = task.standing.table, task.item.destination
    with updating(
        task.cache, task.path, destination, old, new, hidden=hidden, force=False
    ) as update:
        obstacles = update.obstacles(arrived)
    if obstacles:
        raise in_the_way(destination, obstacles)


def publish_tree(task: Task, tree: PartialTree, announced: Announced, counts: Counts) -> Published:
    """Move a tree to its destination after it was announced, or change the copy there in place.

    If this process dies meanwhile, `store.removal` finishes that. Raise DestinationError.
    """
    cache, destination = task.cache, task.item.destination
    if task.standing is None:
        tree.publish(task.path, lambda: cache.promote(destination))
        return Published(announced.record.digest, counts)
    hidden = cache.update_path(destination)
    tree.hand_over(hidden)
    with updating(
        cache, task.path, destination, task.standing.table, announced.table,
        hidden=hidden, force=task.item.options.replace,
    ) as update:  # fmt: skip
        update.apply()
    cache.finish_update(destination)
    return Published(announced.record.digest, counts)
