"""Unpack an archive while it is received, or once it is received if its index is at its end."""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Protocol

from stager.archive.unpack import unpack
from stager.base.errors import SourceError, StageError, write_traceback
from stager.disk.files import as_stage_error, stage_errors

if TYPE_CHECKING:
    from stager.archive.target import Limits
    from stager.disk.partial import Partial

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
    """A Writer that takes an archive and unpacks it.

    ``digests`` has the digest of each unpacked file by its path, after `finish`.
    """

    digests: dict[bytes, bytes]

    def write(self, data: memoryview, offset: int) -> None:
        """Take ``data``, which is at ``offset`` bytes of the archive. Raise StageError."""

    def finish(self) -> None:
        """Unpack all that was written. Raise StageError."""

    def close(self) -> None:
        """Stop, whether all was unpacked or not."""


class StreamUnpacker:
    """Unpacks in a thread while the archive is written, in order, through a pipe.

    What is wrong with the archive is raised by the next `write` or by `finish`.
    """

    def __init__(self, unpacking: Unpacking) -> None:
        self._unpacking = unpacking
        reading, self._writing = os.pipe2(os.O_CLOEXEC)
        with suppress(OSError):  # the kernel limits the memory of one user's pipes
            fcntl.fcntl(self._writing, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        self._error: StageError | None = None
        self.digests: dict[bytes, bytes] = {}
        self._thread = threading.Thread(target=self._run, args=(reading,), daemon=True)
        self._thread.start()

    def _run(self, reading: int) -> None:
        with open(reading, "rb") as archive:
            try:
                self.digests = self._unpacking.unpack(archive)
            except StageError as error:
                self._error = error
            except OSError as error:
                self._error = as_stage_error(error, self._unpacking.folder)
            except BaseException as error:
                # Raised here it would end the thread alone, and the rest would be published.
                write_traceback()
                self._error = SourceError(f"{self._unpacking.name} cannot be unpacked: {error!r}")

    def write(self, data: memoryview, _: int) -> None:
        """Take the next bytes. Raise StageError if the unpacking has failed."""
        while data and self._writing >= 0:
            try:
                data = data[os.write(self._writing, data) :]
            except BrokenPipeError:
                self.finish()

    def finish(self) -> None:
        """Wait until all is unpacked. Raise StageError if that failed."""
        self.close()
        if self._error:
            raise self._error

    def close(self) -> None:
        """End the archive here, and wait for the thread."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1
        self._thread.join()


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
