"""Carry out root's command about one user's copies, in a process of that user.

Root touches no path that a user named. What the process answers is judged as what comes from
another node; one that does not answer in time is left alone.

Carry out what a user asks for on one node's copies: verify, evict, pin or unpin.

`stagectl` calls this on its own node; on other nodes `stagectl node` does, for a command that came
from `launch.nodes`.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import time
import zlib
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from shlex import quote
from typing import TYPE_CHECKING, Annotated

from stager.base.child import answer_as
from stager.base.codec import codec_of
from stager.base.errors import (
    BusyError,
    IntegrityError,
    LaunchError,
    PolicyRefusal,
    SpaceError,
    StageError,
    UsageError,
)
from stager.base.text import bytes_text
from stager.base.users import name_or_uid
from stager.fs.files import as_stage_error
from stager.node.as_user import groups_of
from stager.store import removal, space
from stager.store.cache import RECORD_LIMIT, Cache, look_for_cache
from stager.store.locks import Locks
from stager.store.removal import finish
from stager.store.verify import as_mended, delete_command, fault_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from stager.store.record import Record
    from stager.store.space import Candidate

#: Seconds for all that one user's copies need; the removal of a million files may take a minute.
_LIMIT = 120.0
#: The most bytes of an answer.
_LONGEST = 32 << 20


def carry_out_for(user: int, command: Command, disk: str, limit: float = _LIMIT) -> NodeResult:
    """Carry out ``command`` as the ``user`` on the node whose disk is seen at ``disk``.

    Raise PolicyRefusal unless this process is root's.
    """
    check_may_ask(user)

    def act(output: int) -> None:
        result = carry_out(replace(command, job=0), disk)
        with open(output, "wb") as file:
            file.write(zlib.compress(json.dumps(codec_of(NodeResult).to_data(result)).encode()))

    try:
        # To unpin a copy, its record is written.
        told = answer_as(user, *groups_of(user), act, limit, file_size=RECORD_LIMIT)
        answer = zlib.decompressobj().decompress(told, _LONGEST)
        return codec_of(NodeResult).from_data(json.loads(answer))
    except (zlib.error, ValueError, RecursionError):
        text = (
            f"what a process of uid {user} answered cannot be read, and some of it may be done; "
            "stagectl status --user shows what is left; name single copies, then try again"
        )
    except OSError:
        text = (
            f"a process that looks at the copies of uid {user} as this user did not answer within "
            f"{limit:g} s; look for a filesystem of that user that does not answer, or for a "
            "process of that user that stops it; then try again"
        )
    return NodeResult(refused=[Refused(LaunchError.code, text)])


def check_may_ask(user: int) -> None:
    """Raise PolicyRefusal if this process may not ask about the copies of ``user``."""
    if os.getuid() not in (0, user):
        raise PolicyRefusal(
            f"only root may use the copies of another user (uid {user}); run this as root, or "
            "leave out --user"
        )


class Action(StrEnum):
    """What a user asks for."""

    STATUS = "status"
    VERIFY = "verify"
    EVICT = "evict"
    PIN = "pin"
    UNPIN = "unpin"
    #: For `stagectl doctor`.
    FACTS = "facts"
    #: For `stagectl prepare`.
    PREPARE = "prepare"


#: Why what is at the path of a copy stays, though its record goes.
_FORGOTTEN = "not the copy, which is gone"


@dataclass(frozen=True, slots=True)
class Command:
    """An action, the site's roots, and the copies that the action is for.

    Without ``destinations`` it is for all copies, or for those that ``older`` or ``to_free`` mean.
    For `Action.FACTS`, ``destinations`` are the site's.
    """

    action: Action
    roots: tuple[str, ...]
    shared_roots: tuple[str, ...] = ()
    destinations: tuple[str, ...] = ()
    #: Evict what was not used for so many seconds.
    older: int = 0
    #: Evict until so many bytes are free on each disk.
    to_free: int = 0
    dry_run: bool = False
    #: Show the status of all users' copies.
    everyone: bool = False
    #: The uid of the account that stages beneath ``shared_roots``.
    shared_owner: int = 0
    #: The job from which the command comes, 0 outside of jobs: it may evict what it alone uses.
    job: int = 0
    #: The uid of the user whose copies root asks about; None for those of the user who asks.
    #: Messages then name this user in the commands that they propose to root.
    user: int | None = None
    #: The path of stage.toml, for `Action.FACTS` and `Action.PREPARE`.
    config: str = ""
    #: For `Action.FACTS`: what Slurm's configuration names, and whether jobs run there.
    plugstack: str = ""
    computes: bool = True
    #: Likewise: the scripts that Slurm runs before and after a job, the file for metrics, and what
    #: ranks are given.
    scripts: tuple[str, ...] = ()
    textfile: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def option(self) -> str:
        """The option behind the name of a command, with a space, if root asks about a user."""
        return "" if self.user is None else f" --user {name_or_uid(self.user)}"

    def to_text(self) -> str:
        """Return the command as one argument that every shell passes on unchanged."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def from_text(cls, text: str) -> Command:
        """Return the command that `to_text` wrote. Raise UsageError."""
        try:
            fields = json.loads(base64.urlsafe_b64decode(text))
            lists = ("roots", "shared_roots", "destinations", "scripts")
            fields |= {name: tuple(fields[name]) for name in lists}
            return cls(**{**fields, "action": Action(fields["action"])})
        except (binascii.Error, ValueError, TypeError, KeyError):
            raise UsageError("only stagectl on another node calls this command") from None


@dataclass(frozen=True, slots=True)
class Done:
    """A copy that the action was done to, and its bytes. One to evict may have been ``gone``, and
    the folder be ``kept`` for what is the user's own in it.
    """

    destination: str
    size: int
    gone: bool = False
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """Why the action could not be done, and the exit code of that."""

    code: Annotated[int, range(1, 10).__contains__]
    message: str
    #: The destination, if the reason is that it is not staged on this node.
    absent: str = ""


@dataclass(frozen=True, slots=True)
class Stays:
    """A copy that was not evicted with others, and why: an `evict.Held`."""

    destination: str
    why: str


@dataclass(frozen=True, slots=True)
class Enough:
    """A disk, named by one of its roots, with as many bytes free as were to be freed."""

    root: str
    free: int


@dataclass(slots=True)
class NodeResult:
    """What one node did; ``stay`` are the copies to evict that had to be kept, ``enough`` the disks
    on which none had to be evicted.
    """

    done: list[Done] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    stay: list[Stays] = field(default_factory=list)
    enough: list[Enough] = field(default_factory=list)


def carry_out(command: Command, disk: str) -> NodeResult:
    """Carry out ``command`` on the node whose disk is seen at ``disk``. Raise nothing."""
    with ExitStack() as stack:
        run = _Run(command, disk, stack)
        with run.refusing():
            if command.destinations:
                run.for_destinations()
            elif command.action is Action.VERIFY:
                run.verify_all()
            elif command.older:
                run.evict_older()
            else:
                run.evict_to_free()
    return run.result


class _AbsentError(UsageError):
    """A destination that has no record on this node."""

    def __init__(self, destination: str, command: Command) -> None:
        whose = "yours" if command.user is None else name_or_uid(command.user)
        super().__init__(
            f"{destination} is no copy of {whose} here; stagectl status{command.option} lists what "
            "is staged"
        )
        self.destination = destination


class _Run:
    """One command on one node: its caches, their locks, and the result so far."""

    def __init__(self, command: Command, disk: str, stack: ExitStack) -> None:
        self._command = command
        self._disk = disk
        self._stack = stack
        self._locks: dict[Cache, Locks] = {}
        self._own, self._of_site = _caches(command, disk)
        self.result = NodeResult()
        if command.action is Action.EVICT:  # what killed stages left takes room, too
            for cache in self._own:
                with suppress(OSError):
                    cache.sweep()

    @contextmanager
    def refusing(self, path: str = "") -> Iterator[None]:
        """Note an error of the block in the result. An OSError without a path is about ``path``."""
        try:
            yield
        except StageError as error:
            absent = error.destination if isinstance(error, _AbsentError) else ""
            self.result.refused.append(Refused(error.code, error.message, absent))
        except OSError as error:
            known = as_stage_error(error, path)
            self.result.refused.append(Refused(known.code, known.message))

    def for_destinations(self) -> None:
        """Do the action for each destination; one that fails does not stop the others."""
        actions = {
            Action.VERIFY: self._verify,
            Action.EVICT: self._evict,
            Action.PIN: self._pin,
            Action.UNPIN: self._pin,
        }
        for destination in self._command.destinations:
            with self.refusing(destination):
                actions[self._command.action](*self._find(destination))

    def verify_all(self) -> None:
        """Verify every copy of this user."""
        for cache in self._own:
            for record in sorted(cache.records(), key=lambda record: record.destination):
                with self.refusing(record.destination):
                    self._verify(cache, record)

    def evict_older(self) -> None:
        """Evict the copies that were not used for `Command.older` seconds."""
        limit = time.time() - self._command.older
        self._evict_all(
            one
            for cache in self._own
            for one in space.find_candidates(cache, self._disk)
            if one.record.used_at < limit
        )

    def evict_to_free(self) -> None:
        """Evict least recently used copies until `Command.to_free` bytes of each disk are free."""
        by_disk: dict[int, list[Cache]] = {}
        for cache in self._own:
            by_disk.setdefault(os.stat(cache.folder).st_dev, []).append(cache)
        for caches in by_disk.values():
            with self.refusing():
                self._free_disk(caches)

    def _find(self, destination: str) -> tuple[Cache, Record]:
        for cache in (*self._own, *self._of_site):
            if record := cache.load(destination):
                action = self._command.action
                if cache in self._of_site and action is not Action.VERIFY:
                    by_root = f", or root by --user {name_or_uid(cache.uid)}"
                    raise PolicyRefusal(
                        f"{destination} was staged for all users: only the account that staged it "
                        f"(uid {cache.uid}) may {action} it"
                        + (by_root if action is Action.EVICT else "")
                    )
                return cache, record
        raise _AbsentError(destination, self._command)

    def _locks_of(self, cache: Cache) -> Locks:
        if cache not in self._locks:
            self._locks[cache] = self._stack.enter_context(closing(Locks(cache)))
        return self._locks[cache]

    @contextmanager
    def _locked(self, cache: Cache, destination: str) -> Iterator[None]:
        """Hold the lock of ``destination`` for the block. Raise BusyError if another job has it."""
        locks = self._locks_of(cache)
        if not locks.take(destination):
            raise self._busy(cache, destination)
        try:
            yield
        finally:
            locks.release(destination)

    def _busy(self, cache: Cache, destination: str) -> BusyError:
        holder = self._locks_of(cache).holder(destination)
        return BusyError(f"{destination} is being staged or evicted by {holder}; try again later")

    def _verify(self, cache: Cache, record: Record) -> None:
        fault = fault_of(cache, record, self._disk)
        if fault.text and cache in self._own:
            # A job may have replaced the copy meanwhile; it cannot while this holds the lock.
            with self._locked(cache, record.destination):
                if cache.is_updating(record.destination):
                    finish(cache, f"{self._disk}{record.destination}", record.destination)
                now = cache.load(record.destination)
                if now is None:
                    return  # evicted meanwhile
                record = now
                fault = fault_of(cache, record, self._disk)
                with suppress(StageError):  # the fault is reported even if the disk is full
                    if fault.is_damage:
                        cache.save(record.as_damaged())
        if fault.text:
            raise IntegrityError(f"{record.destination}: {fault.text}")
        if record.tree and record.is_damaged and cache in self._own:
            with suppress(StageError), self._locked(cache, record.destination):
                if cache.load(record.destination) == record:
                    cache.save(as_mended(cache, record))  # by its user
        self._note(record.destination, record.copy_facts.size)

    def _evict(self, cache: Cache, record: Record) -> None:
        destination = record.destination
        if record.pinned:
            unpin = f"stagectl unpin{self._command.option} {quote(destination)}"
            raise PolicyRefusal(f"{destination} is pinned; unpin it first: {unpin}")
        jobs = cache.jobs_using(destination)
        own = self._command.job
        if jobs := [job for job in jobs if job != own]:
            used_by = f"job{'s' * (len(jobs) > 1)} {','.join(map(str, jobs))}"
            ended = "they have ended" if len(jobs) > 1 else "it has ended"
            raise BusyError(f"{destination} is used by {used_by}; evict it when {ended}")
        path = f"{self._disk}{destination}"
        size, gone = space.size_on_disk(cache, path, record), not os.path.lexists(path)
        is_copy = removal.is_copy(record, path)
        if self._command.dry_run and not is_copy:
            raise IntegrityError(
                f"{destination} was changed or replaced, so it would not be deleted"
            )
        if not self._remove(cache, record, own):
            raise self._busy(cache, destination)
        if not is_copy:
            text = (
                f"{destination} was changed or replaced, so it was not deleted, and slurm-stage no "
                "longer manages it"
            )
            if self._command.user is None:  # root deletes nothing of what a user put there
                command = delete_command(destination)
                text = f"{text}; if you do not need it, delete it there: {command}"
            raise IntegrityError(text)
        self._note_evicted(destination, size, gone=gone)

    def _free_disk(self, caches: list[Cache]) -> None:
        """Evict copies of ``caches``, which are on one disk.

        Raise SpaceError, and evict nothing there, if that cannot free enough.
        """
        disk = os.statvfs(caches[0].folder)
        free = disk.f_bavail * disk.f_frsize
        lacking = self._command.to_free - free
        root = caches[0].root.removeprefix(self._disk) or "/"
        if lacking <= 0:
            self.result.enough.append(Enough(root, free))
            return
        candidates = [one for cache in caches for one in space.find_candidates(cache, self._disk)]
        chosen = space.choose(candidates, lacking)
        freed = sum(one.size for one in chosen)
        if freed < lacking:
            held = [one for one in candidates if one.held]
            wanted = _wanted_text(self._command.to_free)
            whose = "your" if self._command.user is None else "this user's"
            raise SpaceError(
                f"{root}: cannot free {wanted}: {bytes_text(free)} are free, and evicting "
                f"{whose} copies would free only {bytes_text(freed)} more"
                f"{_held_text(held)}; nothing was evicted there"
            )
        self._evict_all(chosen)

    def _evict_all(self, candidates: Iterable[Candidate]) -> None:
        """Evict those that may go; one that fails does not stop the others."""
        for one in sorted(candidates, key=lambda one: one.destination):
            with self.refusing(one.destination):
                self._evict_or_keep(one)

    def _evict_or_keep(self, one: Candidate) -> None:
        why: str = one.held or space.Held.IN_USE
        path = f"{self._disk}{one.destination}"
        gone = not os.path.lexists(path)
        is_copy = not one.may_go or removal.is_copy(one.record, path)
        is_done = one.may_go and self._remove(one.cache, one.record)
        if is_done and is_copy:
            self._note_evicted(one.destination, one.size, gone=gone)
        else:
            why = _FORGOTTEN if is_done else why
            self.result.stay.append(Stays(one.destination, str(why)))

    def _remove(self, cache: Cache, record: Record, job: int = 0) -> bool:
        """Remove a copy, unless this is a dry run.

        Return False if it is pinned, being staged, or in use by another than ``job``.
        """
        if self._command.dry_run:
            return True
        locks = self._locks_of(cache)
        return removal.remove(cache, locks, self._disk, record.destination, job) is not None

    def _pin(self, cache: Cache, record: Record) -> None:
        destination = record.destination
        with self._locked(cache, destination):
            now = cache.load(destination)
            if now is None:
                raise _AbsentError(destination, self._command)
            cache.save(replace(now, pinned=self._command.action is Action.PIN))
        self._note(destination, record.copy_facts.size)

    def _note(self, destination: str, size: int) -> None:
        self.result.done.append(Done(destination, size))

    def _note_evicted(self, destination: str, size: int, *, gone: bool) -> None:
        kept = not self._command.dry_run and os.path.lexists(f"{self._disk}{destination}")
        self.result.done.append(Done(destination, size, gone, kept))


def _wanted_text(size: int) -> str:
    """Return a size that a user wrote, if in whole GB also in that unit: all else is in GiB."""
    gigabytes, rest = divmod(size, 1000**3)
    text = bytes_text(size)
    return text if rest or not gigabytes else f"{gigabytes} GB ({text})"


def _held_text(held: Sequence[Candidate]) -> str:
    if not held:
        return ""
    return f" ({space.held_names(held)} {'stays' if len(held) == 1 else 'stay'})"


def _caches(command: Command, disk: str) -> tuple[list[Cache], list[Cache]]:
    """Return the caches of this user, and the shared ones that this user may only read."""
    uid, owner = os.getuid(), command.shared_owner
    own: list[Cache] = []
    of_site: list[Cache] = []
    for root in command.roots:
        with suppress(StageError):  # this user never staged anything there
            own.append(look_for_cache(f"{disk}{root}", uid, disk=disk))
    for root in command.shared_roots:
        with suppress(StageError):
            shared = look_for_cache(f"{disk}{root}", owner, shared=True, disk=disk)
            (own if uid == owner else of_site).append(shared)
    return own, of_site
