"""Survey one node for a folder: is its copy current, and what would a new one replace?

A tree is current if the listing of its source is as recorded, and so is every entry of the copy
that the record names. For that each of these is statted, and nothing is read. What else is in the
copy is its user's: it is not looked for.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from stager.base.errors import DestinationError
from stager.base.options import Mode, Validate
from stager.fs.files import existing_folder_above, kind_of, read_back
from stager.store.record import is_ours
from stager.store.validity import (
    Reason,
    Survey,
    check_folder,
    check_trees_above,
    damage,
    has_same_bytes,
    made_differently,
    or_other_source,
    own_lstat,
    shared_differently,
)
from stager.tree.listing import Kind, text_of
from stager.tree.table import Table
from stager.tree.update import State, in_the_way, look

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from stager.request.items import StageItem
    from stager.source.description import Source
    from stager.store.cache import Cache
    from stager.store.record import Record, TreeFacts


class Standing(NamedTuple):
    """What is in the copy of a folder by its ``table``: a `State` for each row of this.

    ``digest`` is that of the table; empty if that cannot be read, and nothing is known of the copy.
    """

    digest: str
    table: Table
    states: bytes

    @property
    def changed(self) -> list[str]:
        """What was staged, and its user has changed since."""
        paths = self.table.source.paths
        return [text_of(paths[row]) for row, one in enumerate(self.states) if one == State.CHANGED]


def standing_of(path: str, cache: Cache, record: Record | None) -> Standing | None:
    """Return how the copy of a folder at ``path`` is now; None if there is none."""
    try:
        there = os.lstat(path)
    except OSError:
        return None
    if not (record and record.tree and is_ours(there, record)):
        return None
    table = Table.load(cache, record)
    if table is None:
        return Standing("", Table.empty(), bytes(1))
    return Standing(record.tree.table_digest, table, look(path, table))


def names_changed(path: str, table: Table) -> bool:
    """Return whether a folder in the copy at ``path`` has another time than the ``table`` says.

    That is the time at which a name in it came or went.
    """
    above = os.fsencode(path) + b"/"
    return any(
        os.lstat(above + table.source.paths[row]).st_mtime_ns != table.mtimes[row]
        for row in table.source.rows(Kind.FOLDER)
    )


def survey_tree(
    item: StageItem,
    path: str,
    source: Source,
    cache: Cache,
    node: str,
    standings: MutableMapping[str, Standing],
) -> Survey:
    """Return what this node holds at ``path``, the place of the folder of ``item``.

    ``standings`` has those of destinations that were looked at already, and gets this one's.

    Raise DestinationError if nothing can be put at ``path``, or if a file that the user changed
    would be lost without the option ``replace``.
    """
    there = own_lstat(path)
    check_folder(existing_folder_above(path), cache)
    check_trees_above(item, path, cache)
    if cache.is_updating(item.destination):  # in a dry run; a stage finishes that
        return Survey(node, Reason.COPY_CHANGED, "")
    record = cache.load(item.destination)
    tree = record.tree if record else None
    reason = or_other_source(item, record, judge_tree(item, source, record, there))
    known = standings.get(item.destination)
    if not (known and tree and known.digest == tree.table_digest):
        known = standing_of(path, cache, record)
    if known is None:
        standings.pop(item.destination, None)
        is_own = check_place(item, path, there, cache)
        return Survey(node, reason or Reason.REPLACED, "", changed=is_own)
    standings[item.destination] = known
    changed = known.changed
    if changed and not item.options.replace:
        raise in_the_way(item.destination, changed)
    if any(known.states) or not known.digest:
        reason = reason or Reason.COPY_CHANGED
    reason = reason or damage(item, record, lambda record: damaged(path, cache, record) == [])
    if reason or record is None or tree is None:
        return Survey(node, reason, "", changed=bool(changed))
    return Survey(node, None, record.digest, tree.files, tree.note, split=tree.split)


def check_place(item: StageItem, path: str, there: os.stat_result | None, cache: Cache) -> bool:
    """Return whether a plain file of the user's own is ``there``, which may be replaced.

    Raise DestinationError if a new folder would replace something else that nobody staged.
    """
    record = cache.load(item.destination)
    is_own = bool(there and not _is_replaceable(path, there, record))
    if there and is_own:
        is_file = stat.S_ISREG(there.st_mode)
        if not (is_file and item.options.replace):
            raise _would_replace(item, path, there, record)
    return is_own


def _would_replace(
    item: StageItem, path: str, there: os.stat_result, record: Record | None
) -> DestinationError:
    remedy = "move it, delete it, or choose another destination"
    if stat.S_ISREG(there.st_mode):
        remedy = "move it, delete it, choose another destination, or add the option replace"
    elif stat.S_ISDIR(there.st_mode) and record is None:
        remedy += f"; to put the copy into it, write {item.destination}/"
    return DestinationError(
        f"{path} is {kind_of(there.st_mode)} {_change(there, record)}; it is kept: {remedy}"
    )


def _change(there: os.stat_result, record: Record | None) -> str:
    """Return in what way that which is ``there`` is not the copy of the ``record``."""
    if record and record.tree and stat.S_ISDIR(there.st_mode):
        return "that was put in the place of the copy"
    if record and not record.tree and stat.S_ISREG(there.st_mode):
        return "that was changed after it was staged"
    return "that was not staged"


def _is_replaceable(path: str, there: os.stat_result, record: Record | None) -> bool:
    """Return whether what is ``there`` is a file that was staged, or an empty folder."""
    if stat.S_ISDIR(there.st_mode):
        with suppress(PermissionError):
            return not os.listdir(path)
        return False
    return bool(record and not record.tree and has_same_bytes(path, there, record))


def judge_tree(
    item: StageItem, source: Source, record: Record | None, there: os.stat_result | None
) -> Reason | None:
    """Return why the copy of a folder cannot be current, before it is walked; else None. Pure."""
    if there is None:
        return Reason.ABSENT
    if record is None or record.tree is None:
        return Reason.NOT_RECORDED
    if item.options.validate is Validate.ALWAYS:
        return Reason.ALWAYS
    if record.is_damaged:
        return Reason.DAMAGED
    copy, tree = record.copy_facts, record.tree
    if not stat.S_ISDIR(there.st_mode) or (there.st_ino, there.st_uid) != (copy.inode, copy.owner):
        return Reason.REPLACED
    reason = made_differently(item, record) or shared_differently(item, record)
    if reason := reason or _made_differently(item, source, tree):
        return reason
    if not source.is_tree:  # an archive
        return None if record.source_facts == source.facts else Reason.SOURCE_CHANGED
    return None if tree.source_digest == source.listing else Reason.LISTING_CHANGED


def _made_differently(item: StageItem, source: Source, tree: TreeFacts) -> Reason | None:
    """Return a reason if the copy was made with other options."""
    if tree.relocation != source.relocation:
        return Reason.RELOCATED_DIFFERENTLY
    if bool(tree.split) != (item.options.mode is Mode.SHARD):
        return Reason.PART_ONLY if tree.split else Reason.NOT_SPLIT
    if tree.by != item.options.by:
        return Reason.SPLIT_DIFFERENTLY
    return None


def damaged(path: str, cache: Cache, record: Record) -> list[str] | None:
    """Return the files of the tree at ``path`` whose bytes on the disk differ from their digests.

    None if the table with the digests is missing.
    """
    table = Table.load(cache, record)
    if table is None:
        return None
    above = os.fsencode(path) + b"/"
    return [
        text_of(table.source.paths[row])
        for row in table.source.rows(Kind.FILE)
        if _digest_or_none(above + table.source.paths[row]) != table.digest(row)
    ]


def _digest_or_none(path: bytes) -> bytes | None:
    try:
        return bytes.fromhex(read_back(path))
    except OSError:
        return None
