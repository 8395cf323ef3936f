"""Measure how fast network, disks and source are, each by itself, for `stagectl bench`.

The network is measured by the same broadcast that stages files, between memory and memory. A disk
is measured by the same partial file that a copy is written to; it is never published.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from stager.base.codec import NUMBER, REAL, pair_of
from stager.base.digest import Digest
from stager.base.errors import SourceError
from stager.base.outcome import NodeRates, Rate
from stager.fs.partial_file import Partial
from stager.fs.reader import FileReader
from stager.rank.agree import together
from stager.store.cache import Cache, RootFacts, open_cache
from stager.store.space import check_room_to_measure
from stager.wire.layout import Algorithm, Layout
from stager.wire.ring import Drain, Ring
from stager.wire.transfer import broadcast, ring_depth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stager.rank.agree import Context
    from stager.request.items import StageItem, StageRequest
    from stager.wire.layout import Settings

#: Bytes of the smallest message, and the factor from one size to the next.
_SMALLEST, _FACTOR = 64 * 1024, 4
#: Times that each broadcast is repeated. The fastest counts: only disturbances make it slower.
_REPEATS = 3
#: Most bytes that are sent at once from each node to the next; as much memory is taken twice.
_LONGEST_MESSAGE = 64 << 20


class _AnyBytes:
    """A Reader that leaves in the buffer whatever it holds."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Do nothing."""


def measure(context: Context, tell: Callable[..., None]) -> None:
    """Measure with up to ``request.bench`` bytes; rank 0 tells each Rate. Collective.

    The request's one item names the cache root to write beneath, and the source if there is one.
    Raise RefusedError if disk or source cannot be used.
    """
    (item,) = context.request.items

    def tell_rate(rate: Rate) -> None:
        if context.comm.rank == 0:
            tell("rate", **asdict(rate))

    # What may fail comes first.
    source = [_measure_source(context, item)] if item.source else []
    times = _measure_disks(context, item)
    for rate in (*_slowest(context, times), *source):
        tell_rate(rate)
    for size in _sizes(context.request.bench):
        for algorithm in Algorithm:
            if algorithm is not Algorithm.AUTO:
                settings = replace(context.request.transfer, algorithm=algorithm)
                tell_rate(_measure_wire(context, size, settings))
    links = _measure_links(context)
    if context.comm.rank == 0:
        for one in _node_rates(context, times, links):
            tell("node_rates", **asdict(one))


def _sizes(most: int) -> Iterator[int]:
    size = _SMALLEST
    while size < most:
        yield size
        size *= _FACTOR
    yield most


def _measure_wire(context: Context, size: int, settings: Settings) -> Rate:
    """Broadcast ``size`` bytes from rank 0. Collective."""
    comm = context.comm
    layout = Layout.dense(size, settings.chunk)
    best = float("inf")
    for _ in range(_REPEATS):
        reader = _AnyBytes() if comm.rank == 0 else None
        comm.Barrier()
        begun = time.monotonic()
        broadcast(comm, layout, [1], settings, reader=reader, writer=None, digest=Digest())
        best = min(best, max(context.channel.allgather(time.monotonic() - begun, REAL)))
    return Rate("wire", size, best, algorithm=settings.algorithm)


def _measure_links(context: Context) -> list[float]:
    """Return the bytes a second at which each rank receives from the previous one. Collective.

    All links are in use at once.
    """
    comm = context.comm
    size = min(context.request.bench, _LONGEST_MESSAGE)
    sent, received = bytearray(size), bytearray(size)
    best = float("inf")
    for _ in range(_REPEATS):
        comm.Barrier()
        begun = time.monotonic()
        receiving = comm.Irecv(received, (comm.rank - 1) % comm.size)
        sending = comm.Isend(sent, (comm.rank + 1) % comm.size)
        receiving.Wait()
        best = min(best, time.monotonic() - begun)
        sending.Wait()
    return [size / seconds for seconds in context.channel.allgather(best, REAL)]


def _node_rates(
    context: Context, disks: Sequence[tuple[float, float]], links: Sequence[float]
) -> Iterator[NodeRates]:
    """Yield the rates of each node, from the seconds of its disk and the rates of all links."""
    size = context.request.bench
    outgoing = [*links[1:], links[0]]
    for node, (write, read), *both in zip(
        context.channel.nodes, disks, links, outgoing, strict=True
    ):
        yield NodeRates(node, size / write, size / read, max(both))


def _measure_disks(context: Context, item: StageItem) -> list[tuple[float, float]]:
    """Return each node's seconds to write, and to read past the page cache. Collective."""
    node, request = context.node, context.request
    opened: list[Cache] = []
    root = node.path(item.root)
    of_root = RootFacts(item.root in request.space.private, by_user=bool(request.hosts))

    def open_here() -> None:
        opened.append(open_cache(root, node.uid, of_root=of_root, disk=node.disk))

    together(context, open_here)
    size, space, folder = request.bench, request.space, opened[0].folder
    together(context, lambda: check_room_to_measure(item.root, size, space, folder))
    return together(context, lambda: _write_and_read(opened[0], request), pair_of(REAL, REAL))


def _slowest(context: Context, times: Sequence[tuple[float, float]]) -> Iterator[Rate]:
    """Yield the rates of the slowest nodes' disks."""
    for index, what in enumerate(("write", "read")):
        slowest = max(range(len(times)), key=lambda rank: times[rank][index])
        yield Rate(
            what, context.request.bench, times[slowest][index], context.channel.nodes[slowest]
        )


def _write_and_read(cache: Cache, request: StageRequest) -> tuple[float, float]:
    """Return the seconds to write and sync ``request.bench`` bytes, and to read them again."""
    settings = request.transfer
    layout = Layout.dense(request.bench, settings.chunk)
    with closing(Partial(cache, direct=settings.direct)) as partial:
        partial.allocate(layout.size, layout.extents)
        ring = Ring(layout, ring_depth(settings, request.nodes))
        begun = time.monotonic()
        drain = Drain(partial, layout, ring, settings.writers, Digest())
        for index in range(layout.count):
            ring.take(index)
            ring.release(index)  # in place of a transfer that passes it on
            drain.put(index)
        drain.finish()
        if drain.error:
            raise drain.error
        partial.seal(0o600, os.getgid(), time.time_ns())
        written = time.monotonic()
        partial.read_back()
        return written - begun, time.monotonic() - written


def _measure_source(context: Context, item: StageItem) -> Rate:
    """Measure how fast rank 0 reads the source. Collective."""

    def read() -> tuple[int, float]:
        return _read(item.source, context.request) if context.comm.rank == 0 else (0, 0.0)

    size, seconds = together(context, read, pair_of(NUMBER, REAL))[0]
    return Rate("source", size, seconds, context.channel.nodes[0])


def _read(path: str, request: StageRequest) -> tuple[int, float]:
    """Read at most ``request.bench`` bytes; return how many, and the seconds it took."""
    with closing(FileReader(path)) as reader:
        size = min(request.bench, os.fstat(reader.descriptor).st_size)
        if not size:
            raise SourceError(f"{path} is empty, so it cannot be measured; name a larger file")
        layout = Layout.dense(size, request.transfer.chunk)
        buffer = memoryview(bytearray(layout.chunk))
        begun = time.monotonic()
        for index in range(layout.count):
            reader.read_into(buffer[: layout.length(index)], index * layout.chunk)
        return size, time.monotonic() - begun
