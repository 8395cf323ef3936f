"""Send or receive a single file."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base.errors import Failure, IntegrityError, SourceError
from stager.base.extents import rounded
from stager.base.options import Share
from stager.base.progress import Kind, doing
from stager.disk.files import made_parents
from stager.disk.partial import Partial
from stager.disk.reader import FileReader
from stager.rank.cargo import Cargo, Opened, Published
from stager.source.location import is_url
from stager.source.posix import data_size, facts_of, gives_less
from stager.wire.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stager.rank.task import Task
    from stager.source.remote import RemoteReader
    from stager.wire.transfer import Transferred


class FileCargo(Cargo):
    """One file: read by a FileReader on a sender, written to a Partial on a receiver."""

    _file: FileReader | None = None
    _object: RemoteReader | None = None
    _partial: Partial | None = None

    @property
    def retries(self) -> int:
        return self._object.retries if self._object else 0

    def need(self) -> int:
        task = self.task
        if task.plan.from_source:
            return data_size(task.item.source, task.source)
        return task.source.allocated

    def need_in_all(self) -> int:
        return 0

    def open(self) -> Opened:
        task = self.task
        if task.receives:
            self.stack.enter_context(made_parents(task.path))
            self.writer = self._partial = Partial(task.cache, direct=task.settings.direct)
            self.stack.callback(self._partial.close)
        return self._open_to_send() if task.sends else Opened()

    def _open_to_send(self) -> Opened:
        task, plan = self.task, self.task.plan
        if plan.from_source and is_url(task.item.source):
            return self._open_object()
        try:
            path = task.item.source if plan.from_source else task.path
            self.reader = self._file = FileReader(path)
            self.stack.callback(self._file.close)
            if plan.from_source and (stale := source_replaced(task, self._file)):
                return Opened(stale=stale)  # before a byte of another file is sent
            if task.rank == plan.senders[0]:
                return Opened(rounded(self._file.extents(plan.size), plan.size))
        except SourceError:
            if plan.from_source:
                raise
            return Opened(stale=task.mark_damaged())
        return Opened()

    def _open_object(self) -> Opened:
        from stager.source.remote import RemoteReader  # slow to import

        task = self.task
        try:
            self.reader = self._object = RemoteReader(
                task.item.source, task.source.facts, task.remote
            )
        except IntegrityError as error:
            return Opened(stale=Failure.of(error, task.node.name))
        if task.rank == task.plan.senders[0]:
            return Opened(tuple(self._object.extents(task.plan.size)))
        return Opened()

    def layout(self, opened: Sequence[Opened]) -> Layout:
        plan = self.task.plan
        return Layout(plan.size, self.task.settings.chunk, opened[plan.senders[0]].extents)

    def allocate(self, layout: Layout) -> None:
        if self._partial:
            self._partial.allocate(layout.size, layout.extents)

    def staleness(self, result: Transferred) -> Failure | None:
        task = self.task
        if self._object and isinstance(result.error, IntegrityError):
            return Failure.of(result.error, task.node.name)
        if not self._file:
            return None
        if task.plan.from_source:
            return source_changed(task, self._file)
        if not result.error and result.digest == task.plan.digest:
            return None
        return task.mark_damaged()

    def seal(self) -> None:
        source = self.task.source
        if self._partial:
            self._partial.seal(source.mode, source.group, source.facts.mtime_ns)

    def verify(self, digest: str) -> None:
        if self._partial and self._partial.read_back() != digest:
            raise self.task.readback_error()

    def announce(self) -> None:
        """Do nothing: a file whose record was not written yet is replaced without loss."""

    def publish(self, digest: str) -> Published:
        if self._partial:
            copy = self._partial.publish(self.task.path)
            self.task.cache.save(self.task.record(copy, digest))
        return Published(digest)


def source_replaced(task: Task, reader: FileReader) -> Failure | None:
    """Return a Failure if the open file is not the one surveyed, or fewer may read it now."""
    failure = source_changed(task, reader)
    if failure or task.item.options.share is not Share.SOURCE:
        return failure
    with suppress(OSError), doing(Kind.READ, task.item.source):
        if not gives_less(reader.descriptor, task.source):
            return None
    return _changed(task)


def source_changed(task: Task, reader: FileReader) -> Failure | None:
    """Return a Failure if the file that was read is not, or no longer, the one surveyed."""
    with suppress(OSError), doing(Kind.READ, task.item.source):
        named = facts_of(os.stat(task.item.source))
        if facts_of(os.fstat(reader.descriptor)) == named == task.source.facts:
            return None
    return _changed(task)


def _changed(task: Task) -> Failure:
    text = f"{task.item.source} changed while it was read; submit again when nothing writes to it"
    return Failure(IntegrityError.code, text, task.node.name)
