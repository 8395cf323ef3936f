"""How is a file decompressed as its bytes come, in a thread of its own and in bounded memory?"""

from __future__ import annotations

import bz2
import lzma
import queue
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Generic, Protocol, TypeVar

from isal import igzip_lib

from stager.archive.content import MAGICS
from stager.archive.damage import DamagedError, UnsupportedError
from stager.base.formats import Compression

if sys.version_info >= (3, 14):
    from compression import zstd as zstd
else:
    from backports import zstd as zstd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Block = TypeVar("Block", bytes, memoryview)

#: Bytes that are decompressed at a time: few enough for a processor's cache.
BLOCK = 1 << 18
#: Bytes with which a stream begins, unless it is shorter: more than a magic number, and than the
#: header of gzip, whose fields ISA-L does not know any more when it goes on within them.
_BEGINNING = 1 << 17
#: Decompressed blocks that may wait to be written.
_WAITING = 16
#: The most bytes of memory that a file may require to be decompressed; xz -9 requires 65 MiB.
_XZ_MEMORY = 256 << 20
#: What is told for messages of liblzma and libzstd that do not stand for damage.
_MEANINGS = {
    "Memory usage limit": f"it takes more than {_XZ_MEMORY >> 20} MiB of memory to decompress; "
    "compress it again with a smaller dictionary, such as that of xz -9",
    "too much memory": "it takes more than 128 MiB of memory to decompress; "
    "compress it again by zstd without --ultra, with --long=27 at most",
    "Dictionary mismatch": "it was compressed with a dictionary; compress it again by zstd "
    "without -D",
}
#: Seconds between looks whether the thread that reads ahead has ended.
_LOOK = 0.01


class _Stream(Protocol):
    """What decompresses one stream, as the standard library has it for most formats."""

    @property
    def eof(self) -> bool:
        """Whether the stream has ended."""

    @property
    def needs_input(self) -> bool:
        """Whether there is nothing more without more of the file."""

    @property
    def unused_data(self) -> bytes:
        """What follows the stream."""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Take ``data`` of the file, and return up to so many bytes of what is in it."""


#: What begins to decompress a stream.
_STREAMS: dict[Compression, Callable[[], _Stream]] = {
    Compression.GZIP: partial(igzip_lib.IgzipDecompressor, flag=igzip_lib.DECOMP_GZIP),
    Compression.XZ: partial(lzma.LZMADecompressor, memlimit=_XZ_MEMORY),
    Compression.ZSTD: zstd.ZstdDecompressor,
    Compression.BZIP2: bz2.BZ2Decompressor,
}
#: What they raise for what they cannot read; bz2 raises an OSError without a number.
_ERRORS: tuple[type[Exception], ...] = (
    igzip_lib.IsalError,  # type: ignore[assignment] # declared as if it were an exception itself
    lzma.LZMAError,
    zstd.ZstdError,
)


def decompressed(file: IO[bytes], compression: Compression) -> Iterator[bytes]:
    """Yield what is in the ``file`` in blocks, some of which may be empty.

    Several compressed streams in a row are one, and zeros may follow each. Raise DamagedError if
    the last one ends early, or if something else follows; UnsupportedError for what takes too much
    memory or a dictionary; or an exception of bz2.
    """
    if compression is Compression.NONE:
        return read_blocks(file)
    return _in_streams(file, compression)


def read_blocks(archive: IO[bytes]) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks."""
    while block := archive.read(BLOCK):
        yield block


def _in_streams(file: IO[bytes], compression: Compression) -> Iterator[bytes]:
    data = _beginning(file, b"")
    while True:
        stream = _STREAMS[compression]()
        while not stream.eof:
            if stream.needs_input:
                data = data or _more_of(file)
            yield _next_block(stream, data)
            data = b""
        if not (data := _beginning(file, stream.unused_data)):
            return
        if not any(data.startswith(magic[: len(data)]) for magic in MAGICS[compression]):
            raise DamagedError("something else follows the compressed data")


def _next_block(stream: _Stream, data: bytes) -> bytes:
    try:
        return stream.decompress(data, BLOCK)
    except _ERRORS as error:
        for words, meaning in _MEANINGS.items():
            if words in str(error):
                raise UnsupportedError(meaning) from None
        raise DamagedError(str(error)) from None


def _more_of(file: IO[bytes]) -> bytes:
    """Return the next bytes of a stream that has not ended, or raise DamagedError."""
    if data := file.read(BLOCK):
        return data
    raise DamagedError("it ends early")


def _beginning(file: IO[bytes], data: bytes) -> bytes:
    """Return the beginning of the next stream in ``data`` and the file, without zeros before it."""
    while len(data := data.lstrip(b"\0")) < _BEGINNING and (more := file.read(BLOCK)):
        data += more
    return data


def decompressed_into(
    buffers: Iterable[memoryview], file: IO[bytes], compression: Compression
) -> Iterator[memoryview]:
    """Fill ``buffers``, which have one size, with what is in the ``file``, and yield each.

    Only the last one may be shorter. Raise as `decompressed` does.
    """
    blocks, rest = decompressed(file, compression), memoryview(b"")
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
