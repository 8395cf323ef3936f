"""The ring's buffers: never more than its depth, and each for one chunk at a time."""

from __future__ import annotations

import ctypes
import resource
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import xxhash

from stager.base.digest import Digest
from stager.base.errors import SourceError, SpaceError
from stager.wire import ring as module
from stager.wire.layout import Layout
from stager.wire.ring import FAILED, OK, STATUS_SIZE, Drain, Filler, Ring

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA = bytes(range(100))


class Memory:
    """A reader and writer of bytes in memory, which fails from an offset on."""

    def __init__(self, fails_at: int = 1000) -> None:
        self.data = bytearray(DATA)
        self.fails_at = fails_at

    def read_into(self, buffer: memoryview, offset: int) -> None:
        if offset >= self.fails_at:
            raise SourceError("the source is gone")
        buffer[:] = self.data[offset : offset + len(buffer)]

    def write(self, data: memoryview, offset: int) -> None:
        if offset >= self.fails_at:
            raise SpaceError("the disk is full")
        self.data[offset : offset + len(data)] = data


def filled(
    ring: Ring, layout: Layout, reader: Memory, threads: int = 1
) -> Iterator[tuple[int, memoryview]]:
    """The chunks as a reader fills them, each of which is then to be released."""
    filler = Filler(reader, layout, ring, range(layout.count), threads)
    for index in range(layout.count):
        while not filler.has(index):
            pass
        yield index, ring.message(index)
    filler.finish()


def test_a_ring_never_has_more_buffers_than_its_depth() -> None:
    ring = Ring(Layout.dense(100, 10), 3)
    assert [ring.take(index) for index in range(3)] == [True] * 3
    assert not ring.has_room(3)
    for _ in range(2):
        ring.release(1)
    assert not ring.has_room(3)  # chunk 0 is the oldest, and everybody waits for the oldest
    for _ in range(2):
        ring.release(0)
    assert ring.has_room(4)
    assert not ring.has_room(5)
    ring.close()
    assert not ring.take(5)


def test_a_buffer_holds_a_chunk_and_its_status() -> None:
    ring = Ring(Layout.dense(25, 10), 8)
    assert ring.depth == 3  # never more than the file has chunks
    for index in range(3):
        assert ring.take(index)
    assert [len(ring.message(index)) for index in range(3)] == [10 + STATUS_SIZE] * 2 + [
        5 + STATUS_SIZE
    ]


@pytest.mark.parametrize("writers", [1, 3])
def test_what_is_filled_is_hashed_and_written(writers: int) -> None:
    layout = Layout.dense(len(DATA), 7)
    ring, written = Ring(layout, 3), Memory()
    written.data = bytearray(len(DATA))
    drain = Drain(written, layout, ring, writers, Digest())
    for index, message in filled(ring, layout, Memory()):
        assert message[-1] == OK
        drain.put(index)
        ring.release(index)
    assert drain.finish() == xxhash.xxh3_128_hexdigest(DATA)
    assert (drain.error, bytes(written.data)) == (None, DATA)


class Slow(Memory):
    """A reader each of whose reads waits until as many others are under way."""

    def __init__(self, at_once: int) -> None:
        super().__init__()
        self._barrier = threading.Barrier(at_once, timeout=30)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        self._barrier.wait()
        super().read_into(buffer, offset)


def test_several_threads_read_at_once_and_fill_the_chunks_in_order() -> None:
    layout = Layout.dense(len(DATA), 5)
    ring, found = Ring(layout, 4), b""
    for index, message in filled(ring, layout, Slow(4), threads=4):
        found += bytes(message[:-1])
        ring.release(index)
        ring.release(index)
    assert found == DATA


def test_a_failed_reader_marks_all_further_chunks() -> None:
    layout = Layout.dense(len(DATA), 10)
    ring = Ring(layout, 2)
    statuses = []
    for index, message in filled(ring, layout, Memory(fails_at=30)):
        statuses.append(message[-1])
        ring.release(index)
        ring.release(index)
    assert statuses == [OK] * 3 + [FAILED] * 7


def test_a_failed_writer_still_releases_all_chunks() -> None:
    layout = Layout.dense(len(DATA), 10)
    ring = Ring(layout, 2)
    drain = Drain(Memory(fails_at=30), layout, ring, 1, Digest())
    for index, _ in filled(ring, layout, Memory()):
        drain.put(index)
        ring.release(index)
    assert drain.finish() == xxhash.xxh3_128_hexdigest(DATA)
    assert str(drain.error) == "the disk is full"


@pytest.mark.parametrize(("limit", "kind"), [(resource.RLIM_INFINITY, "rw-p"), (1 << 40, "rw-s")])
def test_memory_is_shared_where_private_memory_is_limited(limit: int, kind: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        memory = module._memory(8 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, flags, *_ = line.split()
        begin, end = (int(one, 16) for one in place.split("-"))
        if begin <= address < end:
            assert flags == kind
            return
    raise AssertionError(hex(address))
