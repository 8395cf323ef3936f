"""Broadcast a file's data from the readers of some ranks to the writers of all.

Reading, sending and writing overlap. A chunk has a buffer of the ring from its reading or receiving
until it is both sent on and written. MPI is called by one thread, which never blocks in it unless
the algorithm is ``bcast``: where nothing has moved it sleeps for a moment, so that the threads that
read, hash and write have the cores.

Every message carries a status byte behind its data. When a reader fails at a chunk, all ranks see
it there, and all stop behind the chunks that may be under way already. In the same way the first
reader calls for others where reading is slower than the network.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stager.base.telemetry import Figures, Kind, doing, writing
from stager.wire.forward import forward
from stager.wire.pump import Pump
from stager.wire.ring import Drain, Ring
from stager.wire.route import best_depth, choose
from stager.wire.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from stager.base.digest import KeyedDigest
    from stager.base.errors import StageError
    from stager.wire.layout import Layout, Settings
    from stager.wire.ring import Digester, Reader, Writer

#: Most bytes of buffers of a rank where the site sets no depth; most chunks at once, whose messages
#: must differ in their tags.
_MOST_MEMORY, _MOST_DEPTH = 256 << 20, 1 << 14


@dataclass(frozen=True, slots=True)
class Transferred:
    """What became of a transfer on this rank; times in seconds."""

    #: The ``digest`` of the data as it passed this rank, in hexadecimal; empty if none was wanted.
    digest: str
    #: The `KeyedDigest` of all that passed, which is equal on all ranks; empty if none was wanted.
    keyed_digest: str
    #: Why this rank's reader or writer failed, None if it did not.
    error: StageError | None
    seconds: float
    #: How long nothing moved here because this rank's reader had the next chunk not ready.
    reading: float
    #: What this rank wrote.
    wrote: Figures


def broadcast(
    comm: MPI.Intracomm,
    layout: Layout,
    readers: Sequence[int],
    settings: Settings,
    *,
    reader: Reader | None,
    writer: Writer | None,
    progress: Callable[[int], None] = lambda _: None,
    digest: Digester | None = None,
    keyed: KeyedDigest | None = None,
) -> Transferred:
    """Move the file's data from the ``reader`` of the first ranks to the ``writer`` of each.

    Collective over ``comm``, with the same ``layout``, ``readers`` and ``settings`` on all ranks.
    Each byte is read once. The first ``readers[0]`` ranks take turns in reading; the next number
    of them is tried where these prove too slow.
    ``progress`` is called with the bytes that have passed this rank. ``digest`` and ``keyed`` are
    digests to compute on this rank. What reader and writer raise is returned as ``error``.
    """
    begun, before = time.monotonic(), writing.figures()
    algorithm = choose(settings.algorithm, comm.size, layout.count)
    turns = Turns(comm.rank, readers)
    ring = Ring(layout, ring_depth(settings, comm.size))
    drain = Drain(writer, layout, ring, settings.writers, digest, keyed)
    route = forward(comm, algorithm, turns, ring.depth)
    pump = Pump(layout, ring, route, turns, reader, drain, settings.requests)
    with doing(Kind.WAIT):
        while not pump.step():
            progress(pump.bytes_passed)
    progress(pump.bytes_passed)
    reader_error = pump.finish()
    moved = time.monotonic()
    found = drain.finish()
    now, after = time.monotonic(), writing.figures()
    return Transferred(
        digest=found,
        keyed_digest=keyed.hexdigest() if keyed else "",
        error=reader_error or drain.error,
        seconds=now - begun,
        reading=pump.reading,
        wrote=Figures(
            after.size - before.size,
            after.busy - before.busy,
            after.held - before.held + now - moved,
        ),
    )


def ring_depth(settings: Settings, size: int) -> int:
    """Return the chunks for which a rank in a world of ``size`` ranks has buffers."""
    best = max(2, min(best_depth(size), _MOST_MEMORY // settings.chunk))
    return min(settings.depth or best, _MOST_DEPTH)
