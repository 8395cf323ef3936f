"""Change the copy of a folder in place; and finish what a process began that died then."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stager.disk.files import opened_beneath, stage_errors
from stager.disk.record import is_ours
from stager.tree.table import Table
from stager.tree.update import Update

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stager.disk.cache import Cache


@contextmanager
def updating(
    cache: Cache,
    path: str,
    destination: str,
    old: Table,
    new: Table,
    *,
    hidden: str = "",
    force: bool = False,
) -> Iterator[Update]:
    """Open the copy at ``path``, that of ``destination``, and yield its `Update`.

    Raise DestinationError or SpaceError, also for an OSError of the body.
    """
    with stage_errors(path), opened_beneath(cache.root, path) as top:
        yield Update(destination, top, old, new, hidden, force=force)


def finish(cache: Cache, path: str, destination: str, *, force: bool = False) -> None:
    """Finish the update of the copy at ``path``, or drop it if the copy is gone.

    The caller holds the destination's lock. With ``force``, what is the user's own and in the way
    is removed. Raise DestinationError if there is any.
    """
    record = cache.updated(destination)
    new = Table.load(cache, record)
    try:
        there = os.lstat(path)
    except OSError:
        there = None
    if record is None or new is None or there is None or not is_ours(there, record):
        cache.drop_update(destination)
        return
    # It is gone already if all steps were taken.
    old = Table.load(cache, cache.load(destination)) or Table.empty()
    hidden = cache.update_path(destination)
    with updating(cache, path, destination, old, new, hidden=hidden, force=force) as update:
        update.apply()
    cache.finish_update(destination)
