"""Receive a chunk and send it on, by MPI's own broadcasts or from rank to rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from mpi4py import MPI

from stager.base.telemetry import Kind, wait_for
from stager.wire.layout import Algorithm
from stager.wire.route import route

if TYPE_CHECKING:
    from stager.wire.turns import Turns

#: Chunks that are received at once where they come in order. More would be spread over more memory
#: than the processor's caches hold, before they are hashed and written.
_AT_ONCE = 4

Sends: TypeAlias = "list[MPI.Request]"


class Forward(Protocol):
    """How a chunk comes to this rank and goes on to others."""

    #: Chunks that may be received at once.
    at_once: int

    def receive(self, index: int, message: memoryview) -> MPI.Request | None:
        """Start to receive the chunk. Return None if it is complete when this returns."""

    def send(self, index: int, message: memoryview) -> Sends:
        """Start to send the chunk, which is complete, to the ranks that get it from this one."""


def forward(comm: MPI.Intracomm, algorithm: Algorithm, turns: Turns, depth: int) -> Forward:
    """Return the Forward for ``algorithm``; ``depth`` is that of the ring in chunks."""
    if algorithm in (Algorithm.BCAST, Algorithm.IBCAST):
        return LibraryBroadcast(comm, turns, blocking=algorithm is Algorithm.BCAST)
    return PointToPoint(comm, turns, algorithm, depth)


class LibraryBroadcast:
    """The MPI library's broadcast of each chunk, from the chunk's reader to all ranks."""

    at_once = _AT_ONCE

    def __init__(self, comm: MPI.Intracomm, turns: Turns, *, blocking: bool) -> None:
        self._comm = comm
        self._turns = turns
        self._blocking = blocking

    def receive(self, index: int, message: memoryview) -> MPI.Request | None:
        """Take part in the chunk's broadcast, as its root on the chunk's reader."""
        root = self._turns.reader(index)
        if self._blocking:
            wait_for(Kind.RECEIVE)
            self._comm.Bcast([message, MPI.BYTE], root)
            return None
        return self._comm.Ibcast([message, MPI.BYTE], root)

    def send(self, index: int, message: memoryview) -> Sends:
        """Send nothing: the broadcast has reached all ranks."""
        return []


class PointToPoint:
    """Messages from rank to rank along a route."""

    #: Tags have at least 15 bits in any MPI library.
    _TAGS = 1 << 15

    def __init__(self, comm: MPI.Intracomm, turns: Turns, algorithm: Algorithm, depth: int) -> None:
        self._comm = comm
        self._turns = turns
        # This rank is deeper in one of the two trees than in the other. The chunks of the tree in
        # which it is less deep arrive earlier, by as many as the difference.
        self.at_once = depth if algorithm is Algorithm.TREE else _AT_ONCE
        self._hop = route(algorithm, comm.rank, comm.size)

    def receive(self, index: int, message: memoryview) -> MPI.Request | None:
        """Start to receive the chunk; an own chunk is complete already."""
        parent = self._hop(self._turns.turn(index), self._turns.reader(index)).parent
        if parent is None:
            return None
        return self._comm.Irecv([message, MPI.BYTE], parent, index % self._TAGS)

    def send(self, index: int, message: memoryview) -> Sends:
        """Start to send the chunk to this rank's children in the route."""
        children = self._hop(self._turns.turn(index), self._turns.reader(index)).children
        return [
            self._comm.Isend([message, MPI.BYTE], child, index % self._TAGS) for child in children
        ]
