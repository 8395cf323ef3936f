"""Ask a hub's interface which commit a revision is, which files it has, and where a file is read.

The user's token goes to the hub's own server alone: no redirection to another one is followed here.
"""

from __future__ import annotations

import json
import os
import re
import ssl
from contextlib import suppress
from http.client import HTTPException, IncompleteRead
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

from stager.base.errors import SourceError
from stager.base.linux import untagged
from stager.base.telemetry import Kind, count, doing
from stager.base.text import showable
from stager.source.endpoints import HUB
from stager.source.remote import read_authorities
from stager.source.retry import Access, AnswerError, Patience, ShortBodyError
from stager.source.schemes import Location, Scheme

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from http.client import HTTPMessage, HTTPResponse

    from stager.source.endpoints import RemoteSettings

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
                        raise ShortBodyError("the connection was closed before the end")
                    link = _NEXT_PAGE.search(answer.headers.get("Link", ""))
            except _ElsewhereError as elsewhere:
                host = _server(elsewhere.url)[1]
                raise AnswerError(302, "Found", f"it is redirected to {host}") from None
            except IncompleteRead:
                raise ShortBodyError("the connection was closed before the end") from None
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
