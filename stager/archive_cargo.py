"""An archive as a Cargo: its bytes are broadcast as those of a file, and unpacked as they come."""

from __future__ import annotations

import os
import threading
from typing import IO, TYPE_CHECKING

from stager import store
from stager.cargo import Cargo, Opened, Published, Task
from stager.directive import Relocate
from stager.errors import Failure, SourceError, StageError
from stager.file_cargo import source_changed
from stager.layout import Layout
from stager.listing import Kind, Listing, Row
from stager.reader import FileReader
from stager.report import Counts
from stager.stream import DIGEST_SIZE, place
from stager.tree import PartialTree
from stager.tree_cargo import announce_tree, publish_tree, read_back, relocate
from stager.unpack import Limits, is_zip, unpack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stager.manifest import Record
    from stager.transfer import Result


class _Unpacker:
    """Takes an archive's bytes in order, and has a thread unpack them into ``folder``.

    What is wrong with the archive is raised by the next `write`, or by `finish`.
    """

    def __init__(self, name: str, folder: str, limits: Limits) -> None:
        reading, self._writing = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(
            target=self._run, args=(reading, name, os.fsencode(folder), limits), daemon=True
        )
        self._error: StageError | None = None
        self.digests: dict[bytes, bytes] = {}
        self._thread.start()

    def _run(self, reading: int, name: str, folder: bytes, limits: Limits) -> None:
        with open(reading, "rb") as archive:
            self._unpack(archive, name, folder, limits)

    def _unpack(self, archive: IO[bytes], name: str, folder: bytes, limits: Limits) -> None:
        try:
            self.digests = unpack(archive, name, folder, limits)
        except StageError as error:
            self._error = error
        except OSError as error:
            self._error = store.as_stage_error(error, os.fsdecode(folder))
        except BaseException as error:
            # A surprise: whatever it is, nothing of this may be published.
            self._error = SourceError(f"{name} cannot be unpacked: {error!r}")

    def write(self, data: memoryview, _: int) -> None:
        """Take the next bytes."""
        while data and self._writing >= 0:
            try:
                data = data[os.write(self._writing, data) :]
            except BrokenPipeError:
                self.finish()

    def finish(self) -> None:
        """Have all that was written unpacked."""
        self.close()
        if self._error:
            raise self._error

    def close(self) -> None:
        """Stop, whatever was unpacked."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1
        self._thread.join()


class _Spool:
    """Keeps the bytes of an archive that is read from its end, until all have come."""

    def __init__(self, task: Task, folder: str, limits: Limits) -> None:
        self._archive = store.Partial(task.cache, direct=task.settings.direct)
        self._name = task.item.source
        self._folder = folder
        self._limits = limits
        self.digests: dict[bytes, bytes] = {}

    def write(self, data: memoryview, offset: int) -> None:
        """Put ``data`` at ``offset`` bytes."""
        self._archive.write(data, offset)

    def finish(self) -> None:
        """Unpack all of it."""
        with store.raising(self._folder), self._archive.opened() as archive:
            self.digests = unpack(
                archive, self._name, os.fsencode(self._folder), self._limits
            )  # fmt: skip

    def close(self) -> None:
        """Let go of the bytes."""
        self._archive.close()


class ArchiveCargo(Cargo):
    """Brings the tree that an archive holds. What it unpacks to is known when it is unpacked."""

    _file: FileReader | None = None
    _tree: PartialTree | None = None
    _published: Record | None = None
    _unpacker: _Unpacker | _Spool | None = None

    def need(self) -> int:
        task = self.task
        before = task.cache.load(task.item.destination)
        known = before.tree.allocated if before and before.tree else 0
        return max(known, task.source.allocated) if task.receives else 0

    def need_in_all(self) -> int:
        return self.need()

    def open(self) -> Opened:
        task = self.task
        if task.receives:
            self.stack.enter_context(store.made_parents(task.path))
            self._tree = PartialTree(task.cache, Listing.of([Row(b"", Kind.FOLDER)]))
            self.stack.callback(self._tree.close)
            self.writer = self._unpacker = self._make_unpacker(self._tree.path)
            self.stack.callback(self._unpacker.close)
        if task.sends:
            self.reader = self._file = FileReader(task.item.source)
            self.stack.callback(self._file.close)
        return Opened()

    def _make_unpacker(self, folder: str) -> _Unpacker | _Spool:
        task = self.task
        limits = Limits(task.space.unpacked_size, task.space.unpacked_members)
        if is_zip(task.item.source):
            return _Spool(task, folder, limits)
        return _Unpacker(task.item.source, folder, limits)

    def layout(self, opened: Sequence[Opened]) -> Layout:
        return Layout.dense(self.task.plan.size, self.task.settings.chunk)

    def allocate(self, layout: Layout) -> None:
        pass

    def staleness(self, result: Result) -> Failure | None:
        return source_changed(self.task, self._file) if self._file else None

    def seal(self) -> None:
        if self._tree and self._unpacker:
            self._unpacker.finish()
            self._tree.adopt()
            if self.task.item.relocate is Relocate.VENV:
                self._relocate(self._tree, self._unpacker.digests)
            self._tree.sync()

    def _relocate(self, tree: PartialTree, digests: dict[bytes, bytes]) -> None:
        listing = tree.copy
        changed = relocate(self.task, tree, listing, b"\1" * len(listing), {})
        for row, (_, digest) in changed.items():
            digests[listing.paths[row]] = digest

    def verify(self, digest: str) -> None:
        if self._tree:
            listing = self._tree.copy
            read_back(self.task, self._tree, listing, self._rows(listing))

    def _rows(self, listing: Listing) -> Iterator[tuple[int, bytes]]:
        assert self._unpacker is not None
        for row in listing.rows(Kind.FILE):
            yield row, self._unpacker.digests[listing.paths[row]]

    def announce(self) -> None:
        if self._tree:
            listing = self._tree.copy
            digests = bytearray(DIGEST_SIZE * len(listing))
            for row, found in self._rows(listing):
                digests[place(row)] = found
            self._published = announce_tree(self.task, self._tree, listing, bytes(digests), {})

    def publish(self, digest: str) -> Published:
        if not self._tree or not self._published or not self._published.tree:
            return Published()
        files = self._published.tree.files
        counts = Counts(files, files, self.task.plan.size)
        return publish_tree(self.task, self._tree, self._published, counts)
