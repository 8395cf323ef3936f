"""The pump in virtual time, on links that a test machine does not have.

The pumps of all ranks run here, with requests, readers and disks that take a fixed time. A link
carries one chunk in each direction per unit of time; measured are the units for each chunk.
"""

from __future__ import annotations

import heapq
import itertools
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from mpi4py import MPI

from stager.wire import pump as module
from stager.wire.forward import PointToPoint
from stager.wire.layout import Algorithm, Layout
from stager.wire.pump import Pump
from stager.wire.ring import OK, Ring
from stager.wire.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Data = tuple[memoryview, Any]

CHUNKS = 300


class Request:
    """A message in transit. It is true, like MPI's requests."""

    def __init__(self, message: memoryview) -> None:
        self.message = message
        self.done = False

    @staticmethod
    def Testsome(requests: list[Request]) -> list[int]:  # noqa: N802 - MPI's name
        return [number for number, request in enumerate(requests) if request.done]


class Network:
    """Full-duplex links, one for each rank, and a clock."""

    def __init__(self, size: int) -> None:
        self.now = 0.0
        self.size = size
        self._out = [0.0] * size
        self._in = [0.0] * size
        self._receives: dict[tuple[int, int, int], Request] = {}
        self._sends: dict[tuple[int, int, int], Request] = {}
        self._matched: list[tuple[tuple[int, int, int], Request, Request]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def after(self, delay: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._count), act))

    def post(self, key: tuple[int, int, int], message: memoryview, *, sending: bool) -> Request:
        posted = self._sends if sending else self._receives
        assert key not in posted
        posted[key] = request = Request(message)
        if key in self._sends and key in self._receives:
            self._matched.append((key, self._sends.pop(key), self._receives.pop(key)))
        return request

    def advance(self) -> bool:
        """Start the messages whose links are free, and go on to the next event."""
        waiting = []
        for key, send, receive in self._matched:
            source, target, _ = key
            if max(self._out[source], self._in[target]) > self.now:
                waiting.append((key, send, receive))
                continue
            self._out[source] = self._in[target] = self.now + 1
            self.after(1, partial(_arrive, send, receive))
        self._matched = waiting
        if not self._events:
            return False
        self.now = self._events[0][0]
        while self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()
        return True


def _arrive(send: Request, receive: Request) -> None:
    receive.message[:] = send.message
    send.done = receive.done = True


class Comm:
    """A rank's end of the network."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network = network
        self.rank = rank
        self.size = network.size

    def Irecv(self, data: Data, source: int, tag: int) -> Request:  # noqa: N802
        return self._network.post((source, self.rank, tag), data[0], sending=False)

    def Isend(self, data: Data, target: int, tag: int) -> Request:  # noqa: N802
        return self._network.post((self.rank, target, tag), data[0], sending=True)


class Filler:
    """Reads as many chunks at once as there are threads, each in ``units``."""

    made: list[Filler]
    units = 0.1

    def __init__(
        self, network: Network, _: Layout, ring: Ring, indices: Iterator[int], threads: int
    ) -> None:
        self._network = network
        self._ring = ring
        self._indices = indices
        self._next = next(indices, None)
        self._idle = self._threads = threads
        self._filled: set[int] = set()
        self.made.append(self)

    def step(self) -> bool:
        index = self._next
        if index is None or not self._idle or not self._ring.has_room(index):
            return False
        self._ring.take(index)
        self._ring.message(index)[-1] = OK
        self._idle -= 1
        self._network.after(self.units, partial(self._end, index))
        self._next = next(self._indices, None)
        return True

    def _end(self, index: int) -> None:
        self._filled.add(index)
        self._idle += 1

    @property
    def is_held_up(self) -> bool:
        return self._next is not None and self._idle == self._threads

    def has(self, index: int) -> bool:
        found = index in self._filled
        self._filled.discard(index)
        return found


class Drain:
    """Writes each chunk in a tenth of a unit."""

    def __init__(self, network: Network, ring: Ring) -> None:
        self._network = network
        self._ring = ring
        self._free = 0.0

    def put(self, index: int) -> None:
        self._free = max(self._free, self._network.now) + 0.1
        self._network.after(self._free - self._network.now, lambda: self._ring.release(index))


def transfer(
    monkeypatch: pytest.MonkeyPatch,
    algorithm: Algorithm,
    size: int,
    readers: Sequence[int],
    *,
    reading: float = 0.1,
    requests: int = 1,
    chunks: int = CHUNKS,
) -> tuple[float, int]:
    """Return the time of a transfer on such a network, and how many ranks read its last chunk.

    The time is divided by the number of chunks. ``reading`` is the time to read one, and
    ``requests`` how many each reader reads at once.
    """
    network = Network(size)
    layout = Layout.dense(chunks, 1)
    monkeypatch.setattr(module, "MPI", SimpleNamespace(Request=Request))
    monkeypatch.setattr(module, "Filler", lambda _, *rest: Filler(network, *rest))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: network.now))
    monkeypatch.setattr(Filler, "units", reading)
    Filler.made = []
    pumps: list[Any] = []
    for rank in range(size):
        ring = Ring(layout, depth=16)
        turns = Turns(rank, readers)
        comm: Any = Comm(network, rank)
        forward = PointToPoint(comm, turns, algorithm, ring.depth)
        reader: Any = object() if rank < max(readers) else None
        drain: Any = Drain(network, ring)
        pumps.append(Pump(layout, ring, forward, turns, reader, drain, requests))
    running = True
    while running:
        moved = True
        while moved:
            steps = [filler.step() for filler in Filler.made]
            steps += [pump._begin() | pump._complete() for pump in pumps]
            moved = any(steps)
        before = network.now
        running = network.advance()
        for pump in pumps:
            pump._note_rest(network.now - before)
    assert [pump._passed for pump in pumps] == [chunks] * size
    (last,) = {pump._turns.readers for pump in pumps}
    return network.now / chunks, last


@pytest.mark.parametrize(
    ("algorithm", "size", "readers", "most"),
    [
        (Algorithm.CHAIN, 4, 1, 1.05),
        (Algorithm.CHAIN, 64, 1, 1.25),
        (Algorithm.CHAIN, 4, 4, 1.5),
        (Algorithm.TREE, 4, 1, 1.1),
        (Algorithm.TREE, 16, 1, 1.2),
        (Algorithm.TREE, 64, 1, 1.25),
        (Algorithm.TREE, 16, 2, 1.4),
        (Algorithm.TREE, 64, 4, 1.4),
    ],
)
def test_the_rate_does_not_fall_with_the_number_of_nodes(
    monkeypatch: pytest.MonkeyPatch, algorithm: Algorithm, size: int, readers: int, most: float
) -> None:
    if MPI.COMM_WORLD.size == 1:  # once is enough: the ranks here are simulated
        # If all ranks read in turns, each receives only what the others read.
        units, _ = transfer(monkeypatch, algorithm, size, [readers])
        assert 0.7 < units < most


@pytest.mark.parametrize(
    ("reading", "last", "most"),
    [
        (0.1, 4, 1.3),  # the network is slower than one reader
        (6, 8, 1.45),  # four readers would take 1.5
        (32, 16, 4),  # four readers would take 8
    ],
)
def test_more_ranks_read_until_the_network_is_what_is_slow(
    monkeypatch: pytest.MonkeyPatch, reading: float, last: int, most: float
) -> None:
    if MPI.COMM_WORLD.size == 1:
        units, readers = transfer(
            monkeypatch, Algorithm.TREE, 17, [4, 8, 16], reading=reading, chunks=600
        )
        assert 0.7 < units < most
        assert readers == last
