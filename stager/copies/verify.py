"""Compare a copy's bytes on the disk with its recorded digest.

`upkeep` calls this for `stagectl verify`.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from stager.copies.survey_tree import copy_digest, damaged
from stager.disk.files import READ_FILE, digest_of, opened

if TYPE_CHECKING:
    from stager.disk.cache import Cache
    from stager.disk.record import Record

#: What to do about a copy that is not what was staged.
_REMEDY = "evict it and stage it again"
#: Damaged files of a folder that are named.
_MOST_NAMED = 5


def fault_of(cache: Cache, record: Record, disk: str) -> str:
    """Return what is wrong with the copy and what to do, or nothing. All of the copy is read."""
    path = f"{disk}{record.destination}"
    try:
        there = os.lstat(path)
        if record.tree:
            fault = _fault_of_tree(path, cache, record)
            return f"{fault}; {_REMEDY}" if fault else ""
        if not stat.S_ISREG(there.st_mode) or there.st_uid != record.copy_facts.owner:
            return f"the copy was replaced by something else; {_REMEDY}"
        _forget_pages(path)
        if digest_of(path) == record.digest:
            return ""
    except FileNotFoundError:
        return "the copy is gone; stage it again"
    except OSError as error:
        return f"the copy cannot be read: {error.strerror}; {_REMEDY}, or use another node"
    copy = record.copy_facts
    if (there.st_size, there.st_mtime_ns) != (copy.size, copy.mtime_ns):
        return f"the copy was modified after staging; {_REMEDY}"
    return f"the copy is damaged: its bytes differ from its digest; {_REMEDY}"


def _fault_of_tree(path: str, cache: Cache, record: Record) -> str:
    files = damaged(path, cache, record)
    if files is None:
        return "the list of its files' digests is missing"
    if files:
        names = ", ".join(files[:_MOST_NAMED]) + (", …" if len(files) > _MOST_NAMED else "")
        count = "1 file differs" if len(files) == 1 else f"{len(files)} files differ"
        return f"{count} from what was staged: {names}"
    if record.tree and copy_digest(path) != record.tree.copy_digest:
        return "files or folders in it were added, removed or changed after staging"
    return ""


def _forget_pages(path: str) -> None:
    """Drop the file from the page cache, so that its bytes are read from the disk."""
    with opened(path, READ_FILE) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
