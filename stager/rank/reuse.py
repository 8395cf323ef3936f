"""Find the files of a new tree that this node's old copy already has."""

from __future__ import annotations

import os
import zlib
from array import array
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stager.base.errors import LaunchError
from stager.base.options import Validate
from stager.disk.files import digest_of, read_back

if TYPE_CHECKING:
    from collections.abc import Callable

    from stager.rank.task import Task
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
