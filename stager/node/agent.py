"""Carry out what a user asks one node for: the commands of `stagectl`, and what the node answers.

`stagectl` calls `answer` on its own node; on other nodes `stagectl node` does, for a command that
came from `launch.nodes`. A command of root's about one user's copies is carried out in a process of
that user, since root touches no path that a user named. What this process answers is judged as what
comes from another node; one that does not answer in time is left alone.
"""

from __future__ import annotations

import base64
import json
import os
import time
import zlib
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

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
from stager.base.shared_note import SharedNote
from stager.base.text import bytes_text
from stager.base.users import name_or_uid
from stager.fs.files import as_stage_error
from stager.node.as_user import groups_of
from stager.node.shared_status import shared_room
from stager.store import removal, space
from stager.store.cache import RECORD_LIMIT, Cache, caches_in
from stager.store.entries import shown
from stager.store.locks import Locks
from stager.store.removal import finish
from stager.store.states import NodeStatus, copies_of, node_status
from stager.store.verify import as_mended, delete_command, fault_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from stager.node.facts import NodeFacts
    from stager.node.user_folders import NodePrepared
    from stager.store.record import Record
    from stager.store.space import Candidate

#: Seconds for all that one user's copies need; the removal of a million files may take a minute.
_LIMIT = 120.0
#: The most bytes of an answer.
_LONGEST = 32 << 20
#: Why what is at the path of a copy stays, though its record goes.
_FORGOTTEN = "not the copy, which is gone"


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


@dataclass(frozen=True, slots=True)
class Where:
    """The site's roots, and whose copies beneath them a command is about."""

    roots: tuple[str, ...]
    shared_roots: tuple[str, ...] = ()
    #: The uid of the account that stages beneath ``shared_roots``.
    shared_owner: int = 0
    #: The uid of the user whose copies root asks about; None for those of the user who asks.
    #: Messages then name this user in the commands that they propose to root.
    user: int | None = None

    @property
    def option(self) -> str:
        """The option behind the name of a command, with a space, if root asks about a user."""
        return "" if self.user is None else f" --user {name_or_uid(self.user)}"


@dataclass(frozen=True, slots=True)
class Status(Where):
    """Tell what is staged; for root, with ``everyone`` that of all users."""

    everyone: bool = False
    #: The job whose filesystem of its disks is told of, 0 for none.
    job: int = 0

    def carry_out(self, disk: str) -> NodeStatus:
        """Return what the node holds. Raise PolicyRefusal."""
        if self.user is not None:
            check_may_ask(self.user)
        note = SharedNote.read(self.job) if self.job and not disk else None
        return node_status(
            disk, self.roots, self.shared_roots, self.shared_owner,
            everyone=self.everyone, user=self.user,
            shared=shared_room(note) if note else None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class OfCopies(Where):
    """Do something with the copies at ``destinations``, or of sources that the store has."""

    destinations: tuple[str, ...] = ()
    #: What nobody can guess, by which each cache that several nodes see is left to the first.
    turn: str = ""

    #: The name of the command of `stagectl`.
    verb: ClassVar[str]

    def carry_out(self, disk: str) -> NodeResult:
        """Return what was done on the node whose disk is seen at ``disk``. Raise PolicyRefusal."""
        if self.user is not None:
            return carry_out_for(self.user, self, disk)
        return carry_out(self, disk)

    def do_all(self, node: _Node) -> None:
        """Do it with each copy; one that fails does not stop the others."""
        for name in self.destinations:
            with node.refusing(name):
                for cache, record in node.find(name):
                    with node.refusing(name):
                        self.do(node, cache, record)

    def do(self, node: _Node, cache: Cache, record: Record) -> None:
        """Do it with one copy. Raise StageError or OSError."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Verify(OfCopies):
    """Compare copies with their checksums; without ``destinations``, all of this user."""

    verb = "verify"

    def do_all(self, node: _Node) -> None:
        """Verify each copy."""
        if self.destinations:
            OfCopies.do_all(self, node)
            return
        for cache in node.own:
            for record in sorted(cache.records(), key=lambda record: record.destination):
                with node.refusing(shown(record)):
                    self.do(node, cache, record)

    def do(self, node: _Node, cache: Cache, record: Record) -> None:
        """Verify one copy, and note in its record whether it is damaged."""
        fault = fault_of(cache, record)
        if fault.text and cache in node.own:
            # A job may have replaced the copy meanwhile; it cannot while this holds the lock.
            with node.locked(cache, record.destination):
                if cache.is_updating(record.destination):
                    finish(cache, record.destination)
                now = cache.load(record.destination)
                if now is None:
                    return  # evicted meanwhile
                record = now
                fault = fault_of(cache, record)
                with suppress(StageError):  # the fault is reported even if the disk is full
                    if fault.is_damage:
                        cache.save(record.as_damaged())
        if fault.text:
            raise IntegrityError(f"{shown(record)}: {fault.text}")
        if record.tree and record.is_damaged and cache in node.own:
            with suppress(StageError), node.locked(cache, record.destination):
                if cache.load(record.destination) == record:
                    cache.save(as_mended(cache, record))  # by its user
        node.result.done.append(Done(shown(record), record.copy_facts.size))


@dataclass(frozen=True, slots=True)
class Pin(OfCopies):
    """Protect copies from eviction."""

    verb = "pin"

    def do(self, node: _Node, cache: Cache, record: Record) -> None:
        """Note it in the record."""
        with node.locked(cache, record.destination):
            now = cache.load(record.destination)
            if now is None:
                raise _AbsentError(shown(record), self)
            cache.save(replace(now, pinned=self.verb == Pin.verb))
        node.result.done.append(Done(shown(record), record.copy_facts.size))


@dataclass(frozen=True, slots=True)
class Unpin(Pin):
    """Protect copies from eviction no longer."""

    verb = "unpin"


@dataclass(frozen=True, slots=True)
class Evict(OfCopies):
    """Delete copies: those at ``destinations``, or those that ``older`` or ``to_free`` mean."""

    #: What was not used for so many seconds.
    older: int = 0
    #: The least recently used, until so many bytes are free on each disk.
    to_free: int = 0
    dry_run: bool = False
    #: The job from which the command comes, 0 outside of jobs: it may evict what it alone uses.
    job: int = 0

    verb = "evict"

    def do_all(self, node: _Node) -> None:
        """Evict what is meant, after what killed stages left, which takes room, too."""
        for cache in node.own:
            with suppress(OSError):
                cache.sweep()
        if self.destinations:
            OfCopies.do_all(self, node)
        elif self.older:
            limit = time.time() - self.older
            found = (one for cache in node.own for one in space.find_candidates(cache))
            self._evict_all(node, (one for one in found if one.record.used_at < limit))
        else:
            by_disk: dict[int, list[Cache]] = {}
            for cache in node.own:
                by_disk.setdefault(os.stat(cache.folder).st_dev, []).append(cache)
            for caches in by_disk.values():
                with node.refusing():
                    self._free_disk(node, caches)

    def do(self, node: _Node, cache: Cache, record: Record) -> None:
        """Evict one copy."""
        destination, name = record.destination, shown(record)
        if record.pinned:
            unpin = f"stagectl unpin{self.option} {quote(name)}"
            raise PolicyRefusal(f"{name} is pinned; unpin it first: {unpin}")
        jobs = cache.jobs().get(destination, [])
        own = self.job
        if jobs := [job for job in jobs if job != own]:
            used_by = f"job{'s' * (len(jobs) > 1)} {','.join(map(str, jobs))}"
            ended = "they have ended" if len(jobs) > 1 else "it has ended"
            raise BusyError(f"{name} is used by {used_by}; evict it when {ended}")
        path = cache.path_of(destination)
        size, gone = space.size_on_disk(cache, record), not os.path.lexists(path)
        is_copy = removal.is_copy(cache, record)
        if self.dry_run and not is_copy:
            raise IntegrityError(
                f"{destination} was changed or replaced, so it would not be deleted"
            )
        if not self._remove(node, cache, destination, own):
            raise node.busy(cache, destination)
        if not is_copy:
            text = (
                f"{destination} was changed or replaced, so it was not deleted, and slurm-stage no "
                "longer manages it"
            )
            if self.user is None:  # root deletes nothing of what a user put there
                command = delete_command(destination)
                text = f"{text}; if you do not need it, delete it there: {command}"
            raise IntegrityError(text)
        self._note(node, cache, record, size, gone=gone)

    def _free_disk(self, node: _Node, caches: list[Cache]) -> None:
        """Evict copies of ``caches``, which are on one disk.

        Raise SpaceError, and evict nothing there, if that cannot free enough.
        """
        disk = os.statvfs(caches[0].folder)
        free = disk.f_bavail * disk.f_frsize
        lacking = self.to_free - free
        root = caches[0].root.removeprefix(caches[0].disk) or "/"
        if lacking <= 0:
            node.result.enough.append(Enough(root, free))
            return
        candidates = [one for cache in caches for one in space.find_candidates(cache)]
        chosen = space.choose(candidates, lacking)
        freed = sum(one.size for one in chosen)
        if freed < lacking:
            held = [one for one in candidates if one.held]
            wanted = _wanted_text(self.to_free)
            whose = "your" if self.user is None else "this user's"
            raise SpaceError(
                f"{root}: cannot free {wanted}: {bytes_text(free)} are free, and evicting "
                f"{whose} copies would free only {bytes_text(freed)} more"
                f"{_held_text(held)}; nothing was evicted there"
            )
        self._evict_all(node, chosen)

    def _evict_all(self, node: _Node, candidates: Iterable[Candidate]) -> None:
        """Evict those that may go; one that fails does not stop the others."""
        for one in sorted(candidates, key=lambda one: one.destination):
            with node.refusing(shown(one.record)):
                self._evict_or_keep(node, one)

    def _evict_or_keep(self, node: _Node, one: Candidate) -> None:
        why: str = one.held or space.Held.IN_USE
        path = one.cache.path_of(one.destination)
        gone = not os.path.lexists(path)
        is_copy = not one.may_go or removal.is_copy(one.cache, one.record)
        is_done = one.may_go and self._remove(node, one.cache, one.destination)
        if is_done and is_copy:
            self._note(node, one.cache, one.record, one.size, gone=gone)
        else:
            why = _FORGOTTEN if is_done else why
            node.result.stay.append(Stays(shown(one.record), str(why)))

    def _remove(self, node: _Node, cache: Cache, destination: str, job: int = 0) -> bool:
        """Remove a copy, unless this is a dry run.

        Return False if it is pinned, being staged, or in use by another than ``job``.
        """
        if self.dry_run:
            return True
        locks = node.locks(cache)
        return removal.remove(cache, locks, destination, job) is not None

    def _note(self, node: _Node, cache: Cache, record: Record, size: int, *, gone: bool) -> None:
        kept = not self.dry_run and os.path.lexists(cache.path_of(record.destination))
        node.result.done.append(Done(shown(record), size, gone, kept))


@dataclass(frozen=True, slots=True)
class Facts:
    """Gather the facts of the machine, for `stagectl doctor`; see `facts.node_facts`."""

    roots: tuple[str, ...] = ()
    shared_roots: tuple[str, ...] = ()
    destinations: tuple[str, ...] = ()
    #: The path of stage.toml.
    config: str = ""
    #: What Slurm's configuration names, whether jobs run there, and the scripts that Slurm runs
    #: before and after a job.
    plugstack: str = ""
    computes: bool = True
    scripts: tuple[str, ...] = ()
    #: The file for metrics, and what ranks are given.
    textfile: str = ""
    #: The store, and the folders of jobs for which it keeps copies, as patterns outside of a job.
    store: str = ""
    job_roots: tuple[str, ...] = ()
    #: The driver and the folder for filesystems of jobs' disks.
    shared_driver: str = ""
    shared_folder: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def carry_out(self, disk: str) -> NodeFacts:
        """Return the facts."""
        from stager.node.facts import node_facts  # only for stagectl doctor

        return node_facts(self)


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make the folders of records beneath ``roots``; ``config`` is the path of stage.toml."""

    roots: tuple[str, ...]
    config: str

    def carry_out(self, disk: str) -> NodePrepared:
        """Return what was made."""
        from stager.node.user_folders import prepare_node  # only for stagectl prepare

        return prepare_node(self.roots, self.config)


Command = Status | OfCopies | Facts | Prepare
_COMMANDS: dict[str, type[Command]] = {
    kind.__name__: kind for kind in (Status, Verify, Evict, Pin, Unpin, Facts, Prepare)
}


def text_of(command: Command) -> str:
    """Return the command as one argument that every shell passes on unchanged."""
    told = [type(command).__name__, _data(command)]
    return base64.urlsafe_b64encode(json.dumps(told).encode()).decode()


def command_of(text: str) -> Command:
    """Return the command that `text_of` wrote. Raise UsageError."""
    try:
        name, data = json.loads(base64.urlsafe_b64decode(text))
        return codec_of(_COMMANDS[name]).from_data(data)
    except (ValueError, TypeError, KeyError):
        raise UsageError("only stagectl on another node calls this command") from None


def answer(command: Command, disk: str) -> dict[str, Any]:
    """Carry out ``command`` on the node whose disk is seen at ``disk``; return its JSON answer.

    Raise PolicyRefusal.
    """
    return _data(command.carry_out(disk))


def _data(value: object) -> dict[str, Any]:
    data: dict[str, Any] = codec_of(type(value)).to_data(value)
    return data


def carry_out(command: OfCopies, disk: str) -> NodeResult:
    """Carry out ``command`` on the node whose disk is seen at ``disk``. Raise nothing."""
    with ExitStack() as stack:
        node = _Node(command, disk, stack)
        with node.refusing():
            command.do_all(node)
    return node.result


def carry_out_for(user: int, command: OfCopies, disk: str, limit: float = _LIMIT) -> NodeResult:
    """Carry out ``command`` as the ``user`` on the node whose disk is seen at ``disk``.

    Raise PolicyRefusal unless this process is root's.
    """
    check_may_ask(user)

    def act(output: int) -> None:
        result = carry_out(command, disk)
        with open(output, "wb") as file:
            file.write(zlib.compress(codec_of(NodeResult).encode(result)))

    try:
        # To unpin a copy, its record is written.
        told = answer_as(user, *groups_of(user), act, limit, file_size=RECORD_LIMIT)
        answer = zlib.decompressobj().decompress(told, _LONGEST)
        return codec_of(NodeResult).decode(answer)
    except (zlib.error, ValueError):
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


class _AbsentError(UsageError):
    """A destination that has no record on this node."""

    def __init__(self, destination: str, command: Where) -> None:
        whose = "yours" if command.user is None else name_or_uid(command.user)
        super().__init__(
            f"{destination} is no copy of {whose} here; stagectl status{command.option} lists what "
            "is staged"
        )
        self.destination = destination


class _Node:
    """The caches on one node that a command is about, their locks, and the result so far."""

    def __init__(self, command: OfCopies, disk: str, stack: ExitStack) -> None:
        self._command = command
        self._stack = stack
        self._locks: dict[Cache, Locks] = {}
        own, self._of_site = _caches(command, disk)
        self.own = [cache for cache in own if not command.turn or cache.take_turn(command.turn)]
        #: Those that another node sees, too, and does it to.
        self._left = [cache for cache in own if cache not in self.own]
        self.result = NodeResult()

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

    def find(self, name: str) -> list[tuple[Cache, Record]]:
        """Return what `copies_of` does, without what is left to another node.

        Raise UsageError or PolicyRefusal.
        """
        found = copies_of((*self.own, *self._left, *self._of_site), name)
        verb = self._command.verb
        for cache, _ in found:
            if cache in self._of_site and verb != Verify.verb:
                by_root = f", or root by --user {name_or_uid(cache.uid)}"
                raise PolicyRefusal(
                    f"{name} was staged for all users: only the account that staged it "
                    f"(uid {cache.uid}) may {verb} it" + (by_root if verb == Evict.verb else "")
                )
        if not found:
            raise _AbsentError(name, self._command)
        return [one for one in found if one[0] not in self._left]

    def locks(self, cache: Cache) -> Locks:
        """Return the locks of a cache, of which each has one place in a process."""
        if cache not in self._locks:
            self._locks[cache] = self._stack.enter_context(closing(Locks(cache)))
        return self._locks[cache]

    @contextmanager
    def locked(self, cache: Cache, destination: str) -> Iterator[None]:
        """Hold the lock of ``destination`` for the block. Raise BusyError if another job has it."""
        locks = self.locks(cache)
        if not locks.take(destination):
            raise self.busy(cache, destination)
        try:
            yield
        finally:
            locks.release(destination)

    def busy(self, cache: Cache, destination: str) -> BusyError:
        """Return the error for a copy that another process works on."""
        holder, record = self.locks(cache).holder(destination), cache.load(destination)
        name = shown(record) if record else destination
        return BusyError(f"{name} is being staged or evicted by {holder}; try again later")


def _wanted_text(size: int) -> str:
    """Return a size that a user wrote, if in whole GB also in that unit: all else is in GiB."""
    gigabytes, rest = divmod(size, 1000**3)
    text = bytes_text(size)
    return text if rest or not gigabytes else f"{gigabytes} GB ({text})"


def _held_text(held: Sequence[Candidate]) -> str:
    if not held:
        return ""
    return f" ({space.held_names(held)} {'stays' if len(held) == 1 else 'stay'})"


def _caches(command: Where, disk: str) -> tuple[list[Cache], list[Cache]]:
    """Return the caches of this user, and the shared ones that this user may only read."""
    uid, owner = os.getuid(), command.shared_owner
    own = [*caches_in(command.roots, uid, disk=disk)]
    shared = [*caches_in(command.shared_roots, owner, shared=True, disk=disk)]
    return ([*own, *shared], []) if uid == owner else (own, shared)
