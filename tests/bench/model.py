"""A model of a transfer: the seconds until all nodes have a file, for a system's rates.

``python -m tests.bench.model`` prints the README's table and, with ``--svg FILE``, draws its plot;
``--measured FILE`` compares the model with measured times.

The transfer is simulated chunk by chunk and rank by rank along the routes of `stager.wire.route`:

- A chunk needs a buffer of the ring before it is read or sent to a rank, and frees it once it is
  written and sent to all children. Chunk k waits until all chunks up to k - depth have done so.
- A message occupies the sender's link for the latency and for its bytes, and begins when the sender
  has the chunk and the receiver a buffer. A rank sends chunks in order, and each to its children in
  order. So a rank with one parent receives one message after the other. In the tree a rank has two
  parents, which send half of the chunks each, together no more than one link carries; that two of
  their messages may share the link for a moment is ignored.
- A rank notices a chunk the handling time after it arrived or was read, and then passes it on.
- A node writes one chunk at a time, in order. Hashing is faster than writing and is ignored.
- Reader k % readers reads chunk k, one at a time. Several readers are modelled as several streams
  from the storage to one root; that each is the root of its own routes is ignored.
- ``bcast`` is the MPI library's: a chunk starts when the one before it has arrived everywhere. In
  the library a chunk is cut into segments that follow each other down a binary tree.

All times are sums and maxima of earlier ones. So a transfer that reaches an earlier state again,
apart from the clock, continues as it did then. Such whole periods are skipped. This does not change
a result, because the clock counts whole picoseconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_left
from collections import deque
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from math import ceil, gcd, log2, log10
from operator import sub
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from stager.wire.layout import Algorithm, Settings
from stager.wire.route import best_depth, choose, route
from tests.bench.plot import curve, document, rule, text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

GB, GIB = 10**9, 1 << 30
#: Units of the model's clock in a second.
TICKS = 10**12


@dataclass(frozen=True, slots=True)
class System:
    """The rates of the nodes and the storage, in bytes a second, and delays, in seconds.

    The defaults are an example, not a real machine: a 200 Gb/s port on each node, of which a stream
    gets 22 GB/s; a parallel filesystem that gives one client 10 GB/s; a PCIe 4 NVMe, without the
    page cache.
    """

    wire: float = 22e9
    #: Of one message, between two programs, over InfiniBand or Slingshot.
    latency: float = 2e-6
    #: From a chunk's arrival until it is noticed: half of the longest pause in `wire.transfer`,
    #: and the 50 us by which Linux extends any sleep (PR_SET_TIMERSLACK).
    handling: float = 150e-6
    #: One reader's, and all readers' together.
    source: float = 10e9
    all_sources: float = 40e9
    disk: float = 5e9
    #: The data is on the disk already; fsync has only to confirm it, and the copy is published.
    fsync: float = 0.01
    #: srun, Python, MPI_Init and the survey; assumed, with all modules on the nodes' disks.
    startup: float = 1.0
    startup_per_doubling: float = 0.3

    def startup_seconds(self, nodes: int) -> float:
        """Return the seconds before the first byte is read."""
        return self.startup + self.startup_per_doubling * log2(nodes)


@dataclass(frozen=True, slots=True)
class Transfer:
    """The transfer's settings: ``chunk`` and ``segment`` in bytes, ``depth`` in chunks.

    A rank accepts no chunk that is ``window`` or more ahead of the first that it lacks; 0 means
    ``depth``. With ``in_order`` a rank passes a chunk on only after all earlier ones have arrived.
    """

    chunk: int = Settings().chunk
    depth: int = Settings().depth
    readers: int = 1
    window: int = 0
    in_order: bool = False
    #: The longest that Open MPI's own rules choose for a long broadcast.
    segment: int = 128 << 10


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine that simulates all nodes: its cores, and the core-seconds that a byte costs.

    ``cpu_wire`` covers sending and receiving. Measured on two cores with 1 GiB, TCP and tmpfs.
    """

    cores: int = 2
    cpu_wire: float = 0.35 / GIB
    cpu_write: float = 0.26 / GIB
    cpu_hash: float = 0.025 / GIB
    cpu_read: float = 0.12 / GIB

    def core_seconds(self, nodes: int, size: int) -> float:
        """Return the work of all ranks; with any algorithm, all but one receive each byte once."""
        links = (nodes - 1) * self.cpu_wire
        return size * (links + nodes * (self.cpu_write + self.cpu_hash) + self.cpu_read)


#: The test cluster as if each node were a machine of its own: one TCP stream over a veth pair, and
#: the work of one core as in Machine. No start-up: only the transfer is measured there.
TEST_CLUSTER = System(
    wire=2.0e9,
    latency=50e-6,
    source=GIB / 0.12,
    all_sources=GIB / 0.12,
    disk=GIB / 0.26,
    fsync=0.0,
    startup=0.0,
    startup_per_doubling=0.0,
)


@dataclass(frozen=True, slots=True)
class Published:
    """A figure published for another tool: ``size`` bytes to ``nodes`` nodes in ``seconds``."""

    tool: str
    nodes: int
    size: int
    seconds: float


SIZES = (8_300_000_000, 16_000_000_000)
#: Published by the tools' authors, who do not define what counts as start-up.
PUBLISHED = (
    Published("ezpz yeet", 64, SIZES[0], 91),
    Published("ezpz yeet", 512, SIZES[0], 175),
    Published("ezpz yeet", 4096, SIZES[0], 751),
    Published("mpi-stage", 156, SIZES[1], 5.3),
)
NODES = (64, 156, 256, 512, 1024, 4096, 16384)
#: The smallest difference worth noticing, as a part of a transfer's time.
_WORTH = 0.05
ALGORITHMS = (Algorithm.CHAIN, Algorithm.TREE, Algorithm.BCAST)

_Edges: TypeAlias = "list[tuple[int, int]]"
_Row: TypeAlias = "list[int]"


def staging_seconds(
    algorithm: Algorithm, nodes: int, size: int, system: System, transfer: Transfer
) -> float:
    """Return the seconds until ``nodes`` nodes have ``size`` bytes on disk, from the launch."""
    moving = transfer_seconds(algorithm, nodes, size, system, transfer)
    return system.startup_seconds(nodes) + moving + system.fsync


def shared_seconds(
    algorithm: Algorithm,
    nodes: int,
    size: int,
    system: System,
    transfer: Transfer,
    machine: Machine,
) -> float:
    """Return `staging_seconds` where one ``machine`` simulates all nodes, with its few cores."""
    work = machine.core_seconds(nodes, size) / machine.cores
    alone = transfer_seconds(algorithm, nodes, size, system, transfer)
    whole = staging_seconds(algorithm, nodes, size, system, transfer)
    return whole + max(0.0, work - alone)


@cache
def transfer_seconds(
    algorithm: Algorithm,
    nodes: int,
    size: int,
    system: System,
    transfer: Transfer,
    *,
    skip: bool = True,
) -> float:
    """Return the seconds until all is sent and written; ``skip`` whole periods, or play all."""
    count = -(-size // transfer.chunk)
    depth = max(1, min(transfer.depth or best_depth(nodes), count))
    transfer = replace(transfer, depth=depth, window=min(transfer.window or depth, depth))
    if algorithm is Algorithm.BCAST:
        world: _World = _Library(nodes, system, transfer)
    else:
        world = _PointToPoint(algorithm, nodes, system, transfer)
    full, rest = divmod(size, transfer.chunk)
    played = _skipped(world, full, transfer) if skip else 0
    for _ in range(played, full):
        world.step(transfer.chunk)
    if rest:
        world.step(rest)
    return world.end / TICKS


def _skipped(world: _World, count: int, transfer: Transfer) -> int:
    """Play chunks until a state repeats, then skip periods; return how many of ``count`` are done.

    A state covers as many chunks as the next one depends on, and repeats only on the same tree.
    """
    span = max(transfer.depth, transfer.readers)
    marks: list[int] = []
    clocks: list[int] = []
    last: dict[int, int] = {}
    for index in range(count):
        before = world.clock
        world.step(transfer.chunk)
        clocks.append(world.clock)
        marks.append(hash((world.clock - before, *world.state())))
        apart = index - last.get(marks[-1], index)
        last[marks[-1]] = index
        period = apart * world.phases // gcd(apart, world.phases)
        if period and marks[-span:] == marks[-span - period : -period]:
            times = (count - 1 - index) // period
            world.shift(times * (clocks[-1] - clocks[-1 - period]))
            return index + 1 + times * period
    return count


def _ticks(size: float, rate: float) -> int:
    return round(size / rate * TICKS)


class _World:
    """All ranks: when each received and wrote the latest chunks, and freed their buffers."""

    #: The routes repeat after this number of chunks.
    phases = 1

    def __init__(self, ranks: int, system: System, transfer: Transfer) -> None:
        self._system = system
        self._handling = _ticks(system.handling, 1)
        self._in_order = transfer.in_order
        self._sent = [0] * ranks
        self._written = [0] * ranks
        # Rows of the latest chunks; the next chunk waits for the first row of each.
        self._seen = deque([[0] * ranks] * transfer.window, transfer.window)
        self._released = deque([[0] * ranks] * transfer.depth, transfer.depth)
        self._read = deque([0] * transfer.readers, transfer.readers)

    @property
    def clock(self) -> int:
        """The time at which the latest chunk was read."""
        return self._read[-1]

    @property
    def end(self) -> int:
        """The time at which all ranks were finished with all chunks."""
        return max(self._released[-1])

    def state(self) -> Iterator[tuple[int, ...]]:
        """Yield the latest chunk's rows, relative to the clock."""
        for row in (self._sent, self._written, self._seen[-1]):
            yield tuple(map(sub, row, [self.clock] * len(row)))

    def shift(self, ticks: int) -> None:
        """Add ``ticks`` to all times."""

        def later(row: Iterable[int]) -> _Row:
            return [time + ticks for time in row]

        self._sent = later(self._sent)
        self._written = later(self._written)
        self._read.extend(later(self._read))
        self._seen.extend([later(row) for row in self._seen])
        self._released.extend([later(row) for row in self._released])

    def step(self, size: int) -> None:
        """Move the next chunk, of ``size`` bytes."""
        room = self._released[0]
        begun = max(self._read[0], room[0])
        together = self.clock + _ticks(size, self._system.all_sources)
        self._read.append(max(begun + _ticks(size, self._system.source), together))
        posted = list(map(max, room, self._seen[0]))
        here = self._spread(size, self.clock + self._handling, posted)
        seen = list(map(max, self._seen[-1], here))
        write = _ticks(size, self._system.disk)
        self._written = [begin + write for begin in map(max, self._written, seen)]
        self._released.append(list(map(max, self._written, self._sent)))
        self._seen.append(seen)

    def _spread(self, size: int, ready: int, posted: _Row) -> _Row:
        """Return when each rank has the chunk that the first rank has at ``ready``."""
        raise NotImplementedError


class _PointToPoint(_World):
    """Messages along the routes of `stager.wire.route`, from the first rank on."""

    def __init__(
        self, algorithm: Algorithm, nodes: int, system: System, transfer: Transfer
    ) -> None:
        super().__init__(nodes, system, transfer)
        self.phases = 2 if algorithm is Algorithm.TREE else 1
        self._trees = deque(_edges(algorithm, nodes, phase) for phase in range(self.phases))

    def _spread(self, size: int, ready: int, posted: _Row) -> _Row:
        # No rank sends this chunk, or a later one, before it is ready to receive this one.
        self._sent = sent = list(map(max, self._sent, posted))
        handling = self._handling
        message = _ticks(self._system.latency, 1) + _ticks(size, self._system.wire)
        here = self._seen[-1].copy() if self._in_order else [0] * len(sent)
        here[0] = ready
        # Most of the run time is spent here: comparisons are faster than max().
        for parent, child in self._trees[0]:
            begin = here[parent]
            if sent[parent] > begin:
                begin = sent[parent]
            if posted[child] > begin:
                begin = posted[child]
            sent[parent] = begin = begin + message
            begin += handling
            if begin > here[child]:
                here[child] = begin
        self._trees.rotate(-1)
        return here


def _edges(algorithm: Algorithm, nodes: int, index: int) -> _Edges:
    """Return senders and receivers of a chunk; a rank receives before it sends."""
    found: _Edges = []
    ranks = [0]
    for parent in ranks:
        children = route(algorithm, parent, nodes)(index, 0).children
        found += [(parent, child) for child in children]
        ranks.extend(children)
    return found


class _Library(_World):
    """The MPI library's broadcast. One rank stands for all: they have a chunk at the same time."""

    def __init__(self, nodes: int, system: System, transfer: Transfer) -> None:
        super().__init__(1, system, transfer)
        self._nodes = nodes
        self._segment = transfer.segment

    def _spread(self, size: int, ready: int, posted: _Row) -> _Row:
        begin = max(ready, posted[0], self._sent[0])
        self._sent = [begin + broadcast_ticks(self._nodes, size, self._segment, self._system)]
        return self._sent


def broadcast_ticks(nodes: int, size: int, segment: int, system: System) -> int:
    """Return the time of one ideal MPI_Bcast: a binary tree, each segment sent to two children.

    The first segment passes ceil(log2 nodes) ranks, the others follow it.
    """
    if nodes == 1:
        return 0
    fanout = min(2, nodes - 1)
    steps = ceil(log2(nodes)) - 1 + ceil(size / segment)
    message = _ticks(system.latency, 1) + _ticks(min(size, segment), system.wire)
    return steps * fanout * message


def crossover(
    size: int, system: System, transfer: Transfer, gain: float = 0.0, most: int = NODES[-1]
) -> int | None:
    """Return the number of nodes from which a tree is faster than a chain, by ``gain`` of its time.

    None if it is not with ``most`` nodes, a power of two. Lower powers of two are tried while the
    tree is faster, then the numbers below the last of them.
    """

    def tree_wins(nodes: int) -> bool:
        chain, tree = (
            transfer_seconds(algorithm, nodes, size, system, transfer)
            for algorithm in (Algorithm.CHAIN, Algorithm.TREE)
        )
        return chain > tree * (1 + gain)

    nodes = most
    if not tree_wins(nodes):
        return None
    while nodes > 2 and tree_wins(nodes // 2):
        nodes //= 2
    return nodes // 2 + bisect_left(range(nodes // 2, nodes), True, key=tree_wins)


def advice(size: int, system: System, transfer: Transfer) -> str:
    """Return what ``auto`` should choose for ``size`` bytes, and from how many nodes it matters."""
    name = f"{size / GB:g} GB"
    first = crossover(size, system, transfer)
    if first is None:
        return f"{name}: the chain up to {NODES[-1]} nodes."
    worth = crossover(size, system, transfer, _WORTH)
    return f"{name}: the tree overtakes the chain at {first} nodes" + (
        f", and is {_WORTH:.0%} faster from {worth} on." if worth else "."
    )


_Seconds: TypeAlias = "Mapping[tuple[int, Algorithm, int], float]"


def all_seconds(nodes: Sequence[int], system: System, transfer: Transfer) -> _Seconds:
    """`staging_seconds` by size, algorithm and nodes."""
    return {
        (size, algorithm, count): staging_seconds(algorithm, count, size, system, transfer)
        for size in SIZES
        for algorithm in ALGORITHMS
        for count in nodes
    }


def table(seconds: _Seconds, nodes: Sequence[int], system: System) -> str:
    """Return a markdown table of the model's times, with figures published for as many nodes.

    The model's times include the start-up, which also has a column of its own.
    """
    columns = [(size, algorithm) for size in SIZES for algorithm in ALGORITHMS]
    names = [f"{size / GB:g} GB, {algorithm}" for size, algorithm in columns]
    lines = [["nodes", "start-up", *names, "published"]]
    for count in nodes:
        figures = [f"{system.startup_seconds(count):.2f} s"]
        figures += [f"{seconds[size, algorithm, count]:.2f} s" for size, algorithm in columns]
        said = [
            f"{figure.tool}, {figure.size / GB:g} GB: {figure.seconds:g} s"
            for figure in PUBLISHED
            if figure.nodes == count
        ]
        lines.append([str(count), *figures, "; ".join(said)])
    return _markdown(lines)


def measured_table(
    measured: Iterable[Mapping[str, Any]], system: System, transfer: Transfer, machine: Machine
) -> str:
    """Return a markdown table of measured times, the model's, and their ratio.

    Each of ``measured`` has ``nodes``, ``seconds``, ``size`` in bytes, and ``algorithm`` unless
    it was the one that ``auto`` stands for.
    """
    lines = [["nodes", "size", "measured", "model", "model / measured"]]
    for run in measured:
        nodes, size, seconds = run["nodes"], run["size"], run["seconds"]
        wanted = Algorithm(run.get("algorithm", Algorithm.AUTO))
        algorithm = choose(wanted, nodes, -(-size // transfer.chunk))
        found = shared_seconds(algorithm, nodes, size, system, transfer, machine)
        lines.append(
            [str(nodes), f"{size / GIB:.2f} GiB", f"{seconds:.2f} s", f"{found:.2f} s",
             f"{found / seconds:.2f}"]
        )  # fmt: skip
    return _markdown(lines)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    rule = ["---:"] * (len(lines[0]) - 1) + ["---"]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [lines[0], rule, *lines[1:]])


def assumptions(system: System, transfer: Transfer) -> str:
    """Return the table's assumptions, as a sentence to print below it."""
    buffers = transfer.depth or f"{best_depth(64)} (64 nodes) to {best_depth(16384)} (16384)"
    return (
        f"Assumed: wire {system.wire / GB:g} GB/s and {system.latency * 1e6:g} us a message, "
        f"{system.handling * 1e6:g} us until a rank notices a chunk, source "
        f"{system.source / GB:g} GB/s a reader ({transfer.readers}), disk {system.disk / GB:g} "
        f"GB/s, chunks of {transfer.chunk / (1 << 20):g} MiB in {buffers} buffers, start-up "
        f"{system.startup:g} s and {system.startup_per_doubling:g} s more each time the nodes "
        f"double, {system.fsync:g} s to publish."
    )


# The plot has a panel for each size: nodes (powers of two) across, seconds (powers of ten) upwards.

_WIDTH, _HEIGHT = 760, 330
_PANELS = (50, 420)  # where each begins
_PANEL_WIDTH, _TOP, _BOTTOM = 312, 62, 280
_TICKS_ACROSS = (64, 256, 1024, 4096, 16384)
_TICKS_UPWARDS = (1, 10, 100, 1000)
_PLOTTED = tuple(1 << power for power in range(6, 15))

_COLOURS = dict(zip(ALGORITHMS, ("blue", "green", "orange"), strict=True))


def svg(seconds: _Seconds, nodes: Sequence[int]) -> str:
    """Draw `all_seconds` and the published figures, for light and dark pages."""
    parts = [*_legend()]
    for left, size in zip(_PANELS, SIZES, strict=True):
        parts += _axes(left, f"{size / GB:g} GB")
        for algorithm in ALGORITHMS:
            points = [(_x(left, n), _y(seconds[size, algorithm, n])) for n in nodes]
            parts.append(curve(points, _COLOURS[algorithm]))
        parts += _peers(left, size)
    title = "Seconds until all nodes have the file, by number of nodes"
    return document(_WIDTH, _HEIGHT, title, parts)


def _x(left: int, nodes: int) -> float:
    first, last = log2(_TICKS_ACROSS[0]), log2(_TICKS_ACROSS[-1])
    return left + _PANEL_WIDTH * (log2(nodes) - first) / (last - first)


def _y(seconds: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * log10(seconds) / log10(_TICKS_UPWARDS[-1])


def _legend() -> Iterator[str]:
    for number, algorithm in enumerate(ALGORITHMS):
        x = _PANELS[0] + 90 * number
        yield rule(x, 16, x + 26, 16, f"line {_COLOURS[algorithm]}")
        yield text(x + 32, 20, algorithm, "start")
    x = _PANELS[0] + 90 * len(ALGORITHMS)
    yield f'<circle class="violet" cx="{x}" cy="16" r="4"/>'
    yield text(x + 10, 20, "published by others", "start")


def _axes(left: int, title: str) -> Iterator[str]:
    right = left + _PANEL_WIDTH
    yield text((left + right) / 2, _TOP - 14, title, kind="title")
    yield text(left - 32, _TOP - 14, "seconds", "start")
    for value in _TICKS_UPWARDS:
        yield rule(left, _y(value), right, _y(value))
        yield text(left - 6, _y(value) + 4, str(value), "end")
    for nodes in _TICKS_ACROSS:
        yield rule(_x(left, nodes), _BOTTOM, _x(left, nodes), _BOTTOM + 4)
        yield text(_x(left, nodes), _BOTTOM + 18, str(nodes))
    yield text((left + right) / 2, _BOTTOM + 38, "nodes")


def _peers(left: int, size: int) -> Iterator[str]:
    names = {}
    for figure in PUBLISHED:
        if figure.size == size:
            x, y = _x(left, figure.nodes), _y(figure.seconds)
            yield f'<circle class="violet" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
            # Each tool's name is printed once, below the last of its points.
            names[figure.tool] = text(x, y + 18, figure.tool)
    yield from names.values()


def main() -> int:
    """Print the model's table, or compare it with measured times; draw the plot if asked."""
    parser = argparse.ArgumentParser(description="How staging scales, by a model.")
    parser.add_argument("--svg", type=Path, help="where to draw the plot")
    parser.add_argument("--measured", type=Path, help="JSON list of nodes, seconds, size")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=_assignment,
        metavar="NAME=VALUE",
        help=f"another {', '.join(_names())}",
    )
    options = parser.parse_args()
    values = dict(options.set)
    transfer = _changed(Transfer(), values)
    if options.measured:
        runs = json.loads(options.measured.read_text())
        machine = _changed(Machine(), values)
        print(measured_table(runs, _changed(TEST_CLUSTER, values), transfer, machine))
    else:
        _print_scale(_changed(System(), values), transfer, options.svg)
    return 0


def _names() -> list[str]:
    return [field.name for kind in (System, Transfer, Machine) for field in fields(kind)]


def _assignment(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if name not in _names():
        raise argparse.ArgumentTypeError(f"no such name: {name}")
    return name, json.loads(value)


_Kind = TypeVar("_Kind", System, Transfer, Machine)


def _changed(thing: _Kind, values: Mapping[str, Any]) -> _Kind:
    """Return ``thing`` with those of ``values`` that are its fields."""
    own = asdict(thing).keys() & values.keys()
    return replace(thing, **{name: type(getattr(thing, name))(values[name]) for name in own})


def _print_scale(system: System, transfer: Transfer, plot: Path | None) -> None:
    nodes = sorted({*NODES, *_PLOTTED}) if plot else NODES
    seconds = all_seconds(nodes, system, transfer)
    print(table(seconds, NODES, system))
    print(f"\n{assumptions(system, transfer)}\n")
    for size in SIZES:
        print(advice(size, system, transfer))
    if plot:
        plot.write_text(svg(seconds, nodes))


if __name__ == "__main__":
    sys.exit(main())
