"""A user's copies on a node in, room for what is wanted out: the least recently used go first.

What a running job uses, or its user has pinned, never goes.
"""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stager.base.errors import SpaceError, StageError
from stager.base.options import Lifetime
from stager.base.outcome import Evicted
from stager.disk.files import existing_folder_above, opened_beneath
from stager.disk.jobs import jobs_are_known
from stager.disk.locks import Locks
from stager.disk.reader import BLOCK
from stager.disk.record import CopyFacts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from stager.disk.cache import Cache
    from stager.disk.record import Record
    from stager.request.items import Space


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recorded copy: the bytes that its removal would free, and whether it may be removed."""

    record: Record
    size: int
    may_go: bool


def look(cache: Cache, disk: str) -> list[Candidate]:
    """All recorded copies of ``cache``, on the node whose disk is seen at ``disk``."""
    in_use = cache.in_use()
    # Simulated nodes have no jobs.
    known = bool(disk) or jobs_are_known()
    return [
        Candidate(
            record,
            size_on_disk(f"{disk}{record.destination}", record),
            known and not record.pinned and record.destination not in in_use,
        )
        for record in cache.records()
    ]


def size_on_disk(path: str, record: Record) -> int:
    """Bytes that removing the copy frees; 0 where it is not there or not as recorded."""
    try:
        there = os.lstat(path)
    except OSError:
        return 0
    if not is_ours(there, record):
        return 0
    if record.tree:
        return record.tree.allocated
    return there.st_blocks * BLOCK if there.st_nlink == 1 else 0


def is_ours(there: os.stat_result, record: Record) -> bool:
    """Whether what is there is the file that was published, as it was: else it is its user's own.

    An inode's number says little by itself: a filesystem may give it away again at once. So the
    folder of a tree is only thought to be ours, until what is in it was looked at.
    """
    copy = record.copy_facts
    if record.tree:
        known = there.st_ino in (copy.inode, record.tree.before) and there.st_uid == copy.owner
        return known and stat.S_ISDIR(there.st_mode)
    facts = CopyFacts(there.st_size, there.st_mtime_ns, there.st_ino, there.st_uid)
    return facts == copy and stat.S_ISREG(there.st_mode)


def choose(kept: Iterable[Candidate], goal: int) -> list[Candidate]:
    """Those to remove for ``goal`` bytes, least recently used first; all, where that is too few.

    Pure. None of them could be left out.
    """
    chosen: list[Candidate] = []
    freed = 0
    for one in oldest(kept):
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


def oldest(kept: Iterable[Candidate]) -> list[Candidate]:
    """Those that may go, in the order in which they would. Pure."""
    return sorted((one for one in kept if one.may_go and one.size), key=_order)


def _order(one: Candidate) -> tuple[bool, int, str]:
    # What nobody asked to be kept goes first.
    return one.record.lifetime != Lifetime.JOB, one.record.used_at, one.record.destination


def plan_room(
    root: str, need: int, free: int, limit: int, kept: Sequence[Candidate], whole: int = 0
) -> list[Candidate]:
    """What to remove before ``need`` bytes come beneath ``root``, which has ``free``. Pure.

    ``limit`` is on all bytes of the user there, 0 for none. What comes takes ``whole`` bytes in the
    end, where a part of them is there already. Raises SpaceError where it cannot be done.
    """
    used = sum(one.size for one in kept)
    whole = max(need, whole)
    over = used + whole - limit if limit else 0
    chosen = choose(kept, max(need - free, over))
    freed = sum(one.size for one in chosen)
    held = sum(one.size for one in kept if not one.may_go)
    holds = f"; {held} of yours are in use or pinned" if held else ""
    if over > freed:
        raise SpaceError(
            f"{root}: {whole} bytes are needed, where you have {used} of the {limit} that the site "
            f"lets a user have{holds}; ask for less, or unpin some"
        )
    if need > free + freed:
        more = f", {freed} more by eviction" if freed else ""
        raise SpaceError(
            f"{root}: {need} bytes are needed and {free} free{more}, {need - free - freed} too "
            f"few{holds}; make room or ask for nodes with more"
        )
    return chosen


@dataclass(frozen=True, slots=True)
class Need:
    """``need`` bytes on the disk for ``destination``, which lies beneath ``root``; with what of it
    is there already, ``whole`` bytes.
    """

    root: str
    cache: Cache
    destination: str
    need: int
    whole: int = 0


class RoomPlan:
    """Room on one disk of a node for the ``wishes`` that are to be written there.

    Two steps, so that nothing goes on any node where one of them has too little: `plan`, then
    `make`. The ``wanted`` destinations stay; ``disk`` is where the node's files are seen, and
    ``others`` are further caches of the user's on this one.
    """

    def __init__(
        self,
        wishes: Sequence[Need],
        wanted: Collection[str],
        space: Space,
        disk: str,
        others: Collection[Cache] = (),
    ) -> None:
        self._root = wishes[0].root
        self._need = sum(wish.need for wish in wishes)
        self._whole = sum(max(wish.need, wish.whole) for wish in wishes)
        self._limit = space.user_limit
        self._free = free_bytes(_existing(wishes[0].cache), space)
        self._disk = disk
        # Records are read only where it matters: there may be thousands.
        asked = self._limit or self._need > self._free
        caches = {*(wish.cache for wish in wishes), *others} if asked else set()
        replaced = {wish.destination for wish in wishes}
        self._kept = {
            cache: {
                one.record.destination: replace(
                    one, may_go=one.may_go and one.record.destination not in wanted
                )
                for one in look(cache, disk)
                if one.record.destination not in replaced
            }
            for cache in caches
        }

    def plan(self) -> list[tuple[Cache, Candidate]]:
        """What has to go. Raises SpaceError."""
        owners = {id(one): cache for cache, of in self._kept.items() for one in of.values()}
        kept = [one for of in self._kept.values() for one in of.values()]
        chosen = plan_room(self._root, self._need, self._free, self._limit, kept, self._whole)
        return [(owners[id(one)], one) for one in chosen]

    def make(self, locks: Mapping[Cache, Locks], node: str) -> list[Evicted]:
        """Remove what has to go; what is in use by now is passed over. Raises SpaceError."""
        gone: list[Evicted] = []
        while chosen := self.plan():
            for cache, one in chosen:
                destination = one.record.destination
                if self._remove(cache, locks.get(cache), destination):
                    del self._kept[cache][destination]
                    self._free += one.size
                    gone.append(Evicted(node, destination, one.size))
                else:
                    self._kept[cache][destination] = replace(one, may_go=False)
        return gone

    def _remove(self, cache: Cache, locks: Locks | None, destination: str) -> bool:
        try:
            with ExitStack() as stack:
                locks = locks or stack.enter_context(closing(Locks(cache)))
                return remove(cache, locks, self._disk, destination) is not None
        except (OSError, StageError):
            # What its user made impossible to remove is no reason to give up: others may do.
            return False


def rooms(
    wishes: Sequence[Need],
    wanted: Collection[str],
    space: Space,
    disk: str,
    others: Iterable[Cache] = (),
) -> list[RoomPlan]:
    """One Room for each disk that the ``wishes`` are on; ``others`` are all caches of the user."""
    by_disk: dict[int, list[Need]] = {}
    for wish in wishes:
        by_disk.setdefault(_disk_of(wish.cache), []).append(wish)
    caches: dict[int, set[Cache]] = {}
    for cache in others:
        caches.setdefault(_disk_of(cache), set()).add(cache)
    return [
        RoomPlan(together, wanted, space, disk, caches.get(number, ()))
        for number, together in by_disk.items()
    ]


def _disk_of(cache: Cache) -> int:
    return os.stat(_existing(cache)).st_dev


def _existing(cache: Cache) -> str:
    # A cache that is only planned for has no folder yet.
    return existing_folder_above(f"{cache.folder}/")


def free_bytes(path: str, space: Space) -> int:
    """Bytes that may be written on the disk of ``path``, which lets the site's share stay free."""
    room = os.statvfs(path)
    share = max(space.keep_free, int(room.f_blocks * room.f_frsize * space.keep_free_percent / 100))
    return max(0, room.f_bavail * room.f_frsize - share)


def _is_our_tree(cache: Cache, record: Record, path: str) -> bool:
    from stager.tree.table import is_our_tree  # what a file need not import

    return is_our_tree(cache, record, path)


def remove(cache: Cache, locks: Locks, disk: str, destination: str) -> Record | None:
    """Remove a copy and its record; None where it is in use or wanted again by now.

    A file that its user put in the copy's place stays. Raises OSError, DestinationError.
    """
    if not locks.take(destination):
        return None
    try:
        record = cache.load(destination)
        if record is None or record.pinned or destination in cache.in_use():
            return None
        # First the copy: a record without one is no harm, a file without a record is never found.
        above, name = os.path.split(f"{disk}{destination}")
        with suppress(FileNotFoundError), opened_beneath(cache.root, above) as folder:
            if is_ours(os.lstat(name, dir_fd=folder), record):
                if not record.tree:
                    os.unlink(name, dir_fd=folder)
                elif _is_our_tree(cache, record, f"{above}/{name}"):
                    cache.discard(name, folder)
        cache.forget(destination)
        return record
    finally:
        locks.release(destination)
