"""Records of nodes in, tables out: what lies where, how old, in what state, and what room is left.

`node_status` runs on a node, called there by `stagectl status` or by `stagectl node`.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from stager.base.errors import StageError
from stager.base.paths import RECORDS_FOLDER
from stager.copies.evict import is_ours
from stager.disk.cache import Cache, look_for_cache
from stager.disk.jobs import jobs_using
from stager.source.posix import facts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from stager.disk.record import Record, SourceFacts

#: Seconds for a look at one user's copies; and the group in which that is done.
_OWNER_LIMIT, _NOBODY = 3, 65534


class Entry(NamedTuple):
    """One recorded file of one node; bytes, and seconds since 1970.

    ``state`` is one of: ``current``; ``stale``: the source is another now; ``changed``: the copy
    is; ``gone``: the copy is missing; ``source gone``: the copy is as it was, but its source is not
    to be seen from here; ``whole``: the copy is as it was, and another user's source is not looked
    at. ``jobs`` use it now; ``user`` is the uid of its owner. ``files`` is how many a folder has, 0
    for a single file; ``part``: the node has a part of them only.
    """

    destination: str
    source: str
    size: int
    digest: str
    staged_at: int
    used_at: int
    used_by_job: int
    lifetime: str
    pinned: bool
    jobs: list[int]
    state: str
    user: int
    shared: bool
    files: int = 0
    part: bool = False


#: The kinds of an Entry's fields.
_ENTRY = (str, str, int, str, int, int, int, str, bool, list, str, int, bool, int, bool)


def _checked(values: Sequence[Any], kinds: Sequence[type]) -> Sequence[Any]:
    """``values`` if they are of these kinds: they come from another node. Raises ValueError."""
    if [type(value) for value in values] != list(kinds):
        raise ValueError("fields of other kinds")
    if any(type(job) is not int for value in values if type(value) is list for job in value):
        raise ValueError("a job that is no number")
    return values


class DiskRoom(NamedTuple):
    """A cache root of a node: bytes that are free for users, and bytes in all."""

    root: str
    free: int
    size: int


class Unread(NamedTuple):
    """The file of a record that counts as absent, and why."""

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """What one node holds for a user; entries are sorted by destination."""

    entries: list[Entry] = field(default_factory=list)
    rooms: list[DiskRoom] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)

    def to_wire(self) -> dict[str, Any]:
        """A short JSON object, which `from_wire` reads back."""
        return {"entries": self.entries, "rooms": self.rooms, "unread": self.unread}

    @classmethod
    def from_wire(cls, said: dict[str, Any]) -> NodeStatus:
        """What `to_wire` made. Raises ValueError, TypeError or KeyError for what it did not."""
        return cls(
            [Entry(*_checked(entry, _ENTRY)) for entry in said["entries"]],
            [DiskRoom(*_checked(room, (str, int, int))) for room in said["rooms"]],
            [Unread(*_checked(one, (str, str))) for one in said["unread"]],
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object for the user's programs."""
        return {
            "entries": [entry._asdict() for entry in self.entries],
            "roots": [room._asdict() for room in self.rooms],
            "unreadable": [one._asdict() for one in self.unread],
        }


# On the node.


def node_status(
    disk: str, roots: Iterable[str], shared_roots: Iterable[str], *, everyone: bool = False
) -> NodeStatus:
    """What the node whose disk is seen at ``disk`` holds for this user, and for all users.

    ``everyone`` asks for what it holds for each user, which only root may see.
    """
    seen = NodeStatus()
    places = [(root, False) for root in roots] + [(root, True) for root in shared_roots]
    sources: dict[str, SourceFacts | None] = {}
    for root, shared in places:
        with suppress(OSError):
            room = os.statvfs(f"{disk}{root}" or "/")
            seen.rooms.append(
                DiskRoom(root or "/", room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize)
            )
        for cache in _caches(f"{disk}{root}", shared=shared, everyone=everyone):
            jobs = _jobs_using(None if shared else cache.uid)
            if cache.shared or cache.uid == os.getuid():
                found = _look_into(cache, disk, jobs, sources)
            else:  # root goes nowhere that a user points it to
                found = _as_owner(cache.uid, partial(_look_into, cache, disk, jobs, None))
            seen.entries.extend(found.entries)
            seen.unread.extend(found.unread)
    seen.entries.sort(key=lambda entry: (entry.destination, entry.user))
    return seen


def _look_into(
    cache: Cache,
    disk: str,
    jobs: Mapping[str, list[int]],
    sources: dict[str, SourceFacts | None] | None,
) -> NodeStatus:
    found = NodeStatus()
    for record in _records(cache, found.unread):
        found.entries.append(_entry(record, cache, _state(record, disk, sources), jobs))
    return found


def _as_owner(uid: int, look_into: Callable[[], NodeStatus]) -> NodeStatus:
    """What a child sees that has become that user; nothing where that takes it too long."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.alarm(_OWNER_LIMIT)
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(uid, uid, uid)
            with os.fdopen(writing, "w", encoding="utf-8", errors="surrogateescape") as file:
                json.dump(look_into().to_wire(), file)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8", errors="surrogateescape") as file:
        said = file.read()
    os.waitpid(child, 0)
    return NodeStatus.from_wire(json.loads(said)) if said.endswith("}") else NodeStatus()


def _caches(root: str, *, shared: bool, everyone: bool) -> Iterator[Cache]:
    uids = [0 if shared else os.getuid()]
    if everyone and os.getuid() == 0 and not shared:
        with suppress(OSError):
            uids = sorted(int(n) for n in os.listdir(f"{root}/{RECORDS_FOLDER}") if n.isdecimal())
    for uid in uids:
        with suppress(StageError):  # nothing was ever staged here for this user
            yield look_for_cache(root, uid, shared=shared)


def _jobs_using(uid: int | None) -> dict[str, list[int]]:
    with suppress(OSError):  # a folder that its user has closed
        return jobs_using(uid)
    return {}


def _records(cache: Cache, unread: list[Unread]) -> Iterator[Record]:
    """All records of ``cache``; those that cannot be trusted are told in ``unread``."""
    paths: list[str] = []
    with suppress(OSError):
        paths = cache.record_paths()
    for path in paths:
        try:
            record = cache.read(path)
        except FileNotFoundError:
            continue  # evicted at this moment
        except OSError as error:
            unread.append(Unread(path, error.strerror or str(error)))
        except ValueError as error:
            unread.append(Unread(path, str(error)))
        else:
            yield record


def _entry(record: Record, cache: Cache, state: str, jobs: Mapping[str, list[int]]) -> Entry:
    return Entry(
        record.destination, record.source, record.copy_facts.size, record.digest,
        record.staged_at, record.used_at, record.used_by_job, record.lifetime, record.pinned,
        jobs.get(record.destination, []), state, cache.uid, cache.shared,
        record.tree.files if record.tree else 0, bool(record.tree and record.tree.split),
    )  # fmt: skip


def _state(record: Record, disk: str, sources: dict[str, SourceFacts | None] | None) -> str:
    """``sources`` are those that were looked at already; None where it is not ours to look."""
    try:
        there = os.lstat(disk + record.destination)
    except OSError:
        return "gone"
    if not is_ours(there, record) or (record.tree is None and there.st_nlink != 1):
        return "changed"
    if sources is None:
        return "whole"
    if record.source not in sources:
        sources[record.source] = _look_at(record.source)
    source = sources[record.source]
    if source is None:
        return "source gone"
    if record.tree is None:
        return "current" if source == record.source_facts else "stale"
    # What is in a folder only a stage or verify looks at, for all that is to be statted.
    same = replace(source, size=record.source_facts.size) == record.source_facts
    return "whole" if same else "stale"


def _look_at(source: str) -> SourceFacts | None:
    try:
        return facts_of(os.stat(source))
    except OSError:
        return None
