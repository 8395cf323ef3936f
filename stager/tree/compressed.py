"""List a folder as it is when files in it are decompressed at the destination.

The path of such a file in the listing is that of the copy, without the suffix. Its size, and all
else that identifies its version, are those of the compressed file at the source.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stager.base.errors import UsageError
from stager.base.formats import compressed_suffix
from stager.tree.listing import Kind, Listing, Row, text_of
from stager.tree.patterns import Patterns, unmatched

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def decompressed_listing(listing: Listing, patterns: Sequence[str], folder: str) -> Listing:
    """Return the ``listing`` of ``folder`` with the files decompressed that match. Pure.

    Files that match, but have no suffix of a compressed file, stay as they are. Raise UsageError
    if a path is taken already.
    """
    selected = Patterns(patterns, ())
    paths = {
        listing.paths[row]: _without_suffix(listing.paths[row])
        for row, kind in enumerate(listing.kinds)
        if kind in (Kind.FILE, Kind.HARD_LINK)
        and not selected.leaves_out(listing.paths[row], is_folder=False)
    }
    moved = {path: new for path, new in paths.items() if new != path}
    # A further path of a file is one of what its first path becomes.
    for row in listing.rows(Kind.HARD_LINK):
        if listing.targets[row] not in moved:
            moved.pop(listing.paths[row], None)
    _check(listing, moved, folder)
    return Listing.of(_moved(listing.row(number), moved) for number in range(len(listing)))


def patterns_without_effect(listing: Listing, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return those of the ``patterns`` that match no file which ``listing`` has decompressed. Pure.

    ``listing`` is what `decompressed_listing` returned.
    """
    rows = filter(listing.is_decompressed, listing.targets)
    return unmatched(patterns, [os.fsdecode(listing.source_path(row)) for row in rows])


def _moved(row: Row, moved: Mapping[bytes, bytes]) -> Row:
    """Return the row with the path of the copy."""
    path = moved.get(row.path, row.path)
    if row.kind is Kind.HARD_LINK:
        row = row._replace(target=moved.get(row.target, row.target))
    elif row.kind is Kind.LINK:
        row = row._replace(target=_link_target(row, moved))
    elif path != row.path:
        # Its holes are read: what decompresses it needs every byte.
        row = row._replace(target=row.path, extents=None)
    return row._replace(path=path)


def _link_target(row: Row, moved: Mapping[bytes, bytes]) -> bytes:
    """Return the target of a symbolic link, without its suffix if it is decompressed."""
    above = row.path.rpartition(b"/")[0]
    new = moved.get(os.path.normpath(os.path.join(above, row.target)))
    if new is None or row.target.startswith(b"/"):
        return row.target
    return row.target.rpartition(b"/")[0] + row.target.rpartition(b"/")[1] + new.rpartition(b"/")[2]


def _without_suffix(path: bytes) -> bytes:
    suffix = compressed_suffix(os.fsdecode(path))
    return path[: len(path) - len(suffix)]


def _check(listing: Listing, moved: Mapping[bytes, bytes], folder: str) -> None:
    """Raise UsageError if two entries would have one path."""
    taken = {path for path in listing.paths if path not in moved}
    for path, new in moved.items():
        if new in taken:
            where, name = f"{folder.rstrip('/')}/{text_of(path)}", text_of(new)
            raise UsageError(
                f"{where} would be decompressed to {name}, which is there as well; leave one of "
                "them out with exclude=, or name others with decompress="
            )
        taken.add(new)
