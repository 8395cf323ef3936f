"""Make a squashfs file of a container image on one node, and send it to all."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING

from stager.base.errors import LARGER_DISKS, Failure, SourceError, SpaceError
from stager.base.extents import Extent
from stager.base.rules import amount_of
from stager.fs.files import existing_folder_above, remove_tree, stage_errors
from stager.fs.partial_file import make_partial_folder
from stager.fs.reader import FileReader
from stager.rank.cargo import Opened
from stager.rank.file_cargo import FileCargo
from stager.rank.report import tell
from stager.store.space import free_space
from stager.wire.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stager.wire.transfer import Transferred

#: Bytes that an image takes while it is made into a file, for each byte of its compressed layers:
#: what is in them takes two to three times as much, and the layers or the file lie beside it.
_WHILE_MADE = 4
#: Seconds between two signs that an image is still being made into a file.
_PERIOD = 2.0


class ImageCargo(FileCargo):
    """One image. Its size as a file is not known before the first sender has made it.

    It has the time at which it was staged: a registry knows none.
    """

    _begun = _told = 0.0

    def need(self) -> int:
        copy = self.need_in_all()
        if not (self.task.sends and self.task.plan.from_source):
            return copy
        # What is there for a moment only shall not exceed the user's limit.
        space = self.task.space
        disk = free_space(existing_folder_above(f"{self.task.cache.folder}/"), space).size
        most = amount_of(space.limit_in(self.task.item.root), disk) or inf
        return int(max(copy, min(copy + _WHILE_MADE * self.task.source.allocated, most)))

    def need_in_all(self) -> int:
        before = self.task.cache.load(self.task.item.destination)
        is_same = before and before.source == self.task.item.source
        return before.copy_facts.size if before and is_same else self.task.source.allocated

    def _open_to_send(self) -> Opened:
        task = self.task
        if task.plan.from_source:
            reader = self._make_file()
        else:
            try:
                reader = FileReader(task.path)
            except SourceError:
                return Opened(stale=task.mark_damaged())
        self.reader = reader
        self.stack.callback(reader.close)
        return Opened((Extent(0, os.fstat(reader.descriptor).st_size),))

    def _make_file(self) -> FileReader:
        """Return the open file, which has no name any more."""
        from stager.source.registry import import_image  # only the node that reads needs it

        task = self.task
        with stage_errors(task.cache.partial), _partial_folder(task.cache.partial) as folder:
            digest = task.source.facts.revision
            self._begun = self._told = time.monotonic()
            made = import_image(task.item.source, digest, folder, task.remote, self._go_on)
            reader = FileReader(made.path)
            reader.retries = made.retries
            return reader

    def _go_on(self) -> None:
        """Tell now and then that it goes on. Raise SpaceError if no more may be written here."""
        task, now = self.task, time.monotonic()
        if now - self._told >= _PERIOD:
            self._told = now
            destination, seconds = task.item.destination, now - self._begun
            tell("making", destination=destination, node=task.node.name, seconds=seconds)
        if free_space(task.cache.folder, task.space).usable <= 0:
            raise SpaceError(
                f"{task.item.source}: it takes more than you may write on this disk while a file "
                f"is made of it; free space there (stagectl evict), or {LARGER_DISKS}"
            )

    def layout(self, opened: Sequence[Opened]) -> Layout:
        extents = opened[self.task.plan.senders[0]].extents
        return Layout(extents[-1].end, self.task.settings.chunk, extents)

    def staleness(self, result: Transferred) -> Failure | None:
        return None if self.task.plan.from_source else super().staleness(result)

    def seal(self) -> None:
        source = self.task.source
        if self._partial:
            self._partial.seal(source.mode, source.group, time.time_ns())


@contextmanager
def _partial_folder(parent: str) -> Iterator[str]:
    """Make a folder in ``parent``, and remove it after the block with all that is in it."""
    path, lock = make_partial_folder(parent)
    try:
        yield path
    finally:
        remove_tree(path)
        os.close(lock)
