"""Send the data of many files as one stream: read it from files, digest it, write it to files.

Fifty thousand small files are sent in full chunks, as one large file is; for `wire.transfer` the
stream is a file. Holes are not part of it.
"""

from __future__ import annotations

import errno
import os
import time
from array import array
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple, Protocol

import xxhash

from stager.base.codec import listed_time
from stager.base.digest import DIGEST_SIZE, Digest, digest_of_data
from stager.base.errors import SourceError
from stager.base.extents import Spans
from stager.base.linux import IS_LINK, PASS_FOLDER, open_at, open_beneath
from stager.base.telemetry import Kind as Doing
from stager.base.telemetry import doing
from stager.fs.reader import OPEN_FILE, Pace, changed, is_another
from stager.tree.listing import Kind, text_of
from stager.tree.walk import THREADS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import ThreadPoolExecutor
    from contextlib import AbstractContextManager

    from stager.tree.listing import Listing

#: Seconds for a file from which storage counts as slow: several times what a local disk takes.
_SLOW = 200e-6
#: The errors for a file that was listed and is not there, or not there any more.
_REPLACED = (errno.ENOENT, *IS_LINK)
#: To read a file that is no symbolic link.
_READ_FILE = OPEN_FILE | os.O_NOFOLLOW
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


def place(row: int) -> slice:
    """Return where the digest of the row's file is among the digests of all rows."""
    return slice(row * DIGEST_SIZE, (row + 1) * DIGEST_SIZE)


class Part(NamedTuple):
    """``length`` bytes at ``start`` in a buffer that are at ``offset`` in the file of ``row``."""

    row: int
    start: int
    offset: int
    length: int


class Stream:
    """The data of the files of a ``listing`` whose rows ``needed`` marks, in order.

    ``needed`` has a byte for each row.
    """

    def __init__(self, listing: Listing, needed: bytes | bytearray) -> None:
        self.listing = listing
        #: The rows of the marked files, and of those that are empty or one hole.
        self.rows = array("Q", (row for row in listing.rows(Kind.FILE) if needed[row]))
        self.without_data = array("Q", (row for row in self.rows if not listing.data(row)))
        self._rows = array("Q", (row for row in self.rows if listing.data(row)))
        self._spans = Spans(listing.data(row) for row in self._rows)
        #: Of each file with holes that was met, its extents.
        self._extents: dict[int, Spans] = {}

    @property
    def size(self) -> int:
        """Bytes of the whole stream."""
        return self._spans.size

    def parts(self, offset: int, length: int) -> Iterator[Part]:
        """Yield the parts of files in ``length`` bytes of the stream from ``offset`` on."""
        with_holes = self.listing.extents
        for number, start, within, size in self._spans.slices(offset, offset + length):
            row = self._rows[number]
            if row in with_holes:
                yield from self._between_holes(row, start, within, size)
            else:
                yield Part(row, start, within, size)

    def _between_holes(self, row: int, start: int, begin: int, length: int) -> Iterator[Part]:
        """Yield the parts of a file in ``length`` bytes of its data from ``begin`` on."""
        extents = self.listing.extents[row]
        if row not in self._extents:
            self._extents[row] = Spans(extent.length for extent in extents)
        for number, at, within, size in self._extents[row].slices(begin, begin + length):
            yield Part(row, start + at, extents[number].offset + within, size)


class StreamReader:
    """Reads a stream from the files beneath ``folder``, and counts the bytes that it read.

    If ``folder`` is the source, ``source`` is the inode that it must have, and the stat of each
    file is compared with its row of the listing after it is read. The data of what was put in the
    place of a file or folder is not returned, and no link is followed without ``follow``.
    ``originals`` has, by row, the data of files that were rewritten in a copy. ``homes`` are the
    folders that are read in place of some in the listing, by their paths there. The methods raise
    SourceError if a file cannot be read, IntegrityError if it changed.
    """

    def __init__(
        self,
        folder: str,
        stream: Stream,
        *,
        source: int | None = None,
        follow: bool = False,
        originals: Mapping[int, bytes] | None = None,
        homes: Mapping[bytes, bytes] | None = None,
    ) -> None:
        self._originals = originals or {}
        self._folder = os.fsencode(folder)
        self._homes = homes or {}
        #: The descriptors of the folder and of the homes, by their paths, once they are needed.
        self._roots: dict[bytes, int] = {}
        self._stream = stream
        self._source = source
        self._follow = follow
        self._pace = Pace()
        self._pool: ThreadPoolExecutor | None = None
        #: The row and the descriptor of a file that continues in the next buffer.
        self._large: tuple[int, int] | None = None
        self.bytes_read = self.retries = 0

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` with the stream from ``offset`` on."""
        with doing(Doing.READ, os.fsdecode(self._folder)):
            if not self._roots:
                self._open_roots()
            whole: list[Part] = []
            data = self._stream.listing.data
            for part in self._stream.parts(offset, len(buffer)):
                if part.length < data(part.row):
                    self._read_large(buffer, part)
                else:
                    whole.append(part)
            self._read_whole(buffer, whole)
        self.bytes_read += len(buffer)

    def _read_whole(self, buffer: memoryview, parts: Sequence[Part]) -> None:
        """Read files that are whole in the buffer, many at once if the storage is slow."""
        if not parts:
            return
        if self._pool:
            count = min(THREADS, len(parts))
            shares = [parts[number::count] for number in range(count)]
            list(self._pool.map(lambda share: self._read_all(buffer, share), shares))
            return
        begun = time.monotonic()
        self._read_all(buffer, parts)
        if time.monotonic() - begun > len(parts) * _SLOW:
            from concurrent.futures import ThreadPoolExecutor  # slow to import

            self._pool = ThreadPoolExecutor(THREADS)

    def _read_all(self, buffer: memoryview, parts: Sequence[Part]) -> None:
        with closing(_Opener(self._place)) as opener:
            opened = self._open_any if self._follow else opener.open
            for part in parts:
                if part.row in self._originals:
                    self._copy(buffer, part)
                    continue
                descriptor = self._open(part.row, opened)
                try:
                    self._read(descriptor, buffer, part)
                finally:
                    os.close(descriptor)

    def _copy(self, buffer: memoryview, part: Part) -> None:
        data = self._originals[part.row][part.offset : part.offset + part.length]
        if len(data) != part.length:
            raise changed(text_of(self._path(part.row)))
        buffer[part.start : part.start + part.length] = data

    def _read_large(self, buffer: memoryview, part: Part) -> None:
        if part.row in self._originals:
            self._copy(buffer, part)
            return
        if not self._large or self._large[0] != part.row:
            self._close_large()
            self._large = part.row, self._open_large(part.row)
        self._read(self._large[1], buffer, part)

    def _home(self, path: bytes) -> bytes:
        """Return the path of the home that a file is in, or nothing."""
        return next((one for one in self._homes if path.startswith(one + b"/")), b"")

    def _place(self, path: bytes) -> tuple[int, bytes]:
        """Return the descriptor that a file is opened beneath, and its path there."""
        home = self._home(path)
        return self._roots[home], path[len(home) + 1 :] if home else path

    def _path(self, row: int) -> bytes:
        path = self._stream.listing.source_path(row)
        home = self._home(path)
        return self._homes[home] + path[len(home) :] if home else self._folder + b"/" + path

    def _open_roots(self) -> None:
        for path, folder in {b"": self._folder, **self._homes}.items():
            try:
                self._roots[path] = os.open(folder, _FOLDER)
            except FileNotFoundError:
                raise changed(text_of(folder)) from None
            except OSError as error:
                raise SourceError(f"{text_of(folder)}: {error.strerror}") from None
        if self._source not in (None, 0, os.fstat(self._roots[b""]).st_ino):
            raise changed(text_of(self._folder), is_another=True)

    def _open(self, row: int, opener: Callable[[bytes], int]) -> int:
        """Open the row's file."""
        try:
            return opener(self._stream.listing.source_path(row))
        except OSError as error:
            if error.errno in _REPLACED:
                raise changed(text_of(self._path(row))) from None
            raise SourceError(f"{text_of(self._path(row))}: {error.strerror}") from None

    def _open_any(self, path: bytes) -> int:
        root, beneath = self._place(path)
        return open_at(root, beneath, OPEN_FILE, follow=self._follow)

    def _open_large(self, row: int) -> int:
        """Open the row's file, of which parts are sent before all of it was read."""
        descriptor = self._open(row, self._open_any)
        try:
            self._check(row, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _read(self, descriptor: int, buffer: memoryview, part: Part) -> None:
        at, end, offset = part.start, part.start + part.length, part.offset
        try:
            while at < end:
                done = self._pace.read(descriptor, buffer[at:end], offset)
                if not done:
                    raise changed(text_of(self._path(part.row)))
                at += done
                offset += done
        except OSError as error:
            self._check(part.row, descriptor)  # a folder may be in the place of the file
            raise SourceError(f"{text_of(self._path(part.row))}: {error.strerror}") from None
        self._check(part.row, descriptor)

    def _check(self, row: int, descriptor: int) -> None:
        """Raise IntegrityError if an open file of the source is not as it was listed, SourceError
        if that cannot be seen.
        """
        if self._source is None:
            return
        listing = self._stream.listing
        try:
            facts = os.fstat(descriptor)
        except OSError as error:  # of a network, or of FUSE
            raise SourceError(f"{text_of(self._path(row))}: {error.strerror}") from None
        inode = listing.inodes[row]
        was = listing.sizes[row], listing.mtimes[row], listing.ctimes[row], inode
        now = facts.st_size, listed_time(facts.st_mtime_ns), facts.st_ctime_ns, facts.st_ino
        if was != now if inode else was[:2] != now[:2]:  # see `source.posix.version_of`
            raise changed(text_of(self._path(row)), is_another=is_another(inode, facts))

    def _close_large(self) -> None:
        if self._large:
            os.close(self._large[1])
            self._large = None

    def close(self) -> None:
        """Close the files and end the threads."""
        if self._pool:
            self._pool.shutdown()
        self._close_large()
        while self._roots:
            os.close(self._roots.popitem()[1])


class _Opener:
    """Opens files where ``place`` says, quickly where a folder has many in a row.

    A folder is opened once for them, each file by its name alone.
    """

    def __init__(self, place: Callable[[bytes], tuple[int, bytes]]) -> None:
        self._place = place
        self._above: bytes | None = None
        self._folder = -1

    def open(self, path: bytes) -> int:
        """Open a file to read it, if no part of its path is a symbolic link. Raise OSError."""
        above, _, name = path.rpartition(b"/")
        if above != self._above:
            self.close()
            root, beneath = self._place(path)
            self._folder = open_beneath(root, os.path.dirname(beneath) or b".", PASS_FOLDER)
            self._above = above
        return os.open(name, _READ_FILE, dir_fd=self._folder)

    def close(self) -> None:
        """Close the folder."""
        if self._folder >= 0:
            os.close(self._folder)
        self._above, self._folder = None, -1


class StreamDigest:
    """Computes the digest of each file of a stream, and one digest of all, as the data passes."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._file: tuple[int, Digest] | None = None
        #: DIGEST_SIZE bytes for each row of the listing; zeros for a row that is not in the stream.
        self.digests = bytearray(DIGEST_SIZE * len(stream.listing))
        for row in stream.without_data:
            self._file = row, Digest()
            self._end_file()

    def update(self, data: memoryview, offset: int) -> None:
        """Take the next ``data`` of the stream, which is at ``offset``."""
        for row, start, within, length in self._stream.parts(offset, len(data)):
            part = data[start : start + length]
            if length == self._stream.listing.sizes[row]:
                self._note(row, digest_of_data(part))
                continue
            if not self._file or self._file[0] != row:
                self._end_file()
                self._file = row, Digest()
            self._file[1].update(part, within)

    def hexdigest(self, size: int) -> str:
        """Return the xxh3-128 of all the files' digests, in hexadecimal."""
        self._end_file()
        return xxhash.xxh3_128_hexdigest(self.digests)

    def _end_file(self) -> None:
        if self._file:
            row, digest = self._file
            self._note(row, digest.digest(self._stream.listing.sizes[row]))
            self._file = None

    def _note(self, row: int, digest: bytes) -> None:
        self.digests[place(row)] = digest


class Tree(Protocol):
    """The files that a stream is written to. Several threads call it at once."""

    def writing(self) -> AbstractContextManager[None]:
        """Return a context for `write`, in which an OSError becomes a StageError."""

    def write(self, row: int, data: memoryview, offset: int) -> None:
        """Write ``data`` at ``offset`` of the row's file."""


class StreamWriter:
    """Writes the files of a stream to a tree, but only the rows that ``needs`` marks."""

    def __init__(self, tree: Tree, stream: Stream, needs: bytes | bytearray) -> None:
        self._tree = tree
        self._stream = stream
        self._needs = needs

    def write(self, data: memoryview, offset: int) -> None:
        """Write the ``data``, which is at ``offset`` of the stream, to its files."""
        with self._tree.writing():
            for row, start, within, length in self._stream.parts(offset, len(data)):
                if self._needs[row]:
                    self._tree.write(row, data[start : start + length], within)
