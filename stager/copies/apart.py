"""Find out whether source and destination are, or contain, each other by other names.

A link, a bind mount or ``..`` in the source's path may lead to the destination. Then the copy would
take the place of the only original, and be evicted as any other copy.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stager.base.errors import DestinationError
from stager.base.progress import Kind, doing
from stager.disk.files import existing_folder_above

if TYPE_CHECKING:
    from typing import TypeAlias

    #: Device and inode.
    _Place: TypeAlias = tuple[int, int]


def check_apart(source: str, path: str) -> None:
    """Raise DestinationError if the destination at ``path`` and the ``source`` are not apart.

    Only the node that reads the source can tell. Whether the source can be read is not checked.
    """
    try:
        with doing(Kind.READ, source):
            from_source = _upwards(os.path.realpath(source))
        from_destination = _upwards(os.path.realpath(existing_folder_above(path)))
    except OSError:
        return  # who reads the source, or looks at the destination, says why
    (original, real), *_ = from_source.items()
    there = _place_of(os.lstat(path)) if os.path.lexists(path) else None
    if there == original:
        relation = "is the source itself"
    elif original in from_destination:
        relation = f"is in the source, {real}"
    elif there in from_source:
        relation = f"contains the source, {real}"
    else:
        return
    leads = "" if source == real else f", to which {source} leads"
    raise DestinationError(f"{path} {relation}{leads}; choose another destination")


def _upwards(path: str) -> dict[_Place, str]:
    """Return ``path``, which has no links, and all folders above it. Raise OSError."""
    places = {_place_of(os.stat(path)): path}
    while path != "/":
        path = os.path.dirname(path)
        places.setdefault(_place_of(os.stat(path)), path)
    return places


def _place_of(there: os.stat_result) -> _Place:
    return there.st_dev, there.st_ino
