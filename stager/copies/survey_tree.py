"""Survey one node for a folder: is its copy current, and what would a new one replace?

A tree is current if the listing of its source is as recorded, and so is every entry of the copy,
but for what programs have added in ``__pycache__`` and other caches. For that all of the copy is
statted, and nothing of it is read but the tags of such caches.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from stager.base.errors import DestinationError, StageError
from stager.base.options import Mode, Validate
from stager.copies.own import (
    HoldsOwnError,
    find_own,
    has_new_caches_alone,
    is_copy,
    is_same_file,
    own_text,
    them,
)
from stager.copies.survey import (
    Reason,
    Survey,
    check_folder,
    check_trees_above,
    damage,
    made_differently,
    or_other_source,
    own_lstat,
)
from stager.disk.files import existing_folder_above, kind_of, read_back
from stager.disk.permissions import is_too_open, unpacked_mode
from stager.tree.listing import Kind, text_of
from stager.tree.table import Table, as_copy
from stager.tree.walk import walk

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from stager.disk.cache import Cache
    from stager.disk.record import Record, TreeFacts
    from stager.request.items import StageItem
    from stager.source.facts import Source


class Walked(NamedTuple):
    """A folder at a destination as it was walked: its digest, to compare with that in its record,
    and by inode the path in it of each folder, that of itself being empty.

    The digest is empty if it was not asked for or the folder cannot be walked; then ``folders`` may
    be None, not known.
    """

    digest: str = ""
    folders: Mapping[int, bytes] | None = None


def survey_tree(
    item: StageItem,
    path: str,
    source: Source,
    cache: Cache,
    node: str,
    walked: MutableMapping[str, Walked],
) -> Survey:
    """Return what this node holds at ``path``, the place of the folder of ``item``.

    ``walked`` has the destinations that were walked already. For one whose copy is not current it
    gets the folders that are there when that is looked through: a new tree may replace these.

    Raise DestinationError if nothing can be put at ``path``, or if files of the user's own would be
    lost without the option ``replace``.
    """
    there = own_lstat(path)
    check_folder(existing_folder_above(path), cache)
    check_trees_above(item, path, cache)
    record = cache.load(item.destination)
    tree = record.tree if record else None
    reason = or_other_source(item, record, judge_tree(item, source, record, there))
    if not reason and record and tree:
        if item.destination not in walked:
            walked[item.destination] = walk_copy(path)
        is_same = walked[item.destination].digest == tree.copy_digest
        if not is_same and not has_new_caches_alone(cache, record, path):
            reason = Reason.COPY_CHANGED
    reason = reason or damage(item, record, lambda record: damaged(path, cache, record) == [])
    if reason or record is None or tree is None:
        is_own = _check_loss(item, path, there, cache, record)
        before = walked.get(item.destination)
        try:
            own, folders = _look_through(path, there, cache, record, before)
        except HoldsOwnError as error:
            if not item.options.replace:
                raise _might_delete(item.destination, error) from None
            own, folders = [error.unread], None
        walked[item.destination] = Walked(folders=folders)
        if own and not item.options.replace:
            raise _would_delete(item.destination, own)
        return Survey(node, reason, "", changed=is_own or bool(own))
    return Survey(node, None, record.digest, tree.files, split=tree.split)


def _check_loss(
    item: StageItem, path: str, there: os.stat_result | None, cache: Cache, record: Record | None
) -> bool:
    """Return whether a plain file of the user's own is there, which may be replaced.

    Raise DestinationError if a new tree would replace something else that nobody staged.
    """
    is_own = bool(there and not is_replaceable(path, there, cache, record))
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


def _would_delete(destination: str, own: list[str]) -> DestinationError:
    kept = "it is" if len(own) == 1 else "they are"
    return DestinationError(
        f"{destination} holds {own_text(own)}; {kept} kept: move {them(own)} "
        "elsewhere, choose another destination, or add the option replace"
    )


def _might_delete(destination: str, error: HoldsOwnError) -> DestinationError:
    return DestinationError(
        f"{destination} {error.why}; what is yours in it is kept: {error.remedy}, "
        "choose another destination, or add the option replace"
    )


def _look_through(
    path: str,
    there: os.stat_result | None,
    cache: Cache,
    record: Record | None,
    before: Walked | None,
) -> tuple[list[str], Mapping[int, bytes] | None]:
    """Return the user's own files in the staged folder at ``path``; see `own.find_own`.

    Return, too, the folders as `Walked` has them.
    """
    if there is None or not stat.S_ISDIR(there.st_mode):
        return [], {}
    if record is None or record.tree is None:  # it is empty
        return [], {there.st_ino: b""}
    if before and before.digest == record.tree.copy_digest:
        return [], before.folders
    folders: dict[int, bytes] = {}
    own = find_own(cache, record, path, folders=folders)
    return own, folders or None


def is_replaceable(path: str, there: os.stat_result, cache: Cache, record: Record | None) -> bool:
    """Return whether what is ``there`` was staged, or is an empty folder.

    A staged folder may hold files of the user's own all the same, even nothing else.
    """
    with suppress(PermissionError):
        if stat.S_ISDIR(there.st_mode) and not os.listdir(path):
            return True
    if record and not record.tree:
        return is_same_file(path, there, record)
    return record is not None and is_copy(cache, record, path, there)


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
    if reason := made_differently(item, record) or _made_differently(item, source, tree):
        return reason
    if _is_too_open(item, source, there):
        return Reason.TOO_OPEN
    if not source.is_tree:  # an archive
        return None if record.source_facts == source.facts else Reason.SOURCE_CHANGED
    return None if tree.source_digest == source.listing else Reason.LISTING_CHANGED


def _made_differently(item: StageItem, source: Source, tree: TreeFacts) -> Reason | None:
    """Return a reason if the copy was made with other options."""
    if (tree.relocate, tree.interpreter) != (item.options.relocate, source.interpreter_at):
        return Reason.RELOCATED_DIFFERENTLY
    if bool(tree.split) != (item.options.mode is Mode.SHARD):
        return Reason.PART_ONLY if tree.split else Reason.NOT_SPLIT
    if tree.by != item.options.by:
        return Reason.SPLIT_DIFFERENTLY
    return None if tree.share == item.options.share else Reason.SHARED_DIFFERENTLY


def _is_too_open(item: StageItem, source: Source, there: os.stat_result) -> bool:
    """Whether more users may enter the copy than a new one."""
    mode = source.mode
    if item.options.extract:
        mode = unpacked_mode(stat.S_IMODE(there.st_mode), mode)
    return is_too_open(there, mode, source.group)


def walk_copy(path: str) -> Walked:
    """Return what is in the folder at ``path`` now."""
    folders: dict[int, bytes] = {}
    try:
        copy = walk(path, holes=False, folders=folders)
    except (OSError, StageError):
        return Walked()
    return Walked(as_copy(copy).digest(), folders)


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
