"""Find the earlier stages of a job whose copies a new one replaces.

A step that asks for the same as an earlier stage starts at once. It must not find that staged any
more when something else is at its destination.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from stager.base.errors import StageError
from stager.disk.step_status import all_done
from stager.request.grammar import parse_value
from stager.request.resolve import resolve

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from stager.request.items import StageItem, StageRequest
    from stager.request.policy import Policy

#: The variable that has the directives of the job's own ``--stage`` in its script (stage.h).
_OWN = "SLURM_SPANK_STAGE"


def forgetting_replaced(
    request: StageRequest, rules: Policy, environment: Mapping[str, str]
) -> StageRequest:
    """Return a ``request`` by hand in a job, with the earlier stages that it outdates.

    Without the plugin there are none.
    """
    name = f"{environment['SLURM_JOB_ID']}.{environment.get('SLURM_RESTART_COUNT', '0')}"
    own = own_items(environment, rules)
    gone = outdated(request.items, find_earlier(name, rules), own)
    return replace(request, status_file=name, outdated=gone) if gone else request


def find_earlier(status_file: str, rules: Policy) -> dict[str, tuple[StageItem, ...]]:
    """Return the items of the job's earlier stages, by the text of their directives."""
    earlier: dict[str, tuple[StageItem, ...]] = {}
    for text in all_done(os.getuid(), status_file) if status_file else ():
        with suppress(StageError):
            earlier[text] = resolve(parse_value(text), rules)
    return earlier


def own_items(environment: Mapping[str, str], rules: Policy) -> tuple[StageItem, ...]:
    """Return the items of the job's own ``--stage``, which a script may replace by hand."""
    with suppress(StageError):
        return resolve(parse_value(environment.get(_OWN, "")), rules)
    return ()


def outdated(
    items: Sequence[StageItem],
    earlier: Mapping[str, Sequence[StageItem]],
    apart: Collection[StageItem] = (),
) -> tuple[str, ...]:
    """Return the directives of ``earlier`` stages whose copies these ``items`` replace. Pure.

    To replace one of those ``apart`` does not count.
    """
    new = {item.destination: item for item in items}
    return tuple(
        text
        for text, staged in earlier.items()
        if any(one not in apart and new.get(one.destination, one) != one for one in staged)
    )
