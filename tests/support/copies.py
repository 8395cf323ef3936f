"""Copies to evict: of no disk, and on a disk with a cache."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from stager.base.paths import STORE_FOLDER
from stager.fs.files import CopyFacts, digest_of
from stager.request.items import Space
from stager.store.cache import Cache, open_cache
from stager.store.locks import Locks
from stager.store.removal import remove
from stager.store.space import Candidate, Held, Need, RoomPlan, find_candidates, rooms
from tests.support.records import RECORD

if TYPE_CHECKING:
    from pathlib import Path

    from stager.base.outcome import Evicted
    from stager.store.record import Record

MIB = 1 << 20
CACHE = Cache("/nvme/.slurm-stage/60")


def kept(
    name: str, size: int, used_at: int, *, held: Held | None = None, job: bool = False
) -> Candidate:
    lifetime = "job" if job else "cache"
    record = replace(RECORD, destination=f"/nvme/{name}", used_at=used_at, lifetime=lifetime)
    return Candidate(CACHE, record, size, held)


class Node:
    """A disk with a cache, and files in it."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk
        self.cache = open_cache(str(disk), os.getuid())

    def put_entry(
        self, number: int, size: int, used_at: int = 0, *, pinned: bool = False
    ) -> Record:
        """Put an entry of the store there."""
        name = self.entry(number).removeprefix(f"{self.disk}/")
        return self.put(name, size, used_at, pinned=pinned)

    def entry(self, number: int) -> str:
        """Return the path of an entry."""
        return f"{self.cache.folder}/{STORE_FOLDER}/{number:032x}/data"

    def put(self, name: str, size: int, used_at: int = 0, *, pinned: bool = False) -> Record:
        path = self.disk / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
        there = path.stat()
        copy = CopyFacts(size, there.st_mtime_ns, there.st_ino, there.st_uid)
        record = replace(
            RECORD, destination=str(path), copy_facts=copy, digest=digest_of(str(path)),
            used_at=used_at, pinned=pinned,
        )  # fmt: skip
        self.cache.save(record)
        return record

    def remove(self, name: str) -> Record | None:
        with closing(Locks(self.cache)) as locks:
            return remove(self.cache, locks, str(self.disk / name))

    def names(self) -> list[str]:
        return sorted(path.name for path in self.disk.iterdir() if path.is_file())


def put_own(path: Path) -> None:
    """Put another file in the place of a copy, as its user may."""
    path.with_suffix(".new").write_bytes(b"mine")
    path.with_suffix(".new").rename(path)


def room_on(node: Node, need: int, limit: int = 0, name: str = "new") -> RoomPlan:
    """Room for one more file on the disk, where its user may have no more than ``limit``."""
    new = Need("/nvme", node.cache, str(node.disk / name), need)
    (room,) = rooms([new], [new.destination], Space(user_limit=limit))
    return room


def make(node: Node, room: RoomPlan) -> list[Evicted]:
    with closing(Locks(node.cache)) as locks:
        return [*room.make({node.cache: locks}, "n1")]


def bytes_taken(node: Node) -> int:
    return sum(one.size for one in find_candidates(node.cache))
