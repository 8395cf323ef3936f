"""Decompress a file as its bytes come, in a thread of its own and in bounded memory."""

from __future__ import annotations

import bz2
import lzma
import queue
import threading
import zlib
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Generic, TypeVar, cast

import zstandard

from stager.archive.damage import DamagedError, DemandingError, ForeignError
from stager.archive.zstd_frames import SOMETHING_ELSE, ZstdFrames
from stager.base.formats import Compression

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Block = TypeVar("Block", bytes, memoryview)

#: Bytes that are decompressed at a time: few enough for a processor's cache.
BLOCK = 1 << 18
#: Decompressed blocks that may wait to be written.
_WAITING = 16
#: The most bytes of memory that a file may require to be decompressed; xz -9 requires 65 MiB.
_XZ_MEMORY = 256 << 20
#: The message of liblzma and of libzstd for a file that requires more.
_XZ_EXCEEDED, _ZSTD_EXCEEDED = "limit", "too much memory"
#: The message of libzstd for a file that was compressed with a dictionary.
_ZSTD_DICTIONARY = "Dictionary mismatch"
#: What a file of each format begins with.
_GZIP_MAGIC, _XZ_MAGIC, _BZIP2_MAGIC = b"\x1f\x8b", b"\xfd7zXZ\0", b"BZh"
#: Seconds between looks whether the thread that reads ahead has ended.
_LOOK = 0.01


def decompressed(file: IO[bytes], compression: Compression) -> Iterator[bytes]:
    """Yield what is in the ``file`` in blocks, some of which may be empty.

    Several compressed streams in a row are one. Raise DamagedError if the last one ends early, or
    if something else follows; DemandingError, or an exception of the library that decompresses.
    """
    if compression is Compression.GZIP:
        return _gunzipped(file)
    if compression is Compression.XZ:
        return _unxzed(file)
    if compression is Compression.ZSTD:
        return _unzstded(file)
    if compression is Compression.BZIP2:
        return _in_streams(file, bz2.BZ2Decompressor, _BZIP2_MAGIC)
    return read_blocks(file)


def read_blocks(archive: IO[bytes]) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks."""
    while block := archive.read(BLOCK):
        yield block


def _gunzipped(file: IO[bytes]) -> Iterator[bytes]:
    """Decompress gzip streams; zeros may follow each. zlib compares the digest at its end."""
    data = b""
    while True:
        stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        while not stream.eof:
            data = data or _more_of(file)
            yield stream.decompress(data, BLOCK)
            data = stream.unconsumed_tail
        if not (data := _next_of(file, stream.unused_data, _GZIP_MAGIC)):
            return


def _unxzed(file: IO[bytes]) -> Iterator[bytes]:
    try:
        begin = partial(lzma.LZMADecompressor, memlimit=_XZ_MEMORY)
        yield from _in_streams(file, begin, _XZ_MAGIC)
    except lzma.LZMAError as error:
        if _XZ_EXCEEDED in str(error):
            raise DemandingError(
                f"it takes more than {_XZ_MEMORY >> 20} MiB of memory to decompress; "
                "compress it again with a smaller dictionary, such as that of xz -9"
            ) from None
        raise


def _in_streams(
    file: IO[bytes],
    begin: Callable[[], lzma.LZMADecompressor | bz2.BZ2Decompressor],
    magic: bytes,
) -> Iterator[bytes]:
    """Decompress xz or bzip2 streams; zeros may follow each."""
    data = b""
    while True:
        stream = begin()
        while not stream.eof:
            if stream.needs_input:
                data = data or _more_of(file)
            yield stream.decompress(data, BLOCK)
            data = b""
        if not (data := _next_of(file, stream.unused_data, magic)):
            return


def _more_of(file: IO[bytes]) -> bytes:
    """Return the next bytes of a stream that has not ended, or raise DamagedError."""
    if data := file.read(BLOCK):
        return data
    raise DamagedError("it ends early")


def _next_of(file: IO[bytes], data: bytes, magic: bytes) -> bytes:
    """Return the beginning of the next compressed stream, without the zeros before it, if any.

    Raise DamagedError if what is there does not begin with the ``magic`` number.
    """
    while len(data := data.lstrip(b"\0")) < len(magic) and (more := file.read(BLOCK)):
        data += more
    if not data.startswith(magic[: len(data)]):
        raise DamagedError(SOMETHING_ELSE)
    return data


@contextmanager
def _zstd_reader(file: IO[bytes]) -> Iterator[zstandard.ZstdDecompressionReader]:
    """Decompress zstd frames; the body reads them to the end."""
    frames = ZstdFrames(file)
    reader = zstandard.ZstdDecompressor().stream_reader(
        cast("IO[bytes]", frames), read_size=BLOCK, read_across_frames=True, closefd=False
    )
    try:
        yield reader
    except zstandard.ZstdError as error:
        if _ZSTD_EXCEEDED in str(error):
            raise DemandingError(
                "it takes more than 128 MiB of memory to decompress; "
                "compress it again by zstd without --ultra, with --long=27 at most"
            ) from None
        if _ZSTD_DICTIONARY in str(error):
            raise ForeignError(
                "it was compressed with a dictionary; compress it again by zstd without -D"
            ) from None
        frames.check_last_bytes()
        raise
    frames.end()


def _unzstded(file: IO[bytes]) -> Iterator[bytes]:
    with _zstd_reader(file) as reader:
        yield from read_blocks(reader)


def decompressed_into(
    buffers: Iterable[memoryview], file: IO[bytes], compression: Compression
) -> Iterator[memoryview]:
    """Fill ``buffers``, which have one size, with what is in the ``file``, and yield each.

    Only the last one may be shorter. Raise as `decompressed` does.
    """
    if compression is not Compression.ZSTD:
        yield from _copied_into(buffers, decompressed(file, compression))
        return
    with _zstd_reader(file) as reader:  # which fills a buffer without a copy
        for buffer in buffers:
            filled = 0
            while filled < len(buffer) and (size := reader.readinto(buffer[filled:])):
                filled += size
            yield buffer[:filled]
            if filled < len(buffer):
                break


def _copied_into(buffers: Iterable[memoryview], blocks: Iterator[bytes]) -> Iterator[memoryview]:
    rest = memoryview(b"")
    for buffer in buffers:
        filled = 0
        while filled < len(buffer):
            if not rest and not (rest := memoryview(next(filter(None, blocks), b""))):
                break
            part = rest[: len(buffer) - filled]
            buffer[filled : filled + len(part)] = part
            filled += len(part)
            rest = rest[len(part) :]
        yield buffer[:filled]
        if filled < len(buffer):
            break


class ReadAhead(Generic[Block]):
    """Iterates over ``blocks`` in a thread that is up to ``waiting`` blocks ahead of its user."""

    def __init__(self, blocks: Iterator[Block], waiting: int = _WAITING) -> None:
        self._blocks: Iterator[Block] = blocks
        self._queue: queue.Queue[Block | BaseException | None] = queue.Queue(waiting)
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        end: BaseException | None = None
        try:
            for block in self._blocks:
                if block:
                    self._queue.put(block)
                if self._stop:
                    break
        except BaseException as error:  # raised where the blocks are used
            end = error
        self._queue.put(end)

    def __iter__(self) -> Iterator[Block]:
        while (block := self._queue.get()) is not None:
            if isinstance(block, BaseException):
                raise block
            yield block

    def close(self) -> None:
        """End the thread, however much was read."""
        self._stop = True
        while self._thread.is_alive():
            with suppress(queue.Empty):  # the thread may wait for a place in the queue
                self._queue.get(timeout=_LOOK)
