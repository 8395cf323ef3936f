"""An archive as a Cargo: its bytes are broadcast as those of a file, and unpacked as they come."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from contextlib import suppress
from dataclasses import replace
from typing import IO, TYPE_CHECKING

from stager.archive.target import Limits
from stager.archive.unpack import unpack
from stager.archive.zip import is_zip
from stager.base.errors import Failure, SourceError, StageError
from stager.base.options import Relocate
from stager.base.outcome import Counts
from stager.copies import evict
from stager.disk.files import OPEN_FOLDER, as_stage_error, made_parents, opened, stage_errors
from stager.disk.partial import Partial
from stager.disk.permissions import give_permissions, unpacked_mode
from stager.disk.reader import FileReader
from stager.rank.cargo import Cargo, Opened, Published, Task
from stager.rank.file_cargo import source_changed
from stager.rank.tree_cargo import announce_tree, publish_tree, read_back, relocate
from stager.tree.listing import Kind, Listing, Row
from stager.tree.partial import PartialTree
from stager.tree.stream import DIGEST_SIZE, place
from stager.tree.venv import find_interpreter, note
from stager.wire.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stager.disk.record import Record
    from stager.wire.transfer import Transferred

#: Bytes that may wait between the network and the unpacking; more than a pipe has by itself.
_PIPE = 1 << 20


class _Unpacker:
    """Takes an archive's bytes in order, and has a thread unpack them into ``folder``.

    What is wrong with the archive is raised by the next `write`, or by `finish`.
    """

    def __init__(self, name: str, folder: str, limits: Limits) -> None:
        reading, self._writing = os.pipe2(os.O_CLOEXEC)
        with suppress(OSError):  # the user has too many such
            fcntl.fcntl(self._writing, fcntl.F_SETPIPE_SZ, _PIPE)
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
            self._error = as_stage_error(error, os.fsdecode(folder))
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
        self._archive = Partial(task.cache, direct=task.settings.direct)
        self._name = task.item.source
        self._folder = folder
        self._limits = limits
        self.digests: dict[bytes, bytes] = {}

    def write(self, data: memoryview, offset: int) -> None:
        """Put ``data`` at ``offset`` bytes."""
        self._archive.write(data, offset)

    def finish(self) -> None:
        """Unpack all of it."""
        with stage_errors(self._folder), self._archive.opened() as archive:
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
    _note = ""

    def need(self) -> int:
        if not self.task.receives:
            return 0
        # What is read from its end is on the disk while it is unpacked.
        whole, spooled = self.need_in_all(), self.task.source.allocated
        return self._known + spooled if is_zip(self.task.item.source) else whole

    def need_in_all(self) -> int:
        return max(self._known, self.task.source.allocated) if self.task.receives else 0

    @property
    def _known(self) -> int:
        """Bytes that the archive unpacked to when that was done last."""
        before = self.task.cache.load(self.task.item.destination)
        return before.tree.allocated if before and before.tree else 0

    def open(self) -> Opened:
        task = self.task
        if task.receives:
            self.stack.enter_context(made_parents(task.path))
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
        with stage_errors(folder):
            room = _room(task)
        if is_zip(task.item.source):
            room -= task.plan.size
        limits = Limits(task.space.unpacked_size, task.space.unpacked_members, max(0, room))
        if is_zip(task.item.source):
            return _Spool(task, folder, limits)
        return _Unpacker(task.item.source, folder, limits)

    def layout(self, opened: Sequence[Opened]) -> Layout:
        return Layout.dense(self.task.plan.size, self.task.settings.chunk)

    def allocate(self, layout: Layout) -> None:
        pass

    def staleness(self, result: Transferred) -> Failure | None:
        return source_changed(self.task, self._file) if self._file else None

    def seal(self) -> None:
        if self._tree and self._unpacker:
            self._unpacker.finish()
            with stage_errors(self._tree.path):
                narrow(self._tree.path, self.task.source.mode, self.task.source.group)
            self._tree.adopt()
            if self.task.item.options.relocate is Relocate.VENV:
                self._relocate(self._tree, self._unpacker.digests)
            self._tree.sync()

    def _relocate(self, tree: PartialTree, digests: dict[bytes, bytes]) -> None:
        listing = tree.copy
        changed = relocate(self.task, tree, listing, b"\1" * len(listing), {})
        interpreter = find_interpreter(tree.path, self.task.item.source)
        if interpreter and interpreter.is_shared:
            self._note = note(interpreter.path, may_be_staged=False)
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
        published = publish_tree(self.task, self._tree, self._published, counts)
        return replace(published, note=self._note)


def _room(task: Task) -> int:
    """Bytes that the user may still have on this node's disk: nobody knew before how many it takes.

    What else of this job is still to come there is not known here.
    """
    space, destination = task.space, task.item.destination
    room = evict.free_bytes(task.cache.folder, space)
    if not space.user_limit:
        return room
    kept = evict.look(task.cache, task.here.disk)
    used = sum(one.size for one in kept if one.record.destination != destination)
    return min(room, space.user_limit - used)


def narrow(folder: str, mode: int, group: int) -> None:
    """Let nobody into the ``folder`` who may not read the archive, which has that mode and group.

    Raises OSError.
    """
    with opened(folder, OPEN_FOLDER | os.O_NOFOLLOW) as descriptor:
        found = stat.S_IMODE(os.fstat(descriptor).st_mode)
        give_permissions(descriptor, unpacked_mode(found, mode), group)
