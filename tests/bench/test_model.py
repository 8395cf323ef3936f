"""The model of scaling: compared with a direct simulation, at its limits, and what it prints."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cached_property
from math import inf, log2
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.wire.route import Hop, route
from tests.bench import model
from tests.bench.model import (
    ALGORITHMS,
    GB,
    GIB,
    PUBLISHED,
    SIZES,
    TICKS,
    Machine,
    Published,
    System,
    Transfer,
    broadcast_ticks,
    crossover,
    shared_seconds,
    staging_seconds,
    transfer_seconds,
)

if TYPE_CHECKING:
    from pathlib import Path

    from stager.wire.layout import Algorithm

CHAIN, TREE, BCAST = ALGORITHMS
POINT_TO_POINT = [CHAIN, TREE]

#: A chunk of one MB, so that a rate of 1 MB/s takes a second for it.
MB = 10**6
#: A system in which nothing takes time.
FREE = System(
    wire=inf, latency=0, handling=0, source=inf, all_sources=inf, disk=inf, fsync=0,
    startup=0, startup_per_doubling=0,
)  # fmt: skip


def taking(**seconds: float) -> System:
    """Return a System in which a chunk takes these seconds on ``wire``, ``source`` or ``disk``."""
    return replace(FREE, **{name: MB / value for name, value in seconds.items()})


def transfer(depth: int = 16, **too: Any) -> Transfer:
    return replace(Transfer(chunk=MB, depth=depth), **too)


class Reference:
    """The model's rules, one method each, for every rank and chunk; no period is skipped."""

    def __init__(
        self, algorithm: Algorithm, nodes: int, size: int, system: System, how: Transfer
    ) -> None:
        self.nodes, self.size, self.system, self.how = nodes, size, system, how
        self.count = -(-size // how.chunk)
        self.depth = min(how.depth, self.count)
        self.window = min(how.window or self.depth, self.depth)
        self.routes = [route(algorithm, rank, nodes) for rank in range(nodes)]
        self.known: dict[tuple[str, int, int], int] = {}

    @cached_property
    def seconds(self) -> float:
        # Chunk by chunk, to limit the depth of recursion.
        for chunk in range(self.count):
            for rank in range(self.nodes):
                self.at("released", rank, chunk)
        return max(self.known.values(), default=0) / TICKS

    def at(self, what: str, rank: int, chunk: int) -> int:
        """Return the time of an event; those before the first chunk are at 0."""
        if chunk < 0:
            return 0
        key = what, rank, chunk
        if key not in self.known:
            self.known[key] = getattr(self, what)(rank, chunk)
        return self.known[key]

    def takes(self, chunk: int, rate: float) -> int:
        return round(min(self.how.chunk, self.size - chunk * self.how.chunk) / rate * TICKS)

    def hop(self, rank: int, chunk: int) -> Hop:
        return self.routes[rank](chunk, 0)

    def room(self, rank: int, chunk: int) -> int:
        earlier = range(chunk - self.depth + 1)
        return max((self.at("released", rank, other) for other in earlier), default=0)

    def read(self, rank: int, chunk: int) -> int:
        begun = max(self.at("read", rank, chunk - self.how.readers), self.at("room", rank, chunk))
        alone = begun + self.takes(chunk, self.system.source)
        before = self.at("read", rank, chunk - 1)
        return max(alone, before + self.takes(chunk, self.system.all_sources))

    def noticed(self, rank: int, chunk: int) -> int:
        parent = self.hop(rank, chunk).parent
        if parent is None:
            here = self.at("read", rank, chunk)
        else:
            here = self.sent(parent, chunk)[self.hop(parent, chunk).children.index(rank)]
        return here + round(self.system.handling * TICKS)

    def seen(self, rank: int, chunk: int) -> int:
        """Return when it and all chunks before it were noticed."""
        return max(self.at("noticed", rank, chunk), self.at("seen", rank, chunk - 1))

    def sent(self, rank: int, chunk: int) -> list[int]:
        """Return when each of the children had received it."""
        ends: list[int] = []
        takes = round(self.system.latency * TICKS) + self.takes(chunk, self.system.wire)
        for child in self.hop(rank, chunk).children:
            begun = max(
                self.at("seen" if self.how.in_order else "noticed", rank, chunk),
                ends[-1] if ends else self.at("idle", rank, chunk),
                self.at("room", child, chunk),
                self.at("seen", child, chunk - self.window),
            )
            ends.append(begun + takes)
        return ends

    def idle(self, rank: int, chunk: int) -> int:
        """Return when all earlier chunks were sent."""
        return max(self.at("idle", rank, chunk - 1), *self.sent(rank, chunk - 1), 0) if chunk else 0

    def written(self, rank: int, chunk: int) -> int:
        begun = max(self.at("seen", rank, chunk), self.at("written", rank, chunk - 1))
        return begun + self.takes(chunk, self.system.disk)

    def released(self, rank: int, chunk: int) -> int:
        return max(self.at("written", rank, chunk), *self.sent(rank, chunk), 0)


#: Sizes with and without a shorter last chunk.
BYTES = st.builds(
    lambda chunks, rest: chunks * MB + rest, st.integers(0, 50), st.sampled_from([0, MB // 3])
)
MILLISECONDS = st.integers(0, 9).map(lambda number: number / 1000)


@st.composite
def systems(draw: st.DrawFn) -> System:
    seconds = {name: draw(MILLISECONDS) for name in ("wire", "source", "all_sources", "disk")}
    slow = {name: value for name, value in seconds.items() if value}
    return replace(taking(**slow), latency=draw(MILLISECONDS), handling=draw(MILLISECONDS))


TRANSFERS = st.builds(
    transfer,
    depth=st.integers(1, 9),
    readers=st.integers(1, 3),
    window=st.integers(0, 5),
    in_order=st.booleans(),
)


@given(
    algorithm=st.sampled_from(POINT_TO_POINT),
    nodes=st.integers(1, 9),
    size=BYTES,
    system=systems(),
    how=TRANSFERS,
)
def test_the_model_equals_a_simulation_of_every_rank_and_chunk(
    algorithm: Algorithm, nodes: int, size: int, system: System, how: Transfer
) -> None:
    expected = Reference(algorithm, nodes, size, system, how).seconds
    assert transfer_seconds(algorithm, nodes, size, system, how) == expected


@settings(max_examples=200)
@given(
    algorithm=st.sampled_from(ALGORITHMS),
    nodes=st.integers(1, 20),
    size=BYTES.map(lambda size: 3 * size),
    system=systems(),
    how=TRANSFERS,
)
def test_skipping_periods_changes_no_result(
    algorithm: Algorithm, nodes: int, size: int, system: System, how: Transfer
) -> None:
    skipped, played = (
        transfer_seconds(algorithm, nodes, size, system, how, skip=skip) for skip in (True, False)
    )
    assert skipped == played


def test_most_of_a_long_file_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[int] = []
    step = model._World.step

    def counted(world: model._World, size: int) -> None:
        played.append(size)
        step(world, size)

    monkeypatch.setattr(model._World, "step", counted)
    for algorithm in ALGORITHMS:
        played.clear()
        transfer_seconds(algorithm, 33, 16 * GB + 5, System(), Transfer(chunk=2 * MB, depth=16))
        assert len(played) < 200
        assert played[-1] == 5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_node_waits_only_for_its_source_and_its_disk(algorithm: Algorithm) -> None:
    slow_disk = replace(taking(source=1, wire=9, disk=2), latency=9)
    assert transfer_seconds(algorithm, 1, 10 * MB, slow_disk, transfer()) == 1 + 10 * 2
    slow_source = replace(taking(source=2, wire=9, disk=1), latency=9)
    assert transfer_seconds(algorithm, 1, 10 * MB, slow_source, transfer()) == 10 * 2 + 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("nodes", [1, 9, 64])
def test_a_transfer_takes_as_long_as_the_source_if_all_else_is_free(
    algorithm: Algorithm, nodes: int
) -> None:
    assert transfer_seconds(algorithm, nodes, 100 * MB, taking(source=0.5), transfer()) == 50


@pytest.mark.parametrize(("readers", "seconds"), [(1, 40), (2, 20), (4, 15), (8, 15)])
def test_the_rates_of_readers_add_up_to_that_of_the_storage(readers: int, seconds: int) -> None:
    system = replace(taking(source=4), all_sources=MB / 1.5)
    found = transfer_seconds(CHAIN, 2, 1000 * MB, system, transfer(readers=readers))
    assert found == pytest.approx(100 * seconds, rel=0.01)


def test_the_rate_of_a_chain_does_not_depend_on_the_number_of_nodes() -> None:
    system = replace(taking(wire=2, source=1, disk=1), latency=0.5, handling=3)
    for nodes in (2, 5, 300):
        short, long = (
            transfer_seconds(CHAIN, nodes, chunks * MB, system, transfer()) for chunks in (50, 90)
        )
        assert long - short == 40 * 2.5
        # The first chunk is read and seen; it and the last pass all links; the last is written.
        assert short == 1 + 3 + (nodes - 1) * (2.5 + 3) + 49 * 2.5 + 1


@pytest.mark.parametrize("algorithm", POINT_TO_POINT)
def test_a_ring_of_one_chunk_stops_and_waits(algorithm: Algorithm) -> None:
    system = taking(source=1, wire=2, disk=3)
    # The other rank must have written a chunk before the next is sent.
    assert transfer_seconds(algorithm, 2, 10 * MB, system, transfer(1)) == 1 + 10 * (2 + 3)
    assert transfer_seconds(algorithm, 2, 10 * MB, system, transfer(2)) == 1 + 2 + 10 * 3


def test_latency_counts_for_the_depth_of_a_tree_and_the_length_of_a_chain() -> None:
    system = replace(FREE, latency=1)
    for nodes in (16, 128, 1024):
        assert transfer_seconds(CHAIN, nodes, MB, system, transfer()) == nodes - 1
        # A rank of the tree sends to the second child when the first has the chunk.
        tree = transfer_seconds(TREE, nodes, MB, system, transfer())
        assert log2(nodes) <= tree <= 2 * log2(nodes)


def test_a_tree_is_as_fast_as_a_chain_once_it_is_filled() -> None:
    for nodes in (8, 64, 500):
        seconds = transfer_seconds(TREE, nodes, 1000 * MB, taking(wire=1), transfer(64))
        assert 1000 < seconds < 1000 + 4 * log2(nodes)


def test_a_tree_that_passes_chunks_on_in_order_is_slow() -> None:
    system, chunks = taking(wire=1), 1000
    for nodes in (16, 64):
        seconds = transfer_seconds(TREE, nodes, chunks * MB, system, transfer(in_order=True))
        assert seconds / chunks == pytest.approx(1.5 * (log2(nodes) - 1), rel=0.01)


def test_a_short_ring_slows_a_deep_tree() -> None:
    system = replace(taking(wire=1), handling=4)
    times = [transfer_seconds(TREE, 256, 1000 * MB, system, transfer(n)) for n in (64, 16, 4)]
    assert times[0] < 1100 < 2000 < times[1] < times[2] / 3


def test_the_library_broadcasts_one_chunk_at_a_time() -> None:
    system = replace(taking(wire=4), latency=1)
    # Four segments of one second plus latency, each sent twice, through three ranks.
    assert broadcast_ticks(8, MB, MB // 4, system) == (3 - 1 + 4) * 2 * 2 * TICKS
    # They are sent once if there is only one other rank.
    assert broadcast_ticks(2, MB, MB // 4, system) == 4 * 2 * TICKS
    assert broadcast_ticks(1, MB, MB // 4, system) == 0
    how = transfer(segment=MB // 4)
    assert transfer_seconds(BCAST, 8, 10 * MB, system, how) == 10 * 24


def test_staging_consists_of_start_up_transfer_and_publishing() -> None:
    system = replace(taking(source=1), startup=2, startup_per_doubling=0.5, fsync=0.25)
    assert staging_seconds(CHAIN, 8, 10 * MB, system, transfer()) == 2 + 3 * 0.5 + 10 + 0.25


def test_one_machine_that_simulates_all_nodes_is_limited_by_its_cores() -> None:
    work = 3 * 0.35 + 4 * (0.26 + 0.025) + 0.12
    assert Machine().core_seconds(4, GIB) == pytest.approx(work)
    quick, slow = replace(FREE, startup=1), replace(FREE, startup=1, source=GIB / 9)
    for cores, system, seconds in ((2, quick, 1 + work / 2), (2, slow, 10), (1, quick, 1 + work)):
        machine = Machine(cores=cores)
        found = shared_seconds(CHAIN, 4, GIB, system, Transfer(chunk=GIB // 4), machine)
        assert found == pytest.approx(seconds)


def test_where_the_tree_overtakes_the_chain() -> None:
    system = replace(taking(wire=1, disk=1), handling=1)
    first = crossover(20 * MB, system, transfer(64), most=256)
    assert first is not None
    for nodes in range(2, 40):
        chain, tree = (
            transfer_seconds(algorithm, nodes, 20 * MB, system, transfer(64))
            for algorithm in POINT_TO_POINT
        )
        assert (tree < chain) == (nodes >= first)
    later = crossover(20 * MB, system, transfer(64), gain=0.5, most=256)
    assert later is not None
    assert later > first
    in_order = transfer(64, in_order=True)
    assert crossover(500 * MB, system, in_order, most=64) is None


def test_the_published_figures() -> None:
    expected = (
        Published("ezpz yeet", 64, 8_300_000_000, 91),
        Published("ezpz yeet", 512, 8_300_000_000, 175),
        Published("ezpz yeet", 4096, 8_300_000_000, 751),
        Published("mpi-stage", 156, 16_000_000_000, 5.3),
    )
    assert expected == PUBLISHED


SECONDS = {
    (size, algorithm, nodes): 2.0 + column
    for column, size in enumerate(SIZES)
    for algorithm in ALGORITHMS
    for nodes in (64, 4096)
}


def test_the_table_has_published_figures_beside_the_model() -> None:
    system = replace(FREE, startup=1, startup_per_doubling=0.5)
    names = ("nodes", "start-up", "8.3 GB, chain", "8.3 GB, tree", "8.3 GB, bcast",
             "16 GB, chain", "16 GB, tree", "16 GB, bcast", "published")  # fmt: skip
    small, large = " | ".join(["2.00 s"] * 3), " | ".join(["3.00 s"] * 3)
    assert model.table(SECONDS, (64, 4096), system).splitlines() == [
        f"| {' | '.join(names)} |",
        f"| {'---: | ' * 8}--- |",
        f"| 64 | 4.00 s | {small} | {large} | ezpz yeet, 8.3 GB: 91 s |",
        f"| 4096 | 7.00 s | {small} | {large} | ezpz yeet, 8.3 GB: 751 s |",
    ]


def test_the_plot_shows_all_algorithms_and_figures_within_its_frame() -> None:
    plot = ElementTree.fromstring(model.svg(SECONDS, (64, 4096)))
    tag = "{http://www.w3.org/2000/svg}"
    lines = plot.findall(f"{tag}polyline")
    assert [line.attrib["class"] for line in lines] == [
        "line blue",
        "line green",
        "line orange",
    ] * 2
    points = [pair.split(",") for line in lines for pair in line.attrib["points"].split()]
    points += [[circle.attrib["cx"], circle.attrib["cy"]] for circle in plot.iter(f"{tag}circle")]
    assert len(points) == 6 * 2 + len(PUBLISHED) + 1
    _, _, width, height = map(float, plot.attrib["viewBox"].split())
    assert all(0 <= float(x) <= width and 0 <= float(y) <= height for x, y in points)


def test_measured_times_stand_beside_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        {"nodes": 2, "seconds": 2.0, "size": GIB},
        {"nodes": 4, "seconds": 1.5, "size": GIB, "algorithm": "tree"},
    ]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    argv = ["model", "--measured", f"{tmp_path}/runs.json"]
    for setting in ("cores=1", "cpu_read=0", "cpu_hash=0", f"cpu_wire={1 / GIB}", "cpu_write=0"):
        argv += ["--set", setting]
    monkeypatch.setattr("sys.argv", argv)
    assert model.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "| nodes | size | measured | model | model / measured |",
        "| ---: | ---: | ---: | ---: | --- |",
        "| 2 | 1.00 GiB | 2.00 s | 1.00 s | 0.50 |",
        "| 4 | 1.00 GiB | 1.50 s | 3.00 s | 2.00 |",
    ]


def test_an_unknown_setting_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["model", "--set", "dsk=1"])
    with pytest.raises(SystemExit):
        model.main()
    assert "argument --set: no such name: dsk" in capsys.readouterr().err
