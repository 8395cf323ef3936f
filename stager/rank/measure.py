"""A job's nodes in, rates out: how fast wire, disks and source are, each by itself.

What `stagectl bench` asks of the ranks. The wire is measured by the transfer that stages files,
from memory and to nowhere; a disk by the partial file that a copy is written to, which is never
published.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from stager.base.errors import SourceError
from stager.base.outcome import Rate
from stager.disk.cache import Cache, open_cache
from stager.disk.partial import Partial
from stager.disk.reader import FileReader
from stager.rank.agree import together
from stager.wire.layout import Layout
from stager.wire.ring import Drain, Ring
from stager.wire.route import Algorithm
from stager.wire.transfer import broadcast, ring_depth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpi4py import MPI

    from stager.rank.agree import Here
    from stager.request.items import StageItem, StageRequest
    from stager.wire.settings import Settings

#: Bytes of the smallest message, and the factor from one size to the next.
_SMALLEST, _STEP = 64 * 1024, 4
#: Times that a broadcast is repeated; the fastest counts, as in any measurement of a wire.
_REPEATS = 3


class _Nothing:
    """A Reader of whatever the buffer holds."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Leave the buffer as it is."""


def measure(
    comm: MPI.Intracomm, request: StageRequest, here: Here, tell: Callable[..., None]
) -> None:
    """Measure with up to ``request.bench`` bytes; ``tell`` of each Rate. Collective.

    The request's one item names the cache root to write beneath, and the source if there is one.
    Raises RefusedError.
    """
    (item,) = request.items

    def say(rate: Rate) -> None:
        if comm.rank == 0:
            tell("rate", **asdict(rate))

    # What may fail comes first.
    source = [_source(comm, request, item, here)] if item.source else []
    for rate in (*_disk(comm, request, item, here), *source):
        say(rate)
    for size in _sizes(request.bench):
        for algorithm in Algorithm:
            if algorithm is not Algorithm.AUTO:
                settings = replace(request.transfer, algorithm=algorithm)
                say(_wire(comm, size, settings))


def _sizes(most: int) -> Iterator[int]:
    size = _SMALLEST
    while size < most:
        yield size
        size *= _STEP
    yield most


def _wire(comm: MPI.Intracomm, size: int, settings: Settings) -> Rate:
    layout = Layout.dense(size, settings.chunk)
    best = float("inf")
    for _ in range(_REPEATS):
        reader = _Nothing() if comm.rank == 0 else None
        comm.Barrier()
        begun = time.monotonic()
        broadcast(comm, layout, 1, settings, reader, None)
        best = min(best, max(comm.allgather(time.monotonic() - begun)))
    return Rate("wire", size, best, algorithm=settings.algorithm)


def _disk(
    comm: MPI.Intracomm, request: StageRequest, item: StageItem, here: Here
) -> Iterator[Rate]:
    """How fast the slowest node writes, and reads again past its page cache."""
    cache = together(comm, here, lambda: open_cache(here.path(item.root), here.uid))[comm.rank]
    times = together(comm, here, lambda: _write_and_read(cache, request), patient=True)
    names = comm.allgather(here.name)
    for number, what in enumerate(("write", "read")):
        slowest = max(range(comm.size), key=lambda rank: times[rank][number])
        yield Rate(what, request.bench, times[slowest][number], names[slowest])


def _write_and_read(cache: Cache, request: StageRequest) -> tuple[float, float]:
    """Seconds to write so many bytes and bring them to the disk, and to read them again."""
    settings = request.transfer
    layout = Layout.dense(request.bench, settings.chunk)
    with closing(Partial(cache, direct=settings.direct)) as partial:
        partial.allocate(layout.size, layout.extents)
        ring = Ring(layout, ring_depth(settings, request.nodes))
        begun = time.monotonic()
        drain = Drain(partial, layout, ring, settings.writers)
        for index in range(layout.count):
            ring.take(index)
            ring.release(index)  # it is not passed on
            drain.put(index)
        drain.finish()
        if drain.error:
            raise drain.error
        partial.seal(0o600, os.getgid(), time.time_ns())
        written = time.monotonic()
        partial.read_back()
        return written - begun, time.monotonic() - written


def _source(comm: MPI.Intracomm, request: StageRequest, item: StageItem, here: Here) -> Rate:
    """How fast the first node reads the source."""

    def read() -> tuple[int, float]:
        return _read(item.source, request) if comm.rank == 0 else (0, 0.0)

    size, seconds = together(comm, here, read, patient=True)[0]
    return Rate("source", size, seconds, comm.bcast(here.name))


def _read(path: str, request: StageRequest) -> tuple[int, float]:
    with closing(FileReader(path)) as reader:
        size = min(request.bench, os.fstat(reader.descriptor).st_size)
        if not size:
            raise SourceError(f"{path} is empty; name a file that can be read for a while")
        layout = Layout.dense(size, request.transfer.chunk)
        buffer = memoryview(bytearray(layout.chunk))
        begun = time.monotonic()
        for index in range(layout.count):
            reader.read_into(buffer[: layout.length(index)], index * layout.chunk)
        return size, time.monotonic() - begun
