"""Compare a copy's bytes on the disk with its recorded digest.

`node.agent` calls this for `stagectl verify`.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_128_hexdigest

from stager.base.text import listed
from stager.fs.files import READ_FILE, digest_of, opened
from stager.store.entries import is_entry
from stager.store.record import is_ours
from stager.store.tree_validity import damaged
from stager.tree.listing import Kind, text_of
from stager.tree.table import Table
from stager.tree.update import State, look

if TYPE_CHECKING:
    from stager.store.cache import Cache
    from stager.store.record import Record

#: What to do about a copy that is not what was staged: one that a stage mends, one that it mends
#: only if it is told to, something else that it refuses to replace, and what another account staged
#: for all users.
_STAGE = "stage it again"
_REPLACE = "keep what you changed ({}) elsewhere, then stage it again with the option replace"
_MOVE = "move it elsewhere, or delete it there if you do not need it ({}), and stage it again"
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


def fault_of(cache: Cache, record: Record) -> Fault:
    """Compare a copy with its record. All that was staged is read."""
    path = cache.path_of(record.destination)
    is_of_site = cache.uid != os.getuid()
    remedy = _TELL if is_of_site else _STAGE
    # A stage replaces all that is in an entry of the store.
    has_own = not (is_of_site or is_entry(record.destination))
    try:
        there = os.lstat(path)
        if record.tree:
            fault, changed = _fault_of_tree(path, there, cache, record)
        else:
            fault, changed = _fault_of_file(path, there, record), list[str]()
        is_kept = _is_kept(there, record)
        if not (is_kept or is_ours(there, record)):
            changed = [os.path.basename(path)]
        if has_own and is_kept:
            remedy = _MOVE.format(delete_command(record.destination))
        elif has_own and changed:
            remedy = _REPLACE.format(listed(changed, _MOST_NAMED))
        if fault and not is_ours(there, record):
            return Fault(f"{fault}; {remedy}", is_damage=False)
    except FileNotFoundError:
        return Fault(f"the copy is gone; {remedy}", is_damage=False)
    except OSError as error:
        text = f"the copy cannot be read: {error.strerror}; {remedy}, or use another node"
        return Fault(text, is_damage=error.errno == errno.EIO)  # others may pass
    return Fault(f"{fault}; {remedy}" if fault else "", is_damage=bool(fault))


def _is_kept(there: os.stat_result, record: Record) -> bool:
    """Return whether a stage refuses to replace what is ``there``, whatever its options."""
    if record.tree:
        return not (stat.S_ISREG(there.st_mode) or is_ours(there, record))
    return not (stat.S_ISREG(there.st_mode) or stat.S_ISLNK(there.st_mode))


def as_mended(cache: Cache, record: Record) -> Record:
    """Return the record of a folder in which no fault is left, with the digest that it had."""
    table = Table.load(cache, record)
    return replace(record, digest=xxh3_128_hexdigest(table.digests)) if table else record


def delete_command(destination: str) -> str:
    """Return the command that deletes what is at ``destination`` on a node."""
    return f"srun -N1 -n1 {NODE} rm -r {quote(destination)}"


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


def _fault_of_tree(
    path: str, there: os.stat_result, cache: Cache, record: Record
) -> tuple[str, list[str]]:
    """Return what is wrong with the copy of a folder, and what in it was changed. Raise OSError.

    What was added to it is not looked at.
    """
    if not is_ours(there, record):  # not even if it has the same files
        return _REPLACED, []
    table, files = Table.load(cache, record), damaged(path, cache, record)
    if files is None or table is None:
        return "the list of its files' checksums is missing", []
    kinds, states = table.source.kinds, look(path, table)

    def names(*wanted: State, links: bool = False) -> list[str]:
        return [
            text_of(table.source.paths[row]) or "."
            for row, state in enumerate(states)
            if state in wanted and not (links and kinds[row] == Kind.FILE)
        ]

    faults = []
    if files:
        count = "1 file is" if len(files) == 1 else f"{len(files)} files are"
        faults.append(f"{count} missing, or not as staged: {listed(files, _MOST_NAMED)}")
    if lost := names(State.GONE, State.CHANGED, links=True):
        what = listed(lost, _MOST_NAMED)
        faults.append(f"folders or links in it were removed or changed: {what}")
    if modes := names(State.MODE):
        faults.append(f"permissions in it were changed: {listed(modes, _MOST_NAMED)}")
    return "; ".join(faults), names(State.CHANGED)


def _forget_pages(path: str) -> None:
    """Drop the file from the page cache, so that its bytes are read from the disk."""
    with opened(path, READ_FILE) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
