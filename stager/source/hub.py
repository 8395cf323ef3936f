"""List a model or data set of a hub at one commit, and read its files.

What a commit holds cannot change. So the commit is looked up once, and files are read at it without
a condition on their version; only their sizes are compared with the hub's listing.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from obstore import exceptions, store

from stager.base.errors import SourceError
from stager.source import hub_cache
from stager.source.hub_api import ACCESS, HubApi
from stager.source.location import Location
from stager.source.pace import Pace
from stager.source.patience import Patience, changed
from stager.source.prefix import ObjectsReader, folder, list_objects
from stager.source.remote import Version, ask_range, fill, library_options, tag_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stager.source.facts import Listings, Selection, Source
    from stager.source.prefix import Objects
    from stager.source.settings import RemoteSettings
    from stager.tree.listing import Listing
    from stager.tree.patterns import Patterns
    from stager.tree.stream import Stream

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
    return hub_cache.as_cache(plain, blobs, commit, Location.parse(url).revision)


def open_model(
    url: str, source: Source, stream: Stream, settings: RemoteSettings, *, as_cache: bool = False
) -> ObjectsReader:
    """Return what reads a stream from the files of the commit that was looked at."""
    commit = source.facts.revision
    files: Objects = HubFiles(url, commit, settings)
    if as_cache:
        files = hub_cache.CacheFiles(files, stream.listing, commit)
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
