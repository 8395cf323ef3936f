"""Keep a bounded ring of buffers, which threads fill from a reader, and hash and write.

There is no MPI here: the one thread that calls MPI finds filled buffers, and hands over received
ones. Reading, hashing and writing release the GIL, so they overlap with MPI and with each other.
"""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from stager.base.errors import StageError, write_traceback
from stager.base.telemetry import Kind, doing, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stager.base.digest import KeyedDigest
    from stager.wire.layout import Layout

#: Values of the status byte behind each chunk's data. By it all ranks learn at the same chunk that
#: the chunk's reader failed, that it is late, or that more ranks are to read.
OK, FAILED, LATE, MORE_READERS = 0, 1, 2, 3
STATUS_SIZE = 1
#: Threads that write where the site sets no number: enough to keep a fast disk busy, and fewer
#: where cores are few.
_WRITERS = max(1, min(4, len(os.sched_getaffinity(0)) // 2))


class Reader(Protocol):
    """The source of a sender's bytes."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` bytes on. Raise StageError.

        Only where `Settings.requests` is more than 1, several threads call it at once.
        """


class Writer(Protocol):
    """The place for a receiver's bytes; several threads may call it at once."""

    def write(self, data: memoryview, offset: int) -> None:
        """Put ``data`` at ``offset`` bytes. Raise StageError."""


class Digester(Protocol):
    """A digest that is given all data in order."""

    def update(self, data: memoryview, offset: int) -> None:
        """Add the ``data`` at ``offset`` bytes, which is behind all that was added before."""

    def hexdigest(self, size: int) -> str:
        """Return the digest of all ``size`` bytes in hexadecimal."""


class Ring:
    """Page-aligned buffers for at most ``depth`` chunks of ``layout``, each with its status byte.

    Chunk i gets a buffer only when all chunks up to i - depth are released. So every wait for a
    buffer is a wait for an earlier chunk, and no wait is circular. The buffer that was released
    last is taken first: it is still in the processor's cache.
    """

    #: A chunk is released twice: when it is sent on, and when it is written.
    _HOLDERS = 2

    def __init__(self, layout: Layout, depth: int) -> None:
        # Never more memory than the file needs.
        self.depth = max(1, min(depth, layout.count))
        longest = min(layout.chunk, layout.data) + STATUS_SIZE
        stride = -(-longest // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = memoryview(_memory(stride * self.depth))
        self._layout = layout
        self._free = [whole[i * stride : (i + 1) * stride] for i in range(self.depth)]
        self._taken: dict[int, memoryview] = {}
        self._holders: dict[int, int] = {}
        self._change = threading.Condition()
        self._closed = False
        #: The first chunk that is not released.
        self.first = 0

    def has_room(self, index: int) -> bool:
        """Return whether `take` would return at once."""
        return index < self.first + self.depth

    def take(self, index: int) -> bool:
        """Wait for a buffer for the chunk. Return False if the ring was closed instead."""
        with self._change:
            self._change.wait_for(lambda: self._closed or self.has_room(index))
            if self._closed:
                return False
            self._taken[index] = self._free.pop()
            self._holders[index] = self._HOLDERS
            return True

    def has(self, index: int) -> bool:
        """Return whether the chunk has a buffer."""
        return index in self._taken

    def message(self, index: int) -> memoryview:
        """Return the chunk's bytes and its status byte, as they travel."""
        return self._taken[index][: self._layout.length(index) + STATUS_SIZE]

    def release(self, index: int) -> None:
        """End the hold of one of the chunk's two holders."""
        with self._change:
            self._holders[index] -= 1
            if self._holders[index]:
                return
            self._free.append(self._taken.pop(index))
            while self._holders.get(self.first) == 0:
                del self._holders[self.first]
                self.first += 1
            self._change.notify_all()

    def close(self) -> None:
        """End all waiting for buffers."""
        with self._change:
            self._closed = True
            self._change.notify_all()


def _memory(size: int) -> mmap.mmap:
    """Return memory of ``size`` bytes, in transparent huge pages where the kernel has them.

    Where much memory is free, 32 MiB that are written for the first time take 4 ms in huge pages,
    20 ms in small ones, and 30 ms if the mapping is shared, as it would be by default.
    """
    from resource import RLIM_INFINITY, RLIMIT_DATA, getrlimit  # not needed before data moves

    if getrlimit(RLIMIT_DATA)[0] != RLIM_INFINITY:
        return mmap.mmap(-1, size)  # shared memory does not count to that limit, threads' stacks do
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that is built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class Filler:
    """Threads that read the chunks of ``indices`` into the ring, begun in order."""

    def __init__(
        self,
        reader: Reader,
        layout: Layout,
        ring: Ring,
        indices: Iterable[int],
        threads: int = 1,
    ) -> None:
        self._reader = reader
        self._layout = layout
        self._ring = ring
        #: The chunks that are being read, and those that are read.
        self._reading: set[int] = set()
        self._filled: set[int] = set()
        self._waits = False
        self.error: StageError | None = None
        self._indices = iter(indices)
        self._next = threading.Lock()
        self._threads = [start_thread(self._run) for _ in range(threads)]

    def has(self, index: int) -> bool:
        """Return whether the chunk is read; True only once for each chunk."""
        if index in self._filled:
            self._filled.remove(index)
            return True
        return False

    @property
    def is_held_up(self) -> bool:
        """Whether nothing is read, since all buffers have chunks that wait for something else."""
        return self._waits and not self._reading

    def finish(self) -> None:
        """Wait for the threads, once the ring is closed."""
        for thread in self._threads:
            thread.join()

    def _take(self) -> int | None:
        """Take the next chunk and a buffer for it. Return None if there is none."""
        with self._next:  # chunks get their buffers in order
            index = next(self._indices, None)
            if index is None:
                return None
            self._waits = not self._ring.has_room(index)
            is_taken = self._ring.take(index)
            self._waits = False
            if not is_taken:
                return None
            self._reading.add(index)
            return index

    def _run(self) -> None:
        while (index := self._take()) is not None:
            message = self._ring.message(index)
            if not self.error:
                self._read(index, message)
            message[-1] = FAILED if self.error else OK
            self._filled.add(index)
            self._reading.discard(index)

    def _read(self, index: int, message: memoryview) -> None:
        try:
            for start, offset, length in self._layout.pieces(index):
                self._reader.read_into(message[start : start + length], offset)
        except StageError as error:
            self.error = error


class Drain:
    """Threads that hash the chunks they are given in order, and write them in any order.

    ``writers`` is the number of threads that write, 0 for the default. Without a ``writer`` chunks
    are only hashed. ``digest`` is that of the data, ``keyed`` that of the chunks as they travel;
    either may be None. After a failure the threads go on to take chunks, without writing them, so
    that no other rank waits for this one.
    """

    def __init__(
        self,
        writer: Writer | None,
        layout: Layout,
        ring: Ring,
        writers: int,
        digest: Digester | None = None,
        keyed: KeyedDigest | None = None,
    ) -> None:
        self._writer = writer
        self._layout = layout
        self._ring = ring
        self._digest = digest
        self._keyed = keyed
        self._hashing: SimpleQueue[int | None] = SimpleQueue()
        self._writing: SimpleQueue[int | None] = SimpleQueue()
        self.error: StageError | None = None
        # A single writer also hashes, which saves a hand-over between threads.
        writers = min(writers or _WRITERS, layout.count)
        count = writers if writer and writers > 1 else 0
        self._hasher = start_thread(lambda: self._hash(self._writing.put if count else self._write))
        self._writers = [start_thread(self._write_all) for _ in range(count)]

    def put(self, index: int) -> None:
        """Hand over the next chunk in order."""
        self._hashing.put(index)

    def finish(self) -> str:
        """Wait until all chunks are written. Return the digest of all data, if there is one."""
        self._hashing.put(None)
        self._hasher.join()
        for _ in self._writers:
            self._writing.put(None)
        for thread in self._writers:
            thread.join()
        return self._digest.hexdigest(self._layout.size) if self._digest else ""

    def _hash(self, done: Callable[[int], None]) -> None:
        while (index := self._hashing.get()) is not None:
            message = self._ring.message(index)
            if self._digest:
                for start, offset, length in self._layout.pieces(index):
                    self._digest.update(message[start : start + length], offset)
            if self._keyed:
                self._keyed.add(index, message)
            done(index)

    def _write_all(self) -> None:
        while (index := self._writing.get()) is not None:
            self._write(index)

    def _write(self, index: int) -> None:
        if self._writer and not self.error:
            message = self._ring.message(index)
            try:
                with doing(Kind.WRITE), writing:
                    for start, offset, length in self._layout.pieces(index):
                        self._writer.write(message[start : start + length], offset)
                writing.count(len(message) - STATUS_SIZE)
            except StageError as error:
                self.error = error
        self._ring.release(index)


def start_thread(run: Callable[[], None]) -> threading.Thread:
    """Start and return a thread that calls ``run``.

    An exception in it ends the process with code 1: the other ranks would wait for this one
    forever, and a process that dies is one that the launcher notices.
    """

    def run_or_exit() -> None:
        try:
            run()
        except BaseException:
            try:
                write_traceback()
            finally:
                os._exit(1)

    # A daemon: a rank that ends by an error does not wait for its threads.
    thread = threading.Thread(target=run_or_exit, daemon=True)
    thread.start()
    return thread
