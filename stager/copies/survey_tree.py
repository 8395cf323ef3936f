"""The copy of a folder on this node's disk in, whether it is current out: `survey` for trees.

A tree is current where its source is listed as it was, and every entry of the copy is as it was
recorded. All of the copy is statted for that, and nothing of it is read.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from stager.base.errors import DestinationError, StageError
from stager.base.options import Mode, Validate
from stager.copies.evict import is_ours
from stager.copies.survey import NOT_RECORDED, Survey, check_folder, check_trees_above, own_lstat
from stager.disk.files import existing_folder_above, kind_of, read_back
from stager.tree.listing import Kind, text_of
from stager.tree.table import Table, as_copy, is_our_tree
from stager.tree.walk import walk

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stager.disk.cache import Cache
    from stager.disk.record import Record, TreeFacts
    from stager.request.items import StageItem
    from stager.source.posix import Source


def survey_tree(
    item: StageItem, path: str, source: Source, cache: Cache, node: str, looked: Mapping[str, str]
) -> Survey:
    """What this node holds at ``path``, where the folder of ``item`` is wanted.

    ``looked`` has the `copy_digest` of those destinations that were looked at already.

    Raises DestinationError where nothing could be put at ``path``, or something would be lost.
    """
    there = own_lstat(path)
    folder = existing_folder_above(path)
    check_folder(folder, cache)
    check_trees_above(item, cache)
    record = cache.load(item.destination)
    reason = judge_tree(item, source, record, there)
    if record and record.source != item.source:
        reason = reason or "staged from another source"
    if not reason:
        assert record is not None
        assert record.tree is not None
        now = looked.get(item.destination) or copy_digest(path)
        reason = "" if now == record.tree.copy_digest else "the copy changed"
    if not reason and item.options.validate is Validate.CHECKSUM:
        assert record is not None
        reason = "" if damaged(path, cache, record) == [] else "its bytes differ from its digest"
    if reason or record is None or record.tree is None:
        _check_loss(item, path, there, cache, record)
        return Survey(node, reason, "")
    fresh = _is_same(Validate.STAT, source, record, record.tree)
    tree = record.tree
    return Survey(node, reason, record.digest, tree.files, fresh=fresh, split=tree.split)


def _check_loss(
    item: StageItem, path: str, there: os.stat_result | None, cache: Cache, record: Record | None
) -> None:
    """Raise DestinationError where a new tree would take the place of what nobody has staged, or
    of what is staged by itself.
    """
    if there and not _may_go(path, there, cache, record):
        raise DestinationError(
            f"{path} is {kind_of(there.st_mode)} that was not staged, and would be lost; "
            "remove it or choose another destination"
        )
    for other in cache.records():
        if other.destination.startswith(f"{item.destination}/"):
            raise DestinationError(
                f"{other.destination} is staged by itself and lies in {path}; evict it first"
            )


def _may_go(path: str, there: os.stat_result, cache: Cache, record: Record | None) -> bool:
    if stat.S_ISDIR(there.st_mode) and not os.listdir(path):
        return True
    if record is None or not is_ours(there, record):
        return False
    return record.tree is None or is_our_tree(cache, record, path)


def judge_tree(
    item: StageItem, source: Source, record: Record | None, there: os.stat_result | None
) -> str:
    """Why the copy of a folder cannot be current, or nothing, before the copy is walked. Pure."""
    if there is None:
        return "absent"
    if record is None or record.tree is None:
        return NOT_RECORDED
    if item.options.validate is Validate.ALWAYS:
        return "validate=always"
    copy = record.copy_facts
    if not stat.S_ISDIR(there.st_mode) or (there.st_ino, there.st_uid) != (copy.inode, copy.owner):
        return "replaced"
    how = record.tree.relocate, record.tree.interpreter
    if how != (item.options.relocate, source.interpreter_at):
        return "relocated otherwise"
    if bool(record.tree.split) != (item.options.mode is Mode.SHARD):
        return "a part of it" if record.tree.split else "not split"
    if record.tree.by != item.options.by:
        return "split otherwise"
    return (
        "" if _is_same(item.options.validate, source, record, record.tree) else "the source changed"
    )


def _is_same(validate: Validate, source: Source, record: Record, tree: TreeFacts) -> bool:
    if not source.is_tree:  # an archive
        was, now = record.source_facts, source.facts
        return was.size == now.size if validate is Validate.SIZE else was == now
    if validate is Validate.SIZE:
        files = tree.files_in_all if tree.split else tree.files
        return (files, record.source_facts.size) == (source.files, source.facts.size)
    return tree.source_digest == source.listing


def copy_digest(path: str) -> str:
    """The digest of what is at ``path``, for comparison with the record's; empty without a tree."""
    try:
        return as_copy(walk(path, holes=False)).digest()
    except (OSError, StageError):
        return ""


def damaged(path: str, cache: Cache, record: Record) -> list[str] | None:
    """The files of the tree at ``path`` whose bytes on the disk differ from their digests.

    None where the digests are not to be had.
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
