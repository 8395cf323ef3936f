"""TODO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stager.base.errors import PolicyRefusal, UsageError
from stager.base.formats import archive_suffix
from stager.base.paths import RECORDS_FOLDER
from stager.request.directive import Directive, merge
from stager.request.items import StageItem

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stager.request.policy import Policy


def resolve(directives: Iterable[Directive], policy: Policy) -> tuple[StageItem, ...]:
    """The items that ``directives`` ask for, each once.

    Raises PolicyRefusal for a destination outside of the site's roots, UsageError for two sources
    with one destination.
    """
    items = tuple(dict.fromkeys(_item(directive, policy) for directive in merge(directives)))
    _check_destinations(items)
    return items


def _check_destinations(items: Sequence[StageItem]) -> None:
    """Raise UsageError for two items that would stand in each other's way."""
    by_destination: dict[str, StageItem] = {}
    for item in items:
        other = by_destination.setdefault(item.destination, item)
        if other is not item:
            raise UsageError(
                f"{item.destination} is asked for twice: from {other.source} "
                f"({other.options}) and from {item.source} ({item.options})"
            )
    for item in items:
        for above in by_destination:
            if item.destination.startswith(f"{above}/"):
                raise UsageError(
                    f"{above} is staged as a whole: {item.destination} cannot lie beneath it"
                )


def _item(directive: Directive, policy: Policy) -> StageItem:
    parts = [part for part in directive.destination.split("/") if part not in ("", ".")]
    destination = "/" + "/".join(parts)
    # A root is a folder, written with a '/' at its end or not.
    known = (*policy.roots, *policy.shared_roots, *policy.allowed)
    if directive.destination.endswith("/") or destination in ("/", *known):
        name = directive.source.rstrip("/").rpartition("/")[2]
        if directive.options.extract:
            name = name[: -len(archive_suffix(name))]
        if name in ("", ".", ".."):
            raise UsageError(f"{directive.source} has no name of its own; name the file at DST")
        destination = f"{destination.rstrip('/')}/{name}"
    source = directive.source.rstrip("/")
    if destination == source:
        raise UsageError(f"{destination} is source and destination at once")
    for inner, outer in ((destination, source), (source, destination)):
        if inner.startswith(f"{outer}/"):
            raise UsageError(f"{inner} lies beneath {outer}; one of them cannot become the other")
    if RECORDS_FOLDER in destination.split("/"):
        raise UsageError(f"{destination}: {RECORDS_FOLDER} holds the records of what is staged")
    root = _folder_above(destination, (*policy.roots, *policy.shared_roots))
    shared = root in policy.shared_roots
    if root is None or not (shared or _folder_above(destination, policy.allowed) is not None):
        raise PolicyRefusal(
            f"{destination} is not beneath a folder that this site stages to; "
            f"choose a destination beneath {' or '.join(policy.allowed)}"
        )
    return StageItem(directive.source, destination, root, directive.options, shared)


def _folder_above(path: str, folders: Iterable[str]) -> str | None:
    """The nearest of the ``folders`` that ``path`` lies beneath."""
    above = [folder for folder in folders if path.startswith(f"{folder}/")]
    return max(above, key=len, default=None)
