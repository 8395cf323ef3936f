"""Remove a copy and its record, but none of the user's own files; change a folder's copy in place.

What a process began that died then is finished.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from stager.base.options import Lifetime
from stager.fs.files import facts_beneath, opened_beneath, remove_tree, stage_errors
from stager.fs.partial_file import fresh_name
from stager.source.description import SourceFacts
from stager.store.entries import is_entry
from stager.store.parents import remove_parents
from stager.store.record import is_ours
from stager.tree.table import Table
from stager.tree.update import Update

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stager.store.cache import Cache
    from stager.store.locks import Locks
    from stager.store.record import Record


@contextmanager
def updating(
    cache: Cache,
    destination: str,
    old: Table,
    new: Table,
    *,
    hidden: str = "",
    force: bool = False,
) -> Iterator[Update]:
    """Open the copy of a folder and yield its `Update`.

    Raise DestinationError or SpaceError, also for an OSError of the body.
    """
    path = cache.path_of(destination)
    with stage_errors(path), opened_beneath(cache.root, path) as top:
        yield Update(destination, top, old, new, hidden, force=force)


def finish(cache: Cache, destination: str, *, force: bool = False) -> None:
    """Finish the update of a copy, or drop it if the copy is gone.

    The caller holds the destination's lock. With ``force``, what is the user's own and in the way
    is removed. Raise DestinationError if there is any.
    """
    record = cache.updated(destination)
    new = Table.load(cache, record)
    try:
        there = os.lstat(cache.path_of(destination))
    except OSError:
        there = None
    if record is None or new is None or there is None or not is_ours(there, record):
        cache.drop_update(destination)
        return
    # It is gone already if all steps were taken.
    old = Table.load(cache, cache.load(destination)) or Table.empty()
    hidden = cache.update_path(destination)
    with updating(cache, destination, old, new, hidden=hidden, force=force) as update:
        update.apply()
    cache.finish_update(destination)


def remove(cache: Cache, locks: Locks, destination: str, job: int = 0) -> Record | None:
    """Remove a copy and its record, which is returned; None if it is in use, pinned or locked.

    With it go the folders above that stages have made and that are empty then. That ``job`` uses it
    does not count. What the user put in the copy's place is kept. Of a folder, what was staged
    goes; if files of the user's own stay in it, so does the record, as that of an empty copy. Raise
    OSError or DestinationError.
    """
    if not locks.take(destination):
        return None
    try:
        record, jobs = cache.load(destination), cache.jobs()
        if record is None or record.pinned or set(jobs.get(destination, ())) - {job}:
            return None
        path = cache.path_of(destination)
        # The copy goes first: a copy without a record would never be found again.
        is_there = _is_on_disk(cache.root, path) and is_copy(cache, record)
        if is_there and not _remove_copy(cache, record):
            cache.drop_update(destination)
            cache.save(_emptied(record))
            return record
        cache.forget(destination)
        remove_parents(cache, path, jobs)
        return record
    finally:
        locks.release(destination)


def discard(cache: Cache, destination: str) -> None:
    """Remove what is at the destination of an entry, with all that is in it, and its record.

    The caller holds its lock. Raise OSError or DestinationError.
    """
    path = cache.path_of(destination)
    with stage_errors(path), suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            os.chmod(path, stat.S_IRWXU)  # only a folder that its owner may write in can be moved
        with fresh_name(cache.partial) as gone:
            os.rename(path, gone)
        remove_tree(gone)
    cache.forget(destination)


def _emptied(record: Record) -> Record:
    """Return the record of a folder of which only what is the user's own is left."""
    assert record.tree is not None
    return replace(
        record,
        source_facts=SourceFacts(0, 0, 0, 0),
        copy_facts=replace(record.copy_facts, size=0),
        lifetime=Lifetime.CACHE,
        tree=replace(record.tree, files=0, allocated=0),
    )


def is_copy(cache: Cache, record: Record) -> bool:
    """Return whether what is at the path of a copy, if anything, is that of the ``record``.

    Nothing in an entry of the store is its user's own.
    """
    if is_entry(record.destination):
        return True
    try:
        return is_ours(os.lstat(cache.path_of(record.destination)), record)
    except (FileNotFoundError, NotADirectoryError):
        return True


def _is_on_disk(root: str, path: str) -> bool:
    """Whether ``path`` leads to no other filesystem, where there can be no copy."""
    try:
        facts_beneath(root, path)
    except OSError as error:
        return error.errno != errno.EXDEV
    return True


def _remove_copy(cache: Cache, record: Record) -> bool:
    """Remove a copy. Return False if a folder stays for what is in it.

    Raise OSError or DestinationError.
    """
    if is_entry(record.destination):
        discard(cache, record.destination)
        return True
    path = cache.path_of(record.destination)
    above, name = os.path.split(path)
    with suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(path)  # a file where a folder above was: the copy is gone
        with opened_beneath(cache.root, above) as folder:
            there = os.lstat(name, dir_fd=folder)
            if not is_ours(there, record):
                return True
            if not record.tree:
                os.unlink(name, dir_fd=folder)
                return True
            _remove_staged(cache, record)
            try:
                os.rmdir(name, dir_fd=folder)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
                return False
    return True


def _remove_staged(cache: Cache, record: Record) -> None:
    # Where an update was not finished, there are files of both versions.
    for one in (record, cache.updated(record.destination)):
        if table := Table.load(cache, one):
            with updating(cache, record.destination, table, Table.empty()) as update:
                update.remove_old()
