"""Find the symbolic links of a folder that lead out of it: what is there is not in the copy."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stager.base.errors import SourceError
from stager.tree.listing import Kind, text_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from stager.tree.listing import Listing


def count_leaving(folder: str, listing: Listing, known: Container[bytes] = ()) -> int:
    """Return the number of links that lead out of the ``folder``, without the ``known``. Pure.

    Raise SourceError if nothing else is in it: the copy would have no file.
    """
    places = list(_places(listing, known))
    if places and len(places) == len(listing) - listing.kinds.count(Kind.FOLDER):
        where = text_of(places[0])
        raise SourceError(
            f"{folder} has no files: all links in it lead out of it, as to {where}; take the files "
            "that they lead to by links=follow"
        )
    return len(places)


def _places(listing: Listing, known: Container[bytes]) -> Iterator[bytes]:
    """Yield where links lead that leave the folder: relative to it, or absolute."""
    for row in listing.rows(Kind.LINK):
        target = listing.targets[row]
        if (target.startswith(b"/") or b".." in target) and listing.paths[row] not in known:
            place = os.path.normpath(os.path.join(os.path.dirname(listing.paths[row]), target))
            if place.startswith(b"/") or place.split(b"/")[0] == b"..":
                yield place
