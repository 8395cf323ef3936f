"""Find which earlier stages of a job are outdated: their copies may have been replaced.

A step that asks for the same as an earlier stage starts at once. It must look at its copies again
when something else may be there.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from stager.base.errors import StageError
from stager.disk.step_status import forget
from stager.request.grammar import parse_value, split_value
from stager.request.names import Names
from stager.request.resolve import place_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    from stager.rank.agree import Context
    from stager.request.items import StageRequest


def forget_replaced(context: Context) -> None:
    """Note on this node what a stage by hand outdates. Raise LaunchError, SpaceError."""
    request = context.request
    forget(context.node.uid, request.status_file, still_staged(request))


def still_staged(request: StageRequest) -> Callable[[str], str]:
    """Return what tells which directives of an earlier stage the ``request`` does not outdate."""
    places = {item.destination for item in request.items}
    names = Names.elsewhere(request.letters, request.variables)
    return partial(left_of, own=request.own, places=places, names=names)


def left_of(text: str, own: str, places: AbstractSet[str], names: Names) -> str:
    """Return the directives of ``text`` that are still staged when these places changed. Pure.

    The job's ``own`` ones, with which the list of each step begins, always are: what the job's
    script puts in their place is meant to stay.

    >>> of_job = Names.elsewhere({"j": "17"}, {})
    >>> own = "/a:/nvme/a"
    >>> left_of(f"{own};/b:/nvme/b;/c:/nvme/%j", own, {"/nvme/a", "/nvme/b"}, of_job)
    '/a:/nvme/a;/c:/nvme/%j'
    >>> left_of("/b:/nvme//%j", "", {"/nvme/17"}, of_job)
    ''
    >>> left_of("/b:/nvme/", "", {"/nvme/a", "/nvme/a/a"}, of_job)
    '/b:/nvme/'
    >>> left_of("/b:/nvme/", "", {"/nvme/b"}, of_job)
    ''
    """
    if text == own:
        return text
    first = own if own and text.startswith(f"{own};") else ""
    rest = text.removeprefix(f"{first};") if first else text
    with suppress(StageError):
        parts = zip(split_value(rest), parse_value(rest, names), strict=True)
        kept = [part for part, one in parts if place_of(one) not in places]
        return ";".join(part for part in (first, *kept) if part)
    return text
