"""Compare a copy's bytes on the disk with its recorded digest.

`upkeep` calls this for `stagectl verify`.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_128_hexdigest

from stager.base.errors import StageError
from stager.base.text import listed
from stager.copies.own import HoldsOwnError, find_own, is_copy
from stager.copies.survey_tree import damaged, is_replaceable
from stager.disk.files import READ_FILE, digest_of, opened
from stager.tree.listing import text_of
from stager.tree.table import Table
from stager.tree.walk import walk

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stager.disk.cache import Cache
    from stager.disk.record import Record

#: What to do about a copy that is not what was staged: one that a stage replaces, one that it
#: replaces only if it is told to, something else that it refuses to replace, and what another
#: account staged for all users.
_STAGE = "stage it again"
_REPLACE = "keep what is yours ({}) elsewhere, then stage it again with the option replace"
_MOVE = "move it{} elsewhere, or delete it there if you do not need it ({}), and stage it again"
_TELL = "tell the administrator"
_REPLACED = "the copy was replaced by something else"
#: What stands for the node's name in a message; `stagectl` knows the name.
NODE = "-w NODE"
#: Damaged files of a folder that are named.
_MOST_NAMED = 5


class Fault(NamedTuple):
    """What is wrong with a copy and what to do; the text is empty if nothing is.

    ``is_damage`` tells whether only a new stage can mend it: then it has to know. A file that
    somebody changed is none: its time tells.
    """

    text: str
    is_damage: bool
    #: The user's own files in a folder, see `own`.
    own: Sequence[str] = ()


def fault_of(cache: Cache, record: Record, disk: str) -> Fault:
    """Compare a copy with its record. All of the copy is read."""
    path = f"{disk}{record.destination}"
    is_of_site = cache.uid != os.getuid()
    remedy = _TELL if is_of_site else _MOVE.format("", delete_command(record.destination))
    own: list[str] = []
    try:
        there = os.lstat(path)
        if not is_of_site and there.st_uid == cache.uid:
            own = _own(cache, record, path)
            remedy = _remedy(path, there, cache, record, own)
        if record.tree:
            fault = _fault_of_tree(path, there, cache, record)
        else:
            fault = _fault_of_file(path, there, record)
        if fault and not is_copy(cache, record, path, there):
            return Fault(f"{fault}; {remedy}", is_damage=False)
    except HoldsOwnError as error:
        return Fault(f"the copy cannot be read: {error.unread}; {error.remedy}", is_damage=False)
    except FileNotFoundError:
        text = f"the copy is gone; {_TELL if is_of_site else _STAGE}"
        return Fault(text, is_damage=False)
    except OSError as error:
        text = f"the copy cannot be read: {error.strerror}; {remedy}, or use another node"
        return Fault(text, is_damage=error.errno == errno.EIO)  # others may pass
    return Fault(f"{fault}; {remedy}" if fault else "", is_damage=bool(fault), own=own)


def as_mended(cache: Cache, record: Record) -> Record:
    """Return the record of a folder in which no fault is left, with the digest that it had."""
    table = Table.load(cache, record)
    return replace(record, digest=xxh3_128_hexdigest(table.digests)) if table else record


def _own(cache: Cache, record: Record, path: str) -> list[str]:
    """Return `find_own`. Raise HoldsOwnError if the user may not list the copy."""
    try:
        return find_own(cache, record, path)
    except HoldsOwnError as error:
        if isinstance(error.__cause__, PermissionError):
            raise
    return []  # what else is wrong with it is found when its files are read


def delete_command(destination: str) -> str:
    """Return the command that deletes what is at ``destination`` on a node."""
    return f"srun -N1 -n1 {NODE} rm -r {quote(destination)}"


def _remedy(
    path: str, there: os.stat_result, cache: Cache, record: Record, own: Sequence[str]
) -> str:
    """Return what to do about what is ``there``, which holds the user's ``own`` files."""
    names = listed(own, _MOST_NAMED) if own else ""
    if _stage_replaces(path, there, cache, record):
        return _REPLACE.format(names) if own else _STAGE
    holding = f" with what is yours in it ({names})" if own and stat.S_ISDIR(there.st_mode) else ""
    return _MOVE.format(holding, delete_command(record.destination))


def _stage_replaces(path: str, there: os.stat_result, cache: Cache, record: Record) -> bool:
    """Return whether the next stage replaces what is ``there``; see `survey`, `survey_tree`."""
    if stat.S_ISREG(there.st_mode):
        return True
    return (
        is_replaceable(path, there, cache, record) if record.tree else stat.S_ISLNK(there.st_mode)
    )


def _fault_of_file(path: str, there: os.stat_result, record: Record) -> str:
    copy = record.copy_facts
    if not stat.S_ISREG(there.st_mode) or there.st_uid != copy.owner:
        return _REPLACED
    _forget_pages(path)
    if digest_of(path) == record.digest:
        return ""
    if (there.st_size, there.st_mtime_ns) != (copy.size, copy.mtime_ns):
        return "the copy was changed after staging"
    if there.st_ino != copy.inode:
        return _REPLACED
    return "the copy is damaged: its bytes differ from its checksum"


def _fault_of_tree(path: str, there: os.stat_result, cache: Cache, record: Record) -> str:
    """Return what is wrong with the copy of a folder. Raise OSError."""
    if not stat.S_ISDIR(there.st_mode):
        return _REPLACED
    if not is_copy(cache, record, path, there):  # not even if it has the same files
        return _REPLACED
    return _fault_in_folder(path, cache, record)


def _fault_in_folder(path: str, cache: Cache, record: Record) -> str:
    """Return what is wrong in a folder; what was added to it is not. Raise OSError."""
    files = damaged(path, cache, record)
    table = Table.load(cache, record)
    if files is None or table is None:
        return "the list of its files' checksums is missing"
    faults = []
    if files:
        count = "1 file is" if len(files) == 1 else f"{len(files)} files are"
        faults.append(f"{count} missing, or not as staged: {listed(files, _MOST_NAMED)}")
    try:
        copy = walk(path, holes=False, specials=True, closed=[])  # the user's own may be closed
    except StageError as error:
        faults.append(error.message.partition(";")[0])
        return "; ".join(faults)
    if lost := _names(table, table.lost(copy)):
        faults.append(f"folders or links in it were removed or changed: {lost}")
    if changed := _names(table, table.with_other_modes(copy), but=frozenset(files)):
        faults.append(f"permissions in it were changed: {changed}")
    return "; ".join(faults)


def _names(table: Table, rows: Iterable[int], but: frozenset[str] = frozenset()) -> str:
    """Return the first paths of the ``rows`` as messages name them, ``but`` those named already.

    Return nothing if there are none.
    """
    paths = [text_of(table.source.paths[row]) or "." for row in rows]
    others = [path for path in paths if path not in but]
    return listed(others, _MOST_NAMED) if others else ""


def _forget_pages(path: str) -> None:
    """Drop the file from the page cache, so that its bytes are read from the disk."""
    with opened(path, READ_FILE) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
