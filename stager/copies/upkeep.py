"""What a user does to the copies of one node: an Order in, what was done to each copy out.

`stagectl` carries it out on its own node, or `gather` brings it to others.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import stat
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from stager.base.errors import (
    BusyError,
    IntegrityError,
    PolicyRefusal,
    SpaceError,
    StageError,
    UsageError,
)
from stager.base.text import bytes_text
from stager.copies import evict
from stager.copies.survey_tree import copy_digest, damaged
from stager.disk.cache import Cache, look_for_cache
from stager.disk.files import as_stage_error, digest_of
from stager.disk.jobs import jobs_using
from stager.disk.locks import Locks

if TYPE_CHECKING:
    from stager.copies.evict import Candidate
    from stager.disk.record import Record


class Action(StrEnum):
    """What is asked for."""

    STATUS = "status"
    VERIFY = "verify"
    EVICT = "evict"
    PIN = "pin"
    UNPIN = "unpin"


@dataclass(frozen=True, slots=True)
class Command:
    """A action, and the folders of the site that it is about.

    ``destinations`` are those meant; none for all, or for those that ``older`` or ``to_free`` mean:
    not used for so many seconds; so that so many bytes are free beneath each root. ``everyone``
    asks a status for the copies of all users.
    """

    action: Action
    roots: tuple[str, ...]
    shared_roots: tuple[str, ...] = ()
    destinations: tuple[str, ...] = ()
    older: int = 0
    to_free: int = 0
    dry_run: bool = False
    everyone: bool = False

    def to_text(self) -> str:
        """The order as one word, which no shell on its way takes for anything else."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def from_text(cls, text: str) -> Command:
        """The order that `to_text` wrote. Raises UsageError."""
        try:
            fields = json.loads(base64.urlsafe_b64decode(text))
            lists = ("roots", "shared_roots", "destinations")
            fields |= {name: tuple(fields[name]) for name in lists}
            return cls(**{**fields, "action": Action(fields["action"])})
        except (binascii.Error, ValueError, TypeError, KeyError):
            raise UsageError("this is for stagectl on another node to call") from None


@dataclass(frozen=True, slots=True)
class Done:
    """A copy with which the action was done, and its bytes."""

    destination: str
    size: int


@dataclass(frozen=True, slots=True)
class Refused:
    """What could not be done, and the exit code that this has."""

    code: int
    message: str
    #: The destination that is not staged here, where that is all there is to say.
    absent: str = ""


@dataclass(slots=True)
class NodeResult:
    """What one node did; ``stay`` counts the copies that are old enough to go and may not."""

    done: list[Done] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    stay: int = 0

    def to_wire(self) -> dict[str, Any]:
        """A JSON object, which `from_wire` reads back."""
        return asdict(self)

    @classmethod
    def from_wire(cls, said: dict[str, Any]) -> NodeResult:
        """What `to_wire` made."""
        result = cls(
            [Done(**one) for one in said["done"]],
            [Refused(**one) for one in said["refused"]],
            said["stay"],
        )
        if not (
            all(type(one.destination) is str and type(one.size) is int for one in result.done)
            and all(one.code in range(1, 10) for one in result.refused)
            and all(
                type(text) is str for one in result.refused for text in (one.message, one.absent)
            )
            and type(result.stay) is int
        ):
            raise ValueError("fields of other kinds")
        return result


def carry_out(order: Command, disk: str) -> NodeResult:
    """Do what is asked on the node whose disk is seen at ``disk``; nothing is raised."""
    with ExitStack() as stack:
        keeper = _Keeper(order, disk, stack)
        try:
            if order.action is Action.VERIFY and not order.destinations:
                keeper.verify_all()
            elif order.destinations:
                keeper.each()
            elif order.older:
                keeper.evict_older()
            else:
                keeper.evict_to_free()
        except StageError as error:
            keeper.refuse(error)
        except OSError as error:
            keeper.refuse(as_stage_error(error))
    return keeper.result


class _Keeper:
    """One order on one node: its caches, their locks, and what came of it so far."""

    def __init__(self, order: Command, disk: str, stack: ExitStack) -> None:
        self._order = order
        self._disk = disk
        self._stack = stack
        self._locks: dict[Cache, Locks] = {}
        self._ours, self._of_root = _caches(order, disk)
        self.result = NodeResult()

    def refuse(self, error: StageError) -> None:
        """Note what could not be done."""
        self.result.refused.append(Refused(error.code, error.message))

    def each(self) -> None:
        """Do the action with each destination; one that cannot be is no hindrance to the others."""
        actions = {
            Action.VERIFY: self._verify,
            Action.EVICT: self._evict,
            Action.PIN: self._pin,
            Action.UNPIN: self._pin,
        }
        for destination in self._order.destinations:
            try:
                cache, record = self._find(destination)
                actions[self._order.action](cache, record)
            except _AbsentError as error:
                self.result.refused.append(Refused(error.code, error.message, destination))
            except StageError as error:
                self.refuse(error)
            except OSError as error:
                self.refuse(as_stage_error(error, destination))

    def _find(self, destination: str) -> tuple[Cache, Record]:
        for cache in (*self._ours, *self._of_root):
            record = cache.load(destination)
            if record:
                if cache in self._of_root and self._order.action is not Action.VERIFY:
                    action = self._order.action
                    raise PolicyRefusal(
                        f"{destination} is root's, for all: only root may {action} it"
                    )
                return cache, record
        raise _AbsentError(f"{destination} is not staged here")

    def _locks_of(self, cache: Cache) -> Locks:
        if cache not in self._locks:
            self._locks[cache] = self._stack.enter_context(closing(Locks(cache)))
        return self._locks[cache]

    def _is_held(self, cache: Cache, destination: str) -> BusyError:
        holder = self._locks_of(cache).holder(destination)
        return BusyError(f"{destination} is being staged by {holder}; try again when that is over")

    # verify

    def verify_all(self) -> None:
        """Verify every copy of this user's."""
        for cache in self._ours:
            for record in sorted(cache.records(), key=lambda record: record.destination):
                try:
                    self._verify(cache, record)
                except StageError as error:
                    self.refuse(error)

    def _verify(self, cache: Cache, record: Record) -> None:
        fault = _fault_of(cache, record, self._disk)
        if fault and cache in self._ours:
            # A job may have replaced it meanwhile: under its lock nobody does.
            if not self._locks_of(cache).take(record.destination):
                raise self._is_held(cache, record.destination)
            try:
                now = cache.load(record.destination)
                if now is None:
                    return  # evicted
                record = now
                fault = _fault_of(cache, record, self._disk)
            finally:
                self._locks_of(cache).release(record.destination)
        if fault:
            raise IntegrityError(f"{record.destination}: {fault}")
        self.result.done.append(Done(record.destination, record.copy_facts.size))

    # evict

    def _evict(self, cache: Cache, record: Record) -> None:
        destination = record.destination
        if record.pinned:
            raise PolicyRefusal(f"{destination} is pinned; stagectl unpin it first")
        jobs = jobs_using(None if cache.shared else cache.uid).get(destination, [])
        if jobs:
            plural = "s" if len(jobs) > 1 else ""
            raise BusyError(
                f"{destination} is used by job{plural} {','.join(map(str, jobs))}; "
                "it may go when that has ended"
            )
        path = f"{self._disk}{destination}"
        size = evict.size_on_disk(path, record)
        if not self._remove(cache, destination):
            raise self._is_held(cache, destination)
        if not self._order.dry_run and os.path.lexists(path):
            raise IntegrityError(
                f"{destination} is not what was staged and stays, its record is gone: remove it "
                "yourself"
            )
        self.result.done.append(Done(destination, size))

    def evict_older(self) -> None:
        """Evict what was not used for so long."""
        limit = time.time() - self._order.older
        kept = [
            (cache, one)
            for cache in self._ours
            for one in evict.look(cache, self._disk)
            if one.record.used_at < limit
        ]
        self._let_go(kept)

    def evict_to_free(self) -> None:
        """Evict the least recently used until so much is free on each disk."""
        by_disk: dict[int, list[Cache]] = {}
        for cache in self._ours:
            by_disk.setdefault(os.stat(cache.folder).st_dev, []).append(cache)
        for caches in by_disk.values():
            try:
                self._free_disk(caches)
            except StageError as error:
                self.refuse(error)

    def _free_disk(self, caches: list[Cache]) -> None:
        room = os.statvfs(caches[0].folder)
        free = room.f_bavail * room.f_frsize
        if free >= self._order.to_free:
            return
        kept = [(cache, one) for cache in caches for one in evict.look(cache, self._disk)]
        chosen = evict.choose([one for _, one in kept], self._order.to_free - free)
        freed = sum(one.size for one in chosen)
        if free + freed < self._order.to_free:
            root = caches[0].root.removeprefix(self._disk)
            held = sum(1 for _, one in kept if not one.may_go)
            verb = "is" if held == 1 else "are"
            hold = f"; {held} {verb} pinned or in use" if held else ""
            raise SpaceError(
                f"{root or '/'}: {bytes_text(self._order.to_free)} cannot be free: "
                f"{bytes_text(free)} are, and {bytes_text(freed)} more if all your copies go "
                f"that may{hold}"
            )
        to_go = {one.record.destination for one in chosen}
        self._let_go([pair for pair in kept if pair[1].record.destination in to_go])

    def _let_go(self, kept: list[tuple[Cache, Candidate]]) -> None:
        for cache, one in sorted(kept, key=lambda pair: pair[1].record.destination):
            if one.may_go and self._remove(cache, one.record.destination):
                self.result.done.append(Done(one.record.destination, one.size))
            else:
                self.result.stay += 1

    def _remove(self, cache: Cache, destination: str) -> bool:
        if self._order.dry_run:
            return True
        return evict.remove(cache, self._locks_of(cache), self._disk, destination) is not None

    # pin

    def _pin(self, cache: Cache, record: Record) -> None:
        destination = record.destination
        if not self._locks_of(cache).take(destination):
            raise self._is_held(cache, destination)
        try:
            now = cache.load(destination)
            if now is None:
                raise _AbsentError(f"{destination} is not staged here")
            cache.save(replace(now, pinned=self._order.action is Action.PIN))
        finally:
            self._locks_of(cache).release(destination)
        self.result.done.append(Done(destination, record.copy_facts.size))


class _AbsentError(UsageError):
    """A destination that has no record on this node."""


def _caches(order: Command, disk: str) -> tuple[list[Cache], list[Cache]]:
    """Those of this user, and those of root's that all may use but only root may change."""
    uid = os.getuid()
    ours: list[Cache] = []
    of_root: list[Cache] = []
    for root in order.roots:
        with suppress(StageError):  # nothing was ever staged here for this user
            ours.append(look_for_cache(f"{disk}{root}", uid))
    for root in order.shared_roots:
        with suppress(StageError):
            shared = look_for_cache(f"{disk}{root}", uid, shared=True)
            (of_root if uid else ours).append(shared)
    return ours, of_root


#: What to do about a copy that is not what it was.
_REMEDY = "evict it and stage it again"
#: Damaged files of a tree that are named.
_MOST_NAMED = 5


def _fault_of(cache: Cache, record: Record, disk: str) -> str:
    """What is wrong with the copy's bytes, and what to do; nothing if they are as recorded."""
    path = f"{disk}{record.destination}"
    try:
        there = os.lstat(path)
        if record.tree:
            fault = _fault_of_tree(path, cache, record)
            return f"{fault}; {_REMEDY}" if fault else ""
        if not stat.S_ISREG(there.st_mode) or there.st_uid != record.copy_facts.owner:
            return f"something else was put in its place; {_REMEDY}"
        _forget_pages(path)
        if digest_of(path) == record.digest:
            return ""
    except FileNotFoundError:
        return "its copy is gone; stage it again"
    except OSError as error:
        return f"it cannot be read: {error.strerror}; {_REMEDY}, or use another node"
    copy = record.copy_facts
    if (there.st_size, there.st_mtime_ns) != (copy.size, copy.mtime_ns):
        return f"it was written to since it was staged; {_REMEDY}"
    return f"it is damaged: its bytes differ from its digest; {_REMEDY}"


def _fault_of_tree(path: str, cache: Cache, record: Record) -> str:
    wrong = damaged(path, cache, record)
    if wrong is None:
        return "the table of its files is gone"
    if wrong:
        some = ", ".join(wrong[:_MOST_NAMED]) + (", …" if len(wrong) > _MOST_NAMED else "")
        are = "file is" if len(wrong) == 1 else "files are"
        return f"{len(wrong)} {are} not what was staged: {some}"
    if record.tree and copy_digest(path) != record.tree.copy_digest:
        return "names in it were added, removed or changed since it was staged"
    return ""


def _forget_pages(path: str) -> None:
    """Have what is read next come from the disk: that is what may have failed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
