"""Find the files of a new tree that this node's old copy already has."""

from __future__ import annotations

import os
import stat
import zlib
from array import array
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stager.base.errors import LaunchError, StageError
from stager.base.options import Validate
from stager.base.outcome import OwnFiles
from stager.copies.own import HoldsOwnError, find_own, own_in_listing
from stager.disk.files import digest_of, read_back
from stager.tree.late import Before, is_late
from stager.tree.table import Table
from stager.tree.walk import walk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stager.disk.record import TreeFacts
    from stager.rank.task import Task
    from stager.tree.listing import Listing


@dataclass(frozen=True, slots=True)
class Reuse:
    """The files of a new tree that this node has: by row of its listing, as ``rows[row]``.

    That is the file's row in the ``table`` of the old copy, or -1. ``deleted`` counts the files of
    the old copy that the new tree lacks. ``is_part``: the old copy is a part of a spread folder.
    ``own`` are the user's own files in the old copy; ``names`` are all paths in it, if they are
    known.
    """

    rows: array[int]
    table: Table | None = None
    deleted: int = 0
    is_part: bool = False
    own: Sequence[str] = ()
    names: Sequence[bytes] | None = None

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
    nothing = Reuse(array("q", [-1]) * len(listing))
    if not task.receives:
        return nothing
    record = task.cache.load(task.item.destination)
    table = Table.load(task.cache, record)
    validate = task.item.options.validate
    if record is None or record.tree is None or table is None:
        return nothing
    try:
        copy = walk(task.path, holes=False)
    except (OSError, StageError):
        return replace(nothing, own=find_replaced(task))
    own = own_in_listing(task.cache, record, task.path, copy)
    if validate is Validate.ALWAYS or not _is_relocated_alike(task, record.tree):
        return replace(nothing, own=own)
    read = read_back if record.is_damaged else digest_of  # a page in memory may be sound
    checked, rows = record.is_damaged or validate is Validate.CHECKSUM, nothing.rows
    for row, before in table.kept(listing, copy):
        path = f"{task.path}/{os.fsdecode(listing.paths[row])}"
        if not checked or _has_digest(read, path, table.digest(before)):
            rows[row] = before
    is_part = bool(record.tree.split)
    # The list of all parts is a file of the old copy only; it is not deleted from the source.
    deleted = table.gone(listing) - is_part
    return Reuse(rows, table, deleted, is_part, own, _names(copy, table, task.since))


def _names(copy: Listing, table: Table, since: int) -> Sequence[bytes]:
    """Return the paths in a listing of the ``copy`` that were there ``since`` then.

    A hard link that was made later has changed the time of its file.
    """
    late = {row for row, at in enumerate(copy.ctimes) if at >= since}
    if not late:
        return copy.paths
    staged = {*table.source.paths}
    return [
        path
        for row, path in enumerate(copy.paths)
        if path in staged or (row not in late and copy.file_of(row) not in late)
    ]


def find_replaced(task: Task) -> Sequence[str]:
    """Return the user's own files in the folder that this rank will replace."""
    record = task.cache.load(task.item.destination) if task.receives else None
    if record is None or record.tree is None:
        return ()
    try:
        return find_own(task.cache, record, task.path)
    except HoldsOwnError:  # it cannot be read
        return ()


def lost_files(task: Task, own: Sequence[str]) -> OwnFiles | None:
    """Return those of the user's ``own`` files that go with the old copy now; None without any own.

    What was written or moved since the survey is kept: see `tree.late`.
    """
    before = Before(task.since, folders=task.folders)
    gone = [name for name in own if _is_as_found(task, name, before)]
    return OwnFiles.of(task.node.name, gone) if own else None


def _is_as_found(task: Task, name: str, before: Before) -> bool:
    above, _, _ = name.rpartition("/")  # of a folder, whose name ends so, it is that itself
    with suppress(OSError):
        if not stat.S_ISDIR(os.lstat(task.path).st_mode):  # it has this name itself
            return not is_late(os.lstat(task.path), task.since)
        while above:
            if not before.has_folder(above, os.lstat(f"{task.path}/{above}").st_ino):
                return False  # it got this name since
            above = above.rpartition("/")[0]
        return not is_late(os.lstat(f"{task.path}/{name}".rstrip("/")), task.since)
    return "\\" in name  # it may be there by its real name, of which this is the text


def _is_relocated_alike(task: Task, tree: TreeFacts) -> bool:
    now = task.item.options.relocate, task.source.interpreter_at
    return (tree.relocate, tree.interpreter) == now


def _has_digest(read: Callable[[str], str], path: str, digest: bytes) -> bool:
    with suppress(OSError):
        return bytes.fromhex(read(path)) == digest
    return False
