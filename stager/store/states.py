"""Report what one node holds: its recorded copies, the state of each, and the free space.

`node_status` runs on the node, in `stagectl status` or in `stagectl node`. A `NodeStatus` travels
to the user's node as JSON.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from stager.base.child import NO_GROUP, answer_as
from stager.base.codec import codec_of
from stager.base.memory import room_in_memory
from stager.base.mounts import stranger_at
from stager.base.users import users_of
from stager.fs.files import facts_beneath, opened
from stager.source.posix import version_of
from stager.source.schemes import Scheme
from stager.store.cache import Cache, caches_in
from stager.store.entries import is_entry
from stager.store.record import has_open_names, is_ours

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from stager.source.description import SourceFacts
    from stager.store.record import Record

#: Seconds for a look at the copies of one other user, and of all others together.
_OWNER_LIMIT, _OWNERS_LIMIT = 5.0, 15.0
#: Seconds for a look at the copies of the one user that root asks for. Other nodes than that of
#: the command must answer within `launch.nodes.PATIENCE`.
_ONE_LIMIT = 3.0
#: Files in the folders of one cache that are looked at: 4 µs each.
_MOST_FILES = 250_000


class Entry(NamedTuple):
    """One recorded copy on one node; sizes in bytes, times in seconds since 1970.

    ``state`` is one of:

    - ``ready``: the copy is as recorded, and so is its source, as far as these were looked at: no
      source in a store, of another user, or in a folder, and no more than `_MOST_FILES` of copies;
    - ``outdated``: the source changed, or the copy is being updated;
    - ``changed``: the copy changed;
    - ``damaged``: its bytes were found to differ from its digest, and it was not staged since;
    - ``missing``: the copy was removed.
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
    #: Running jobs that use it.
    jobs: list[int]
    state: str
    #: The uid of its owner.
    user: int
    shared: bool
    #: The number of files of a folder, 0 for a single file.
    files: int = 0
    #: Whether the node has only a part of the folder.
    part: bool = False
    #: Whether it is a folder, which may have no files.
    folder: bool = False
    #: Whether it is an entry of the node's store, whose path nobody named.
    store: bool = False
    #: What it has in common with the entries of the other nodes that see the same copy.
    cache: str = ""


class DiskRoom(NamedTuple):
    """A cache root of a node, its bytes that are free for users, and all its bytes."""

    root: str
    free: int
    size: int


class SharedRoom(NamedTuple):
    """The filesystem of a job's disks, as one node sees it; bytes that are free, and all bytes."""

    mount: str
    #: How many nodes it is made of.
    nodes: int
    free: int
    size: int
    #: Why it cannot be used on this node, empty if it can.
    problem: str
    #: What its driver says of its part here.
    lines: list[str]


class Unread(NamedTuple):
    """The file of a record, or the ``folder`` of all records, that cannot be read, and why not."""

    path: str
    why: str
    folder: bool = False


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """What one node holds for a user."""

    #: Sorted by destination.
    entries: list[Entry] = field(default_factory=list)
    rooms: list[DiskRoom] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    #: The uids of users whose copies are not known, as their own process did not answer.
    silent: list[int] = field(default_factory=list)
    #: That of the job whose nodes are asked.
    shared: SharedRoom | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object for users' programs."""
        return {
            "entries": [entry._asdict() for entry in self.entries],
            "roots": [room._asdict() for room in self.rooms],
            "unreadable": [one._asdict() for one in self.unread],
            "silent": self.silent,
            "shared": self.shared._asdict() if self.shared else None,
        }


#: The facts of sources by path, None for a source that cannot be seen.
_Sources = dict[str, "SourceFacts | None"]


def node_status(
    disk: str,
    roots: Iterable[str],
    shared_roots: Iterable[str],
    shared_owner: int = 0,
    *,
    everyone: bool = False,
    user: int | None = None,
    shared: SharedRoom | None = None,
) -> NodeStatus:
    """Return what the node whose disk is seen at ``disk`` holds for this user and for all users.

    What is for all users was staged by the ``shared_owner``. For root, ``everyone`` adds what it
    holds for each other user, and ``user`` is the one whose copies are shown instead. Copies in
    the filesystem ``shared`` of the job are among them.
    """
    status = NodeStatus(shared=shared)
    mount = [shared.mount] if shared and not shared.problem else []
    own = [*roots, *mount]
    places = [(root, 0) for root in own] + [(root, shared_owner) for root in shared_roots]
    sources: _Sources = {}
    for root, owner in places:
        with suppress(OSError):
            if stranger_at(f"{disk}{root}" or "/"):
                continue
            if root not in mount:
                status.rooms.append(_room(disk, root))
        if user is not None:
            continue
        if owner and os.getuid() == 0:
            _add_from(status, owner, disk, [root], _OWNER_LIMIT, shared=True)
            continue
        for cache in caches_in([root], owner or os.getuid(), shared=bool(owner), disk=disk):
            jobs = _jobs_using(cache)
            _add(status, _read_cache(cache, jobs, sources))
    if everyone and os.getuid() == 0:
        _add_others(status, disk, own)
    elif user is not None:
        _add_of(status, user, disk, own, [root for root, owner in places if owner == user])
    status.entries.sort(key=lambda entry: (entry.destination, entry.user))
    return status


def _room(disk: str, root: str) -> DiskRoom:
    path = f"{disk}{root}" or "/"
    room, left = os.statvfs(path), room_in_memory(path)
    free = room.f_bavail * room.f_frsize
    free = free if left is None else min(free, left)
    return DiskRoom(root or "/", free, room.f_blocks * room.f_frsize)


def copies_of(caches: Iterable[Cache], name: str) -> list[tuple[Cache, Record]]:
    """Return the record of the copy at the destination ``name``, else those of what the store has
    of a source of that name.
    """
    every = list(caches)
    for cache in every:
        if record := cache.load(name):
            return [(cache, record)]
    return [
        (cache, record)
        for cache in every
        for record in cache.records()
        if record.source == name and is_entry(record.destination)
    ]


def _add(status: NodeStatus, found: NodeStatus) -> None:
    status.entries.extend(found.entries)
    status.unread.extend(found.unread)


def _add_of(
    status: NodeStatus, user: int, disk: str, own: Sequence[str], of_site: Sequence[str]
) -> None:
    """Add what one user has, and has staged for all users."""
    deadline = time.monotonic() + _ONE_LIMIT
    _add_from(status, user, disk, own, _ONE_LIMIT)
    if of_site and not status.silent:
        _add_from(status, user, disk, of_site, deadline - time.monotonic(), shared=True)


def _add_others(status: NodeStatus, disk: str, roots: Sequence[str]) -> None:
    """Add what other users have, as far as their own processes answer in time."""
    deadline = time.monotonic() + _OWNERS_LIMIT
    others = {uid for root in roots for uid in users_of(f"{disk}{root}")} - {os.getuid()}
    for uid in sorted(others):
        left = deadline - time.monotonic()
        _add_from(status, uid, disk, roots, min(left, _OWNER_LIMIT))


def _add_from(
    status: NodeStatus,
    uid: int,
    disk: str,
    roots: Sequence[str],
    limit: float,
    *,
    shared: bool = False,
) -> None:
    """Add what another user has, or that no process of that user answers within ``limit``."""
    found = _as_owner(uid, disk, roots, limit, shared=shared) if limit > 0 else None
    if found is None:
        status.silent.append(uid)
    else:
        _add(status, found)


def _read_cache(
    cache: Cache, jobs: Mapping[str, list[int]], sources: _Sources | None
) -> NodeStatus:
    status = NodeStatus()
    left = _MOST_FILES
    for record in _records(cache, status.unread):
        left -= record.tree.files if record.tree else 0
        state = _copy_state(record, cache, looks=left >= 0)
        state = _with_source(state, record, sources)
        status.entries.append(_entry(record, cache, state, jobs))
    return status


def _as_owner(
    uid: int, disk: str, roots: Sequence[str], limit: float, *, shared: bool
) -> NodeStatus | None:
    """Return what user ``uid`` has, None if no process of that user says so in time.

    Root follows no path that another user chose, and reads no file of theirs.
    """

    def tell(output: int) -> None:
        status = NodeStatus()
        for cache in caches_in(roots, uid, shared=shared, disk=disk):
            jobs = _jobs_using(cache)
            _add(status, _read_cache(cache, jobs, None))
        with open(output, "wb") as file:
            file.write(json.dumps(codec_of(NodeStatus).to_data(status)).encode())

    try:
        answer = answer_as(uid, NO_GROUP, [], tell, limit)
        status = codec_of(NodeStatus).from_data(json.loads(answer))
    except (OSError, ValueError, RecursionError):
        return None
    status.entries[:] = [one._replace(user=uid, shared=shared) for one in status.entries]
    return status


def _jobs_using(cache: Cache) -> dict[str, list[int]]:
    with suppress(OSError):  # only root knows the jobs of all users
        return cache.jobs()
    return {}


def _records(cache: Cache, unread: list[Unread]) -> Iterator[Record]:
    """Yield the records of ``cache``; add those that cannot be trusted to ``unread``."""
    try:
        paths = cache.record_paths()
    except OSError as error:
        why = error.strerror or str(error)
        if isinstance(error, PermissionError):
            if cache.uid != os.getuid():
                return  # the site's account opens its folder when it first stages there
            why += f"; its user can open it: chmod -R u+rwX {shlex.quote(cache.folder)}"
        unread.append(Unread(cache.folder, why, folder=True))
        return
    for path in paths:
        try:
            record = cache.read(path)
        except FileNotFoundError:
            continue  # evicted meanwhile
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
        record.tree is not None, is_entry(record.destination), cache.identity(),
    )  # fmt: skip


def _copy_state(record: Record, cache: Cache, *, looks: bool) -> str:
    """Return `Entry.state` by the copy alone; whether it ``looks`` at each file of a folder."""
    try:
        there = facts_beneath(cache.root, cache.path_of(record.destination))
    except OSError:
        return "missing"
    if (record.tree is None and has_open_names(there)) or not is_ours(there, record):
        return "changed"
    if record.is_damaged:
        return "damaged"
    if cache.is_updating(record.destination):  # it may have files of two versions
        return "outdated"
    return "changed" if record.tree and looks and _is_changed(record, cache) else "ready"


def _with_source(state: str, record: Record, sources: _Sources | None) -> str:
    """Return the ``state`` of a copy, or that its source has changed.

    Add the source to ``sources``; None for a source of another user.
    """
    if state != "ready" or sources is None or Scheme.of(record.source).is_url:
        return state  # a store would have to be asked
    if record.source not in sources:
        sources[record.source] = _source_facts(record.source)
    source, was = sources[record.source], record.source_facts
    if source and record.tree:
        # The size of a folder is that of all its files: only a stage or verify looks at those.
        source = replace(source, size=was.size)
        if not source.inode:  # nor is its time its own on FUSE
            source = replace(source, mtime_ns=was.mtime_ns)
    return "ready" if source in (None, was) else "outdated"


def _is_changed(record: Record, cache: Cache) -> bool:
    """Return whether something that was staged in a folder is not as it was."""
    from stager.store.tree_validity import standing_of  # not needed for files

    try:
        standing = standing_of(cache.path_of(record.destination), cache, record)
    except OSError:
        return True
    return standing is None or not standing.digest or any(standing.states)


def _source_facts(source: str) -> SourceFacts | None:
    try:
        with opened(source, os.O_PATH | os.O_CLOEXEC) as descriptor:
            return version_of(descriptor)
    except OSError:
        return None
