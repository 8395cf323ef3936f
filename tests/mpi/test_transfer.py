"""The broadcast from the first ranks' readers to every rank's writer, and its failures."""

from __future__ import annotations

import importlib
import random
import threading
import time
from typing import TYPE_CHECKING

import pytest
import xxhash
from hypothesis import strategies as st

from stager.base.digest import Digest
from stager.base.errors import SourceError, SpaceError
from stager.base.extents import Extent, rounded
from stager.fs.reader import FileReader
from stager.wire.layout import Algorithm, Layout, Settings
from stager.wire.transfer import Transferred, broadcast, ring_depth
from stager.wire.turns import Growth
from tests.support.examples import drawn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mpi4py import MPI

CHUNK = 4096
ALGORITHMS = [algorithm for algorithm in Algorithm if algorithm is not Algorithm.AUTO]


class Memory:
    """A reader and writer of bytes in memory that may fail from an offset on."""

    def __init__(self, data: bytes, fails_at: int | None = None) -> None:
        self.data = bytearray(data)
        self.fails_at = fails_at
        self.bytes_read = 0
        self._lock = threading.Lock()

    def read_into(self, buffer: memoryview, offset: int) -> None:
        if self.fails_at is not None and offset >= self.fails_at:
            raise SourceError("the source is gone")
        with self._lock:
            self.bytes_read += len(buffer)
        buffer[:] = self.data[offset : offset + len(buffer)]

    def write(self, data: memoryview, offset: int) -> None:
        if self.fails_at is not None and offset >= self.fails_at:
            raise SpaceError("the disk is full")
        with self._lock:
            self.data.extend(bytes(max(0, offset + len(data) - len(self.data))))
            self.data[offset : offset + len(data)] = data


class World:
    """A file of ``data`` to broadcast over a communicator."""

    def __init__(self, comm: MPI.Intracomm, data: bytes) -> None:
        self.comm = comm
        self.data = data
        self.reader = Memory(data)
        self.writer: Memory | None = Memory(b"")

    def move(
        self,
        layout: Layout | None = None,
        *,
        readers: Sequence[int] = (1,),
        how: Settings = Settings(depth=3),  # noqa: B008 - frozen
    ) -> Transferred:
        readers = [min(count, self.comm.size) for count in readers]
        layout = layout or Layout.dense(len(self.data), CHUNK)
        reader = self.reader if self.comm.rank < max(readers) else None
        return broadcast(
            self.comm, layout, readers, how, reader=reader, writer=self.writer, digest=Digest()
        )

    def assert_arrived(self, result: Transferred) -> None:
        assert result.error is None
        assert result.digest == xxhash.xxh3_128_hexdigest(self.data)
        assert self.writer is None or bytes(self.writer.data) == self.data


def random_bytes(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 10 * CHUNK, 10 * CHUNK + 123])
def test_every_writer_gets_every_byte(comm: MPI.Intracomm, algorithm: Algorithm, size: int) -> None:
    world = World(comm, random_bytes(size))
    result = world.move(how=Settings(depth=3, algorithm=algorithm))
    world.assert_arrived(result)
    assert 0 <= result.reading + result.wrote.held <= result.seconds


class SlowMemory(Memory):
    """Memory that takes 10 ms for each write."""

    def write(self, data: memoryview, offset: int) -> None:
        time.sleep(0.01)
        super().write(data, offset)


@pytest.mark.parametrize("writers", [1, 2])
def test_each_rank_knows_how_fast_it_writes_and_how_long_it_held_the_others_up(
    comm: MPI.Intracomm, writers: int
) -> None:
    """The last rank has a slow disk. Two threads that write at once are busy once."""
    chunks = 60
    world = World(comm, random_bytes(chunks * CHUNK))
    is_slow = comm.rank == comm.size - 1
    if is_slow:
        world.writer = SlowMemory(b"")
    result = world.move(how=Settings(depth=3, writers=writers))
    world.assert_arrived(result)
    assert result.wrote.size == len(world.data)
    least = chunks * 0.01 / writers
    if is_slow:
        assert least <= result.wrote.busy <= result.seconds
        assert result.wrote.held > 0.5 * least
    else:
        assert result.wrote.busy < 0.5 * least
        assert result.wrote.held < 0.5 * least


ANY_LAYOUT = st.tuples(
    st.integers(0, 40_000),
    st.integers(1, 9_000),
    st.lists(st.integers(1, 7), min_size=1, max_size=3).map(sorted),
    st.builds(
        Settings,
        depth=st.integers(1, 9),
        writers=st.integers(1, 3),
        algorithm=st.sampled_from(list(Algorithm)),
    ),
)


def test_any_size_chunk_depth_and_algorithm(comm: MPI.Intracomm) -> None:
    for size, least, readers, how in drawn(comm, ANY_LAYOUT):
        chunk = max(least, size // 200)
        world = World(comm, random_bytes(size))
        result = world.move(Layout.dense(size, chunk), readers=readers, how=how)
        world.assert_arrived(result)
        assert comm.allreduce(world.reader.bytes_read) == size


def test_ranks_that_have_imported_other_modules_try_the_same_examples(
    comm: MPI.Intracomm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"constants_of_{comm.rank}_in_{comm.size}"
    constants = [997 * number + comm.rank for number in range(1000)]
    (tmp_path / f"{name}.py").write_text(f"CONSTANTS = {constants}\n")
    importlib.import_module(name)
    examples = drawn(comm, st.integers(0, 1_000_000), 300)
    assert len(examples) == 300
    assert comm.allgather(examples) == [examples] * comm.size


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_holes_do_not_travel(comm: MPI.Intracomm, algorithm: Algorithm) -> None:
    hole = 1 << 20
    data = random_bytes(CHUNK) + bytes(hole) + random_bytes(3 * CHUNK + 5) + bytes(hole)
    extents = rounded([Extent(0, CHUNK), Extent(CHUNK + hole, 3 * CHUNK + 5)], len(data))
    world = World(comm, data)
    world.writer = Memory(bytes(len(data)))
    layout = Layout(len(data), 3000, extents)
    world.assert_arrived(world.move(layout, how=Settings(depth=2, algorithm=algorithm)))
    assert layout.data == 5 * CHUNK
    assert comm.allreduce(world.reader.bytes_read) == layout.data


def test_a_file_that_is_one_hole_moves_nothing(comm: MPI.Intracomm) -> None:
    world = World(comm, bytes(3_000_000))
    world.writer = None
    world.assert_arrived(world.move(Layout(3_000_000, CHUNK, ())))
    assert world.reader.bytes_read == 0


def test_readers_take_turns(comm: MPI.Intracomm) -> None:
    world = World(comm, random_bytes(8 * CHUNK + 1))
    world.assert_arrived(world.move(readers=[comm.size]))
    chunks = len(range(comm.rank, 9, comm.size))
    expected = chunks * CHUNK - (CHUNK - 1 if comm.rank == 8 % comm.size else 0)
    assert world.reader.bytes_read == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_other_ranks_join_in_reading(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, algorithm: Algorithm
) -> None:
    def is_due(growth: Growth, index: int, _: float) -> bool:
        return not growth._turns.rank and growth._turns.can_grow and index == 16

    monkeypatch.setattr(Growth, "is_due", is_due)
    world = World(comm, random_bytes(100 * CHUNK))
    readers = min(3, comm.size)
    world.assert_arrived(
        world.move(readers=[1, readers], how=Settings(depth=4, algorithm=algorithm))
    )
    # Chunk 21 is the first that no rank can have begun when it gets chunk 16.
    own = [index for index in range(100) if (index % readers if index > 20 else 0) == comm.rank]
    assert world.reader.bytes_read == len(own) * CHUNK


#: Chunks, readers, the chunks at which more ranks are called, and where the source fails.
ANY_CALLS = st.tuples(
    st.integers(1, 150),
    st.lists(st.integers(1, 6), min_size=2, max_size=4, unique=True).map(sorted),
    st.sets(st.integers(0, 150)),
    st.builds(
        Settings,
        depth=st.integers(1, 9),
        requests=st.integers(1, 3),
        algorithm=st.sampled_from(list(Algorithm)),
    ),
    st.none() | st.integers(0, 149),
)


def test_ranks_may_join_at_any_chunk(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: set[int] = set()

    def is_due(growth: Growth, index: int, _: float) -> bool:
        turns = growth._turns
        may_call = not turns.rank and turns.can_grow and turns.readers != growth._called
        if may_call and index in calls:
            growth._called = turns.readers
            return True
        return False

    monkeypatch.setattr(Growth, "is_due", is_due)
    for chunks, readers, called, how, fails_at in drawn(comm, ANY_CALLS):
        calls = called
        world = World(comm, random_bytes(chunks * 64))
        world.reader.fails_at = fails_at * 64 if fails_at is not None else None
        result = world.move(Layout.dense(len(world.data), 64), readers=readers, how=how)
        failed = comm.allreduce(result.error is not None)
        if fails_at is not None and fails_at < chunks:
            assert failed
        else:
            world.assert_arrived(result)
            assert comm.allreduce(world.reader.bytes_read) == len(world.data)


def test_a_reader_that_is_not_slow_reads_alone(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine any reader may seem slow; with this threshold none does.
    monkeypatch.setattr("stager.wire.turns._SLOW_READER", 2.0)
    world = World(comm, random_bytes(100 * CHUNK))
    world.assert_arrived(world.move(readers=[1, comm.size], how=Settings(depth=4)))
    assert world.reader.bytes_read in ((100 * CHUNK,) if comm.rank == 0 else (0,))


def test_a_sender_without_a_writer(comm: MPI.Intracomm) -> None:
    world = World(comm, random_bytes(3 * CHUNK))
    if comm.rank == 0:
        world.writer = None
    world.assert_arrived(world.move())


def test_progress_ends_at_the_whole_size(comm: MPI.Intracomm) -> None:
    passed: list[int] = []
    layout = Layout.dense(2 * CHUNK + 5, CHUNK)
    reader = Memory(random_bytes(layout.size)) if comm.rank == 0 else None
    broadcast(comm, layout, [1], Settings(), reader=reader, writer=None, progress=passed.append)
    assert passed == sorted(passed)
    assert passed[-1] == layout.size


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("fails_at", [0, 4 * CHUNK, 8 * CHUNK])
def test_a_reader_that_fails_stops_all_ranks(
    comm: MPI.Intracomm, algorithm: Algorithm, readers: int, fails_at: int
) -> None:
    world = World(comm, random_bytes(9 * CHUNK))
    assert world.writer
    world.reader.fails_at = fails_at
    failing = fails_at // CHUNK % min(readers, comm.size)
    if comm.rank != failing:
        world.reader.fails_at = None
    how = Settings(depth=3, algorithm=algorithm)
    result = world.move(readers=[readers], how=how)
    assert bytes(world.writer.data) == world.data[:fails_at]
    assert str(result.error) == ("the source is gone" if comm.rank == failing else "None")


def test_a_failed_transfer_does_not_read_on(comm: MPI.Intracomm) -> None:
    world = World(comm, random_bytes(100 * CHUNK))
    world.reader.fails_at = 2 * CHUNK
    world.move()
    assert world.reader.bytes_read == (2 * CHUNK if comm.rank == 0 else 0)


@pytest.mark.parametrize("writers", [1, 3])
def test_a_writer_that_fails_keeps_no_other_rank_waiting(comm: MPI.Intracomm, writers: int) -> None:
    world = World(comm, random_bytes(9 * CHUNK))
    assert world.writer
    last = comm.size - 1
    if comm.rank == last:
        world.writer.fails_at = 2 * CHUNK
    result = world.move(how=Settings(depth=2, writers=writers))
    if comm.rank == last:
        assert str(result.error) == "the disk is full"
        assert bytes(world.writer.data) == world.data[: 2 * CHUNK]
    else:
        world.assert_arrived(result)


def test_a_source_that_became_shorter_is_an_error(comm: MPI.Intracomm, folder: Path) -> None:
    path = folder / "source"
    reader = None
    if comm.rank == 0:
        path.write_bytes(random_bytes(CHUNK + 10))
        reader = FileReader(str(path))
    result = broadcast(
        comm, Layout.dense(3 * CHUNK, CHUNK), [1], Settings(), reader=reader, writer=None
    )
    if reader:
        assert str(result.error) == f"{path} became shorter while it was read"
        assert reader.bytes_read == CHUNK + 10
        reader.close()


@pytest.mark.parametrize(
    ("size", "depth"), [(1, 8), (4, 8), (7, 8), (8, 10), (1024, 24), (16384, 32)]
)
def test_the_depth_of_a_ring_grows_with_the_length_of_the_route(size: int, depth: int) -> None:
    assert ring_depth(Settings(), size) == depth
    assert ring_depth(Settings(depth=3), size) == 3


def test_a_ring_limits_its_memory_unless_the_depth_is_set() -> None:
    assert ring_depth(Settings(chunk=64 << 20), 4) == 4
    assert ring_depth(Settings(chunk=1 << 30), 4) == 2
    assert ring_depth(Settings(chunk=1 << 30, depth=8), 4) == 8
