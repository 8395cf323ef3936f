"""Send or receive a single file."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from stager.base.errors import DestinationError, Failure, IntegrityError, SourceError, StageError
from stager.base.extents import rounded
from stager.base.options import Share
from stager.fs.files import TICK
from stager.fs.partial_file import Partial
from stager.fs.reader import FileReader
from stager.rank.cargo import Cargo, Opened, Published
from stager.source.access import open_file
from stager.source.posix import data_size
from stager.store.parents import made_parents
from stager.store.record import is_ours
from stager.store.validity import check_contents, own_lstat
from stager.wire.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stager.rank.task import Task
    from stager.source.access import SourceReader
    from stager.store.record import Record
    from stager.wire.transfer import Transferred


class FileCargo(Cargo):
    """One file: read by a FileReader on a sender, written to a Partial on a receiver."""

    _source: SourceReader | None = None
    _partial: Partial | None = None

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
            self.stack.enter_context(made_parents(task.cache, task.path))
            self.writer = self._partial = Partial(task.cache, direct=task.settings.direct)
            self.stack.callback(self._partial.close)
        return self._open_to_send() if task.sends else Opened()

    def _open_to_send(self) -> Opened:
        task, plan = self.task, self.task.plan
        try:
            reader = self._open_source() if plan.from_source else FileReader(task.path)
            self.reader = reader
            self.stack.callback(reader.close)
            if task.rank == plan.senders[0]:
                return Opened(rounded(reader.extents(plan.size), plan.size))
        except IntegrityError as error:
            return Opened(stale=Failure.of(error, task.node.name))
        except SourceError:
            if plan.from_source:
                raise
            return Opened(stale=task.mark_damaged())
        return Opened()

    def _open_source(self) -> SourceReader:
        self._source = open_source(self.task)
        return self._source

    def layout(self, opened: Sequence[Opened]) -> Layout:
        plan = self.task.plan
        return Layout(plan.size, self.task.settings.chunk, opened[plan.senders[0]].extents)

    def allocate(self, layout: Layout) -> None:
        if self._partial:
            self._partial.allocate(layout.size, layout.extents)

    def staleness(self, result: Transferred) -> Failure | None:
        task = self.task
        if self._source:
            return staleness_of(self._source, task.node.name)
        if not self.reader or (not result.error and result.digest == task.plan.digest):
            return None
        return task.mark_damaged()

    def seal(self) -> None:
        source = self.task.source
        if self._partial:
            self._partial.seal(source.mode, source.group, source.facts.mtime_ns)

    def verify(self, digest: str) -> None:
        if self._partial and self._partial.read_back() != digest:
            raise self.task.readback_error()

    def announce(self, digest: str) -> None:
        """Check what is at the destination; `publish` announces the file."""
        task = self.task
        if not self._partial:
            return
        own_lstat(task.path)  # another user may have staged there meanwhile
        record = task.cache.load(task.item.destination)
        if not task.item.options.replace:
            check_contents(task.path, task.source.facts, record, digest)

    def publish(self, digest: str) -> Published:
        if self._partial:
            task, cache = self.task, self.task.cache
            before = cache.load(task.item.destination)
            check_unwritten(task, before)
            is_new = before is None
            record = task.record(self._partial.facts(), digest)
            if is_new:  # if this process dies here, nobody takes the file for the user's own
                cache.save(record.as_damaged())
            try:
                self._partial.publish(task.path)
            except StageError:
                if is_new:
                    cache.forget(task.item.destination)
                raise
            cache.save(record)
        return Published(digest)


def check_unwritten(task: Task, before: Record | None) -> None:
    """Raise DestinationError if the user has written to the destination since the survey.

    Not even the option ``replace`` overwrites that. ``before`` is the record of what was there.
    """
    if there := own_lstat(task.path):
        is_staged = before is not None and is_ours(there, before)
        is_late = there.st_ctime_ns >= task.since - TICK
        if is_late and not is_staged:
            remedy = "choose another destination, or add the option replace"
            if stat.S_ISDIR(there.st_mode):  # which is never replaced
                remedy = "or choose another destination"
            elif task.item.options.replace:
                remedy = "or submit again when nothing is written there"
            raise DestinationError(
                f"{task.path} was written while it was staged; it is kept: move "
                f"it, delete it, {remedy}"
            )


def open_source(task: Task) -> SourceReader:
    """Open a task's source, a single file. Raise IntegrityError if it is not the one surveyed.

    Raise SourceError if it may not become a copy for all users: the site's account reads for them,
    and may be able to read more.
    """
    for_all = task.item.shared and task.item.options.share is Share.NONE
    return open_file(task.item.source, task.source, task.remote, for_all=for_all)


def staleness_of(reader: SourceReader, node: str) -> Failure | None:
    """Return the Failure if a source that was read is not, or no longer, the one surveyed."""
    try:
        reader.check()
    except IntegrityError as error:
        return Failure.of(error, node)
    return None
