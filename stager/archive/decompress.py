"""An archive's compressed bytes in, as they come, those of its tar out, a thread ahead.

What they may take of memory is bounded.
"""

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

#: Bytes that are decompressed at a time, few enough for a processor's cache, and how many such
#: blocks may wait to be written.
BLOCK, _WAITING = 1 << 18, 16
#: The most memory that an archive may ask for to be decompressed; xz -9 asks for 65 MiB.
_XZ_MEMORY = 256 << 20


class DamagedError(Exception):
    """The archive cannot be read on."""


def decompressed(archive: IO[bytes], name: str) -> Iterator[bytes]:
    """The bytes of the tar in the ``archive``, in blocks, some of which may be empty."""
    compression = compression_of(name)
    if compression is Compression.GZIP:
        return _gunzipped(archive)
    if compression is Compression.XZ:
        return _unxzed(archive)
    if compression is Compression.ZSTD:
        return _unzstded(archive)
    return read_blocks(archive)


def read_blocks(archive: IO[bytes]) -> Iterator[bytes]:
    """The bytes of a file, in blocks."""
    while block := archive.read(BLOCK):
        yield block


def _gunzipped(archive: IO[bytes]) -> Iterator[bytes]:
    """One or more gzip files behind each other, with nothing or zeros behind the last.

    The library compares the digest at the end of each.
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
    """The same for xz."""
    data = archive.read(BLOCK)
    while data:
        stream = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)
        while not stream.eof:
            if stream.needs_input and not data and not (data := archive.read(BLOCK)):
                raise DamagedError("it ends early")
            try:
                yield stream.decompress(data, BLOCK)
            except lzma.LZMAError as error:
                if "limit" in str(error):
                    raise DamagedError(
                        f"it takes more than {_XZ_MEMORY >> 20} MiB of memory to decompress; "
                        "compress it again with a smaller dictionary, as xz -9 does"
                    ) from None
                raise
            data = b""
        data = _next_of(archive, stream.unused_data)


def _next_of(archive: IO[bytes], data: bytes) -> bytes:
    """What stands behind one compressed file, or nothing; the zeros between them go."""
    while not (data := data.lstrip(b"\0")) and (data := archive.read(BLOCK)):
        pass
    return data


def _unzstded(archive: IO[bytes]) -> Iterator[bytes]:
    """The same for zstd; a file that ends early is not told here, but lacks the tar's end."""
    reader = zstandard.ZstdDecompressor().stream_reader(
        archive, read_size=BLOCK, read_across_frames=True, closefd=False
    )
    try:
        yield from read_blocks(reader)
    except zstandard.ZstdError as error:
        if "too much memory" in str(error):
            raise DamagedError(
                "it takes more than 128 MiB of memory to decompress; compress it again without "
                "--ultra and with --long=27 at most"
            ) from None
        raise


class Ahead:
    """The blocks of an iterator, which a thread runs some blocks ahead: both sides take time."""

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
        except BaseException as error:  # raised where the blocks are asked for
            end = error
        self._queue.put(end)

    def __iter__(self) -> Iterator[bytes]:
        while block := self._queue.get():
            if isinstance(block, BaseException):
                raise block
            yield block

    def close(self) -> None:
        """Stop, whatever was read."""
        self._stop = True
        while self._thread.is_alive():
            with suppress(queue.Empty):  # it may wait for a place in the queue
                self._queue.get(timeout=0.01)
