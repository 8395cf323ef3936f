"""Send compressed files, or receive and decompress them: every node keeps what is in them."""

from __future__ import annotations

import io
import os
from functools import partial
from typing import IO, TYPE_CHECKING

from stager.archive.target import excess
from stager.archive.unpack import decompress
from stager.base.extents import ALIGNMENT
from stager.base.telemetry import count
from stager.base.text import bytes_text
from stager.fs.files import stage_errors, write_all
from stager.rank.file_cargo import FileCargo
from stager.rank.tree_cargo import TreeCargo
from stager.rank.unpacker import Piped, limits_of
from stager.tree.listing import text_of
from stager.tree.stream import place
from stager.wire.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from stager.archive.target import Limits
    from stager.fs.partial_file import Partial
    from stager.rank.cargo import Opened, Published
    from stager.tree.listing import Listing
    from stager.tree.partial_tree import PartialTree
    from stager.tree.stream import NewTree


class DecompressCargo(FileCargo):
    """One compressed file. The size of the copy is not known before all of it is there.

    A receiver always reads the source: a copy has other bytes.
    """

    _decoder: Piped[str] | None = None
    #: The digest of the copy, once it is sealed.
    _digest = ""

    def need(self) -> int:
        before = self.task.cache.load(self.task.item.destination)
        estimate = before.copy_facts.size if before and before.decompressed else 0
        return max(estimate, self.task.source.allocated)

    def need_in_all(self) -> int:
        return self.need()

    def open(self) -> Opened:
        opened = super().open()
        if self._partial:
            self.writer = self._decoder = self._make_decoder(self._partial)
            self.stack.callback(self._decoder.close)
        return opened

    def _make_decoder(self, copy: Partial) -> Piped[str]:
        name, folder = self.task.item.source, self.task.cache.partial
        with stage_errors(folder):
            limits = limits_of(self.task)
        take = partial(decompress, name=name, partial=copy, limits=limits)
        return Piped(take, name=name, folder=folder, verb="decompress")

    def layout(self, opened: Sequence[Opened]) -> Layout:
        return Layout.dense(self.task.plan.size, self.task.settings.chunk)

    def allocate(self, layout: Layout) -> None:
        """Do nothing: how much room it takes is not known. `Limits` ends it when there is none."""

    def seal(self) -> None:
        if self._decoder:
            self._decoder.finish()
            self._digest = self._decoder.result or ""
        super().seal()

    def verify(self, digest: str) -> None:
        super().verify(self._digest)

    def announce(self, digest: str) -> None:
        super().announce(self._digest)

    def publish(self, digest: str) -> Published:
        return super().publish(self._digest)


class DecompressTreeCargo(TreeCargo):
    """One folder, in which the files that the listing says are decompressed while they come."""

    _target: DecompressingTree | None = None

    def _open_target(self, tree: PartialTree) -> NewTree:
        with stage_errors(tree.path):
            limits = limits_of(self.task)
        self._target = DecompressingTree(tree, self._listing, self.task.item.source, limits)
        self.stack.callback(self._target.close)
        return self._target

    def seal(self) -> None:
        if self._target and self._digests:
            for row, digest in self._target.digests.items():
                self._digests.digests[place(row)] = digest
        super().seal()


class DecompressingTree:
    """Writes files to ``tree``, decompressing some; the ``listing`` of ``folder`` says which.

    The parts of a file come in order, from one thread.
    """

    def __init__(self, tree: PartialTree, listing: Listing, folder: str, limits: Limits) -> None:
        self._tree = tree
        self._listing = listing
        self._folder = folder.rstrip("/")
        self._limits = limits
        #: Bytes of all files so far, and those of the disk that they take.
        self._size = self._allocated = 0
        #: The decoder of a file that continues in the next part, and the bytes that it lacks.
        self._decoder: Piped[None] | None = None
        self._missing = 0
        #: The xxh3-128 of each decompressed file, by row.
        self.digests: dict[int, bytes] = {}

    def writing(self) -> AbstractContextManager[None]:
        """Return a context for `write`, in which an OSError becomes a StageError."""
        return self._tree.writing()

    def create(self, row: int) -> None:
        """Make the row's file, which has no data at the source."""
        if self._listing.is_decompressed(row):
            self._decompress(row, io.BytesIO())
        else:
            self._tree.create(row)

    def write(self, row: int, data: memoryview, offset: int) -> None:
        """Write, or decompress, ``data`` at ``offset`` of the row's file. Raise StageError."""
        size = self._listing.data(row)
        if not self._listing.is_decompressed(row):
            self._tree.write(row, data, offset)
        elif len(data) == size:
            self._decompress(row, io.BytesIO(data))
        else:
            if self._decoder is None:
                take = partial(self._decompress, row)
                name = self._name(row)
                self._decoder = Piped(take, name=name, folder=self._tree.path, verb="decompress")
                self._missing = size
            self._decoder.write(data, offset)
            self._missing -= len(data)
            if not self._missing:
                self._finish()

    def _name(self, row: int) -> str:
        return f"{self._folder}/{text_of(self._listing.source_path(row))}"

    def _decompress(self, row: int, compressed: IO[bytes]) -> None:
        limits = self._limits
        room = None if limits.room is None else max(0, limits.room - self._allocated)
        with self._tree.filling(row) as descriptor:
            target = _File(descriptor)
            digest = decompress(compressed, self._name(row), target, limits._replace(room=room))
        self.digests[row] = bytes.fromhex(digest)
        self._size += target.size
        self._allocated += target.allocated
        if self._size > limits.size:
            raise excess(self._folder, bytes_text(limits.size), "unpacked_size")

    def _finish(self) -> None:
        if self._decoder:
            decoder, self._decoder = self._decoder, None
            decoder.finish()

    def close(self) -> None:
        """End the decoder of a file that has not come whole."""
        if self._decoder:
            self._decoder.close()


class _File:
    """An open file, to which data is written; see `archive.single.SingleTarget`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        #: Bytes of the file, and of the disk that it takes.
        self.size = self.allocated = 0

    def write(self, data: memoryview, offset: int) -> None:
        count()
        write_all(self._descriptor, data, offset)
        self.allocated += -(-len(data) // ALIGNMENT) * ALIGNMENT

    def allocate(self, size: int, _: tuple[()]) -> None:
        os.ftruncate(self._descriptor, size)  # there may be a hole at the end
        self.size = size
