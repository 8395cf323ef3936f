"""A staged folder, made without MPI."""

from __future__ import annotations

import concurrent.futures  # noqa: F401  # `walk` does on a slow disk, also as a user who cannot
import time
from array import array
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stager.base.digest import DIGEST_SIZE
from stager.fs.files import digest_of
from stager.store.record import Record, TreeFacts
from stager.tree.listing import Kind, Listing, Row, text_of
from stager.tree.partial_tree import PartialTree
from stager.tree.stream import place
from stager.tree.table import Table
from tests.support.records import RECORD

if TYPE_CHECKING:
    from collections.abc import Callable

    from stager.store.cache import Cache


def _one_file(folder: Path) -> None:
    (folder / "a").write_bytes(bytes(1 << 20))


def stage_folder(
    cache: Cache, path: str, used_at: int = 0, fill: Callable[[Path], object] = _one_file
) -> Record:
    """Publish the folder that ``fill`` fills at ``path``, one file of a MiB, and record it."""
    tree = PartialTree(cache, Listing.of([Row(b"", Kind.FOLDER, 0o755)]))
    fill(Path(tree.path))
    tree.adopt()
    copy = tree.copy
    digests = bytearray(DIGEST_SIZE * len(copy))
    for row in copy.rows(Kind.FILE):
        file = f"{tree.path}/{text_of(copy.paths[row])}"
        digests[place(row)] = bytes.fromhex(digest_of(file))
    table = cache.announce_table(path, Table.of(copy, copy, bytes(digests), {}).to_bytes())
    facts = TreeFacts(copy.files, copy.allocated(), "0" * 32, table)
    record = replace(
        RECORD,
        destination=path,
        copy_facts=tree.facts(),
        used_at=used_at,
        tree=facts,
        staged_at=int(time.time()),
    )
    cache.announce(record)
    tree.publish(path)
    tree.close()
    cache.settle(path)
    return record


def as_copy(listing: Listing) -> Listing:
    """Return the listing of a copy without the times that change although its data does not.

    A program that makes and removes a file in a folder changes the folder's mtime.
    """
    mtimes = (
        0 if kind == Kind.FOLDER else mtime
        for kind, mtime in zip(listing.kinds, listing.mtimes, strict=True)
    )
    return replace(listing, ctimes=array("q", bytes(8 * len(listing))), mtimes=array("q", mtimes))
