"""A communicator, a Reader on its root, a Writer where the bytes are wanted: the bytes moved.

Reading, broadcasting and writing overlap: a reader thread fills buffers of a bounded ring, the
calling thread broadcasts them, a writer thread empties them. MPI is called by one thread only.
Both digests are computed on the way, where the bytes are in memory anyway.

Every message carries a status byte behind its data, so that all ranks stop at the same chunk when
the reader fails. A writer that fails goes on taking buffers, so that no other rank waits for it.
"""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

import xxhash
from mpi4py import MPI

from stager.errors import IntegrityError, SourceError, StageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_OK, _FAILED = 0, 1
_STATUS_SIZE = 1


class Reader(Protocol):
    """Where the root takes the bytes from."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` bytes on. Raises StageError."""


class Writer(Protocol):
    """Where a rank puts the bytes."""

    def write(self, data: memoryview, offset: int) -> None:
        """Put ``data`` at ``offset`` bytes. Raises StageError."""


@dataclass(frozen=True, slots=True)
class Result:
    """``digest`` of the bytes that passed this rank, hexadecimal xxh3-128; or why it failed."""

    digest: str
    error: StageError | None


class FileReader:
    """Reads an open file, and counts the bytes that it took from the filesystem."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.bytes_read = 0
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}") from None

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer``. Raises IntegrityError where the file ends early, SourceError on EIO."""
        while buffer:
            try:
                count = os.preadv(self.descriptor, [buffer], offset)
            except OSError as error:
                raise SourceError(f"{self._path}: {error.strerror}") from None
            if not count:
                raise IntegrityError(f"{self._path} became shorter while it was read")
            self.bytes_read += count
            buffer = buffer[count:]
            offset += count

    def close(self) -> None:
        """Let go of the file."""
        os.close(self.descriptor)


class Ring:
    """``depth`` page-aligned buffers of ``chunk`` bytes, each with room for a status behind."""

    def __init__(self, chunk: int, depth: int) -> None:
        stride = -(-(chunk + _STATUS_SIZE) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, stride * depth)
        whole = memoryview(self._memory)
        self.free: SimpleQueue[memoryview] = SimpleQueue()
        for index in range(depth):
            self.free.put(whole[index * stride : (index + 1) * stride])


def chunks(size: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Offset and length, in bytes, of each chunk of a file of ``size`` bytes."""
    for offset in range(0, size, chunk):
        yield offset, min(chunk, size - offset)


def broadcast(
    comm: MPI.Intracomm,
    size: int,
    chunk: int,
    depth: int,
    reader: Reader | None,
    writer: Writer | None,
    progress: Callable[[int], None] = lambda _: None,
) -> Result:
    """Move ``size`` bytes from rank 0's ``reader`` to the ``writer`` of every rank that has one.

    Collective over ``comm``; rank 0 alone has a reader. ``progress`` is called with the bytes
    broadcast so far. Failures of reader and writer come back as the Result's error.
    """
    # Never more memory than the file needs.
    ring = Ring(min(chunk, max(size, 1)), min(depth, max(1, -(-size // chunk))))
    filled = _Filler(reader, size, chunk, ring) if reader else None
    drain = _Drain(writer, ring, hashing=filled is None)
    error: StageError | None = None
    for offset, length in chunks(size, chunk):
        buffer = filled.next() if filled else ring.free.get()
        comm.Bcast([buffer, length + _STATUS_SIZE, MPI.BYTE], root=0)
        if buffer[length] == _FAILED:
            error = filled.error if filled else None
            break
        drain.put(buffer, offset, length)
        progress(offset + length)
    drain.finish()
    digest = filled.finish() if filled else drain.digest.hexdigest()
    return Result(digest, error or drain.error)


class _Filler:
    """The reader thread: takes free buffers, fills them in order."""

    def __init__(self, reader: Reader, size: int, chunk: int, ring: Ring) -> None:
        self._reader = reader
        self._ring = ring
        self._ready: SimpleQueue[memoryview] = SimpleQueue()
        self._digest = xxhash.xxh3_128()
        self.error: StageError | None = None
        self._thread = threading.Thread(target=self._run, args=(size, chunk), daemon=True)
        self._thread.start()

    def next(self) -> memoryview:
        """The next filled buffer."""
        return self._ready.get()

    def finish(self) -> str:
        """The digest of all that was read, once the thread has ended."""
        self._thread.join()
        return self._digest.hexdigest()

    def _run(self, size: int, chunk: int) -> None:
        for offset, length in chunks(size, chunk):
            buffer = self._ring.free.get()
            try:
                self._reader.read_into(buffer[:length], offset)
            except StageError as error:
                self.error = error
                buffer[length] = _FAILED
                self._ready.put(buffer)
                return
            buffer[length] = _OK
            self._digest.update(buffer[:length])
            self._ready.put(buffer)


class _Drain:
    """The writer thread: takes broadcast buffers, writes them, gives them back to the ring.

    Without a writer the buffers go straight back. Where ``hashing``, ``digest`` is that of the
    bytes it was given; the root has hashed the same memory already.
    """

    def __init__(self, writer: Writer | None, ring: Ring, *, hashing: bool) -> None:
        self._writer = writer
        self._ring = ring
        self._hashing = hashing
        self._queue: SimpleQueue[tuple[memoryview, int, int] | None] = SimpleQueue()
        self.digest = xxhash.xxh3_128()
        self.error: StageError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, buffer: memoryview, offset: int, length: int) -> None:
        """Hand over a buffer with ``length`` bytes that belong at ``offset``."""
        self._queue.put((buffer, offset, length))

    def finish(self) -> None:
        """Wait until all that was handed over is written."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            buffer, offset, length = work
            data = buffer[:length]
            if self._hashing:
                self.digest.update(data)
            if self._writer and not self.error:
                try:
                    self._writer.write(data, offset)
                except StageError as error:
                    self.error = error
            self._ring.free.put(buffer)
