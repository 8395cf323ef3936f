"""A Layout, a Reader, a Writer in; a bounded ring of buffers, filled and emptied by threads.

No MPI here: the one thread that calls it finds filled buffers and hands over received ones.
Reading, hashing and writing release the GIL, so they overlap with it and with each other.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

from stager.base.digest import Digest
from stager.base.errors import StageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stager.wire.layout import Layout

#: Values of the status byte behind each chunk's data. All ranks learn by it at the same chunk that
#: its reader failed, or that readers shall take turns.
OK, FAILED, TAKE_TURNS = 0, 1, 2
STATUS_SIZE = 1
#: Threads that write where nobody says how many: enough to keep a fast disk busy, and fewer where
#: cores are few.
_WRITERS = max(1, min(4, len(os.sched_getaffinity(0)) // 2))


class Reader(Protocol):
    """Where a sender takes the bytes from."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` bytes on. Raises StageError."""


class Writer(Protocol):
    """Where a receiver puts the bytes; may be called by several threads at once."""

    def write(self, data: memoryview, offset: int) -> None:
        """Put ``data`` at ``offset`` bytes. Raises StageError."""


class Digester(Protocol):
    """What is told all data in order."""

    def update(self, data: memoryview, offset: int) -> None:
        """Take the ``data`` at ``offset`` bytes, which is behind all that was told."""

    def hexdigest(self, size: int) -> str:
        """The digest of all ``size`` bytes, in hexadecimal."""


class Ring:
    """Page-aligned buffers for at most ``depth`` chunks of ``layout``, each with a status behind.

    Chunk i has a buffer only while all chunks up to i - depth are released. So whoever waits for a
    buffer waits for an earlier chunk, and nobody waits in a circle. A buffer that has just been
    let go is the next to be taken: it is still in the processor's cache.
    """

    #: A chunk is released twice: when it is passed on, and when it is written.
    _HOLDERS = 2

    def __init__(self, layout: Layout, depth: int) -> None:
        # Never more memory than the file needs.
        self.depth = max(1, min(depth, layout.count))
        longest = min(layout.chunk, layout.data) + STATUS_SIZE
        stride = -(-longest // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = memoryview(mmap.mmap(-1, stride * self.depth))
        self._layout = layout
        self._free = [whole[i * stride : (i + 1) * stride] for i in range(self.depth)]
        self._taken: dict[int, memoryview] = {}
        self._holders: dict[int, int] = {}
        self._change = threading.Condition()
        self._closed = False
        #: The first chunk that is not released.
        self.first = 0

    def has_room(self, index: int) -> bool:
        """Whether `take` would not wait."""
        return index < self.first + self.depth

    def take(self, index: int) -> bool:
        """Wait for a buffer for the chunk; False where the ring was closed instead."""
        with self._change:
            self._change.wait_for(lambda: self._closed or self.has_room(index))
            if self._closed:
                return False
            self._taken[index] = self._free.pop()
            self._holders[index] = self._HOLDERS
            return True

    def has(self, index: int) -> bool:
        """Whether the chunk has its buffer."""
        return index in self._taken

    def message(self, index: int) -> memoryview:
        """The chunk's bytes with the status behind them, as they travel."""
        return self._taken[index][: self._layout.length(index) + STATUS_SIZE]

    def release(self, index: int) -> None:
        """One of the chunk's two holders needs it no longer."""
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
        """Have all who wait stop waiting."""
        with self._change:
            self._closed = True
            self._change.notify_all()


class Filler:
    """A thread that reads the chunks of ``indices`` into the ring, in order."""

    def __init__(self, reader: Reader, layout: Layout, ring: Ring, indices: Iterable[int]) -> None:
        self._reader = reader
        self._layout = layout
        self._ring = ring
        self._filled: set[int] = set()
        self.error: StageError | None = None
        self._thread = _start(lambda: self._run(indices))

    def has(self, index: int) -> bool:
        """Whether the chunk is read; for each chunk true once."""
        if index in self._filled:
            self._filled.remove(index)
            return True
        return False

    def finish(self) -> None:
        """Wait for the thread, once the ring is closed."""
        self._thread.join()

    def _run(self, indices: Iterable[int]) -> None:
        for index in indices:
            if not self._ring.take(index):
                return
            message = self._ring.message(index)
            if not self.error:
                self._read(index, message)
            message[-1] = FAILED if self.error else OK
            self._filled.add(index)

    def _read(self, index: int, message: memoryview) -> None:
        try:
            for start, offset, length in self._layout.pieces(index):
                self._reader.read_into(message[start : start + length], offset)
        except StageError as error:
            self.error = error


class Drain:
    """Threads that hash the chunks they are given, in order, and write them, in any.

    There are ``writers`` that write, 0 for what is best. Without a ``writer`` the chunks are hashed
    only; ``digest`` takes the place of a `Digest`.
    A writer that fails goes on taking chunks, so that no other rank waits for this one.
    """

    def __init__(
        self,
        writer: Writer | None,
        layout: Layout,
        ring: Ring,
        writers: int,
        digest: Digester | None = None,
    ) -> None:
        self._writer = writer
        self._layout = layout
        self._ring = ring
        self._digest = digest or Digest()
        self._hashing, self._writing = _Queue(), _Queue()
        self.error: StageError | None = None
        # One writer can just as well be the one who hashes, which spares a hand-over.
        writers = min(writers or _WRITERS, layout.count)
        count = writers if writer and writers > 1 else 0
        self._hasher = _start(lambda: self._hash(self._writing.put if count else self._write))
        self._writers = [_start(self._write_all) for _ in range(count)]

    def put(self, index: int) -> None:
        """Hand over a chunk; the next in order."""
        self._hashing.put(index)

    def finish(self) -> str:
        """Wait until all that was handed over is written; the digest of the whole file."""
        self._hashing.put(None)
        self._hasher.join()
        for _ in self._writers:
            self._writing.put(None)
        for thread in self._writers:
            thread.join()
        return self._digest.hexdigest(self._layout.size)

    def _hash(self, done: Callable[[int], None]) -> None:
        while (index := self._hashing.get()) is not None:
            message = self._ring.message(index)
            for start, offset, length in self._layout.pieces(index):
                self._digest.update(message[start : start + length], offset)
            done(index)

    def _write_all(self) -> None:
        while (index := self._writing.get()) is not None:
            self._write(index)

    def _write(self, index: int) -> None:
        if self._writer and not self.error:
            message = self._ring.message(index)
            try:
                for start, offset, length in self._layout.pieces(index):
                    self._writer.write(message[start : start + length], offset)
            except StageError as error:
                self.error = error
        self._ring.release(index)


class _Queue:
    """The chunks that wait for a thread; None tells it to end.

    The standard library's queue would do, but importing it takes twenty path look-ups on each rank.
    """

    def __init__(self) -> None:
        self._items: deque[int | None] = deque()
        self._count = threading.Semaphore(0)

    def put(self, item: int | None) -> None:
        """Append a chunk."""
        self._items.append(item)
        self._count.release()

    def get(self) -> int | None:
        """Take the first chunk; wait until there is one."""
        self._count.acquire()
        return self._items.popleft()


def _start(run: Callable[[], None]) -> threading.Thread:
    def run_or_end() -> None:
        try:
            run()
        except BaseException:
            # A surprise. All ranks would wait for this thread for ever; the launcher ends them
            # with this process.
            import traceback  # rarely needed

            os.write(2, traceback.format_exc().encode(errors="replace"))
            os._exit(1)

    # A rank that dies of an error does not wait for its threads.
    thread = threading.Thread(target=run_or_end, daemon=True)
    thread.start()
    return thread
