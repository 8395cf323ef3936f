"""How are the files of a model, or data set, of a hub listed and read?

What a commit holds cannot change. So the commit is looked up once, and files are read at it without
a condition on their version; only their sizes are compared with the hub's listing.

With ``as_cache``, the copy is as the hub's own programs keep it in their cache: ``blobs`` has the
contents, each once; ``snapshots/COMMIT`` has the files, as links to them; and ``refs`` tells the
commit of a branch or tag.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from obstore import exceptions, store

from stager.base.errors import SourceError
from stager.source.hub_api import ACCESS, HubApi
from stager.source.prefix import ObjectsReader, folder, folders_above, list_objects
from stager.source.remote import MODE, Version, ask_range, fill, library_options, tag_of
from stager.source.retry import Pace, Patience, changed
from stager.source.schemes import Location
from stager.tree.listing import Kind, Listing, Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stager.source.endpoints import RemoteSettings
    from stager.source.facts import Listings, Selection, Source
    from stager.source.prefix import Objects
    from stager.tree.patterns import Patterns
    from stager.tree.stream import Stream

_BLOBS, _SNAPSHOTS, _REFS = b"blobs", b"snapshots", b"refs"


def laid_out_as_cache(
    plain: Listing, blobs: Mapping[bytes, str], commit: str, revision: str
) -> Listing:
    """Return the listing of the cache's folder of a model whose files are ``plain``.

    ``blobs`` has the names of contents by path.
    """
    above = b"%s/%s" % (_SNAPSHOTS, commit.encode())
    rows = {row.path: row for row in _snapshot(plain, blobs, above)}
    if revision != commit:
        path = b"%s/%s" % (_REFS, revision.encode())
        size, mtime = len(commit), plain.mtimes[0]
        rows[path] = _row(plain, path, Kind.FILE, MODE, size, mtime, tag_of(commit))
    for path in {b""}.union(*map(folders_above, rows)) - rows.keys():
        rows[path] = _row(plain, path, Kind.FOLDER, plain.modes[0], 0, plain.mtimes[0], 0)
    return Listing.of(rows.values())


def _snapshot(plain: Listing, blobs: Mapping[bytes, str], above: bytes) -> Iterator[Row]:
    """Yield the files of a commit as links, the folders they are in, and their contents."""
    for row, path in enumerate(plain.paths):
        at = b"%s/%s" % (above, path) if path else above
        mtime, tag = plain.mtimes[row], plain.inodes[row]
        if plain.kinds[row] == Kind.FOLDER:
            yield _row(plain, at, Kind.FOLDER, plain.modes[row], 0, mtime, 0)
            continue
        blob = b"%s/%s" % (_BLOBS, blobs[path].encode())
        yield _row(plain, blob, Kind.FILE, MODE, plain.sizes[row], mtime, tag)
        link = _row(plain, at, Kind.LINK, 0, 0, mtime, 0)
        yield link._replace(target=b"../" * at.count(b"/") + blob)


def _row(
    plain: Listing, path: bytes, kind: Kind, mode: int, size: int, mtime: int, tag: int
) -> Row:
    return Row(path, kind, mode, size, mtime, 0, tag, plain.owners[0], plain.groups[0])


class CacheFiles:
    """The files of the cache's folder, which are read from the files of a commit."""

    def __init__(self, files: Objects, listing: Listing, commit: str) -> None:
        self._files = files
        self._commit = commit.encode()
        above = len(_SNAPSHOTS) + len(commit) + 2
        #: By path of a blob, the path of a file that has these contents.
        self._paths = {
            os.fsdecode(listing.targets[row].lstrip(b"./")): os.fsdecode(listing.paths[row][above:])
            for row in listing.rows(Kind.LINK)
        }

    def fetch(
        self, path: str, version: Version, buffer: memoryview, offset: int
    ) -> tuple[Version, int]:
        """Fill ``buffer`` from the file at ``path``; see `Objects.fetch`."""
        if path in self._paths:
            return self._files.fetch(self._paths[path], version, buffer, offset)
        buffer[:] = self._commit[offset : offset + len(buffer)]
        return version, 0


#: The time of all files of the copy, in nanoseconds: the second of January 1980. A hub lists none,
#: and with the commit's time, files that it left alone would count as changed. Archives cannot
#: hold earlier times.
TIME = 315_619_200 * 10**9


def look_at_model(
    url: str, selection: Selection, listings: Listings, settings: RemoteSettings
) -> Source:
    """Look at the model or data set ``url``; list it if it is not in ``listings`` yet.

    The revision of its facts is the commit. Raise SourceError.
    """
    api = HubApi(url, settings)
    commit = api.commit()

    def look(patterns: Patterns | None) -> Listing:
        return _list(url, api, commit, patterns, as_cache=selection.as_cache)

    return folder(listings.list_once(url, selection, look), commit)


def _list(
    url: str, api: HubApi, commit: str, patterns: Patterns | None, *, as_cache: bool
) -> Listing:
    files = {os.fsencode(one.path): one for one in api.files(commit)}
    if not files:
        raise SourceError(f"{url}: there are no files in it; check the URL")
    versions = {path: Version(one.size, TIME, tag_of(one.oid)) for path, one in files.items()}
    plain = list_objects(f"{url}/", versions, patterns)
    if not as_cache:
        return plain
    blobs = {path: one.blob for path, one in files.items()}
    return laid_out_as_cache(plain, blobs, commit, Location.parse(url).revision)


def open_model(
    url: str, source: Source, stream: Stream, settings: RemoteSettings, *, as_cache: bool = False
) -> ObjectsReader:
    """Return what reads a stream from the files of the commit that was looked at."""
    commit = source.facts.revision
    files: Objects = HubFiles(url, commit, settings)
    if as_cache:
        files = CacheFiles(files, stream.listing, commit)
    return ObjectsReader(files, "", stream, settings.requests)


class HubFiles:
    """The files of a commit.

    A hub redirects each request for a large file to a signed URL on another server, and limits how
    often it is asked. So it is asked once for a file that is read in parts, and again when that URL
    has expired. The library, too, sends the token to the hub's own server alone.
    """

    def __init__(self, url: str, commit: str, settings: RemoteSettings) -> None:
        self._url = url
        self._commit = commit
        self._settings = settings
        self._pace = Pace(settings.limit)
        self._api = api = HubApi(url, settings)
        self._hub = self._store(api.folder_url(commit))
        #: By path, what reads the last files that are read in parts.
        self._located: dict[str, Any] = {}
        self._most = 2 * settings.requests
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def fetch(
        self, path: str, version: Version, buffer: memoryview, offset: int
    ) -> tuple[Version, int]:
        """Fill ``buffer`` from the file at ``path``, from ``offset`` bytes on.

        Return ``version``, and how often a request was repeated. Raise SourceError; IntegrityError
        if the file has another size than was listed.
        """
        url = f"{self._url}/{path}"

        def ask(done: int) -> Iterator[memoryview]:
            begin, length = offset + done, len(buffer) - done
            if len(buffer) == version.size:
                found, blocks = ask_range(self._hub, path, begin, length, {})
            else:
                found, blocks = self._ask(path, begin, length)
            if found.range != (begin, begin + length) or found.meta["size"] != version.size:
                raise changed(url)
            return blocks

        patience = Patience(url, self._settings.patience, ACCESS)
        return version, fill(buffer, url, ask, patience, self._pace)

    def _ask(self, path: str, offset: int, length: int) -> tuple[Any, Iterator[memoryview]]:
        known = self._located.get(path)
        if known:
            with suppress(exceptions.UnauthenticatedError, exceptions.PermissionDeniedError):
                return ask_range(known, "", offset, length, {})
        return ask_range(self._locate(path, known), "", offset, length, {})

    def _locate(self, path: str, expired: Any) -> Any:
        """Return what reads a file, and is not ``expired``."""
        with self._locks.setdefault(path, threading.Lock()):
            now = self._located.get(path)
            if now is None or now is expired:
                now = self._store(self._api.locate(self._commit, path))
                with self._lock:
                    self._located[path] = now
                    if len(self._located) > self._most:
                        self._located.pop(next(iter(self._located)))
            return now

    def _store(self, url: str) -> Any:
        # A hub redirects to another server. That one's URL may be signed, and is for no third one.
        host = urlsplit(url).hostname if not self._api.is_own(url) else None
        only = [host] if host else []
        options = library_options(self._settings, only=only, **self._api.headers(url))
        return store.HTTPStore.from_url(url, **options)
