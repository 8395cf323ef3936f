"""Say how fast requests to a disk, or to a store, were. Pure.

Make requests to a source, or to a disk, from many threads, and measure how long they take.

A source is read as a stage reads it. Files on a mounted filesystem are read past the page cache, so
that the storage is measured and not the memory.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, count
from math import ceil, gcd
from typing import TYPE_CHECKING, Protocol, Self

from stager.base.errors import SourceError, UsageError
from stager.base.extents import ALIGNMENT
from stager.fs.files import opened, stage_errors
from stager.fs.partial_file import UnnamedFile
from stager.fs.reader import OPEN_FILE
from stager.source.access import look_at
from stager.source.facts import EVERYTHING, Listings
from stager.source.location import Location, Scheme, is_image, is_url
from stager.store.cache import open_cache
from stager.tree.listing import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stager.source.endpoints import RemoteSettings
    from stager.source.facts import Source
    from stager.source.prefix import Objects
    from stager.source.remote import Version

#: The golden ratio: steps of this part of a range come near no place again for a long time.
_GOLDEN = 0.618


@dataclass(frozen=True, slots=True)
class Load:
    """How requests are made: each of ``block`` bytes at most, by ``threads`` at once.

    ``what`` is ``read`` or ``write``. Without ``is_random``, the requests go through the files in
    order.
    """

    what: str
    block: int
    threads: int
    is_random: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a `Load`: ``size`` bytes by so many ``requests`` in ``seconds``.

    ``p50`` and ``p99`` are seconds within which half, and 99 of 100, of the requests were answered.
    ``retries`` were repeated.
    """

    what: str
    block: int
    threads: int
    requests: int
    size: int
    seconds: float
    p50: float
    p99: float
    retries: int = 0

    @classmethod
    def of(
        cls, load: Load, spent: Sequence[float], size: int, seconds: float, retries: int = 0
    ) -> Self:
        """Return the measurement of requests that took the seconds ``spent``, at least one."""
        return cls(
            load.what, load.block, load.threads, len(spent), size, seconds,
            percentile(spent, 50), percentile(spent, 99), retries,
        )  # fmt: skip

    @property
    def rate(self) -> float:
        """Bytes in a second."""
        return self.size / self.seconds if self.seconds > 0 else 0.0

    @property
    def iops(self) -> float:
        """Requests in a second."""
        return self.requests / self.seconds if self.seconds > 0 else 0.0


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the least of ``values`` that so many percent of them do not exceed.

    >>> percentile([3, 1, 2, 4], 50), percentile([3, 1, 2, 4], 99)
    (2, 4)
    """
    return sorted(values)[max(1, ceil(len(values) * percent / 100)) - 1]


def best(measured: Sequence[Measured]) -> tuple[Measured, Measured]:
    """Return the fastest, and the one with the fewest threads that has nine tenths of its rate."""
    fastest = max(measured, key=lambda one: one.rate)
    enough = [one for one in measured if one.rate >= 0.9 * fastest.rate]
    return fastest, min(enough, key=lambda one: (one.threads, one.block))


class Places:
    """Where each request begins, in files of these ``sizes``.

    Each file begins with a new request. No request goes beyond the end of its file.
    """

    def __init__(self, sizes: Sequence[int], load: Load) -> None:
        self._sizes = sizes
        self._block = load.block
        self._ends = list(accumulate(-(-size // load.block) for size in sizes))
        self._step = _step(self.count) if load.is_random else 1

    @property
    def count(self) -> int:
        """How many requests read all files once."""
        return self._ends[-1]

    def at(self, request: int) -> tuple[int, int, int]:
        """Return the number of the file, and the offset and the length in it, in bytes.

        After ``count`` requests, the first one comes again.
        """
        place = request * self._step % self.count
        file = bisect_right(self._ends, place)
        offset = (place - (self._ends[file - 1] if file else 0)) * self._block
        return file, offset, min(self._block, self._sizes[file] - offset)


def _step(count: int) -> int:
    """Return a step that meets each of ``count`` places once, and seldom near the last one."""
    step = max(1, int(count * _GOLDEN))
    while gcd(step, count) > 1:
        step += 1
    return step


#: Bytes that are written at a time to fill the file of a disk.
_FILL = 1 << 20


class Target(Protocol):
    """Files whose ``sizes`` are in bytes, and at least 1.

    ``is_direct`` tells whether requests go past the page cache.
    """

    sizes: Sequence[int]
    is_direct: bool

    def act(self, what: str, place: tuple[int, int, int], buffer: memoryview) -> int:
        """Read into ``buffer``, or write from it: a file's number, its offset, and the length.

        Return how often a request was repeated. Raise StageError.
        """

    def close(self) -> None:
        """Close what is open."""


def measure(target: Target, load: Load, seconds: float, most: int) -> Measured:
    """Make requests for some seconds, of ``most`` bytes together. Raise StageError."""
    places = Places(target.sizes, load)
    numbers = count()
    last = max(1, most // load.block)
    stop = threading.Event()
    deadline = time.monotonic() + seconds

    def work() -> list[tuple[float, float, int, int]]:
        done = []
        buffer = _aligned(load.block)
        while (number := next(numbers)) < last and not stop.is_set():
            place = places.at(number)
            begun = time.monotonic()
            try:
                retries = target.act(load.what, place, buffer)
            except BaseException:
                stop.set()
                raise
            done.append((begun, time.monotonic(), place[2], retries))
            if done[-1][1] > deadline:
                break
        return done

    with ThreadPoolExecutor(load.threads) as pool:
        futures = [pool.submit(work) for _ in range(load.threads)]
        try:
            done = [one for future in futures for one in future.result()]
        finally:
            stop.set()
    spent = [end - begun for begun, end, _, _ in done]
    begun, end = min(one[0] for one in done), max(one[1] for one in done)
    size, retries = sum(one[2] for one in done), sum(one[3] for one in done)
    return Measured.of(load, spent, size, end - begun, retries)


def _aligned(size: int) -> memoryview:
    """Return a buffer that begins with a page, as reads past the page cache need it."""
    memory = mmap.mmap(-1, -(-size // ALIGNMENT) * ALIGNMENT)
    memory.write(os.urandom(min(len(memory), _FILL)))  # some disks leave out zeros
    return memoryview(memory)


def open_source(path: str, settings: RemoteSettings) -> Target:
    """Return what reads the file, folder or URL.

    Raise SourceError if there is nothing to read, UsageError for an image.
    """
    if is_image(path):
        raise UsageError(
            f"{path} is an image, which is made of several files; measure a file, a folder or "
            "another URL"
        )
    listings = Listings()
    source = look_at(path, EVERYTHING, listings, settings)
    listing = listings.get(path)
    if not listing:
        if not source.facts.size:
            raise SourceError(f"{path} is empty, so it cannot be measured; name a larger file")
        return _single(path, source, settings)
    rows = [row for row in listing.rows(Kind.FILE) if listing.sizes[row]]
    if not rows:
        raise SourceError(f"{path} has no files with data, so it cannot be measured")
    sizes = [listing.sizes[row] for row in rows]
    if not is_url(path):
        above = os.fsencode(path) + b"/"
        return LocalFiles([above + listing.paths[row] for row in rows], sizes)
    from stager.source.remote import Version  # slow to import

    versions = [
        Version(listing.sizes[row], listing.mtimes[row], listing.inodes[row]) for row in rows
    ]
    objects, above_all = _objects(path, source, settings)
    paths = [above_all + os.fsdecode(listing.paths[row]) for row in rows]
    return RemoteFiles(objects, paths, versions)


def _single(path: str, source: Source, settings: RemoteSettings) -> Target:
    if not is_url(path):
        return LocalFiles([os.fsencode(path)], [source.facts.size])
    from stager.source.remote import Store, Version

    version = Version.recorded(source.facts)
    store = Store(path, settings)
    return RemoteFiles(store, [store.key], [version])


def _objects(path: str, source: Source, settings: RemoteSettings) -> tuple[Objects, str]:
    """Return what reads a folder's objects, and what is before their paths there."""
    location = Location.parse(path)
    if location.scheme is Scheme.HF:
        from stager.source.hub import HubFiles

        return HubFiles(path, source.facts.revision, settings), ""
    from stager.source.remote import Store

    return Store(path, settings), location.above


class RemoteFiles:
    """Objects in a store, files on the web or on a hub."""

    is_direct = True

    def __init__(self, objects: Objects, paths: Sequence[str], versions: Sequence[Version]) -> None:
        self.sizes: Sequence[int] = [one.size for one in versions]
        self._objects = objects
        self._paths = paths
        self._versions = versions

    def act(self, what: str, place: tuple[int, int, int], buffer: memoryview) -> int:
        """Read; see `Target`."""
        file, offset, length = place
        path, version = self._paths[file], self._versions[file]
        _, retries = self._objects.fetch(path, version, buffer[:length], offset)
        return retries

    def close(self) -> None:
        """Do nothing: the library closes its connections."""


class LocalFiles:
    """Files on a mounted filesystem. Each request opens one, unless it is the only one."""

    def __init__(self, paths: Sequence[bytes], sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self._paths = paths
        self.is_direct = _reads_directly(paths[0])
        self._flags = OPEN_FILE | (os.O_DIRECT if self.is_direct else 0)
        self._only = self._open(0) if len(paths) == 1 else -1

    def act(self, what: str, place: tuple[int, int, int], buffer: memoryview) -> int:
        """Read; see `Target`."""
        file, offset, length = place
        descriptor = self._open(file) if self._only < 0 else self._only
        try:
            read_past_cache(descriptor, buffer, offset, length, self.is_direct)
        except OSError as error:
            raise SourceError(f"{os.fsdecode(self._paths[file])}: {error.strerror}") from None
        except EOFError:
            path = os.fsdecode(self._paths[file])
            raise SourceError(f"{path} became shorter while it was read") from None
        finally:
            if self._only < 0:
                os.close(descriptor)
        return 0

    def _open(self, file: int) -> int:
        try:
            return os.open(self._paths[file], self._flags)
        except OSError as error:
            raise SourceError(f"{os.fsdecode(self._paths[file])}: {error.strerror}") from None

    def close(self) -> None:
        """Close the only file."""
        if self._only >= 0:
            os.close(self._only)


def read_past_cache(
    descriptor: int, buffer: memoryview, offset: int, length: int, is_direct: bool
) -> None:
    """Read ``length`` bytes, not from memory. Raise OSError; EOFError if there are fewer."""
    if is_direct:
        part = buffer[: -(-length // ALIGNMENT) * ALIGNMENT]  # it wants whole blocks
    else:
        part = buffer[:length]
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)
    done = os.preadv(descriptor, [part], offset)
    while done < length:  # a filesystem may give less at once
        more = os.preadv(descriptor, [part[done:]], offset + done)
        if not more:
            raise EOFError
        done += more


def _reads_directly(path: bytes) -> bool:
    """Return whether a file can be read past the page cache."""
    with (
        suppress(OSError),
        mmap.mmap(-1, ALIGNMENT) as memory,
        opened(path, OPEN_FILE | os.O_DIRECT) as descriptor,
    ):
        os.preadv(descriptor, [memory], 0)
        return True
    return False


class Disk:
    """A new file of ``size`` bytes on the disk of a staging folder; nobody sees it.

    All methods raise SpaceError or DestinationError.
    """

    def __init__(self, root: str, size: int) -> None:
        self.sizes: Sequence[int] = [size]
        uid = os.getuid()
        # Root, which stages nothing, has no cache. Nobody else may write to the folder itself.
        self._folder = open_cache(root, uid).partial if uid else root
        with stage_errors(self._folder):
            self._file = UnnamedFile(self._folder)
        self._descriptor = self._file.descriptor
        self.is_direct = False
        with suppress(OSError):
            path = f"/proc/self/fd/{self._file.descriptor}"
            self._descriptor = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            self.is_direct = True
        try:
            self._fill(size)
        except BaseException:
            self.close()
            raise

    def _fill(self, size: int) -> None:
        """Write all of the file: what was never written is not read from the disk."""
        buffer = _aligned(_FILL)
        for offset in range(0, size, _FILL):
            self.act("write", (0, offset, min(_FILL, size - offset)), buffer)

    def act(self, what: str, place: tuple[int, int, int], buffer: memoryview) -> int:
        """Read or write; see `Target`."""
        _, offset, length = place
        with stage_errors(self._folder):
            if what == "read":
                read_past_cache(self._descriptor, buffer, offset, length, self.is_direct)
                return 0
            flags = 0 if self.is_direct else os.RWF_DSYNC
            done = 0
            while done < length:
                done += os.pwritev(self._descriptor, [buffer[done:length]], offset + done, flags)
        return 0

    def close(self) -> None:
        """Close the file, which is gone then."""
        if self._descriptor != self._file.descriptor:
            os.close(self._descriptor)
        self._file.close()
