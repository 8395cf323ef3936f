"""A communicator, a Layout, Readers on its first ranks, Writers where wanted: the bytes moved.

Each chunk has a buffer of the ring from its reading or receiving until it is both passed on and
written. MPI is called by one thread, which never blocks in it: where nothing has moved it sleeps
for a moment, so that the threads that read, hash and write have the cores.

Every message carries a status byte behind its data. When a reader fails at a chunk, all ranks see
it there, and all stop behind the chunks that may be on their way already. In the same way the
first reader calls for the others where the wire waits for it.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from mpi4py import MPI

from stager.wire.ring import FAILED, OK, TAKE_TURNS, Drain, Filler, Ring
from stager.wire.route import Algorithm, best_depth, choose, route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stager.base.errors import StageError
    from stager.wire.layout import Layout
    from stager.wire.ring import Digester, Reader, Writer
    from stager.wire.settings import Settings

#: Chunks that a rank awaits at once where they come in order. More would scatter what arrives over
#: more memory than the processor's caches hold, before it is hashed and written.
_AWAITED = 4
#: Bytes of buffers that a rank takes unasked; most chunks at once, whose messages differ in tags.
_MOST_MEMORY, _MOST_DEPTH = 256 << 20, 1 << 14
#: A reader calls for others when it has been waited for during this share of the time, after so
#: many chunks.
_SLOW_READER, _TRIAL = 0.5, 16
#: Seconds of the first pause when nothing has moved, and of the longest: short beside the time of
#: one chunk on a fast wire.
_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 200e-6


@dataclass(frozen=True, slots=True)
class Transferred:
    """``digest`` of the file as it passed this rank, hexadecimal xxh3-128; or why that failed.

    Of the ``seconds`` of the transfer, in ``reading`` nothing moved here for want of a chunk from
    this rank's reader, and in ``writing`` for want of a buffer that was still to be written.
    """

    digest: str
    error: StageError | None
    seconds: float
    reading: float
    writing: float


def broadcast(
    comm: MPI.Intracomm,
    layout: Layout,
    readers: int,
    settings: Settings,
    reader: Reader | None,
    writer: Writer | None,
    progress: Callable[[int], None] = lambda _: None,
    digest: Digester | None = None,
) -> Transferred:
    """Move the file's data from the ``reader`` of the first ranks to the ``writer`` of each.

    Collective over ``comm``, with the same ``layout``, ``readers`` and ``settings`` on all ranks.
    Each byte is read once. The ``readers`` take turns; if ``settings`` leave their number open,
    they do so from when the first has proved too slow. ``progress`` is called with the bytes that
    have passed this rank; ``digest`` is for what is no single file. Failures of reader and writer
    come back as the Result's error.
    """
    begun = time.monotonic()
    algorithm = choose(settings.algorithm, comm.size, layout.count)
    turns = _Turns(comm.rank, readers, 0 if settings.readers else _Turns.NEVER)
    ring = Ring(layout, ring_depth(settings, comm.size))
    drain = Drain(writer, layout, ring, settings.writers, digest)
    pump = _Pump(layout, ring, _wire(comm, algorithm, turns, ring.depth), turns, reader, drain)
    while not pump.step():
        progress(pump.bytes_passed)
    progress(pump.bytes_passed)
    reader_error = pump.finish()
    moved = time.monotonic()
    found = drain.finish()
    now = time.monotonic()
    error = reader_error or drain.error
    return Transferred(found, error, now - begun, pump.reading, pump.writing + now - moved)


def ring_depth(settings: Settings, size: int) -> int:
    """Chunks for which a rank in a world of ``size`` has buffers."""
    best = max(2, min(best_depth(size), _MOST_MEMORY // settings.chunk))
    return min(settings.depth or best, _MOST_DEPTH)


class _Turns:
    """Who reads which chunk: rank 0, and from chunk ``first`` on the ranks below ``readers``."""

    #: A chunk that no file has.
    NEVER = sys.maxsize

    def __init__(self, rank: int, readers: int, first: int) -> None:
        self._rank = rank
        self._readers = readers
        self.first = first

    @property
    def has_turn(self) -> bool:
        """Whether this rank reads, as things stand."""
        return self._rank == 0 or (self._rank < self._readers and self.first < self.NEVER)

    @property
    def may_be_called(self) -> bool:
        """Whether other ranks could read, and do not yet."""
        return self._readers > 1 and self.first == self.NEVER

    def reader(self, index: int) -> int:
        """The rank that reads the chunk."""
        return index % self._readers if index >= self.first else 0

    def turn(self, index: int) -> int:
        """The number of the chunk among those of its reader."""
        return index // self._readers if index >= self.first else index

    def is_own(self, index: int) -> bool:
        """Whether this rank reads the chunk."""
        return self.reader(index) == self._rank

    def own(self, first: int, end: int) -> Iterator[int]:
        """The chunks from ``first`` to before ``end`` that this rank reads, as it turns out."""
        return (index for index in range(first, end) if self.is_own(index))


_Sends: TypeAlias = "list[MPI.Request]"


class _Wire(Protocol):
    """How one chunk gets here and on; an own chunk is here from the start."""

    #: Chunks that may be awaited at once.
    awaits: int

    def begin(self, index: int, message: memoryview) -> MPI.Request | None:
        """Have the chunk come; None where it is here when this returns."""

    def pass_on(self, index: int, message: memoryview) -> _Sends:
        """Send the chunk, which is here, to whoever has it from this rank."""


def _wire(comm: MPI.Intracomm, algorithm: Algorithm, turns: _Turns, depth: int) -> _Wire:
    if algorithm in (Algorithm.BCAST, Algorithm.IBCAST):
        return _Library(comm, turns, blocking=algorithm is Algorithm.BCAST)
    return _PointToPoint(comm, turns, algorithm, depth)


class _Library:
    """The MPI library's broadcast of each chunk."""

    awaits = _AWAITED

    def __init__(self, comm: MPI.Intracomm, turns: _Turns, *, blocking: bool) -> None:
        self._comm = comm
        self._turns = turns
        self._blocking = blocking

    def begin(self, index: int, message: memoryview) -> MPI.Request | None:
        root = self._turns.reader(index)
        if self._blocking:
            self._comm.Bcast([message, MPI.BYTE], root)
            return None
        return self._comm.Ibcast([message, MPI.BYTE], root)

    def pass_on(self, index: int, message: memoryview) -> _Sends:
        return []


class _PointToPoint:
    """From rank to rank along a route."""

    #: Tags are at least 15 bits wide in any MPI library.
    _TAGS = 1 << 15

    def __init__(
        self, comm: MPI.Intracomm, turns: _Turns, algorithm: Algorithm, depth: int
    ) -> None:
        self._comm = comm
        self._turns = turns
        # One tree may be ahead of the other by as many chunks as it is less deep here.
        self.awaits = depth if algorithm is Algorithm.TREE else _AWAITED
        self._hop = route(algorithm, comm.rank, comm.size)

    def begin(self, index: int, message: memoryview) -> MPI.Request | None:
        parent = self._hop(self._turns.turn(index), self._turns.reader(index)).parent
        if parent is None:
            return None
        return self._comm.Irecv([message, MPI.BYTE], parent, index % self._TAGS)

    def pass_on(self, index: int, message: memoryview) -> _Sends:
        children = self._hop(self._turns.turn(index), self._turns.reader(index)).children
        return [
            self._comm.Isend([message, MPI.BYTE], child, index % self._TAGS) for child in children
        ]


class _Pump:
    """Takes each chunk through its states: awaited, here, handed over and passed on.

    Chunks are begun and handed over in order, but arrive and go on in any: of two trees one may be
    ahead, and nobody waits for the other.
    """

    def __init__(
        self,
        layout: Layout,
        ring: Ring,
        wire: _Wire,
        turns: _Turns,
        reader: Reader | None,
        drain: Drain,
    ) -> None:
        self._layout = layout
        self._ring = ring
        self._wire = wire
        self._turns = turns
        self._reader = reader
        self._drain = drain
        #: Where the transfer ends: behind the last chunk, or behind what may be on its way when a
        #: reader fails. No rank can be further: the failed chunk keeps its buffer.
        self._end = layout.count
        self._failed = layout.count
        self._begun = self._handed_over = self._passed = 0
        #: What is under way: for each request its chunk, and whether that is to come or to go.
        self._requests: list[MPI.Request] = []
        self._tickets: list[tuple[int, bool]] = []
        self._awaited = 0
        self._here: set[int] = set()
        #: How many children have not got a chunk yet.
        self._sending: dict[int, int] = {}
        self._pause = _FIRST_PAUSE
        self._started = time.monotonic()
        self.reading = self.writing = 0.0
        self._filler: Filler | None = None
        if turns.has_turn:
            self._fill_from(0)

    def _fill_from(self, first: int) -> None:
        """Have this rank's reader read what is its own from chunk ``first`` on."""
        if self._reader and not self._filler:
            own = self._turns.own(first, self._layout.count)
            self._filler = Filler(self._reader, self._layout, self._ring, own)

    @property
    def bytes_passed(self) -> int:
        """Data that has come and been passed on."""
        return min(self._passed * self._layout.chunk, self._layout.data)

    def finish(self) -> StageError | None:
        """End the reader's thread; why it failed, if it did."""
        self._ring.close()
        if not self._filler:
            return None
        self._filler.finish()
        return self._filler.error

    def step(self) -> bool:
        """Move what can be moved, or rest for a moment; whether all is done."""
        moved = self._begin()
        moved = self._complete() or moved
        if moved:
            self._pause = _FIRST_PAUSE
        elif self._passed < self._end:
            self._rest()
        return self._passed >= self._end

    def _begin(self) -> bool:
        before = self._begun
        while self._begun < self._end and self._awaited < self._wire.awaits and self._has_buffer():
            index = self._begun
            message = self._ring.message(index)
            if self._turns.is_own(index):
                self._call_for_others(index, message)
            request = self._wire.begin(index, message)
            self._begun += 1
            if request:
                self._requests.append(request)
                self._tickets.append((index, True))
                self._awaited += 1
            else:
                self._arrive(index)
        return self._begun > before

    def _has_buffer(self) -> bool:
        if self._turns.is_own(self._begun):
            return self._filler is not None and self._filler.has(self._begun)
        return self._ring.has_room(self._begun) and self._ring.take(self._begun)

    def _call_for_others(self, index: int, message: memoryview) -> None:
        """As the only reader so far, and slower than the wire: have the readers take turns."""
        if self._turns.may_be_called and index >= _TRIAL and message[-1] == OK:
            elapsed = time.monotonic() - self._started
            if self.reading > _SLOW_READER * elapsed:
                message[-1] = TAKE_TURNS
                self._turns.first = self._behind(index)

    def _behind(self, index: int) -> int:
        """The first chunk for which no rank has done anything while ``index`` has its buffer.

        The ring has room up to the one before, which its reader may be waiting for.
        """
        return index + self._ring.depth + 1

    def _complete(self) -> bool:
        """Act on the requests that are done."""
        done = MPI.Request.Testsome(self._requests) if self._requests else None
        if not done:
            return False
        completed = [self._tickets[number] for number in done]
        over = set(done)
        left = [number for number in range(len(self._requests)) if number not in over]
        self._requests = [self._requests[number] for number in left]
        self._tickets = [self._tickets[number] for number in left]
        for index, to_come in completed:
            if to_come:
                self._awaited -= 1
                self._arrive(index)
            else:
                self._sending[index] -= 1
                self._pass(index)
        return True

    def _arrive(self, index: int) -> None:
        message = self._ring.message(index)
        sends = self._wire.pass_on(index, message)
        self._requests += sends
        self._tickets += [(index, False)] * len(sends)
        self._sending[index] = len(sends)
        self._heed(index, message[-1])
        self._here.add(index)
        while self._handed_over in self._here:
            self._here.remove(self._handed_over)
            if self._handed_over < self._failed:
                self._drain.put(self._handed_over)
            self._handed_over += 1
        self._pass(index)

    def _heed(self, index: int, status: int) -> None:
        if status == FAILED:
            self._failed = min(self._failed, index)
            self._end = min(self._end, index + self._ring.depth)
        elif status == TAKE_TURNS:
            self._turns.first = self._behind(index)
            self._fill_from(self._turns.first)

    def _pass(self, index: int) -> None:
        """Let go of the chunk, if all children have it."""
        if not self._sending[index]:
            del self._sending[index]
            self._passed += 1
            self._ring.release(index)

    def _rest(self) -> None:
        before = time.monotonic()
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        seconds = time.monotonic() - before
        if self._awaited or self._begun == self._end:
            return  # the wire is what is slow
        if self._ring.has(self._begun):
            self.reading += seconds
        elif self._ring.first not in self._sending:
            self.writing += seconds
