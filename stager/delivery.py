"""One item and its TransferPlan in, the copies published and recorded on its nodes.

Open, broadcast, compare digests, seal, publish, record: each step is taken by all ranks together,
and nothing gets its final name until every receiver has every byte on its disk.
"""

from __future__ import annotations

import os
import resource
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from stager import store
from stager.agree import Here, RefusedError, together
from stager.directive import Lifetime, Verify
from stager.errors import Failure, IntegrityError, SourceError, StageError
from stager.layout import Extent, Layout, rounded
from stager.manifest import VERSION, CopyFacts, Record
from stager.phases import Phase
from stager.reader import FileReader
from stager.survey import facts_of
from stager.transfer import Result, broadcast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpi4py import MPI

    from stager.phases import Stopwatch
    from stager.plan import TransferPlan
    from stager.request import Settings, StageItem
    from stager.survey import Source


class StaleError(Exception):
    """What was surveyed is no longer so: survey again. ``why`` is for when that does not help.

    ``damaged``: because of a copy whose record is forgotten now, and which is not met again.
    """

    def __init__(self, why: Failure, *, damaged: bool) -> None:
        super().__init__(why)
        self.why = why
        self.damaged = damaged


@dataclass(frozen=True, slots=True)
class Delivered:
    """The digest of the bytes, the ranks that read them, how many of them all ranks together read
    from the source, and the most memory that a rank took, in bytes.
    """

    digest: str
    readers: tuple[int, ...] = ()
    source_bytes_read: int = 0
    peak_memory: int = 0


@dataclass(slots=True)
class _Files:
    """What a rank has open for the item: a sender a reader, a receiver a partial file."""

    reader: FileReader | None = None
    partial: store.Partial | None = None


@dataclass(frozen=True, slots=True)
class _Opened:
    """What the first sender found in its file, or why a sender's copy cannot be sent."""

    extents: tuple[Extent, ...] = ()
    stale: Failure | None = None


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What a rank has to say after the broadcast; seconds, bytes read, and bytes of memory."""

    node: str
    digest: str
    stale: Failure | None
    reading: float
    writing: float
    bytes_read: int
    peak_memory: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """One item on its way; every rank has the same, but for ``cache`` and ``here``."""

    settings: Settings
    job: int
    item: StageItem
    source: Source
    plan: TransferPlan
    cache: store.Cache
    here: Here

    def run(
        self, comm: MPI.Intracomm, watch: Stopwatch, progress: Callable[[int, int], None]
    ) -> Delivered:
        """Bring the file to the plan's receivers. Collective.

        ``progress`` is called on the first sender with the bytes sent so far, and with how many
        there are to send: holes are not sent. Raises RefusedError, or StaleError where the source
        changed meanwhile or a sender's copy proved damaged.
        """
        if comm.rank in self.plan.current:
            self._note_use()
        if not self.plan.receivers:
            return Delivered(self.plan.digest, self.plan.senders[:1])
        watch.enter(Phase.OPEN)
        with ExitStack() as stack:
            files = _Files()
            layout = self._open_all(comm, files, stack)
            watch.enter(Phase.BROADCAST)
            delivered = self._broadcast(comm, layout, files, watch, progress)
            together(comm, self.here, lambda: self._seal(files), patient=True)
            if self.item.verify is Verify.READBACK:
                watch.enter(Phase.VERIFY)
                verify = partial(self._verify, files, delivered.digest)
                together(comm, self.here, verify, patient=True)
            watch.enter(Phase.PUBLISH)
            together(comm, self.here, lambda: self._publish(files, delivered.digest))
            return delivered

    @property
    def _path(self) -> str:
        return self.here.path(self.item.destination)

    def _open_all(self, comm: MPI.Intracomm, files: _Files, stack: ExitStack) -> Layout:
        """Open the senders' and receivers' files; what of the file is to travel."""
        opened = together(comm, self.here, lambda: self._open(comm.rank, files, stack))
        for one in opened:
            if one.stale:
                raise StaleError(one.stale, damaged=True)
        extents = opened[self.plan.senders[0]].extents
        layout = Layout(self.plan.size, self.settings.chunk, extents)
        together(comm, self.here, lambda: self._allocate(files, layout), patient=True)
        return layout

    def _open(self, rank: int, files: _Files, stack: ExitStack) -> _Opened:
        if rank in self.plan.receivers:
            stack.enter_context(store.made_parents(self._path))
            files.partial = store.Partial(self.cache, direct=self.settings.direct)
            stack.callback(files.partial.close)
        if rank not in self.plan.senders:
            return _Opened()
        try:
            files.reader = FileReader(self.item.source if self.plan.from_source else self._path)
            stack.callback(files.reader.close)
            if rank == self.plan.senders[0]:
                extents = files.reader.extents(self.plan.size)
                return _Opened(rounded(extents, self.plan.size))
        except SourceError:
            if self.plan.from_source:
                raise
            return _Opened(stale=self._damaged_copy())
        return _Opened()

    def _allocate(self, files: _Files, layout: Layout) -> None:
        if files.partial:
            files.partial.allocate(layout)

    def _broadcast(
        self,
        comm: MPI.Intracomm,
        layout: Layout,
        files: _Files,
        watch: Stopwatch,
        progress: Callable[[int, int], None],
    ) -> Delivered:
        """Move the bytes among the plan's members; all of them have the same digest then."""
        result = Result("", None, 0.0, 0.0, 0.0)
        with self._members(comm) as group:
            if group:
                first = group.rank == 0
                result = broadcast(
                    group, layout, len(self.plan.senders), self.settings, files.reader,
                    files.partial, lambda sent: progress(sent, layout.data) if first else None,
                )  # fmt: skip
        judge = partial(self._judge, files, result)
        verdicts = together(comm, self.here, judge, patient=True)
        reading = max(verdict.reading for verdict in verdicts)
        writing = max(verdict.writing for verdict in verdicts)
        watch.enter(Phase.FSYNC, {Phase.READ: reading, Phase.WRITE: writing})
        for verdict in verdicts:
            if verdict.stale:
                raise StaleError(verdict.stale, damaged=not self.plan.from_source)
        readers = tuple(rank for rank, verdict in enumerate(verdicts) if verdict.bytes_read)
        read = sum(verdict.bytes_read for verdict in verdicts) if self.plan.from_source else 0
        peak = max(verdict.peak_memory for verdict in verdicts)
        digest = self._agreed_digest(verdicts)
        return Delivered(digest, readers or self.plan.senders[:1], read, peak)

    @contextmanager
    def _members(self, comm: MPI.Intracomm) -> Iterator[MPI.Intracomm | None]:
        """The communicator of the ranks that move bytes, the senders its first."""
        members = self.plan.members
        if members == tuple(range(comm.size)):
            yield comm
        elif comm.rank not in members:
            yield None
        else:
            group = comm.Create_group(comm.group.Incl(list(members)))
            yield group
            group.Free()

    def _judge(self, files: _Files, result: Result) -> _Verdict:
        """What this rank makes of the broadcast; raises its error."""
        stale = self._staleness(files.reader, result) if files.reader else None
        if result.error and not stale:
            raise result.error
        read = files.reader.bytes_read if files.reader else 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return _Verdict(
            self.here.name, result.digest, stale, result.reading, result.writing, read, peak
        )

    def _staleness(self, reader: FileReader, result: Result) -> Failure | None:
        """Why what this rank sent is not what was to be sent."""
        if self.plan.from_source:
            if not self._source_changed(reader):
                return None
            text = f"{self.item.source} changed while it was read; submit again once it rests"
        else:
            if not result.error and result.digest == self.plan.digest:
                return None
            return self._damaged_copy()
        return Failure(IntegrityError.code, text, self.here.name)

    def _damaged_copy(self) -> Failure:
        """Forget this node's copy, so that it is not met again; what to say if that fails too."""
        self.cache.forget(self.item.destination)
        text = f"{self.item.destination}: this copy is damaged; remove it and submit again"
        return Failure(IntegrityError.code, text, self.here.name)

    def _source_changed(self, reader: FileReader) -> bool:
        with suppress(OSError):
            named = facts_of(os.stat(self.item.source))
            return not facts_of(os.fstat(reader.descriptor)) == named == self.source.facts
        return True

    def _agreed_digest(self, verdicts: list[_Verdict]) -> str:
        expected = self.plan.digest or verdicts[self.plan.senders[0]].digest
        text = f"{self.item.destination}: the bytes that came differ from those sent; submit again"
        members = [verdicts[rank] for rank in self.plan.members]
        wrong = [verdict.node for verdict in members if verdict.digest != expected]
        if wrong:
            raise RefusedError([Failure(IntegrityError.code, text, node) for node in wrong])
        return expected

    def _seal(self, files: _Files) -> None:
        if files.partial:
            files.partial.seal(self.source.mode, self.source.group, self.source.facts.mtime_ns)

    def _verify(self, files: _Files, digest: str) -> None:
        if files.partial and files.partial.read_back() != digest:
            text = "what the disk gives back differs from what was written to it; use another node"
            raise IntegrityError(f"{self._path}: {text}")

    def _publish(self, files: _Files, digest: str) -> None:
        if files.partial:
            copy = files.partial.publish(self._path)
            self.cache.save(self._record(copy, digest))

    def _record(self, copy: CopyFacts, digest: str) -> Record:
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
        )

    def _note_use(self) -> None:
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
        return Lifetime.CACHE if kept else self.item.lifetime
