"""Forget earlier stages of a job whose copies a stage by hand replaces.

Steps that ask for the same as an earlier stage start at once. They must look at their copies again
when something else may be there.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base.errors import StageError
from stager.disk.step_status import forget
from stager.request.grammar import parse_value

if TYPE_CHECKING:
    from collections.abc import Collection

    from stager.rank.agree import Context


def forget_replaced(context: Context) -> None:
    """Note on this node that those stages are not current any more. Raise LaunchError, SpaceError.

    The job's own ``--stage``, with which a step's list begins, counts as staged still: what the
    job's script puts there is meant to stay.
    """
    request = context.request
    own, destinations = request.directives, {item.destination for item in request.items}

    def left(text: str) -> str:
        if text == own or not names_one(text, destinations):
            return text
        return own if own and text.startswith(f"{own};") else ""

    forget(context.node.uid, request.status_file, left)


def names_one(text: str, destinations: Collection[str]) -> bool:
    """Return whether the directives of ``text`` may have staged to one of these. Pure.

    What is written may be the folder to which the source's name was added.

    >>> names_one("/shared/a:/nvme/;/shared/b:/nvme/b", {"/nvme/a"})
    True
    >>> names_one("/shared/b:/nvme/b", {"/nvme/a"})
    False
    """
    with suppress(StageError):
        written = {one.destination.rstrip("/") for one in parse_value(text)}
        return any(one in written or os.path.dirname(one) in written for one in destinations)
    return False
