"""Verify, record and publish a partial tree: the last steps of folders and of archives."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import xxhash

from stager.base.errors import DestinationError
from stager.base.outcome import OwnFiles
from stager.copies.survey import own_lstat
from stager.disk.record import TreeFacts
from stager.rank.cargo import Published
from stager.tree.late import Before
from stager.tree.listing import text_of
from stager.tree.table import Table, as_copy

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from stager.base.outcome import Counts
    from stager.disk.record import Record
    from stager.rank.task import Task
    from stager.tree.listing import Listing
    from stager.tree.partial import PartialTree


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
) -> Record:
    """Announce the record of a sealed tree before it is published, and return it.

    If this process dies, the record of the tree that is at the destination then counts.
    ``source``, ``digests`` and ``originals`` are as in `Table`; ``split`` is the name of the split
    that the tree is a part of.
    """
    own_lstat(task.path)  # another user may have staged there meanwhile
    copy = tree.copy
    table = Table.of(source, copy, digests, dict(originals)).to_bytes()
    facts = TreeFacts(
        files=copy.files - bool(split),  # the list of all parts is not a file of the source
        allocated=tree.allocated,
        source_digest=task.source.listing or source.digest(),
        copy_digest=as_copy(copy).digest(),
        table_digest=task.cache.announce_table(task.item.destination, table),
        relocate=task.item.options.relocate,
        interpreter=task.source.interpreter_at,
        split=split,
        by=task.item.options.by,
        share=task.item.options.share,
    )
    record = task.record(tree.facts(), xxhash.xxh3_128_hexdigest(digests), facts)
    task.cache.announce(record)
    return record


def publish_tree(
    task: Task,
    tree: PartialTree,
    record: Record,
    counts: Counts,
    lost: OwnFiles | None,
    names: Container[bytes] | None = None,
) -> Published:
    """Move a tree to its destination after it was announced by ``record``.

    What the user has written there since the survey is kept, with the option ``replace``, too; also
    a new name of a staged file, if ``names`` has all paths that were there when it was looked at.
    What was there before is ``lost``. Raise DestinationError.
    """
    before = Before(task.since, names=names, folders=task.folders)
    try:
        kept = tree.publish(task.path, before, lambda: task.cache.promote(task.item.destination))
    except DestinationError as error:
        own_lstat(task.path)  # the cause, if it is another user's now
        raise _with_lost(error, lost) from None
    own = [text_of(os.fsencode(path)) for path in sorted(kept)]
    moved = OwnFiles.of(task.node.name, own) if own else None
    return Published(record.digest, counts, lost=lost, kept=moved)


def _with_lost(error: DestinationError, lost: OwnFiles | None) -> DestinationError:
    """Return an ``error`` of a publication that names the user's own files of which it is the end.

    Some may still be in what it says is left of the old version.
    """
    if not lost or not lost.count:
        return error
    from stager.base.text import listed  # only for this message
    from stager.copies.own import count_text

    files = count_text(lost.count, lost.names)
    are = "is" if lost.count == 1 else "are"
    names = listed(lost.names, of=lost.count)
    return DestinationError(f"{error.message}; {files} {are} there, or deleted: {names}")
