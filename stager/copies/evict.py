"""Choose copies to evict and remove them, to make room on a node's disk.

The least recently used copies go first; those that a running job uses or a user has pinned never.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from stager.base.errors import DestinationError, SpaceError, StageError
from stager.base.linux import born_at
from stager.base.options import Lifetime
from stager.base.outcome import Evicted
from stager.base.reserve import kept_free
from stager.copies.own import HoldsOwnError, find_own, is_copy
from stager.copies.reading import Reading
from stager.disk.files import (
    TICK,
    existing_folder_above,
    facts_beneath,
    opened_beneath,
    stage_errors,
)
from stager.disk.jobs import jobs_are_known
from stager.disk.locks import Locks
from stager.disk.reader import BLOCK
from stager.disk.record import is_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from stager.disk.cache import Cache
    from stager.disk.record import Record
    from stager.request.items import Space


#: Bytes that are read to tell in an error which copies hold changed files: the job waits for it.
_MOST_READ = 1 << 30
#: What is added to the name of a copy that is looked through, and the characters of it that stay:
#: a name has at most 255 bytes, and a character up to 4.
_ASIDE, _MOST_CHARACTERS = ".before-eviction", 50


class Held(StrEnum):
    """Why a copy may not be removed, as messages show it."""

    PINNED = "pinned"
    IN_USE = "in use"
    #: Root does not mark the jobs of this node.
    PERHAPS_IN_USE = "perhaps in use"
    WANTED = "needed by this job"
    #: See `own`.
    OWN = "holds files of the user's own"


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


class SetAsideError(DestinationError):
    """A copy at ``path`` is at ``aside`` now, with what was written into it meanwhile."""

    def __init__(self, path: str, aside: str) -> None:
        super().__init__(
            f"{path} was to be evicted, but files were written into it meanwhile, and something "
            f"else has its name now; they are in {aside}, with the rest of the copy"
        )


def find_candidates(cache: Cache, disk: str) -> list[Candidate]:
    """Return all recorded copies of ``cache``, on the node whose disk is seen at ``disk``."""
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
        for record in cache.records()
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
    if record.tree:
        return record.tree.allocated if is_copy(cache, record, path, there) else 0
    if not _may_be_removed(record, there):
        return 0
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


def plan_room(
    root: str,
    need: int,
    free: FreeSpace,
    limit: int,
    candidates: Sequence[Candidate],
    whole: int = 0,
    *,
    is_estimate: bool = False,
    replaced: Sequence[Replaced] = (),
) -> list[Candidate]:
    """Return the copies to remove so that ``need`` bytes fit beneath ``root``. Pure.

    The disk has ``free`` space, and the user's copies may take ``limit`` bytes there, 0 for no
    limit. Towards that limit the new copies count with ``whole`` bytes, which include what is there
    already. The ``replaced`` ones are no candidates. Raise SpaceError if there is too little room.
    """
    used = sum(one.size for one in candidates)
    whole = max(need, whole)
    over = used + whole - limit if limit else 0
    lacking = need - free.usable if need else 0  # what is empty needs none of the site's share
    chosen = choose(candidates, max(lacking, over))
    freed = sum(one.size for one in chosen)
    held = [one for one in candidates if one.held and one.size]
    if over > freed:
        raise _over_limit(root, _needed(whole, is_estimate=is_estimate), used, limit, held)
    if lacking > freed:
        needed = _needed(need, is_estimate=is_estimate)
        remedy = _remedy(need, free, lacking - freed, used, held, replaced)
        raise _no_room(root, needed, free, freed, lacking - freed, held, remedy)
    return chosen


def _over_limit(
    root: str, needed: str, used: int, limit: int, held: Sequence[Candidate]
) -> SpaceError:
    """Return the error for what is ``needed`` beyond the ``limit``; ``used`` bytes are taken."""
    from stager.base.text import bytes_text  # not needed where there is room

    release = _release(held, begin=", or ")
    return SpaceError(
        f"{root}: not enough room: {needed}; your limit on this disk is {bytes_text(limit)}, and "
        f"your other copies take {bytes_text(used)}{_held_text(held)}; stage less{release}"
    )


def _no_room(
    root: str,
    needed: str,
    free: FreeSpace,
    freed: int,
    missing: int,
    held: Sequence[Candidate],
    remedy: str,
) -> SpaceError:
    """Return the error for what is ``needed`` on a disk with too little ``free`` space.

    Removing copies frees ``freed`` bytes of it; ``missing`` bytes are still missing.
    """
    from stager.base.text import bytes_text

    more = f", {bytes_text(freed)} can be freed by removing your old copies" if freed else ""
    return SpaceError(
        f"{root}: not enough room: {needed}, {_free_text(free)}{more}, "
        f"{bytes_text(missing)} still missing{_held_text(held)}; {remedy}"
    )


def _free_text(free: FreeSpace) -> str:
    from stager.base.text import bytes_text

    kept = f", of which this site keeps {bytes_text(free.reserve)} free" if free.reserve else ""
    if free.reserve > free.there:
        kept = f", but this site keeps {bytes_text(free.reserve)} free"
    return f"{bytes_text(free.there)} free{kept}"


def _remedy(
    need: int,
    free: FreeSpace,
    missing: int,
    used: int,
    held: Sequence[Candidate],
    replaced: Sequence[Replaced],
) -> str:
    """Return what can help if ``missing`` bytes are missing on a disk for the ``need``.

    The user's copies, with those that are ``held`` and without the ``replaced``, take ``used``
    bytes of it.
    """
    from stager.base.text import bytes_text

    size = bytes_text(free.size)
    if 0 < free.size <= free.reserve:
        return f"tell the administrator: the disk has only {size}, so keep_free must be less"
    if 0 < free.size < free.reserve + need:
        return f"the whole disk has only {size}: ask for nodes with larger disks, or stage less"
    old = _evict_replaced(missing, replaced)
    release = old + _release(held, end=", ")
    others = free.taken - used - sum(one.size for one in replaced)
    if others > 0 and not old and missing > sum(one.size for one in held):
        return (
            f"{release}delete other files of yours there, use other nodes, or ask the "
            f"administrator to make room: {bytes_text(others)} of the disk's {size} are taken by "
            "other files than your copies"
        )
    return f"{release}delete other files of yours there, or ask for nodes with larger disks"


def _needed(size: int, *, is_estimate: bool) -> str:
    from stager.base.text import bytes_text

    if is_estimate:
        return (
            f"about {bytes_text(size)} needed (an estimate: the size of the copy is not known yet)"
        )
    return f"{bytes_text(size)} needed"


def _held_text(held: Sequence[Candidate]) -> str:
    """Return which copies stay, and why."""
    from stager.base.text import bytes_text

    if not held:
        return ""
    size = bytes_text(sum(one.size for one in held))
    return f"; {size} of your copies stay: {held_names(held)}"


def held_names(held: Iterable[Candidate]) -> str:
    """Return the names of copies that stay, each with the reason; of many, those of the largest."""
    from stager.base.text import listed

    largest = sorted(held, key=lambda one: (-one.size, one.destination))
    return listed([f"{one.destination} ({one.held})" for one in largest])


def _release(held: Iterable[Candidate], begin: str = "", end: str = "") -> str:
    """Return what lets ``held`` copies go, between ``begin`` and ``end``; else nothing."""
    reasons = {one.held for one in held}
    remedies = []
    if Held.PINNED in reasons:
        remedies.append("unpin copies (stagectl unpin DST)")
    if Held.PERHAPS_IN_USE in reasons:
        remedies.append("delete copies that no job of yours uses (stagectl evict DST)")
    if Held.OWN in reasons:
        remedies.append(
            "move your files out of those copies, or delete these with your files (stagectl evict "
            "--force DST)"
        )
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
    ``wanted`` destinations are kept. ``disk`` is where the node's files are seen. ``others`` are
    the user's further caches on the same disk.
    """

    def __init__(
        self,
        needs: Sequence[Need],
        wanted: Collection[str],
        space: Space,
        disk: str,
        others: Collection[Cache] = (),
    ) -> None:
        self._root = needs[0].root
        self._need = sum(one.need for one in needs)
        self._whole = sum(max(one.need, one.whole) for one in needs)
        self._is_estimate = any(one.is_estimate for one in needs)
        self._limit = space.user_limit
        self._free = free_space(_existing(needs[0].cache), space)
        self._disk = disk
        # There may be thousands of records, so they are read only if there is too little room.
        short = self._limit or self._need > self._free.usable
        caches = {*(one.cache for one in needs), *others} if short else set()
        found = [one for cache in caches for one in find_candidates(cache, disk)]
        needed = {one.destination: one for one in needs}
        self._replaced = [
            _replaced_by(needed[one.destination], one) for one in found if one.destination in needed
        ]
        self._looked_into: set[tuple[Cache, str]] = set()
        self._reading = Reading()
        self._candidates = {
            (one.cache, one.destination): (
                replace(one, held=Held.WANTED) if one.destination in wanted else one
            )
            for one in found
            if one.destination not in needed
        }

    def plan(self) -> list[Candidate]:
        """Return the copies to remove. Raise SpaceError if there is too little room.

        Only those are looked into for a user's own files that would be removed. If there is too
        little room, the others are, too, as far as that is quick, so that the error counts no copy
        that stays.
        """
        while True:
            try:
                chosen = self._choose()
            except SpaceError:
                if not self._hold_own(oldest(self._candidates.values()), Reading(_MOST_READ)):
                    raise
            else:
                if not self._hold_own(chosen, self._reading):
                    return chosen

    def _hold_own(self, copies: Iterable[Candidate], reading: Reading) -> bool:
        """Hold those ``copies`` that hold a user's own files. Return whether there are any."""
        holders = [one for one in copies if self._holds_own(one, reading)]
        for one in holders:
            self._hold(one, Held.OWN)
        return bool(holders)

    def _holds_own(self, one: Candidate, reading: Reading) -> bool:
        key = one.cache, one.destination
        if key not in self._looked_into:
            self._looked_into.add(key)
            return holds_own(one, self._disk, reading)
        return False

    def _hold(self, one: Candidate, why: Held) -> None:
        self._candidates[one.cache, one.destination] = replace(one, held=why)

    def _choose(self) -> list[Candidate]:
        return plan_room(
            self._root,
            need=self._need,
            free=self._free,
            limit=self._limit,
            candidates=list(self._candidates.values()),
            whole=self._whole,
            is_estimate=self._is_estimate,
            replaced=self._replaced,
        )

    def make(self, locks: Mapping[Cache, Locks], node: str) -> Iterator[Evicted]:
        """Remove copies until there is room, and yield each; skip those in use by now.

        Raise SpaceError.
        """
        while chosen := self.plan():
            for one in chosen:
                if why := self._remove(one, locks.get(one.cache)):
                    self._hold(one, why)
                else:
                    del self._candidates[one.cache, one.destination]
                    self._free = self._free.plus(one.size)
                    yield Evicted(node, one.destination, one.size)

    def _remove(self, one: Candidate, locks: Locks | None) -> Held | None:
        """Remove a copy, or return why it stays."""
        try:
            with ExitStack() as stack:
                locks = locks or stack.enter_context(closing(Locks(one.cache)))
                gone = remove(one.cache, locks, self._disk, one.destination, reading=self._reading)
                return None if gone else Held.IN_USE
        except HoldsOwnError:  # since it was looked into
            return Held.OWN
        except SetAsideError:  # nobody else tells the user
            raise
        except (OSError, StageError):
            # A copy that its user made impossible to remove: others may be enough.
            return Held.IN_USE


def _replaced_by(need: Need, old: Candidate) -> Replaced:
    # That this job uses it does not count, and whether another one does is told by evict.
    kept = max(0, need.whole - need.need)
    return Replaced(old.destination, old.size, old.size - kept, old.held is Held.PINNED)


def rooms(
    needs: Sequence[Need],
    wanted: Collection[str],
    space: Space,
    disk: str,
    others: Iterable[Cache] = (),
) -> list[RoomPlan]:
    """Return a `RoomPlan` for each disk of ``needs``; ``others`` are all caches of the user."""
    by_disk: dict[int, list[Need]] = {}
    for need in needs:
        by_disk.setdefault(_disk_of(need.cache), []).append(need)
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
    # In a dry run the cache may have no folder yet.
    return existing_folder_above(f"{cache.folder}/")


def free_space(path: str, space: Space) -> FreeSpace:
    """Return what may be written to the disk of ``path``: the site's share stays free."""
    room = os.statvfs(path)
    disk = room.f_blocks * room.f_frsize
    share = kept_free(disk, space.keep_free, space.keep_free_percent)
    free = room.f_bavail * room.f_frsize
    taken = (room.f_blocks - room.f_bfree) * room.f_frsize
    return FreeSpace(free - share, free, share, disk, taken)


def check_room_to_measure(root: str, size: int, space: Space, path: str = "") -> None:
    """Raise SpaceError if a file of ``size`` bytes leaves less free than the site's share.

    ``path`` is the staging folder ``root`` as seen on a simulated node.
    """
    with stage_errors(root):
        free = free_space(path or root, space)
    if size > free.usable:
        raise SpaceError(
            f"{root}: not enough room: {_needed(size, is_estimate=False)}, {_free_text(free)}; "
            "measure with a smaller --size, or remove copies (stagectl evict)"
        )


def holds_own(one: Candidate, disk: str, reading: Reading) -> bool:
    """Return whether a user's own files would be deleted with the copy.

    Those that ``reading`` skips do not count.
    """
    path = f"{disk}{one.destination}"
    if not is_removable(one.cache, one.record, path):
        return False
    skipped = reading.skipped
    return len(find_own(one.cache, one.record, path, reading)) > reading.skipped - skipped


def remove(
    cache: Cache,
    locks: Locks,
    disk: str,
    destination: str,
    job: int = 0,
    *,
    force: bool = False,
    reading: Reading | None = None,
) -> Record | None:
    """Remove a copy and its record, which is returned; None if it is in use, pinned or locked.

    That ``job`` uses it does not count. A folder that the user put in the copy's place is kept.
    With ``force``, files of the user's own are deleted with the copy; without, ``reading`` finds
    them. Raise HoldsOwnError, OSError or DestinationError; after SetAsideError the record is gone.
    """
    if not locks.take(destination):
        return None
    try:
        record = cache.load(destination)
        if record is None or record.pinned or set(cache.jobs_using(destination)) - {job}:
            return None
        path = f"{disk}{destination}"
        # The copy goes first: a copy without a record would never be found again.
        if _is_on_disk(cache.root, path) and is_removable(cache, record, path):
            try:
                _remove_copy(cache, record, path, None if force else reading or Reading())
            except SetAsideError:
                cache.forget(destination)
                raise
        cache.forget(destination)
        return record
    finally:
        locks.release(destination)


def is_removable(cache: Cache, record: Record, path: str) -> bool:
    """Return whether what is at ``path`` is the copy, or what a user made of it.

    A folder that the user put there instead is not removable.
    """
    try:
        there = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    if record.tree:
        return is_copy(cache, record, path, there)
    return _may_be_removed(record, there)


def _may_be_removed(record: Record, there: os.stat_result) -> bool:
    if record.tree:
        return is_ours(there, record)
    is_file = stat.S_ISREG(there.st_mode) or stat.S_ISLNK(there.st_mode)
    return is_file and there.st_uid == record.copy_facts.owner


def _is_on_disk(root: str, path: str) -> bool:
    """Whether ``path`` leads to no other filesystem, where there can be no copy."""
    try:
        facts_beneath(root, path)
    except OSError as error:
        return error.errno != errno.EXDEV
    return True


def _remove_copy(cache: Cache, record: Record, path: str, reading: Reading | None) -> None:
    """Remove the copy at ``path``, unless ``reading`` finds files of the user's own in it.

    A folder is looked through before and, for what was written meanwhile, again under another name.
    Raise HoldsOwnError, SetAsideError or OSError.
    """

    def check(place: str) -> None:
        if reading and (files := find_own(cache, record, place, reading)):
            raise HoldsOwnError(record, files)

    begun = time.time_ns() - TICK
    check(path)
    above, name = os.path.split(path)
    with suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(path)  # a file where a folder above was: the copy is gone
        with opened_beneath(cache.root, above) as folder:
            there = os.lstat(name, dir_fd=folder)
            if not _may_be_removed(record, there):
                return
            if record.tree and reading:
                _remove_folder(cache, path, folder, begun, check)
            elif record.tree:
                cache.discard(name, folder)
            else:
                if there.st_ctime_ns >= begun:
                    check(path)
                os.unlink(name, dir_fd=folder)


def _remove_folder(
    cache: Cache, path: str, folder: int, begun: int, check: Callable[[str], object]
) -> None:
    """Remove the copy at ``path``, in the descriptor ``folder``, which passed a check at ``begun``.

    It is checked again under another name if it was written into since, in nanoseconds since 1970.
    What is written later still, by a program in that folder, is moved to ``path``. Raise what
    ``check`` raises, SetAsideError or OSError.
    """
    from stager.tree.late import Before, late, remove_but_late, was_touched  # not needed for a file

    above, name = os.path.split(path)
    checked: dict[int, int] = {}  # when the file with an inode was made

    def check_late(place: str) -> None:
        for file in late(place, Before(begun)):
            with suppress(FileNotFoundError):
                checked[os.lstat(f"{place}/{file}").st_ino] = born_at(f"{place}/{file}")
        if checked or was_touched(place, begun):
            check(place)

    def remove(place: str) -> None:
        try:
            remove_but_late(place, f"/proc/self/fd/{folder}/{name}", Before(begun, checked))
        except OSError:
            os.rename(place, aside, dst_dir_fd=folder)
            raise SetAsideError(path, f"{above}/{aside}") from None

    aside = _moved_aside(path, folder, check_late)
    cache.discard(aside, folder, remove)


def _moved_aside(path: str, folder: int, check: Callable[[str], object]) -> str:
    """Give the copy at ``path``, in the descriptor ``folder``, another name for the ``check``.

    Return that name. It is in the same folder, where nothing is removed if this process dies. What
    ``check`` raises, by the new path, is raised when the copy has its old name again. Raise
    SetAsideError if that was taken, OSError if the copy cannot be renamed.
    """
    above, name = os.path.split(path)
    aside = _free_name(f"{name[:_MOST_CHARACTERS]}{_ASIDE}", folder)
    os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
    try:
        check(f"{above}/{aside}")
    except BaseException:
        try:
            os.rename(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            raise SetAsideError(path, f"{above}/{aside}") from None
        raise
    return aside


def _free_name(name: str, folder: int) -> str:
    free, number = name, 1
    with suppress(FileNotFoundError):
        while os.lstat(free, dir_fd=folder):
            free, number = f"{name}-{number}", number + 1
    return free
