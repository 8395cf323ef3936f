"""The broadcast: from rank 0's reader to every rank's writer, and what may fail on the way."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import xxhash

from stager.errors import SourceError, SpaceError
from stager.transfer import FileReader, broadcast

if TYPE_CHECKING:
    from pathlib import Path

    from mpi4py import MPI

CHUNK = 4096


class Memory:
    """A reader and writer of bytes in memory, which may fail from some offset on."""

    def __init__(self, data: bytes, fails_at: int | None = None) -> None:
        self.data = bytearray(data)
        self.fails_at = fails_at

    def read_into(self, buffer: memoryview, offset: int) -> None:
        if self.fails_at is not None and offset >= self.fails_at:
            raise SourceError("the source is gone")
        buffer[:] = self.data[offset : offset + len(buffer)]

    def write(self, data: memoryview, offset: int) -> None:
        if self.fails_at is not None and offset >= self.fails_at:
            raise SpaceError("the disk is full")
        self.data[offset : offset + len(data)] = data


def random_bytes(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize("depth", [2, 5])
@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 10 * CHUNK, 10 * CHUNK + 123])
def test_every_writer_gets_every_byte(comm: MPI.Intracomm, size: int, depth: int) -> None:
    data = random_bytes(size)
    writer = Memory(b"")
    reader = Memory(data) if comm.rank == 0 else None
    result = broadcast(comm, size, CHUNK, depth, reader, writer)
    assert bytes(writer.data) == data
    assert result.digest == xxhash.xxh3_128_hexdigest(data)
    assert result.error is None


def test_the_sender_need_not_write(comm: MPI.Intracomm) -> None:
    data = random_bytes(3 * CHUNK)
    reader = Memory(data) if comm.rank == 0 else None
    writer = Memory(b"") if comm.rank else None
    result = broadcast(comm, len(data), CHUNK, 2, reader, writer)
    assert result.digest == xxhash.xxh3_128_hexdigest(data)
    assert writer is None or bytes(writer.data) == data


def test_progress_counts_the_bytes_sent(comm: MPI.Intracomm) -> None:
    sent: list[int] = []
    reader = Memory(random_bytes(2 * CHUNK + 5)) if comm.rank == 0 else None
    broadcast(comm, 2 * CHUNK + 5, CHUNK, 2, reader, Memory(b""), sent.append)
    assert sent == [CHUNK, 2 * CHUNK, 2 * CHUNK + 5]


def test_a_reader_that_fails_stops_all_ranks_at_the_same_chunk(comm: MPI.Intracomm) -> None:
    data = random_bytes(9 * CHUNK)
    writer = Memory(b"")
    reader = Memory(data, fails_at=4 * CHUNK) if comm.rank == 0 else None
    result = broadcast(comm, len(data), CHUNK, 3, reader, writer)
    assert bytes(writer.data) == data[: 4 * CHUNK]
    assert result.digest == xxhash.xxh3_128_hexdigest(data[: 4 * CHUNK])
    assert str(result.error) == ("the source is gone" if comm.rank == 0 else "None")


def test_a_writer_that_fails_keeps_no_other_rank_waiting(comm: MPI.Intracomm) -> None:
    data = random_bytes(9 * CHUNK)
    last = comm.size - 1
    writer = Memory(b"", fails_at=2 * CHUNK if comm.rank == last else None)
    result = broadcast(comm, len(data), CHUNK, 2, Memory(data) if comm.rank == 0 else None, writer)
    if comm.rank == last:
        assert str(result.error) == "the disk is full"
        assert bytes(writer.data) == data[: 2 * CHUNK]
    else:
        assert result.error is None
        assert bytes(writer.data) == data


def test_a_file_that_became_shorter_is_an_error_and_no_end(
    comm: MPI.Intracomm, folder: Path
) -> None:
    path = folder / "source"
    reader = None
    if comm.rank == 0:
        path.write_bytes(random_bytes(CHUNK + 10))
        reader = FileReader(str(path))
    result = broadcast(comm, 3 * CHUNK, CHUNK, 2, reader, None)
    if reader:
        assert str(result.error) == f"{path} became shorter while it was read"
        assert reader.bytes_read == CHUNK + 10
        reader.close()
