"""Unpack an archive or a file while it is received, or once it is if its index is at its end."""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Generic, Protocol, TypeVar

from stager.archive.target import Limits
from stager.archive.unpack import unpack
from stager.base.errors import SourceError, StageError, write_traceback
from stager.base.rules import amount_of
from stager.fs.files import as_stage_error, stage_errors
from stager.store.space import find_candidates, free_space

if TYPE_CHECKING:
    from collections.abc import Callable

    from stager.fs.partial_file import Partial
    from stager.rank.task import Task

Result = TypeVar("Result")

#: Bytes that may wait between the network and the unpacking; a pipe has 64 KiB by default.
_PIPE_SIZE = 1 << 20


@dataclass(frozen=True, slots=True)
class Unpacking:
    """An archive's ``name``, which tells its format, the folder to fill, and what it may take."""

    name: str
    folder: str
    limits: Limits

    def unpack(self, archive: IO[bytes]) -> dict[bytes, bytes]:
        """Unpack, and return the digest of each file by its path. Raise StageError or OSError."""
        return unpack(archive, self.name, os.fsencode(self.folder), self.limits)


class Unpacker(Protocol):
    """A Writer that takes an archive and unpacks it."""

    @property
    def digests(self) -> dict[bytes, bytes]:
        """The digest of each unpacked file by its path, after `finish`."""

    def write(self, data: memoryview, offset: int) -> None:
        """Take ``data``, which is at ``offset`` bytes of the archive. Raise StageError."""

    def finish(self) -> None:
        """Unpack all that was written. Raise StageError."""

    def close(self) -> None:
        """Stop, whether all was unpacked or not."""


class Piped(Generic[Result]):
    """A Writer that gives what is written, in order, to a function in a thread of its own.

    ``take`` gets a pipe, and may raise StageError, or an OSError of the disk of ``folder``. That is
    raised by the next `write` or by `finish`. The ``verb`` is what it does with ``name``: unpack.
    """

    def __init__(
        self, take: Callable[[IO[bytes]], Result], *, name: str, folder: str, verb: str
    ) -> None:
        self._take = take
        self._name, self._folder, self._verb = name, folder, verb
        reading, self._writing = os.pipe2(os.O_CLOEXEC)
        with suppress(OSError):  # the kernel limits the memory of one user's pipes
            fcntl.fcntl(self._writing, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        self._error: StageError | None = None
        #: What the function returned, after `finish`.
        self.result: Result | None = None
        self._thread = threading.Thread(target=self._run, args=(reading,), daemon=True)
        self._thread.start()

    def _run(self, reading: int) -> None:
        with open(reading, "rb") as pipe:
            try:
                self.result = self._take(pipe)
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

    def finish(self) -> None:
        """Wait until the function has taken all. Raise StageError if it failed."""
        self.close()
        if self._error:
            raise self._error

    def close(self) -> None:
        """End what is written here, and wait for the thread."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1
        self._thread.join()


class StreamUnpacker(Piped[dict[bytes, bytes]]):
    """Unpacks in a thread while the archive is written, in order, through a pipe."""

    def __init__(self, unpacking: Unpacking) -> None:
        super().__init__(
            unpacking.unpack, name=unpacking.name, folder=unpacking.folder, verb="unpack"
        )

    @property
    def digests(self) -> dict[bytes, bytes]:
        """The digest of each unpacked file by its path, after `finish`."""
        return self.result or {}


class SpoolUnpacker:
    """Keeps an archive in a partial file until all of it has come, then unpacks it.

    A zip archive has its index at its end.
    """

    def __init__(self, unpacking: Unpacking, spool: Partial) -> None:
        self._unpacking = unpacking
        self._spool = spool
        self.digests: dict[bytes, bytes] = {}

    def write(self, data: memoryview, offset: int) -> None:
        """Write ``data`` at ``offset`` bytes. Raise SpaceError or DestinationError."""
        self._spool.write(data, offset)

    def finish(self) -> None:
        """Unpack the archive. Raise StageError."""
        with stage_errors(self._unpacking.folder), self._spool.opened() as archive:
            self.digests = self._unpacking.unpack(archive)

    def close(self) -> None:
        """Remove the partial file."""
        self._spool.close()


def limits_of(task: Task, reserved: int = 0) -> Limits:
    """Return what the item may unpack to here, beside ``reserved`` bytes. Raise OSError."""
    space, room = task.space, room_to_unpack(task) - reserved
    return Limits(space.unpacked_size, space.unpacked_members, max(0, room))


def room_to_unpack(task: Task) -> int:
    """Return the bytes that the item may take on this node's disk when it is unpacked.

    What the request's other items will take there is not subtracted. Raise OSError.
    """
    space, destination = task.space, task.item.destination
    free = free_space(task.cache.folder, space)
    room = max(0, free.usable)
    limit = space.limit_in(task.item.root)
    if not limit:
        return room
    copies = find_candidates(task.cache, task.node.disk)
    used = sum(one.size for one in copies if one.record.destination != destination)
    return min(room, amount_of(limit, free.size) - used)
