"""Verify, record and publish a partial tree: the last steps of folders and of archives."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import xxhash

from stager.copies.survey import own_lstat
from stager.copies.survey_tree import check_place
from stager.copies.update import updating
from stager.disk.files import stage_errors
from stager.disk.record import TreeFacts
from stager.rank.cargo import Published
from stager.tree.listing import text_of
from stager.tree.table import Table
from stager.tree.update import in_the_way

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from stager.base.outcome import Counts
    from stager.disk.record import Record
    from stager.rank.task import Task
    from stager.tree.listing import Listing
    from stager.tree.partial import PartialTree


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

    If this process dies meanwhile, `copies.update` finishes that. Raise DestinationError.
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
