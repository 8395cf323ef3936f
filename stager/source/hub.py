"""How are the files of a model, or data set, of a hub listed and read?

`HubApi` asks the hub's interface. The user's token goes to the hub's own server alone: no
redirection to another one is followed there.

What a commit holds cannot change. So the commit is looked up once, and files are read at it without
a condition on their version; only their sizes are compared with the hub's listing.

With ``as_cache``, the copy is as the hub's own programs keep it in their cache: ``blobs`` has the
contents, each once; ``snapshots/COMMIT`` has the files, as links to them; and ``refs`` tells the
commit of a branch or tag.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import threading
from contextlib import suppress
from http.client import HTTPException, IncompleteRead
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

from obstore import exceptions, store

from stager.base.errors import SourceError
from stager.base.linux import untagged
from stager.base.telemetry import Kind, count, doing
from stager.base.text import showable
from stager.source.endpoints import HUB
from stager.source.prefix import ObjectsReader, folder, folders_above, list_objects
from stager.source.remote import (
    MODE,
    Version,
    ask_range,
    fill,
    library_options,
    read_authorities,
    tag_of,
)
from stager.source.retry import Access, AnswerError, Pace, Patience, changed, cut_short
from stager.source.schemes import Location, Scheme
from stager.tree.listing import Kind as Entry
from stager.tree.listing import Listing, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from http.client import HTTPMessage, HTTPResponse

    from stager.source.description import Listings, Selection, Source
    from stager.source.endpoints import RemoteSettings
    from stager.source.prefix import Objects
    from stager.tree.patterns import Patterns
    from stager.tree.stream import Stream

#: Seconds for a connection, and without a byte on one.
_TIMEOUT = 20
#: Bytes that are read at a time, the most of an answer, and the most of one that says what failed.
_BLOCK, _LARGEST, _LARGEST_REFUSAL = 256 << 10, 64 << 20, 4096
#: The most entries of a commit that are listed, in some 0.4 GiB. A page counts as one, too. Hubs
#: advise to have no more than a tenth of it.
MOST_ENTRIES = 1_000_000
#: What git calls a commit, or contents.
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_NEXT_PAGE = re.compile(r'<([^>]*)>\s*;\s*rel="?next"?')
#: What can be a token; a line end in one would end the header.
_TOKEN = re.compile(r"[!-~]+")
#: Hubs say the same of what does not exist and of what is private.
ACCESS = Access(
    (
        "it does not exist, or is not shown to you",
        "check the URL, and that HF_TOKEN is in the job's environment and still valid",
    ),
    (
        "you may not read it",
        "ask for access on its page, with the account that HF_TOKEN in the job's environment is of",
    ),
)
#: The time of all files of the copy, in nanoseconds: the second of January 1980. A hub lists none,
#: and with the commit's time, files that it left alone would count as changed. Archives cannot
#: hold earlier times.
TIME = 315_619_200 * 10**9
#: The folders of the hub's own cache.
_BLOBS, _SNAPSHOTS, _REFS = b"blobs", b"snapshots", b"refs"


class HubFile(NamedTuple):
    """A file of a commit: its path, its size in bytes, and what git calls its contents.

    ``blob`` is what they are called in the hub's own cache.
    """

    path: str
    size: int
    oid: str
    blob: str


class HubApi:
    """The interface of the hub for the model, or the data set, that ``url`` names.

    Several threads may call the methods. They raise SourceError.
    """

    def __init__(self, url: str, settings: RemoteSettings) -> None:
        self._url = url
        self._settings = settings
        self._location = Location.parse(url)
        self.endpoint = _endpoint()
        proxies = dict.fromkeys(("https", "http"), settings.proxy) if settings.proxy else {}
        self._opener = build_opener(
            ProxyHandler(proxies), HTTPSHandler(context=_tls(settings)), _SameServer()
        )

    def commit(self) -> str:
        """Return the commit that the revision is now."""
        revision = quote(self._location.revision, safe="")
        found, _ = self._read(f"{self._api}/revision/{revision}")
        commit = found.get("sha") if isinstance(found, dict) else None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise self._not_understood()
        return commit

    def files(self, commit: str) -> Iterator[HubFile]:
        """Yield the files of a commit. The hub lists them page by page."""
        tree = f"{self._api}/tree/{commit}"
        query, asked, listed = "recursive=true", set[str](), 0
        while query:
            if query in asked:
                raise self._not_understood()
            asked.add(query)
            entries, query = self._read(f"{tree}?{query}")
            try:
                yield from (_file(one) for one in entries if one["type"] == "file")
                listed += 1 + len(entries)
            except (KeyError, TypeError, ValueError):
                raise self._not_understood() from None
            if listed > MOST_ENTRIES:
                raise SourceError(
                    f"{self._url}: {self.endpoint} lists more than {MOST_ENTRIES:,} files and "
                    "folders, too many for one stage; tell those who keep it to put them into "
                    "archives"
                )

    def folder_url(self, commit: str) -> str:
        """Return the URL beneath which the files of a commit are read."""
        return f"{self.endpoint}/{self._repository}/resolve/{commit}"

    def locate(self, commit: str, path: str) -> str:
        """Return the URL at which a file is read: the hub's own, or one on another server.

        Raise what `Patience.keep` knows.
        """
        url = f"{self.folder_url(commit)}/{quote(path)}"
        try:
            with self._open(url) as answer:
                return str(answer.geturl())
        except _ElsewhereError as elsewhere:
            if _server(elsewhere.url)[0] not in ("https", "http"):
                raise AnswerError(502, "Bad Gateway", "a file is on no web server") from None
            return elsewhere.url

    def headers(self, url: str) -> dict[str, str]:
        """Return the headers of a request to ``url``: with the token, if it is the hub's own."""
        return _authorization() if self.is_own(url) else {}

    def is_own(self, url: str) -> bool:
        """Return whether ``url`` is of the hub's own server."""
        return _server(url) == _server(self.endpoint)

    @property
    def _repository(self) -> str:
        kind, organization, name = self._location.account, *self._location[2:4]
        return "/".join(filter(None, (kind, organization, name)))

    @property
    def _api(self) -> str:
        kind = "" if self._location.account else "models/"
        return f"{self.endpoint}/api/{kind}{self._repository}"

    def _read(self, url: str) -> tuple[Any, str]:
        """Return the JSON at ``url``, and the query of the next page or nothing."""

        def read(again: Callable[[], None]) -> tuple[bytes, str]:
            body = bytearray()
            try:
                with self._open(url) as answer:
                    while block := answer.read(_BLOCK):
                        body += block
                        if len(body) > _LARGEST:
                            raise self._not_understood()
                        count()
                        again()
                    if answer.length:  # so many bytes were to come
                        raise cut_short()
                    link = _NEXT_PAGE.search(answer.headers.get("Link", ""))
            except _ElsewhereError as elsewhere:
                host = _server(elsewhere.url)[1]
                raise AnswerError(302, "Found", f"it is redirected to {host}") from None
            except IncompleteRead:
                raise cut_short() from None
            return bytes(body), urlsplit(link[1]).query if link else ""

        with doing(Kind.READ, self._url):
            body, query = Patience(self._url, self._settings.patience, ACCESS).keep(read)
        try:
            return json.loads(body), query
        except (ValueError, RecursionError):
            raise self._not_understood() from None

    def _open(self, url: str) -> HTTPResponse:
        request = Request(url, headers={"User-Agent": "slurm-stage"})  # noqa: S310 - of http(s)
        for name, value in self.headers(url).items():
            request.add_unredirected_header(name, value)
        try:
            with untagged():
                answer: HTTPResponse = self._opener.open(request, timeout=_TIMEOUT)
        except HTTPError as error:
            with error:
                if error.code in range(300, 400):
                    raise OSError("too many redirections") from None
                raise AnswerError(error.code, error.reason, _said(error)) from None
        except (HTTPException, ValueError) as error:
            raise OSError(f"no answer of a web server: {type(error).__name__}") from None
        return answer

    def _not_understood(self) -> SourceError:
        return SourceError(
            f"{self._url}: {showable(self.endpoint)} does not answer as a hub does; check "
            "HF_ENDPOINT in the job's environment"
        )


class _ElsewhereError(Exception):
    """A hub redirects to another server."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url


class _SameServer(HTTPRedirectHandler):
    """Follows redirections to other URLs of a server, and takes the token there."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        if _server(newurl) != _server(req.full_url):
            fp.close()
            raise _ElsewhereError(newurl)
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new:
            for name, value in _authorization().items():
                new.add_unredirected_header(name, value)
        return new


def _endpoint() -> str:
    (name,) = Scheme.HF.endpoints
    return (os.environ.get(name) or HUB).rstrip("/")


def _authorization() -> dict[str, str]:
    token = os.environ.get("HF_TOKEN", "").strip()
    if token and not _TOKEN.fullmatch(token):
        raise SourceError(
            "HF_TOKEN in the job's environment has blanks or other characters that no token has; "
            "set it to the token alone"
        )
    return {"Authorization": f"Bearer {token}"} if token else {}


def _server(url: str) -> tuple[str, str | None, int | None]:
    """Return what tells servers apart: a token that one may see is not shown to another one."""
    with suppress(ValueError):  # another server may redirect to what is no URL
        parts = urlsplit(url)
        return parts.scheme, parts.hostname, parts.port
    return "", None, None


def _tls(settings: RemoteSettings) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if settings.ca_file:
        authorities = read_authorities(settings.ca_file)
        try:
            context.load_verify_locations(cadata=authorities.decode())
        except (ssl.SSLError, ValueError):
            raise SourceError(
                f"ca_file in [source] of stage.toml, {settings.ca_file}: it has no certificates; "
                "tell the administrator"
            ) from None
    return context


def _file(entry: Any) -> HubFile:
    """Return a file of the hub's listing. Raise KeyError, TypeError or ValueError."""
    path, size, oid = entry["path"], entry["size"], entry["oid"]
    lfs = entry.get("lfs")
    blob = lfs["oid"] if lfs else oid
    if not (isinstance(path, str) and type(size) is int and 0 <= size < 2**63):
        raise ValueError("this is no file")
    path.encode()  # raises a ValueError if it is no text
    if not (_COMMIT.fullmatch(oid) and _COMMIT.fullmatch(blob)):
        raise ValueError("this is no name of contents")
    return HubFile(path, size, oid, blob)


def _said(error: HTTPError) -> str:
    """Return the hub's own words."""
    said = error.headers.get("X-Error-Message", "")
    if not said:
        try:
            found = json.loads(error.read(_LARGEST_REFUSAL))
        except (ValueError, RecursionError, OSError, HTTPException):
            return ""
        said = found.get("error", "") if isinstance(found, dict) else ""
    return said if isinstance(said, str) else ""


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
    url: str, source: Source, stream: Stream, settings: RemoteSettings, *,
    as_cache: bool = False, is_only: bool = False,
) -> ObjectsReader:  # fmt: skip
    """Return what reads a stream from the files of the commit that was looked at."""
    commit = source.facts.revision
    files: Objects = HubFiles(url, commit, settings)
    if as_cache:
        files = CacheFiles(files, stream.listing, commit)
    return ObjectsReader(files, "", stream, settings.requests, is_only=is_only)


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
        rows[path] = _row(plain, path, Entry.FILE, MODE, size, mtime, tag_of(commit))
    for path in {b""}.union(*map(folders_above, rows)) - rows.keys():
        rows[path] = _row(plain, path, Entry.FOLDER, plain.modes[0], 0, plain.mtimes[0], 0)
    return Listing.of(rows.values())


def _snapshot(plain: Listing, blobs: Mapping[bytes, str], above: bytes) -> Iterator[Row]:
    """Yield the files of a commit as links, the folders they are in, and their contents."""
    for row, path in enumerate(plain.paths):
        at = b"%s/%s" % (above, path) if path else above
        mtime, tag = plain.mtimes[row], plain.inodes[row]
        if plain.kinds[row] == Entry.FOLDER:
            yield _row(plain, at, Entry.FOLDER, plain.modes[row], 0, mtime, 0)
            continue
        blob = b"%s/%s" % (_BLOBS, blobs[path].encode())
        yield _row(plain, blob, Entry.FILE, MODE, plain.sizes[row], mtime, tag)
        link = _row(plain, at, Entry.LINK, 0, 0, mtime, 0)
        yield link._replace(target=b"../" * at.count(b"/") + blob)


def _row(
    plain: Listing, path: bytes, kind: Entry, mode: int, size: int, mtime: int, tag: int
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
            for row in listing.rows(Entry.LINK)
        }

    def fetch(
        self, path: str, version: Version, buffer: memoryview, offset: int
    ) -> tuple[Version, int]:
        """Fill ``buffer`` from the file at ``path``; see `Objects.fetch`."""
        if path in self._paths:
            return self._files.fetch(self._paths[path], version, buffer, offset)
        buffer[:] = self._commit[offset : offset + len(buffer)]
        return version, 0


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
