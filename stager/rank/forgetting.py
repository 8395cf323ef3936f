"""Forget earlier stages of a job whose copies a stage by hand replaces.

Steps that ask for the same as an earlier stage start at once. They must look at their copies again
when something else may be there.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from stager.base.errors import StageError
from stager.disk.step_status import all_done, forget
from stager.request.grammar import parse_value
from stager.request.items import copy_name
from stager.request.resolve import plain_path

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from stager.rank.agree import Context


def forget_replaced(context: Context) -> None:
    """Note on this node that those stages are not current any more. Raise LaunchError, SpaceError.

    The job's own ``--stage``, with which a step's list begins, counts as staged still: what the
    job's script puts there is meant to stay.
    """
    request, uid = context.request, context.node.uid
    places = {
        place
        for item in request.items
        for place in (item.destination, f"{item.destination}/{item.name}")
    }
    own = own_list(request.directives, all_done(uid, request.status_file))
    forget(uid, request.status_file, partial(left_of, own=own, places=places))


def own_list(known: str, done: Iterable[str]) -> str:
    """Return the job's own ``--stage`` list. Pure.

    ``known`` is that list, or within an srun that of the step, which begins with it. ``done`` are
    the lists of the job's stages.

    >>> own_list("/a:/nvme/a;/b:/nvme/b", ["/a:/nvme/a", "/a:/nvme/a;/c:/nvme/c"])
    '/a:/nvme/a'
    >>> own_list("/a:/nvme/a", [])
    '/a:/nvme/a'
    """
    return min((one for one in (known, *done) if one and _begins(known, one)), key=len, default="")


def left_of(text: str, own: str, places: AbstractSet[str]) -> str:
    """Return which directives of a stage's ``text`` are still staged if these places changed. Pure.

    >>> left_of("/a:/nvme/a;/b:/nvme/b", "/a:/nvme/a", {"/nvme/b"})
    '/a:/nvme/a'
    >>> left_of("/b:/nvme//b", "", {"/nvme/b"})
    ''
    >>> left_of("/b:/nvme/", "", {"/nvme/a", "/nvme/a/a"})
    '/b:/nvme/'
    """
    if text == own or places.isdisjoint(_places_of(text)):
        return text
    return own if own and _begins(text, own) else ""


def _begins(text: str, first: str) -> bool:
    """Return whether a list of directives begins with the ``first`` ones."""
    return text == first or text.startswith(f"{first};")


def _places_of(text: str) -> set[str]:
    """Return the paths to which directives may have staged; the source's name may be added."""
    found: set[str] = set()
    with suppress(StageError):
        for one in parse_value(text):
            place = plain_path(one.destination)
            found |= {place, f"{place.rstrip('/')}/{copy_name(one.source, one.options)}"}
    return found
