"""Decompress an archive as its bytes come, in a thread of its own and in bounded memory."""

from __future__ import annotations

import lzma
import queue
import threading
import zlib
from contextlib import suppress
from typing import IO, TYPE_CHECKING

import zstandard

from stager.base.formats import Compression, compression_of

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Bytes that are decompressed at a time: few enough for a processor's cache.
BLOCK = 1 << 18
#: Decompressed blocks that may wait to be written.
_WAITING = 16
#: The most bytes of memory that an archive may require to be decompressed; xz -9 requires 65 MiB.
_XZ_MEMORY = 256 << 20
#: The message of liblzma and of libzstd for an archive that requires more.
_XZ_EXCEEDED, _ZSTD_EXCEEDED = "limit", "too much memory"
#: Seconds between looks whether the thread that reads ahead has ended.
_LOOK = 0.01


class DamagedError(Exception):
    """The archive cannot be read any further, for this problem."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"the archive is damaged ({problem}); get an undamaged copy of it, or create it again"
        )


class DemandingError(Exception):
    """The archive takes too much memory to decompress: the problem, and what can be done."""


def decompressed(archive: IO[bytes], name: str) -> Iterator[bytes]:
    """Yield the tar in the ``archive`` in blocks, some of which may be empty.

    Raise DamagedError or DemandingError, or an exception of the library that decompresses it.
    """
    compression = compression_of(name)
    if compression is Compression.GZIP:
        return _gunzipped(archive)
    if compression is Compression.XZ:
        return _unxzed(archive)
    if compression is Compression.ZSTD:
        return _unzstded(archive)
    return read_blocks(archive)


def read_blocks(archive: IO[bytes]) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks."""
    while block := archive.read(BLOCK):
        yield block


def _gunzipped(archive: IO[bytes]) -> Iterator[bytes]:
    """Decompress one or more gzip streams in a row; zeros may follow each.

    zlib compares the digest at the end of each.
    """
    data = archive.read(BLOCK)
    while data:
        stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        while not stream.eof:
            if not data and not (data := archive.read(BLOCK)):
                raise DamagedError("it ends early")
            yield stream.decompress(data, BLOCK)
            data = stream.unconsumed_tail
        data = _next_of(archive, stream.unused_data)


def _unxzed(archive: IO[bytes]) -> Iterator[bytes]:
    """Decompress one or more xz streams in a row; zeros may follow each."""
    data = archive.read(BLOCK)
    while data:
        stream = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)
        while not stream.eof:
            if stream.needs_input and not data and not (data := archive.read(BLOCK)):
                raise DamagedError("it ends early")
            try:
                yield stream.decompress(data, BLOCK)
            except lzma.LZMAError as error:
                if _XZ_EXCEEDED in str(error):
                    raise DemandingError(
                        f"it takes more than {_XZ_MEMORY >> 20} MiB of memory to decompress; "
                        "compress it again with a smaller dictionary, such as that of xz -9"
                    ) from None
                raise
            data = b""
        data = _next_of(archive, stream.unused_data)


def _next_of(archive: IO[bytes], data: bytes) -> bytes:
    """Return the beginning of the next compressed stream, without the zeros before it, if any."""
    while not (data := data.lstrip(b"\0")) and (data := archive.read(BLOCK)):
        pass
    return data


def _unzstded(archive: IO[bytes]) -> Iterator[bytes]:
    """Decompress one or more zstd frames in a row.

    One that ends early raises nothing here: the tar then lacks its end.
    """
    reader = zstandard.ZstdDecompressor().stream_reader(
        archive, read_size=BLOCK, read_across_frames=True, closefd=False
    )
    try:
        yield from read_blocks(reader)
    except zstandard.ZstdError as error:
        if _ZSTD_EXCEEDED in str(error):
            raise DemandingError(
                "it takes more than 128 MiB of memory to decompress; "
                "compress it again by zstd without --ultra, with --long=27 at most"
            ) from None
        raise


class ReadAhead:
    """Iterates over ``blocks`` in a thread that is some blocks ahead of whoever uses them."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._queue: queue.Queue[bytes | BaseException] = queue.Queue(_WAITING)
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        end: bytes | BaseException = b""
        try:
            for block in self._blocks:
                if block:
                    self._queue.put(block)
                if self._stop:
                    break
        except BaseException as error:  # raised where the blocks are used
            end = error
        self._queue.put(end)

    def __iter__(self) -> Iterator[bytes]:
        while block := self._queue.get():
            if isinstance(block, BaseException):
                raise block
            yield block

    def close(self) -> None:
        """End the thread, however much was read."""
        self._stop = True
        while self._thread.is_alive():
            with suppress(queue.Empty):  # the thread may wait for a place in the queue
                self._queue.get(timeout=_LOOK)
