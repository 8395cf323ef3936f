"""Where what is staged to a job's own folder is kept for the next job: the node's store.

The store is a cache root whose destinations nobody names: an entry is the copy of one source, made
with the same options, and what jobs find at their destinations are views of it (`rank.view`). Its
files are read-only, and nothing in it names a destination. Pure.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import xxhash

from stager.base.options import DEFAULT_OPTIONS, Lifetime, Validate, Verify
from stager.base.paths import RECORDS_FOLDER, STORE_FOLDER
from stager.fs.files import WRITABLE, copy_mode
from stager.request.items import StageItem, copy_name

if TYPE_CHECKING:
    from stager.request.items import Space
    from stager.source.description import Source
    from stager.store.record import Record


#: The options that say nothing of an entry's bytes: who sees a copy and how long, and what is in
#: its way. ``validate`` and ``verify`` are the stage's: they are not part of the key.
_OF_VIEW = ("lifetime", "share", "replace", "via", "name")
_OF_STAGE = ("validate", "verify")
_ENTRY = re.compile(rf"/{re.escape(RECORDS_FOLDER)}/[0-9]+/{STORE_FOLDER}/[0-9a-f]{{32}}/")


def is_entry(destination: str) -> bool:
    """Return whether a destination is that of an entry in a store."""
    return _ENTRY.search(destination) is not None


def shown(record: Record) -> str:
    """Return what a user calls a recorded copy: an entry has no path that anybody named."""
    return record.source if is_entry(record.destination) else record.destination


def has_entry(item: StageItem, space: Space) -> bool:
    """Return whether an item is kept in the node's store: its own root goes with the job."""
    lasts = item.options.lifetime is not Lifetime.JOB
    return bool(space.store) and item.root in space.of_job and not item.shared and lasts


def entry_of(item: StageItem, store: str, uid: int) -> StageItem:
    """Return the entry that an item is a view of, in the user's folder beneath ``store``.

    >>> item = StageItem("/shared/set", "/tmp/set", "/tmp")
    >>> entry_of(item, "/nvme", 7).destination
    '/nvme/.slurm-stage/7/store/ade1e6ef9a7299bf1f5641dad7be293a/set'
    """
    defaults = {name: getattr(DEFAULT_OPTIONS, name) for name in _OF_VIEW}
    options = replace(item.options, **defaults)
    made = {name: value for name, value in options.to_json().items() if name not in _OF_STAGE}
    key = xxhash.xxh3_128_hexdigest(repr((item.source, sorted(made.items()))).encode())
    name = copy_name(item.source, options) or "copy"
    folder = f"{store}/{RECORDS_FOLDER}/{uid}/{STORE_FOLDER}/{key}"
    # What is changed in an entry is nobody's own.
    return StageItem(item.source, f"{folder}/{name}", store, replace(options, replace=True))


def as_checked(entry: StageItem, other: StageItem) -> StageItem:
    """Return the ``entry`` with the stricter checks of two items, of which both are views."""
    one, two = entry.options, other.options
    options = replace(
        one,
        validate=max(one.validate, two.validate, key=list(Validate).index),
        verify=max(one.verify, two.verify, key=list(Verify).index),
    )
    return replace(entry, options=options)


def as_entry(source: Source) -> Source:
    """Return the ``source`` of an item as that of its entry, which nobody else sees.

    It is read-only, and no path in it is changed. What its environments need comes along.
    """
    mode = copy_mode(source.mode) & ~WRITABLE
    return replace(source, mode=mode, group=os.getegid(), relocation="", environment_note="")
