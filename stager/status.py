"""Records of a node in, rows of a table out: what lies where, how old, and if it still fits."""

from __future__ import annotations

import os
import stat
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from stager.errors import StageError
from stager.report import bytes_text, seconds_text
from stager.store import look_for_cache
from stager.survey import facts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stager.manifest import Record

HEADERS = ("NODE", "DST", "SIZE", "STAGED", "STATE", "SOURCE", "LAST JOB")


@dataclass(frozen=True, slots=True)
class Entry:
    """One recorded file of one node; ``state`` is ``current``, ``stale``, ``changed``, ``gone``.

    ``stale``: the source is another now; ``changed``: the copy is; ``gone``: the copy is missing;
    ``source gone``: the copy is as it was, but its source is not to be seen from here.
    """

    node: str
    record: Record
    state: str

    def to_json(self) -> dict[str, Any]:
        """A JSON object: the record's fields with the node and the state."""
        return {"node": self.node, "state": self.state, **asdict(self.record)}


def gather(node: str, disk: str, roots: Iterable[str], uid: int) -> list[Entry]:
    """The user's entries beneath ``roots`` of the node whose disk is seen at ``disk``, sorted."""
    entries: list[Entry] = []
    for root in roots:
        try:
            cache = look_for_cache(disk + root, uid)
        except StageError:
            continue  # nothing was ever staged here for this user
        entries += [Entry(node, record, _state(record, disk)) for record in cache.records()]
    return sorted(entries, key=lambda entry: entry.record.destination)


def rows(entries: Sequence[Entry], now: float) -> list[tuple[str, ...]]:
    """A table's rows, as HEADERS names them; ``now`` in seconds since 1970."""
    return [
        (
            entry.node,
            entry.record.destination,
            bytes_text(entry.record.copy_facts.size),
            f"{seconds_text(max(0.0, now - entry.record.staged_at))} ago",
            entry.state,
            entry.record.source,
            str(entry.record.used_by_job) if entry.record.used_by_job else "-",
        )
        for entry in entries
    ]


def _state(record: Record, disk: str) -> str:
    try:
        there = os.lstat(disk + record.destination)
    except OSError:
        return "gone"
    copy = record.copy_facts
    same = (copy.size, copy.mtime_ns, copy.inode, copy.owner) == (
        there.st_size, there.st_mtime_ns, there.st_ino, there.st_uid,
    )  # fmt: skip
    if not same or not stat.S_ISREG(there.st_mode):
        return "changed"
    try:
        source = os.stat(record.source)
    except OSError:
        return "source gone"
    return "current" if facts_of(source) == record.source_facts else "stale"
