"""List what lies beneath a folder of a store, and read it as the stream of a folder's files.

Stores have no folders: the parts of an object's path are made into those of the copy.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from stager.base.errors import SourceError
from stager.source.description import Listings, Selection, Source, SourceFacts
from stager.source.remote import MODE, Store, Version
from stager.tree.listing import Kind, Listing, Row, text_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from stager.source.endpoints import RemoteSettings
    from stager.tree.patterns import Patterns
    from stager.tree.stream import Part, Stream

#: Permissions of a folder of the copy; see `remote.MODE`.
_FOLDER_MODE = 0o700
#: Bytes of a name on the filesystems of Linux.
_LONGEST_NAME = 255
#: The most bytes of an object that is asked for once, although two reads take parts of it.
_AT_ONCE = 8 << 20
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")


def look_at_prefix(
    url: str, selection: Selection, listings: Listings, settings: RemoteSettings
) -> Source:
    """Look at what lies beneath ``url``; list it if it is not in ``listings`` yet.

    Raise SourceError if there is nothing, or something that cannot be a file in a folder.
    """
    listing = listings.list_once(url, selection, lambda patterns: _list(url, patterns, settings))
    return folder(listing)


def folder(listing: Listing, revision: str = "") -> Source:
    """Return the folder that ``listing`` is of. Pure."""
    facts = SourceFacts(listing.size, listing.mtimes[0], 0, 0, revision)
    return Source(
        facts, _FOLDER_MODE, os.getegid(), listing.allocated(), listing.files, listing.digest()
    )


def _list(url: str, patterns: Patterns | None, settings: RemoteSettings) -> Listing:
    store = Store(url, settings)
    above, place = store.location.above, store.location.path
    found: dict[bytes, Version] = {}
    marks = set[bytes]()
    left_out = _LeftOut(patterns)

    def leaves_out(at: str) -> bool:
        return left_out.has(os.fsencode(at.removeprefix(above)), is_folder=True)

    for at, one in store.list(leaves_out if patterns else None):
        path = os.fsencode(at.removeprefix(above)) if at != place else b""
        if path in found:  # the library leaves out the slash at a key's end
            marks.add(path)
        if one.size or path not in found:
            found[path] = one
    # The object at the place of the folder itself is the sign by which some programs mark one.
    if (own := found.pop(b"", None)) and own.size:
        raise SourceError(
            f"{url} is a folder, and also the key of an object of {own.size} bytes, which cannot "
            "be a file in it; rename that object"
        )
    if not found:
        raise SourceError(f"{url}: there are no objects beneath it; check the URL")
    marks.update(store.marks(above, _empty_ones(found, marks, left_out)))
    return list_objects(url, found, patterns, marks)


def _empty_ones(
    objects: Mapping[bytes, Version], marks: Collection[bytes], left_out: _LeftOut
) -> Iterator[tuple[bytes, list[bytes], int]]:
    """Yield each folder with what can be empty files, or signs of empty folders.

    It is yielded as its path, the paths of these, and the number of all entries in it.
    """
    folders = set(marks).union(*map(folders_above, objects))
    found = defaultdict[bytes, list[bytes]](list)
    for path, one in objects.items():
        if not one.size and path not in folders and not left_out.has(path):
            found[os.path.dirname(path)].append(path)
    entries = Counter(map(os.path.dirname, chain(objects, folders)) if found else ())
    return ((folder, paths, entries[folder]) for folder, paths in found.items())


def list_objects(
    url: str,
    objects: Mapping[bytes, Version],
    patterns: Patterns | None = None,
    marks: Collection[bytes] = (),
) -> Listing:
    """Return the listing of a folder with these ``objects``, which are beneath ``url``. Pure.

    ``url`` ends in a slash. ``marks`` are the paths of further folders.

    An empty object in the place of a folder is the sign by which some programs mark one. The time
    of each folder is that of the newest object. Raise SourceError if a path cannot be that of a
    file.
    """
    folders = {b"", *marks}.union(*map(folders_above, objects))
    left_out = _LeftOut(patterns)
    files = {
        path: one
        for path, one in objects.items()
        if (path not in folders or one.size) and not left_out.has(path)
    }
    folders = {path for path in folders if not path or not left_out.has(path, is_folder=True)}
    for path in files:
        _check(url, path)
    if both := min(files.keys() & folders, default=None):
        raise SourceError(_two_of_one_name(url, both, objects))
    newest = max((one.mtime_ns for one in files.values()), default=0)
    owner, group = os.getuid(), os.getegid()
    rows = [Row(path, Kind.FOLDER, _FOLDER_MODE, 0, newest, 0, 0, owner, group) for path in folders]
    rows += [
        Row(path, Kind.FILE, MODE, one.size, one.mtime_ns, 0, one.tag, owner, group)
        for path, one in files.items()
    ]
    return Listing.of(patterns.pruned(rows) if patterns else rows)


def _two_of_one_name(url: str, path: bytes, objects: Iterable[bytes]) -> str:
    """Return the message for an object at the ``path`` of a folder. Pure."""
    below = min((one for one in objects if one.startswith(path + b"/")), default=path + b"/")
    name = text_of(path)
    return (
        f"{url}{name} and {url}{text_of(below)} are both objects, but a file and a folder cannot "
        f"have one name; leave out the folder with exclude=/{name}/, or both with exclude=/{name}"
    )


def folders_above(path: bytes) -> Iterator[bytes]:
    """Yield the folders above ``path``."""
    while (at := path.rfind(b"/")) > 0:
        path = path[:at]
        yield path


def _check(url: str, path: bytes) -> None:
    """Raise SourceError if an object cannot be a file of the copy."""
    name = text_of(path)
    remedy = f"leave it out with exclude=/{name}"
    parts = path.split(b"/")
    # The library puts no control character into a request.
    if any(part in (b"", b".", b"..") for part in parts) or _CONTROL.search(path):
        raise SourceError(f"{url}{name} cannot be the path of a file; {remedy}")
    if max(map(len, parts)) > _LONGEST_NAME:
        most = f"a name in it has more than {_LONGEST_NAME} bytes"
        raise SourceError(f"{url}{name} cannot be the path of a file: {most}; {remedy}")


class _LeftOut:
    """Tells which paths the patterns leave out; what lies in a folder goes with it."""

    def __init__(self, patterns: Patterns | None) -> None:
        self._patterns = patterns
        self._known: dict[bytes, bool] = {b"": False}

    def has(self, path: bytes, *, is_folder: bool = False) -> bool:
        if not self._patterns:
            return False
        if not is_folder:
            return self._is_matched(path, is_folder=False)
        if path not in self._known:
            self._known[path] = self._is_matched(path, is_folder=True)
        return self._known[path]

    def _is_matched(self, path: bytes, *, is_folder: bool) -> bool:
        assert self._patterns
        above = path[: max(0, path.rfind(b"/"))]
        return self.has(above, is_folder=True) or self._patterns.leaves_out(
            path, is_folder=is_folder
        )


class Objects(Protocol):
    """Where the objects of a folder are read: a `Store`, or the files of a hub."""

    def fetch(
        self, path: str, version: Version, buffer: memoryview, offset: int
    ) -> tuple[Version, int]:
        """Fill ``buffer`` from a version of the object at ``path``, from ``offset`` bytes on.

        Return the version with its ETag, and how often a request was repeated. Several threads may
        call it. Raise IntegrityError, SourceError.
        """


def open_prefix(
    url: str, stream: Stream, settings: RemoteSettings, *, is_only: bool = False
) -> ObjectsReader:
    """Return what reads a stream from the objects beneath ``url``."""
    store = Store(url, settings)
    return ObjectsReader(store, store.location.above, stream, settings.requests, is_only=is_only)


class _Shared:
    """An object that is asked for once, of which several reads take a part each."""

    def __init__(self, size: int) -> None:
        self.lock = threading.Lock()
        #: Its bytes once they are here, and how many of them nobody has taken.
        self.data = bytearray()
        self.missing = size


class ObjectsReader:
    """Reads a stream from objects, whose paths are ``above`` and those of the stream's listing.

    Several threads may read at once; ``requests`` are under way at once for each. One that
    ``is_only`` reads the whole stream: it asks once for an object that is not large.

    ``bytes_read`` counts the bytes, and ``retries`` the requests that were repeated. Raise
    IntegrityError if an object is another version than the one listed, SourceError if one cannot be
    read.
    """

    def __init__(
        self, objects: Objects, above: str, stream: Stream, requests: int, *, is_only: bool = False
    ) -> None:
        self._objects = objects
        self._above = above
        self._stream = stream
        #: The versions of objects that are read in parts, with their ETags.
        self._versions: dict[int, Version] = {}
        self._is_only = is_only
        self._shared: dict[int, _Shared] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(requests)
        self.bytes_read = self.retries = 0

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` with the stream from ``offset`` on."""
        parts = list(self._stream.parts(offset, len(buffer)))
        # A thread of this pool for each part, so that small objects are asked for at once, too.
        call = map if len(parts) == 1 else self._pool.map
        for _ in call(lambda part: self._read(buffer, part), parts):
            pass

    def _read(self, buffer: memoryview, part: Part) -> None:
        target = buffer[part.start : part.start + part.length]
        size = self._stream.listing.sizes[part.row]
        if self._is_only and part.length < size <= _AT_ONCE:
            self._take_part(target, part, size)
        else:
            self._fetch(part.row, target, part.offset)

    def _take_part(self, target: memoryview, part: Part, size: int) -> None:
        """Fill ``target`` with a part of an object that is asked for once."""
        with self._lock:
            one = self._shared.setdefault(part.row, _Shared(size))
        with one.lock:
            if not one.data:
                data = bytearray(size)
                self._fetch(part.row, memoryview(data), 0)
                one.data = data
            target[:] = memoryview(one.data)[part.offset : part.offset + part.length]
            one.missing -= part.length
            if not one.missing:
                with self._lock:
                    del self._shared[part.row]

    def _fetch(self, row: int, target: memoryview, offset: int) -> None:
        listing = self._stream.listing
        listed = Version(listing.sizes[row], listing.mtimes[row], listing.inodes[row])
        version, retries = self._objects.fetch(
            self._above + os.fsdecode(listing.source_path(row)),
            self._versions.get(row, listed),
            target,
            offset,
        )
        with self._lock:
            if len(target) < listed.size:
                self._versions[row] = version
            self.bytes_read += len(target)
            self.retries += retries

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
