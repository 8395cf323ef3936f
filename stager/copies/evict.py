"""Find the copies that may be evicted, and choose among them.

The least recently used copies go first; those that a running job uses or a user has pinned never.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from stager.base.options import Lifetime
from stager.disk.files import facts_beneath
from stager.disk.jobs import jobs_are_known
from stager.disk.reader import BLOCK
from stager.disk.record import is_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from stager.disk.cache import Cache
    from stager.disk.record import Record


class Held(StrEnum):
    """Why a copy may not be removed, as messages show it."""

    PINNED = "pinned"
    IN_USE = "in use"
    #: Root does not mark the jobs of this node.
    PERHAPS_IN_USE = "perhaps in use"
    WANTED = "needed by this job"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recorded copy, the bytes that its removal frees, and why it may not be removed, if so."""

    cache: Cache
    record: Record
    size: int
    held: Held | None = None

    @property
    def may_go(self) -> bool:
        """Whether the copy may be removed."""
        return self.held is None

    @property
    def destination(self) -> str:
        """The path of the copy."""
        return self.record.destination


def find_candidates(
    cache: Cache, disk: str, is_wanted: Callable[[Record], bool] = lambda _: True
) -> list[Candidate]:
    """Return the recorded copies of ``cache``, on the node whose disk is seen at ``disk``.

    Only those whose record ``is_wanted`` are looked at.
    """
    in_use = cache.in_use()
    # Simulated nodes have no jobs.
    jobs_known = bool(disk) or jobs_are_known()
    return [
        Candidate(
            cache,
            record,
            size_on_disk(cache, f"{disk}{record.destination}", record),
            _why_held(record, in_use, jobs_known=jobs_known),
        )
        for record in filter(is_wanted, cache.records())
    ]


def _why_held(record: Record, in_use: Collection[str], *, jobs_known: bool) -> Held | None:
    if record.pinned:
        return Held.PINNED
    if record.destination in in_use:
        return Held.IN_USE
    return None if jobs_known else Held.PERHAPS_IN_USE


def size_on_disk(cache: Cache, path: str, record: Record) -> int:
    """Return the bytes that removing the copy frees, 0 if it is missing or something else is there.

    It is also 0 if the record names a path outside of the cache root's filesystem.
    """
    try:
        there = facts_beneath(cache.root, path)
    except OSError:
        return 0
    if not is_ours(there, record):
        return 0
    if record.tree:
        return record.tree.allocated
    return there.st_blocks * BLOCK if there.st_nlink == 1 else 0


def choose(candidates: Iterable[Candidate], goal: int) -> list[Candidate]:
    """Return the copies to remove for ``goal`` bytes; all that may go, if those are too few. Pure.

    The least recently used are taken first. The selection is minimal.
    """
    chosen: list[Candidate] = []
    freed = 0
    for one in oldest(candidates):
        if freed >= goal:
            break
        chosen.append(one)
        freed += one.size
    needed: list[Candidate] = []
    for one in reversed(chosen):
        if freed - one.size >= goal:
            freed -= one.size
        else:
            needed.append(one)
    return needed[::-1]


def oldest(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the copies that may be removed, in the order in which they are. Pure."""
    return sorted((one for one in candidates if one.may_go and one.size), key=_order)


def _order(one: Candidate) -> tuple[bool, int, str]:
    # Copies with lifetime=job go first.
    return one.record.lifetime != Lifetime.JOB, one.record.used_at, one.destination


def held_names(held: Iterable[Candidate]) -> str:
    """Return the names of copies that stay, each with the reason; of many, those of the largest."""
    from stager.base.text import listed

    largest = sorted(held, key=lambda one: (-one.size, one.destination))
    return listed([f"{one.destination} ({one.held})" for one in largest])
