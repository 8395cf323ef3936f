"""What the first sender tells of a transfer while it lasts."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from stager.base.digest import Digest
from stager.rank.delivery import _broadcast
from stager.rank.plan import TransferPlan
from stager.wire.layout import Layout, Settings

if TYPE_CHECKING:
    from mpi4py import MPI

#: Bytes of what is read, in one chunk.
SIZE = 1000


class Objects:
    """A reader that waits, after some bytes of a chunk, until they are told of."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self.are_told = threading.Event()

    def read_into(self, buffer: memoryview, offset: int) -> None:
        self.bytes_read = 300
        assert self.are_told.wait(60)
        buffer[:] = bytes(len(buffer))
        self.bytes_read = SIZE


def test_what_is_read_of_a_chunk_is_progress(comm: MPI.Intracomm) -> None:
    """A chunk can have thousands of objects, for which a store takes minutes."""
    reader = Objects() if comm.rank == 0 else None
    told: list[tuple[int, int, int]] = []

    def on_progress(sent: int, size: int, files: int) -> None:
        told.append((sent, size, files))
        if reader and sent == 300:
            reader.are_told.set()

    plan = TransferPlan(SIZE, tuple(range(comm.size)), (), (0,), True, "")
    task = SimpleNamespace(rank=comm.rank, plan=plan, settings=Settings())
    transfer: Any = SimpleNamespace(
        task=task, sender=SimpleNamespace(reader=reader), sink=SimpleNamespace(writer=None),
        layout=Layout.dense(SIZE, SIZE), size=SIZE, files=3, digester=Digest(),
    )  # fmt: skip
    channel = SimpleNamespace(fresh_key=lambda: bytes(32))
    context: Any = SimpleNamespace(comm=comm, channel=channel)
    result = _broadcast(context, transfer, on_progress)
    assert result.error is None
    if reader:
        assert (300, SIZE, 3) in told
        assert told[-1] == (SIZE, SIZE, 3)
    else:
        assert not told
