"""Move the chunks of one transfer through this rank: the only place that waits for MPI.

A chunk goes through these states, each of which has a counter or a set in `Pump`:

1. *Begun*: it has a buffer of the ring. It is being received, or this rank's reader has filled it.
2. *Here*: it is complete. Sends to the next ranks are started, and its status byte is obeyed.
3. *Handed over*: the drain hashes and writes it. The drain is the first holder of the buffer.
4. *Passed*: all sends are done. The pump, which is the second holder, releases the buffer.

Chunks are begun and handed over in order. They arrive and are passed in any order: of two trees one
may be ahead of the other, and neither waits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from mpi4py import MPI

from stager.base.telemetry import Kind, count, wait_for, writing
from stager.wire.ring import FAILED, LATE, MORE_READERS, OK, Filler
from stager.wire.turns import Growth

if TYPE_CHECKING:
    from stager.base.errors import StageError
    from stager.wire.forward import Forward
    from stager.wire.layout import Layout
    from stager.wire.ring import Drain, Reader, Ring
    from stager.wire.turns import Turns

#: Seconds of the first pause when nothing has moved, and of the longest: short beside the time of
#: one chunk on a fast network.
_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 200e-6
#: Seconds of one pause that count as waiting.
_LONGEST_REST = 1.0


class _Message(NamedTuple):
    """A message of a chunk that is under way: whether this rank ``receives`` it, or sends it."""

    request: MPI.Request
    chunk: int
    receives: bool


class Pump:
    """Takes all chunks of ``layout`` through their states, a little with each `step`.

    ``reading`` are the seconds in which nothing moved because the next chunk was not read here yet.
    """

    def __init__(
        self,
        layout: Layout,
        ring: Ring,
        forward: Forward,
        turns: Turns,
        reader: Reader | None,
        drain: Drain,
        requests: int = 1,
    ) -> None:
        self._layout = layout
        self._ring = ring
        self._forward = forward
        self._turns = turns
        self._reader = reader
        self._drain = drain
        self._requests = requests
        #: The first chunk that is not moved: behind the last, or behind those that may be under way
        #: when a reader fails. No rank is further than that: the failed chunk keeps its buffer.
        self._end = layout.count
        #: The first chunk that could not be read.
        self._failed = layout.count
        #: Chunks that are begun, handed over and passed.
        self._begun = self._handed_over = self._passed = 0
        self._messages: list[_Message] = []
        #: Chunks that are being received.
        self._receiving = 0
        #: Chunks that are here, but not handed over since an earlier one is not here.
        self._here: set[int] = set()
        #: Sends of each chunk that are not done.
        self._sending: dict[int, int] = {}
        self._pause = _FIRST_PAUSE
        #: What is noted as waited for.
        self._waits_for: Kind | None = None
        self._growth = Growth(turns, ring.depth, time.monotonic())
        self.reading = 0.0
        self._filler: Filler | None = None
        if turns.has_turn:
            self._fill_from(0)

    @property
    def bytes_passed(self) -> int:
        """Bytes of data that this rank has received or read, and sent on."""
        return min(self._passed * self._layout.chunk, self._layout.data)

    def step(self) -> bool:
        """Move what can be moved, or pause for a moment. Return whether all is done."""
        moved = self._begin()
        moved = self._complete() or moved
        if moved:
            self._pause = _FIRST_PAUSE
        elif self._passed < self._end:
            self._rest()
        return self._passed >= self._end

    def finish(self) -> StageError | None:
        """End the reader's thread. Return why reading failed, if it did."""
        self._ring.close()
        if not self._filler:
            return None
        self._filler.finish()
        return self._filler.error

    def _fill_from(self, first: int) -> None:
        """Let this rank's reader read its own chunks from ``first`` on."""
        if self._reader and not self._filler:
            own = self._turns.own(first, self._layout.count)
            self._filler = Filler(self._reader, self._layout, self._ring, own, self._requests)

    def _begin(self) -> bool:
        """Begin the next chunks. Return whether there was one."""
        before = self._begun
        at_once = self._forward.at_once
        while self._begun < self._end and self._receiving < at_once and self._has_buffer():
            index = self._begun
            message = self._ring.message(index)
            if self._turns.is_own(index):
                self._note_pace(index, message)
            request = self._forward.receive(index, message)
            self._begun += 1
            if request:
                self._messages.append(_Message(request, index, True))
                self._receiving += 1
            else:
                self._arrive(index)
        return self._begun > before

    def _has_buffer(self) -> bool:
        """Return whether the next chunk has a buffer: one that is filled, if it is read here."""
        if self._turns.is_own(self._begun):
            return self._filler is not None and self._filler.has(self._begun)
        return self._ring.has_room(self._begun) and self._ring.take(self._begun)

    def _note_pace(self, index: int, message: memoryview) -> None:
        """Tell all ranks if this own chunk is late, and on rank 0 if more ranks are to read."""
        if message[-1] != OK:
            return
        now = time.monotonic()
        is_held_up = self._filler is not None and self._filler.is_held_up
        if self._growth.is_late(now, self.reading, is_held_up=is_held_up):
            message[-1] = LATE
        if index >= self._turns.first and self._growth.is_due(index, now):
            message[-1] = MORE_READERS

    def _complete(self) -> bool:
        """Act on the requests that are done. Return whether there was one."""
        if not self._messages:
            return False
        done = MPI.Request.Testsome([message.request for message in self._messages])
        if not done:
            return False
        completed = [self._messages[number] for number in done]
        over = set(done)
        self._messages = [
            message for number, message in enumerate(self._messages) if number not in over
        ]
        for _, index, receives in completed:
            if receives:
                self._receiving -= 1
                self._arrive(index)
            else:
                self._sending[index] -= 1
                self._pass(index)
        return True

    def _arrive(self, index: int) -> None:
        """Send the chunk on, obey its status, and hand over all that is here in order."""
        count()
        message = self._ring.message(index)
        sends = self._forward.send(index, message)
        self._messages += [_Message(send, index, False) for send in sends]
        self._sending[index] = len(sends)
        self._obey(index, message[-1])
        self._here.add(index)
        while self._handed_over in self._here:
            self._here.remove(self._handed_over)
            if self._handed_over < self._failed:
                self._drain.put(self._handed_over)
            self._handed_over += 1
        self._pass(index)

    def _obey(self, index: int, status: int) -> None:
        if status == FAILED:
            self._failed = min(self._failed, index)
            self._end = min(self._end, index + self._ring.depth)
        elif status == LATE:
            self._growth.count_late()
        elif status == MORE_READERS:
            # No rank can have begun that chunk while this one has its buffer: the ring has room for
            # ``depth`` chunks, and a reader may be waiting for room for its next one.
            self._turns.grow(index + self._ring.depth + self._turns.readers)
            if self._turns.has_turn:
                self._fill_from(self._turns.first)

    def _pass(self, index: int) -> None:
        """Release the chunk if all its sends are done."""
        if not self._sending[index]:
            del self._sending[index]
            self._passed += 1
            count()
            self._ring.release(index)

    def _note_wait(self) -> None:
        """Note for others what is waited for now, if it is not noted yet: this runs very often."""
        kind = Kind.SEND if self._messages else Kind.WAIT
        if self._receiving:
            kind = Kind.RECEIVE
        if kind is not self._waits_for:
            self._waits_for = kind
            wait_for(kind)

    def _rest(self) -> None:
        """Sleep, so that the other threads have the cores."""
        self._note_wait()
        before = time.monotonic()
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        # Longer only if the process was suspended, which is no disk's fault.
        self._note_rest(min(time.monotonic() - before, _LONGEST_REST))

    def _note_rest(self, seconds: float) -> None:
        """Count for how long it was waited, and for what."""
        if self._receiving or self._begun == self._end:
            return  # the network is what is slow
        if self._ring.has(self._begun):
            self.reading += seconds
        elif self._ring.first not in self._sending:
            writing.hold_up(seconds)
