"""One item and its TransferPlan in, the copies published and recorded on its nodes.

Open, broadcast, compare digests, seal, publish, record: each step is taken by all ranks together,
and nothing gets its final name until every receiver has every byte on its disk.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stager import store
from stager.agree import Here, RefusedError, together
from stager.errors import Failure, IntegrityError, StageError
from stager.manifest import VERSION, CopyFacts, Record
from stager.survey import facts_of
from stager.transfer import FileReader, broadcast

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI

    from stager.plan import TransferPlan
    from stager.request import StageItem, StageRequest
    from stager.survey import Source


class StaleError(Exception):
    """What was surveyed is no longer so: survey again. ``why`` is for when that does not help."""

    def __init__(self, why: Failure) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True, slots=True)
class Delivered:
    """The digest of the bytes, and how many of them all ranks together read from the source."""

    digest: str
    source_bytes_read: int


@dataclass(slots=True)
class _Files:
    """What a rank has open for the item: the sender a reader, a receiver a partial file."""

    reader: FileReader | None = None
    partial: store.Partial | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """One item on its way; every rank has the same, but for ``cache`` and ``here``."""

    request: StageRequest
    item: StageItem
    source: Source
    plan: TransferPlan
    cache: store.Cache
    here: Here

    def run(self, comm: MPI.Intracomm, progress: Callable[[int], None]) -> Delivered:
        """Bring the file to the plan's receivers. Collective.

        ``progress`` is called on the sender with the bytes sent so far. Raises RefusedError, or
        StaleError where the source changed meanwhile or the sender's copy proved damaged.
        """
        if comm.rank in self.plan.current:
            self._note_use()
        if not self.plan.receivers:
            return Delivered(self.plan.digest, 0)
        with ExitStack() as stack:
            files = _Files()
            together(comm, self.here, lambda: self._open(comm.rank, files, stack))
            digest = self._broadcast(comm, files, progress)
            together(comm, self.here, lambda: self._seal(files))
            together(comm, self.here, lambda: self._publish(files, digest))
            return Delivered(digest, comm.allreduce(self._source_bytes(files)))

    @property
    def _path(self) -> str:
        return self.here.path(self.item.destination)

    def _open(self, rank: int, files: _Files, stack: ExitStack) -> None:
        if rank == self.plan.sender:
            path = self.item.source if self.plan.from_source else self._path
            files.reader = FileReader(path)
            stack.callback(files.reader.close)
        if rank in self.plan.receivers:
            stack.enter_context(store.made_parents(self._path))
            files.partial = store.Partial(self.cache, self.plan.size)
            stack.callback(files.partial.close)

    def _broadcast(
        self, comm: MPI.Intracomm, files: _Files, progress: Callable[[int], None]
    ) -> str:
        """Move the bytes among the plan's members; return the digest that all of them have."""
        digest, error = "", None
        if group := self._members(comm):
            tell = progress if files.reader else lambda _: None
            result = broadcast(
                group, self.plan.size, self.request.chunk, self.request.depth,
                files.reader, files.partial, tell,
            )  # fmt: skip
            group.Free()
            digest, error = result.digest, result.error
        answers = together(comm, self.here, lambda: self._judge(files, digest, error))
        for _, _, stale in answers:
            if stale:
                raise StaleError(stale)
        return self._agreed_digest([(node, digest) for node, digest, _ in answers])

    def _members(self, comm: MPI.Intracomm) -> MPI.Intracomm | None:
        """The communicator of the ranks that move bytes, the sender its rank 0."""
        members = self.plan.members
        group = comm.group.Incl(list(members))
        return comm.Create_group(group) if comm.rank in members else None

    def _judge(
        self, files: _Files, digest: str, error: StageError | None
    ) -> tuple[str, str, Failure | None]:
        """This node, the digest that passed it, and what went stale; raises a transfer's error."""
        name = self.here.name
        if files.reader and self.plan.from_source:
            if self._source_changed(files.reader):
                text = f"{self.item.source} changed while it was read; submit again once it rests"
                return name, digest, Failure(IntegrityError.code, text, name)
        elif files.reader and (error or digest != self.plan.digest):
            self.cache.forget(self.item.destination)
            text = f"{self.item.destination}: this copy is damaged; remove it and submit again"
            return name, digest, Failure(IntegrityError.code, text, name)
        if error:
            raise error
        return name, digest, None

    def _source_changed(self, reader: FileReader) -> bool:
        with suppress(OSError):
            named = facts_of(os.stat(self.item.source))
            return not facts_of(os.fstat(reader.descriptor)) == named == self.source.facts
        return True

    def _agreed_digest(self, answers: list[tuple[str, str]]) -> str:
        sent = answers[self.plan.sender][1]
        text = f"{self.item.destination}: the bytes that came differ from those sent; submit again"
        wrong = [answers[rank][0] for rank in self.plan.members if answers[rank][1] != sent]
        if wrong:
            raise RefusedError([Failure(IntegrityError.code, text, node) for node in wrong])
        return sent

    def _seal(self, files: _Files) -> None:
        if files.partial:
            files.partial.seal(self.source.mode, self.source.group, self.source.facts.mtime_ns)

    def _publish(self, files: _Files, digest: str) -> None:
        if files.partial:
            copy = files.partial.publish(self._path)
            self.cache.save(self._record(copy, digest))

    def _record(self, copy: CopyFacts, digest: str) -> Record:
        now = int(time.time())
        return Record(
            version=VERSION,
            source=self.item.source,
            destination=self.item.destination,
            source_facts=self.source.facts,
            copy_facts=copy,
            digest=digest,
            staged_at=now,
            used_at=now,
            used_by_job=self.request.job,
        )

    def _note_use(self) -> None:
        record = self.cache.load(self.item.destination)
        if record:
            used = replace(record, used_at=int(time.time()), used_by_job=self.request.job)
            with suppress(StageError):  # an unnoted use costs nothing but its note
                self.cache.save(used)

    def _source_bytes(self, files: _Files) -> int:
        return files.reader.bytes_read if files.reader and self.plan.from_source else 0
