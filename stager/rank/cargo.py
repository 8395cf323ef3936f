"""What one rank brings to, or takes from, the delivery of one item: a file or a tree.

`delivery` has all ranks take the same steps together; what a step does on this rank's disk is
the Cargo's. No MPI here.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from stager.base.errors import Failure, IntegrityError, StageError
from stager.base.options import Lifetime
from stager.disk.record import VERSION, CopyFacts, Record, TreeFacts
from stager.wire.ring import Reader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stager.base.extents import Extent
    from stager.base.outcome import Counts
    from stager.disk.cache import Cache
    from stager.rank.agree import Here
    from stager.rank.plan import TransferPlan
    from stager.request.items import Space, StageItem
    from stager.source.posix import Source
    from stager.wire.layout import Layout
    from stager.wire.ring import Digester, Writer
    from stager.wire.settings import Settings
    from stager.wire.transfer import Transferred


#: A digest that nothing has.
_UNKNOWN = "0" * 32


@dataclass(frozen=True, slots=True)
class Task:
    """One item on its way; every rank has the same, but for ``cache``, ``here`` and ``rank``."""

    settings: Settings
    job: int
    item: StageItem
    source: Source
    plan: TransferPlan
    cache: Cache
    here: Here
    rank: int
    space: Space

    @property
    def path(self) -> str:
        """Where the copy is on this node's disk."""
        return self.here.path(self.item.destination)

    @property
    def receives(self) -> bool:
        """Whether this rank is to have a new copy."""
        return self.rank in self.plan.receivers

    @property
    def sends(self) -> bool:
        """Whether this rank reads what is sent."""
        return self.rank in self.plan.senders

    def record(self, copy: CopyFacts, digest: str, tree: TreeFacts | None = None) -> Record:
        """The record of a copy that was published just now."""
        now = int(time.time())
        before = self.cache.load(self.item.destination)
        return Record(
            version=VERSION,
            source=self.item.source,
            destination=self.item.destination,
            source_facts=self.source.facts,
            copy_facts=copy,
            digest=digest,
            staged_at=now,
            used_at=now,
            used_by_job=self.job,
            lifetime=self._lifetime(before),
            pinned=bool(before and before.pinned),
            tree=tree,
        )

    def note_use(self) -> None:
        """Note in this node's record that the copy is used."""
        record = self.cache.load(self.item.destination)
        if record is None or (self.cache.shared and self.here.uid):
            return
        lifetime, now = self._lifetime(record), int(time.time())
        used = replace(record, used_at=now, used_by_job=self.job, lifetime=lifetime)
        with suppress(StageError):  # an unnoted time costs nothing but its note
            self.cache.save(used)

    def _lifetime(self, before: Record | None) -> Lifetime:
        # Who wants it kept is not outdone by who does not.
        kept = before is not None and before.lifetime == Lifetime.CACHE
        return Lifetime.CACHE if kept else self.item.options.lifetime

    def unlike(self, path: str = "") -> IntegrityError:
        """The error of a disk that does not give back what was written, at ``path`` in a tree."""
        text = "what the disk gives back differs from what was written to it; use another node"
        return IntegrityError(f"{self.path}{path}: {text}")

    def damaged_copy(self) -> Failure:
        """Have this node's copy not be met again; what to say if that fails too."""
        record = self.cache.load(self.item.destination)
        if record and record.tree:  # it is still ours to replace
            unknown = replace(record.tree, source_digest=_UNKNOWN, table_digest=_UNKNOWN)
            self.cache.save(replace(record, tree=unknown))
        else:
            self.cache.forget(self.item.destination)
        text = f"{self.item.destination}: this copy is damaged; remove it and submit again"
        return Failure(IntegrityError.code, text, self.here.name)


class CountingReader(Reader, Protocol):
    """A Reader that counts the bytes that it took."""

    bytes_read: int


@dataclass(frozen=True, slots=True)
class Opened:
    """What a rank has to tell of what it opened.

    A sender: where its file has data, or why its copy cannot be sent. A receiver of a tree: the
    rows of the listing that it ``needs``, a byte each, compressed.
    """

    extents: tuple[Extent, ...] = ()
    stale: Failure | None = None
    needs: bytes = b""


@dataclass(frozen=True, slots=True)
class Published:
    """The ``digest`` that a new copy is known by, and of a tree what became of its files.

    ``note`` is what the user should know besides.
    """

    digest: str = ""
    tree: Counts | None = None
    note: str = ""


class Cargo(ABC):
    """The steps in the order in which they are taken. All but `close` raise StageError."""

    reader: CountingReader | None = None
    writer: Writer | None = None
    #: For what has more digests than one.
    digester: Digester | None = None

    def __init__(self, task: Task) -> None:
        self.task = task
        #: What is to be closed at the end.
        self.stack = ExitStack()

    @abstractmethod
    def need(self) -> int:
        """Bytes that a copy will take on a disk."""

    @abstractmethod
    def open(self) -> Opened:
        """Open what this rank reads and writes."""

    @abstractmethod
    def layout(self, opened: Sequence[Opened]) -> Layout:
        """What is to travel, from what all ranks have ``opened``."""

    @abstractmethod
    def allocate(self, layout: Layout) -> None:
        """Take the room for it."""

    @abstractmethod
    def staleness(self, result: Transferred) -> Failure | None:
        """Why what this rank sent is not what was to be sent, if so."""

    @abstractmethod
    def seal(self) -> None:
        """Complete what was written, and bring it to the disk."""

    @abstractmethod
    def verify(self, digest: str) -> None:
        """Compare what the disk gives back. Raises IntegrityError."""

    @abstractmethod
    def need_in_all(self) -> int:
        """The same with what of it is there already."""

    @abstractmethod
    def announce(self) -> None:
        """Record what is about to be published, where its place must not be taken for unknown."""

    @abstractmethod
    def publish(self, digest: str) -> Published:
        """Put the copy in its place and record it."""

    def close(self) -> None:
        """Let go of all; what was not published is gone."""
        self.stack.close()
