"""Records of nodes in, tables out: what lies where, how old, in what state, and what room is left.

`look` is run on a node, by itself or when `gather` asks it; all else is pure, but for the names of
users, which the caller gives.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from stager import store
from stager.directive import Lifetime
from stager.errors import StageError, printable
from stager.evict import is_ours
from stager.manifest import RECORDS_FOLDER
from stager.report import bytes_text, files_text
from stager.survey import facts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from stager.manifest import Record, SourceFacts

    Fold = Callable[[list[str]], str]
    Row = tuple[str, ...]

HEADERS = ("NODE", "DST", "SIZE", "STAGED", "STATE", "KEPT", "SOURCE", "LAST JOB")
FILE_HEADERS = ("DST", "SIZE", "NODES", "STATE", "KEPT", "SOURCE")
USER_HEADERS = ("USER", "FILES", "COPIES", "SIZE", "NODES")
#: What stands to the right in its column.
_TO_THE_RIGHT = ("SIZE", "FILES", "COPIES")

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


class Room(NamedTuple):
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
    rooms: list[Room] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)

    def to_wire(self) -> dict[str, Any]:
        """A short JSON object, which `from_wire` reads back."""
        return {"entries": self.entries, "rooms": self.rooms, "unread": self.unread}

    @classmethod
    def from_wire(cls, said: dict[str, Any]) -> NodeStatus:
        """What `to_wire` made. Raises ValueError, TypeError or KeyError for what it did not."""
        return cls(
            [Entry(*_checked(entry, _ENTRY)) for entry in said["entries"]],
            [Room(*_checked(room, (str, int, int))) for room in said["rooms"]],
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


def look(
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
                Room(root or "/", room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize)
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
    cache: store.Cache,
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


def _caches(root: str, *, shared: bool, everyone: bool) -> Iterator[store.Cache]:
    uids = [0 if shared else os.getuid()]
    if everyone and os.getuid() == 0 and not shared:
        with suppress(OSError):
            uids = sorted(int(n) for n in os.listdir(f"{root}/{RECORDS_FOLDER}") if n.isdecimal())
    for uid in uids:
        with suppress(StageError):  # nothing was ever staged here for this user
            yield store.look_for_cache(root, uid, shared=shared)


def _jobs_using(uid: int | None) -> dict[str, list[int]]:
    with suppress(OSError):  # a folder that its user has closed
        return store.jobs_using(uid)
    return {}


def _records(cache: store.Cache, unread: list[Unread]) -> Iterator[Record]:
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


def _entry(record: Record, cache: store.Cache, state: str, jobs: Mapping[str, list[int]]) -> Entry:
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


# Tables. Pure.


def missing(nodes: Mapping[str, NodeStatus]) -> dict[str, list[str]]:
    """The nodes that lack a file which another one has recorded, by destination."""
    held = {
        node: {entry.destination for entry in one.entries if not entry.shared}
        for node, one in nodes.items()
    }
    everything = sorted(set().union(*held.values())) if held else []
    lacking = {path: [node for node in nodes if path not in held[node]] for path in everything}
    return {path: where for path, where in lacking.items() if where}


def rows(nodes: Mapping[str, NodeStatus], now: float, fold: Fold, *, whole_job: bool) -> list[Row]:
    """A table's rows, as HEADERS names them; rows that are equal but for the node are one.

    ``now`` in seconds since 1970. Of a ``whole_job`` it is told too which nodes lack what.
    """
    where: dict[Row, list[str]] = {}
    entries: dict[Row, list[Entry]] = {}
    for node, one in nodes.items():
        for entry in one.entries:
            job = str(entry.used_by_job) if entry.used_by_job else "-"
            key: Row = (
                entry.destination, "" if entry.part else _size(entry), entry.state, _kept(entry),
                entry.source, job,
            )  # fmt: skip
            where.setdefault(key, []).append(node)
            entries.setdefault(key, []).append(entry)
    order = {node: place for place, node in enumerate(nodes)}
    found: list[tuple[str, int, Row]] = []
    for key, names in where.items():
        path, size, *rest = key
        ages = _ages([entry.staged_at for entry in entries[key]], now)
        row = (fold(names), path, size or _parts(entries[key]), ages, *rest)
        found.append((path, order[names[0]], row))
    if whole_job:
        size_and_source = {key[0]: (key[1], key[4]) for key in where}
        for path, names in missing(nodes).items():
            size, source = size_and_source[path]
            lacking = (fold(names), path, size or "-", "-", "missing", "-", source, "-")
            found.append((path, order[names[0]], lacking))
    return [_printed(row) for _, _, row in sorted(found)]


def file_rows(nodes: Mapping[str, NodeStatus], *, whole_job: bool) -> list[Row]:
    """One row a file, as FILE_HEADERS names them: on how many nodes it is in which state."""
    entries: dict[str, list[Entry]] = {}
    for one in nodes.values():
        for entry in one.entries:
            entries.setdefault(entry.destination, []).append(entry)
    lacking = missing(nodes) if whole_job else {}
    found: list[Row] = []
    for path, every in sorted(entries.items()):
        states = Counter(entry.state for entry in every)
        states.update({"missing": len(lacking.get(path, []))})
        told = ", ".join(f"{count} {state}" for state, count in states.most_common() if count)
        found.append(
            (
                path, _sizes(every), str(len(every)), told,
                _alternatives(map(_kept, every)),
                _alternatives(entry.source for entry in every),
            )
        )  # fmt: skip
    return [_printed(row) for row in found]


def user_rows(
    nodes: Mapping[str, NodeStatus], fold: Fold, name_of: Callable[[int], str]
) -> list[Row]:
    """One row a user, as USER_HEADERS names them."""
    found: list[Row] = []
    users = {entry.user for one in nodes.values() for entry in one.entries}
    for user in sorted(users):
        theirs = {
            node: [entry for entry in one.entries if entry.user == user]
            for node, one in nodes.items()
        }
        every = [entry for some in theirs.values() for entry in some]
        found.append(
            (
                name_of(user),
                str(len({entry.destination for entry in every})),
                str(len(every)),
                bytes_text(sum(entry.size for entry in every)),
                fold([node for node, some in theirs.items() if some]),
            )
        )
    return [_printed(row) for row in found]


def total_line(nodes: Mapping[str, NodeStatus]) -> str:
    """How much lies there in all."""
    every = [entry for one in nodes.values() for entry in one.entries]
    files = len({(entry.user, entry.destination) for entry in every})
    size = bytes_text(sum(entry.size for entry in every))
    copies = f", {len(every)} copies" if len(nodes) > 1 else ""
    return f"{files} file{'' if files == 1 else 's'}{copies}, {size} in all"


def room_lines(nodes: Mapping[str, NodeStatus], fold: Fold) -> list[str]:
    """What is free beneath each root: the least and the most of the nodes."""
    rooms: dict[str, dict[str, Room]] = {}
    for node, one in nodes.items():
        for room in one.rooms:
            rooms.setdefault(room.root, {})[node] = room
    return [
        f"{printable(root)}: "
        f"{_between(min(r.free for r in by_node.values()), max(r.free for r in by_node.values()))} "
        f"free of "
        f"{_between(min(r.size for r in by_node.values()), max(r.size for r in by_node.values()))}"
        f" on {fold(list(by_node))}"
        for root, by_node in rooms.items()
    ]


def unread_lines(nodes: Mapping[str, NodeStatus]) -> list[str]:
    """The records that cannot be read: how many on each node, and why the first cannot."""
    lines: list[str] = []
    for node, one in nodes.items():
        count = len(one.unread)
        if count:
            first = min(one.unread)
            what = (
                "1 record cannot be read and counts"
                if count == 1
                else (f"{count} records cannot be read and count")
            )
            such = "" if count == 1 else "such as "
            lines.append(printable(f"{node}: {what} as absent: {such}{first.path}: {first.why}"))
    return lines


def table(headers: Row, found: Sequence[Row]) -> Iterator[str]:
    """The lines of a table in plain columns."""
    # By hand: a library's table takes seconds for thousands of rows.
    widths = [max(map(len, column)) for column in zip(headers, *found, strict=True)]
    right = [header in _TO_THE_RIGHT for header in headers]
    for row in (headers, *found):
        cells = (
            cell.rjust(width) if to_the_right else cell.ljust(width)
            for cell, width, to_the_right in zip(row, widths, right, strict=True)
        )
        yield "  ".join(cells).rstrip()


def age_text(seconds: float) -> str:
    """``5000`` → ``1 h``: whole units, so that nodes which staged together say the same."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(max(0.0, seconds))} s"


def _ages(staged: Sequence[int], now: float) -> str:
    newest, oldest = age_text(now - max(staged)), age_text(now - min(staged))
    # One transfer ends on all nodes within a second or two; that is no span to speak of.
    together = newest == oldest or max(staged) - min(staged) <= _TOGETHER
    return f"{oldest} ago" if together else f"{newest} to {oldest} ago"


#: Seconds between copies of one transfer.
_TOGETHER = 10


def _kept(entry: Entry) -> str:
    """Why an entry stays, or how long."""
    reasons = ["pinned"] if entry.pinned else []
    if entry.jobs:
        plural = "s" if len(entry.jobs) > 1 else ""
        reasons.append(f"job{plural} {','.join(map(str, entry.jobs))}")
    elif entry.lifetime == Lifetime.JOB and not entry.pinned:
        reasons.append("until its job ends")
    return ", ".join(reasons) or "-"


def _size(entry: Entry) -> str:
    size = bytes_text(entry.size)
    return f"{files_text(entry.files)}, {size}" if entry.files else size


def _sizes(entries: Sequence[Entry]) -> str:
    """The sizes of copies that may differ."""
    if entries[0].part:
        return _parts(entries)
    sizes = dict.fromkeys(map(_size, entries))
    each = [entry.size for entry in entries]
    return _between(min(each), max(each)) if len(sizes) > 1 else next(iter(sizes))


def _parts(entries: Sequence[Entry]) -> str:
    """All parts of a folder that is spread over nodes."""
    sizes = [entry.size for entry in entries]
    files = files_text(sum(entry.files for entry in entries))
    return f"{files}, {_between(min(sizes), max(sizes))} on each"


def _between(least: int, most: int) -> str:
    low, high = bytes_text(least), bytes_text(most)
    return low if low == high else f"{low} to {high}"


def _alternatives(texts: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(texts))


def _printed(row: Row) -> Row:
    return tuple(map(printable, row))
