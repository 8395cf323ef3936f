"""Unpack archives and decompress files while they are received, or once all has come."""

from __future__ import annotations

import fcntl
import io
import os
import threading
from contextlib import suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Generic, TypeVar

from stager.archive.target import Limits, excess
from stager.archive.unpack import decompress
from stager.base.errors import SourceError, StageError, write_traceback
from stager.base.extents import ALIGNMENT
from stager.base.telemetry import count
from stager.base.text import bytes_text
from stager.fs.files import as_stage_error, stage_errors, write_all
from stager.store.space import find_candidates, free_space
from stager.tree.listing import text_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from stager.fs.partial_file import Partial
    from stager.rank.plan import Task
    from stager.tree.listing import Listing
    from stager.tree.partial_tree import PartialTree

Result = TypeVar("Result")

#: Bytes that may wait between the network and the decoder; a pipe has 64 KiB by default.
_PIPE_SIZE = 1 << 20


class Piped(Generic[Result]):
    """A Writer that gives what is written, in order, to a function in a thread of its own.

    ``take`` gets a pipe, and may raise StageError, or an OSError of the disk of ``folder``. That is
    raised by the next `write` or by `finish`. The ``verb`` is what it does with ``name``: unpack.
    """

    _result: Result

    def __init__(
        self, take: Callable[[IO[bytes]], Result], *, name: str, folder: str, verb: str
    ) -> None:
        self._take = take
        self._name, self._folder, self._verb = name, folder, verb
        reading, self._writing = os.pipe2(os.O_CLOEXEC)
        with suppress(OSError):  # the kernel limits the memory of one user's pipes
            fcntl.fcntl(self._writing, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        self._error: StageError | None = None
        self._thread = threading.Thread(target=self._run, args=(reading,), daemon=True)
        self._thread.start()

    def _run(self, reading: int) -> None:
        with open(reading, "rb") as pipe:
            try:
                self._result = self._take(pipe)
            except StageError as error:
                self._error = error
            except OSError as error:
                self._error = as_stage_error(error, self._folder)
            except BaseException as error:
                # Raised here it would end the thread alone, and the rest would be published.
                write_traceback()
                self._error = SourceError(f"{self._name} cannot be {self._verb}ed: {error!r}")

    def write(self, data: memoryview, _: int) -> None:
        """Take the next bytes. Raise StageError if the function has failed."""
        while data and self._writing >= 0:
            try:
                data = data[os.write(self._writing, data) :]
            except BrokenPipeError:
                self.finish()

    def finish(self) -> Result:
        """Return what the function returns when it has taken all. Raise StageError if it failed."""
        self.close()
        if self._error:
            raise self._error
        return self._result

    def close(self) -> None:
        """End what is written here, and wait for the thread."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1
        self._thread.join()


class Spooled(Generic[Result]):
    """A Writer that keeps all in a partial file, which `finish` gives to a function.

    A zip archive has its index at its end. What ``take`` raises is as for `Piped`.
    """

    def __init__(
        self, take: Callable[[IO[bytes]], Result], *, folder: str, partial: Partial
    ) -> None:
        self._take, self._folder, self._partial = take, folder, partial
        self.write = partial.write
        self.close = partial.close

    def finish(self) -> Result:
        """Return what the function returns. Raise StageError."""
        with stage_errors(self._folder), self._partial.opened() as file:
            return self._take(file)


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
        #: The digest of each decompressed file, by row.
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
                decoder, self._decoder = self._decoder, None
                decoder.finish()

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

    def close(self) -> None:
        """End the decoder of a file that has not come whole."""
        if self._decoder:
            self._decoder.close()


class _File:
    """An open file, to which data is written; see `archive.unpack.SingleTarget`."""

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


def limits_of(task: Task, reserved: int = 0) -> Limits:
    """Return what the item may become here, beside ``reserved`` bytes. Raise DestinationError."""
    with stage_errors(task.cache.partial):
        room = max(0, room_to_unpack(task) - reserved)
    return Limits(task.space.unpacked_size, task.space.unpacked_members, room)


def room_to_unpack(task: Task) -> int:
    """Return the bytes that the item may take on this node's disk when it is unpacked.

    What the request's other items will take there is not subtracted. Raise OSError.
    """
    space, destination = task.space, task.item.destination
    free = free_space(task.cache.folder, space)
    room = max(0, free.usable)
    limit = space.limit_in(task.item.root, free.size)
    if not limit:
        return room
    copies = find_candidates(task.cache)
    used = sum(one.size for one in copies if one.record.destination != destination)
    return min(room, limit - used)
