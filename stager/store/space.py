"""Make room on a node's disk for new copies: plan which old ones go, then remove them.

The least recently used copies go first; those that a running job uses or a user has pinned never.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from stager.base import linux
from stager.base.errors import LARGER_DISKS, SpaceError, StageError
from stager.base.memory import room_in_memory
from stager.base.options import Lifetime
from stager.base.outcome import Evicted
from stager.base.rules import amount_of
from stager.base.text import bytes_text, listed
from stager.fs.files import existing_folder_above, facts_beneath, stage_errors
from stager.fs.reader import BLOCK
from stager.store.entries import is_entry, shown
from stager.store.leases import jobs_are_known
from stager.store.locks import Locks
from stager.store.record import is_ours
from stager.store.removal import remove

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from stager.request.items import Space
    from stager.store.cache import Cache
    from stager.store.record import Record


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

    @property
    def shown(self) -> str:
        """What a user knows the copy by: that of the store has a path that nobody named."""
        return shown(self.record)


def find_candidates(
    cache: Cache, is_wanted: Callable[[Record], bool] = lambda _: True
) -> list[Candidate]:
    """Return the recorded copies of ``cache``; only those whose record ``is_wanted``."""
    in_use = cache.jobs()
    # Simulated nodes have no jobs.
    jobs_known = bool(cache.disk) or jobs_are_known()
    return [
        Candidate(
            cache,
            record,
            size_on_disk(cache, record),
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


def size_on_disk(cache: Cache, record: Record) -> int:
    """Return the bytes that removing the copy frees, 0 if it is missing or something else is there.

    It is also 0 if the record names a path outside of the cache root's filesystem.
    """
    try:
        there = facts_beneath(cache.root, cache.path_of(record.destination))
    except OSError:
        return 0
    if not is_ours(there, record):
        return 0
    if record.tree:
        return record.tree.allocated
    # Of an entry, a job may have another name, but not for long.
    is_alone = there.st_nlink == 1 or is_entry(record.destination)
    return there.st_blocks * BLOCK if is_alone else 0


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
    largest = sorted(held, key=lambda one: (-one.size, one.destination))
    return listed([f"{one.shown} ({one.held})" for one in largest])


#: Bytes that a stage needs beside its copies, which may be of those that the site keeps free: a few
#: blocks for records, for the folders above the copies, and for the filesystem's own notes.
_BESIDE = 64 << 10


class FreeSpace(NamedTuple):
    """Bytes that may be written to a disk, that are free there, that the site keeps free, that the
    whole disk has, and that files take there.

    The first is negative where less is free than the site keeps. The last two are 0 if they are not
    known. What is neither free nor taken is kept for root.
    """

    usable: int
    there: int
    reserve: int = 0
    size: int = 0
    taken: int = 0
    #: Whether the user's quota ends it: then ``there`` and ``size`` are those of the quota.
    is_quota: bool = False

    def plus(self, size: int) -> FreeSpace:
        """Return the free space after ``size`` bytes were freed."""
        usable, there, taken = self.usable + size, self.there + size, self.taken - size
        return self._replace(usable=usable, there=there, taken=taken)


class Replaced(NamedTuple):
    """An old copy at the ``destination`` of a new one: its bytes, and those that are free for the
    new one if the old one is deleted first.
    """

    destination: str
    size: int
    gain: int
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be put on one disk, beneath ``root``, and what is there.

    The new copies take ``need`` bytes, and what is written beside them ``beside``, if anything is
    needed. The disk has ``free`` space, and the user's copies may take ``limit`` bytes there, 0 for
    no limit. Towards that limit the new copies count with ``whole`` bytes, which include what is
    there already, but nothing in folders of the user's own. It is that of the store if the
    candidates are its entries, ``in_store``. The ``replaced`` ones are no candidates.
    """

    root: str
    need: int
    free: FreeSpace
    limit: int
    candidates: Sequence[Candidate]
    whole: int = 0
    beside: int = 0
    is_estimate: bool = False
    replaced: Sequence[Replaced] = ()
    in_store: bool = False

    @property
    def _used(self) -> int:
        """The bytes of the user's other copies."""
        return sum(one.size for one in self.candidates)

    @property
    def _held(self) -> list[Candidate]:
        return [one for one in self.candidates if one.held and one.size]

    def choose(self) -> list[Candidate]:
        """Return the copies to remove so that all fits. Raise SpaceError if it cannot."""
        over = self._used + self.whole - self.limit if self.limit else 0
        need = self.need + self.beside if self.need else 0
        lacking = need - self.free.usable if need else 0  # what is empty needs none of the share
        chosen = choose(self.candidates, max(lacking, over))
        freed = sum(one.size for one in chosen)
        if over > freed:
            raise self._over_limit()
        if lacking > freed:
            raise self._no_room(need, freed, lacking - freed)
        return chosen

    def needed(self, size: int) -> str:
        """Return that ``size`` bytes are needed."""
        if self.is_estimate:
            about = "(an estimate: the size of the copy is not known yet)"
            return f"about {bytes_text(size)} needed {about}"
        return f"{bytes_text(size)} needed"

    def _over_limit(self) -> SpaceError:
        """Return the error for new copies that are beyond the limit."""
        what = "the size of the node's store" if self.in_store else "your limit on this disk"
        return SpaceError(
            f"{self.root}: not enough room: {self.needed(self.whole)}; {what} is "
            f"{bytes_text(self.limit)}, and your other copies take {bytes_text(self._used)}"
            f"{_held_text(self._held)}; stage less{_release(self._held, begin=', or ')}"
        )

    def _no_room(self, need: int, freed: int, missing: int) -> SpaceError:
        """Return the error if ``missing`` bytes of the ``need`` are missing although copies that
        take ``freed`` would go.
        """
        more = f", {bytes_text(freed)} can be freed by removing your old copies" if freed else ""
        return SpaceError(
            f"{self.root}: not enough room: {self.needed(need)}, {_free_text(self.free)}{more}, "
            f"{bytes_text(missing)} still missing{_held_text(self._held)}; "
            f"{self._remedy(need, missing)}"
        )

    def _remedy(self, need: int, missing: int) -> str:
        """Return what can help if ``missing`` bytes are missing on a disk for the ``need``."""
        free, size = self.free, bytes_text(self.free.size)
        old = _evict_replaced(missing, self.replaced)
        release = old + _release(self._held, end=", ")
        if free.is_quota:
            return f"{release}delete other files of yours there, or ask the administrator for more"
        if 0 < free.size <= free.reserve:
            return f"tell the administrator: the disk has only {size}, so keep_free must be less"
        if 0 < free.size < free.reserve + need:
            return f"the whole disk has only {size}: {LARGER_DISKS}, or stage less"
        others = free.taken - self._used - sum(one.size for one in self.replaced)
        if others > 0 and not old and missing > sum(one.size for one in self._held):
            return (
                f"{release}delete other files of yours there, use other nodes, or ask the "
                f"administrator to make room: {bytes_text(others)} of the disk's {size} are taken "
                "by other files than your copies"
            )
        return f"{release}delete other files of yours there, or {LARGER_DISKS}"


def _free_text(free: FreeSpace) -> str:
    if free.is_quota:
        return f"{bytes_text(free.there)} left of your quota of {bytes_text(free.size)}"
    kept = f", of which this site keeps {bytes_text(free.reserve)} free" if free.reserve else ""
    if free.reserve > free.there:
        kept = f", but this site keeps {bytes_text(free.reserve)} free"
    return f"{bytes_text(free.there)} free{kept}"


def _held_text(held: Sequence[Candidate]) -> str:
    """Return which copies stay, and why."""
    if not held:
        return ""
    size = bytes_text(sum(one.size for one in held))
    return f"; {size} of your copies stay: {held_names(held)}"


def _release(held: Iterable[Candidate], begin: str = "", end: str = "") -> str:
    """Return what lets ``held`` copies go, between ``begin`` and ``end``; else nothing."""
    reasons = {one.held for one in held}
    remedies = []
    if Held.PINNED in reasons:
        remedies.append("unpin copies (stagectl unpin DST)")
    if Held.PERHAPS_IN_USE in reasons:
        remedies.append("delete copies that no job of yours uses (stagectl evict DST)")
    if Held.IN_USE in reasons:
        remedies.append("wait until the jobs that use copies have ended")
    return f"{begin}{', '.join(remedies)}{end}" if remedies else ""


def _evict_replaced(missing: int, replaced: Sequence[Replaced]) -> str:
    """Return how to delete as many old copies as it takes; nothing if all are too few."""
    from shlex import join

    chosen: list[Replaced] = []
    for one in sorted(replaced, key=lambda one: -one.gain):
        if missing > 0 and one.gain > 0:
            chosen.append(one)
            missing -= one.gain
    if missing > 0:
        return ""
    commands = [join(["stagectl", "evict", *(one.destination for one in chosen)])]
    if pinned := [one.destination for one in chosen if one.is_pinned]:
        commands.insert(0, join(["stagectl", "unpin", *pinned]))
    return f"delete the old copies that are to be replaced ({', then '.join(commands)}), "


@dataclass(frozen=True, slots=True)
class Need:
    """The bytes that are needed on a disk for ``destination``, which lies beneath ``root``.

    The copy takes ``whole`` bytes if a part of it is there already. Of what is unpacked, ``need``
    is an estimate.
    """

    root: str
    cache: Cache
    destination: str
    need: int
    whole: int = 0
    is_estimate: bool = False


class RoomPlan:
    """Makes room on one disk of a node for ``needs``.

    First `plan`, then `make`: so no node removes anything if another one has too little room.
    ``wanted`` destinations are kept. ``others`` are the user's further caches on the same disk.
    """

    def __init__(
        self,
        needs: Sequence[Need],
        wanted: Collection[str],
        space: Space,
        others: Collection[Cache] = (),
    ) -> None:
        need = sum(one.need for one in needs)
        #: The roots for which there is to be room.
        self.roots = {one.root for one in needs}
        self._folder = _existing(needs[0].cache)
        free = free_space(self._folder, space)
        limited = [one for one in needs if one.root not in space.private]
        limit = amount_of(space.user_limit, free.size) if limited else 0
        entries = [one for one in needs if is_entry(one.destination)]
        size = amount_of(space.store_size, free.size) if entries else 0
        beside = max(0, _BESIDE - free.reserve)
        # There may be thousands of records, so they are read only if there is too little room.
        short = limit or size or need + beside > free.usable
        caches = {*(one.cache for one in needs), *others} if short else set()
        found = [one for cache in caches for one in find_candidates(cache)]
        needed = {one.destination: one for one in needs}
        self._candidates = {
            (one.cache, one.destination): (
                replace(one, held=Held.WANTED) if one.destination in wanted else one
            )
            for one in found
            if one.destination not in needed
            # What is there for a job alone goes with it, and the job may be at work on it.
            and one.cache.root.removeprefix(one.cache.disk) not in space.of_job
        }
        self._demand = Demand(
            needs[0].root, need, free, limit, (), whole=_whole(limited), beside=beside,
            is_estimate=any(one.is_estimate for one in needs),
            replaced=[
                _replaced_by(needed[one.destination], one)
                for one in found
                if one.destination in needed
            ],
        )  # fmt: skip
        self._store = Demand(
            space.store, 0, free, size, (), whole=_whole(entries),
            is_estimate=any(one.is_estimate for one in entries), in_store=True,
        )  # fmt: skip

    def plan(self) -> list[Candidate]:
        """Return the copies to remove. Raise SpaceError if there is too little room."""
        self._check_memory()
        every = [*self._candidates.values()]
        entries = [one for one in every if is_entry(one.destination)]
        first = replace(self._store, candidates=entries).choose()
        gone = {one.destination for one in first}
        others = [one for one in every if one.destination not in gone]
        free = self._demand.free.plus(sum(one.size for one in first))
        return first + replace(self._demand, candidates=others, free=free).choose()

    def _check_memory(self) -> None:
        """Raise SpaceError if the copies would take more memory than the job may.

        What others have there counts elsewhere, so its removal would not help.
        """
        demand = self._demand
        left = room_in_memory(self._folder) if demand.need else None
        if left is not None and left < demand.need:
            raise SpaceError(
                f"{demand.root}: this folder is in memory, and there is not enough: "
                f"{demand.needed(demand.need)}, {bytes_text(left)} left of what the job may take "
                "on this node; ask for more by --mem, or stage less"
            )

    def make(self, locks: Mapping[Cache, Locks], node: str) -> Iterator[Evicted]:
        """Remove copies until there is room, and yield each; skip those in use by now.

        Raise SpaceError.
        """
        while chosen := self.plan():
            for one in chosen:
                place = one.cache, one.destination
                if why := self._remove(one, locks.get(one.cache)):
                    self._candidates[place] = replace(one, held=why)
                else:
                    del self._candidates[place]
                    free = self._demand.free.plus(one.size)
                    self._demand = replace(self._demand, free=free)
                    yield Evicted(node, one.shown, one.size)

    def _remove(self, one: Candidate, locks: Locks | None) -> Held | None:
        """Remove a copy, or return why it stays."""
        try:
            with ExitStack() as stack:
                locks = locks or stack.enter_context(closing(Locks(one.cache)))
                gone = remove(one.cache, locks, one.destination)
                return None if gone else Held.IN_USE
        except (OSError, StageError):
            # A copy that its user made impossible to remove: others may be enough.
            return Held.IN_USE


def _whole(needs: Iterable[Need]) -> int:
    return sum(max(one.need, one.whole) for one in needs)


def _replaced_by(need: Need, old: Candidate) -> Replaced:
    # That this job uses it does not count, and whether another one does is told by evict.
    kept = max(0, need.whole - need.need)
    return Replaced(old.shown, old.size, old.size - kept, old.held is Held.PINNED)


def rooms(
    needs: Sequence[Need],
    wanted: Collection[str],
    space: Space,
    others: Iterable[Cache] = (),
) -> list[RoomPlan]:
    """Return a `RoomPlan` for each disk of ``needs``; ``others`` are all caches of the user."""
    by_disk: dict[int, list[Need]] = {}
    for need in needs:
        by_disk.setdefault(disk_of(need.cache), []).append(need)
    caches: dict[int, set[Cache]] = {}
    for cache in others:
        caches.setdefault(disk_of(cache), set()).add(cache)
    return [
        RoomPlan(together, wanted, space, caches.get(number, ()))
        for number, together in by_disk.items()
    ]


def disk_of(cache: Cache) -> int:
    """Return the number of the disk that a cache is on."""
    return os.stat(_existing(cache)).st_dev


def _existing(cache: Cache) -> str:
    # In a dry run the cache may have no folder yet.
    return existing_folder_above(f"{cache.folder}/")


def free_space(path: str, space: Space) -> FreeSpace:
    """Return what may be written to the disk of ``path``: the site's share stays free.

    Where a quota leaves this user less, that is what the removal of his copies adds to.
    """
    room = os.statvfs(path)
    disk = room.f_blocks * room.f_frsize
    share = amount_of(space.keep_free, disk)
    free = room.f_bavail * room.f_frsize
    taken = (room.f_blocks - room.f_bfree) * room.f_frsize
    with suppress(OSError):  # this filesystem has no quotas
        quota = linux.quota_of(os.getuid(), path)
        left = max(0, quota.limit - quota.used) if quota else free
        if quota and left < free - share:
            return FreeSpace(left, left, 0, quota.limit, quota.used, is_quota=True)
    return FreeSpace(free - share, free, share, disk, taken)


def check_room_to_measure(root: str, size: int, space: Space, path: str = "") -> None:
    """Raise SpaceError if a file of ``size`` bytes leaves less free than the site's share.

    ``path`` is the staging folder ``root`` as seen on a simulated node.
    """
    with stage_errors(root):
        free = free_space(path or root, space)
    if size > free.usable:
        raise SpaceError(
            f"{root}: not enough room: {bytes_text(size)} needed, {_free_text(free)}; "
            "measure with a smaller --size, or remove copies (stagectl evict)"
        )
