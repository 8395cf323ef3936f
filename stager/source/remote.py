"""Look at objects in stores and at files on the web, and read ranges of them.

The library speaks to the store. This module decides what identifies a version of an object, that
every byte is of that version, and what is tried again for how long.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
from obstore import exceptions

from stager.base.errors import IntegrityError, SourceError
from stager.base.extents import Extent
from stager.base.linux import leave_untagged
from stager.base.progress import Kind, count, doing
from stager.base.text import printable
from stager.disk.record import SourceFacts
from stager.source.location import Location, Scheme
from stager.source.posix import Source
from stager.source.settings import ENDPOINTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from datetime import datetime

    from stager.source.settings import RemoteSettings

#: Bytes that the library hands over at a time. They are a sign of life.
_BLOCK = 256 << 10
#: Seconds for a connection, and without a byte on one.
_CONNECT_TIMEOUT, _READ_TIMEOUT = 10, 20
#: Seconds before the first and the last repetitions, each of which waits about twice as long as the
#: one before.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
#: Permissions of a copy: what opens the object is a credential of the user's.
_MODE = 0o600
#: The status in a message of the library, as ``503 Service Unavailable``, and those of requests
#: that may succeed later.
_STATUS = re.compile(r"status code: ((\d{3})[^:\n]*)")
_LATER = frozenset({"408", "429", "500", "502", "503", "504"})
#: The text of a store's answer, in the XML of S3 and Azure.
_ANSWER = re.compile(r"<Code>([^<]*)</Code>(?:\s*<Message>([^<]*)</Message>)?")
#: How much of what a server said is repeated.
_MOST_SAID = 200


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """What a store says of an object now."""

    size: int
    etag: str
    modified: datetime

    @property
    def identity(self) -> SourceFacts:
        """What is recorded of it: it differs for any two versions."""
        nanoseconds = int(self.modified.timestamp()) * 10**9
        return SourceFacts(self.size, nanoseconds, 0, 0, self.etag)

    @property
    def condition(self) -> dict[str, Any]:
        """What a request for a range must demand, so that it is of this version."""
        if self.etag and not self.etag.startswith("W/"):
            return {"if_match": self.etag}
        return {"if_unmodified_since": self.modified}


def look_at_object(url: str, settings: RemoteSettings) -> Source:
    """Look at the object that ``url`` names. Raise SourceError."""
    found = RemoteObject(url, settings).look()
    return Source(found.identity, _MODE, os.getegid(), found.size)


class RemoteObject:
    """One object. The methods raise SourceError if the store refuses, or fails for too long."""

    def __init__(self, url: str, settings: RemoteSettings) -> None:
        self._url = url
        self._settings = settings
        location = Location.parse(url)
        self._path = location.path
        self._store = _store(location, settings)

    def look(self) -> ObjectFacts:
        """Ask the store for the object's facts."""
        with doing(Kind.READ, self._url):
            found = Patience(self._url, self._settings.patience).keep(
                lambda _: obstore.head(self._store, self._path)
            )
        return _facts(found)

    def ranges(self, facts: ObjectFacts, offset: int, length: int) -> Iterator[memoryview[int]]:
        """Yield the bytes of one range. Raise what the library raises."""
        options: Any = {"range": (offset, offset + length), **facts.condition}
        found = obstore.get(self._store, self._path, options=options)
        if found.range != (offset, offset + length) or _facts(found.meta) != facts:
            raise _changed(self._url)
        for block in found.stream(min_chunk_size=_BLOCK):
            yield memoryview(block)


class RemoteReader:
    """Reads one version of an object; several threads may read at once.

    ``bytes_read`` counts the bytes, and ``retries`` the requests that were repeated.
    """

    def __init__(self, url: str, identity: SourceFacts, settings: RemoteSettings) -> None:
        self._url = url
        self._settings = settings
        self._object = RemoteObject(url, settings)
        self._facts = self._object.look()
        if self._facts.identity != identity:
            raise _changed(url)
        self._lock = threading.Lock()
        self.bytes_read = self.retries = 0

    def extents(self, size: int) -> Iterator[Extent]:
        """Yield the extent of the whole object: stores know no holes."""
        if size:
            yield Extent(0, size)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` bytes on.

        Raise IntegrityError if the object is another version now, SourceError if it cannot be read.
        """
        done = 0

        def read(again: Callable[[], None]) -> None:
            nonlocal done
            for block in self._object.ranges(self._facts, offset + done, len(buffer) - done):
                if done + len(block) > len(buffer):
                    raise _changed(self._url)
                buffer[done : done + len(block)] = block
                done += len(block)
                count()
                again()
            if done < len(buffer):
                raise _ShortBodyError("the connection was closed before the end")

        with doing(Kind.READ, self._url):
            patience = Patience(self._url, self._settings.patience)
            try:
                patience.keep(read)
            finally:
                with self._lock:
                    self.bytes_read += done
                    self.retries += patience.retries

    def close(self) -> None:
        """Do nothing: the library closes its connections."""


class _ShortBodyError(Exception):
    """An answer ended early."""


class Patience:
    """Repeats a request until it succeeds, or ``limit`` seconds have passed without any success."""

    def __init__(self, url: str, limit: float) -> None:
        self._url = url
        self._limit = limit
        self._deadline = time.monotonic() + limit
        self._pause = _FIRST_PAUSE
        self.retries = 0

    def keep(self, act: Callable[[Callable[[], None]], Any]) -> Any:
        """Return what ``act`` returns. It may call what it is given when it gets on."""
        while True:
            try:
                return act(self._begin_anew)
            except (exceptions.BaseError, OSError, _ShortBodyError) as error:
                if isinstance(error, exceptions.PreconditionError):
                    raise _changed(self._url) from None
                failure = _explained(error)
                pause = self._pause * random.uniform(0.75, 1.25)  # noqa: S311 - no secret
                if not failure.may_pass or time.monotonic() + pause > self._deadline:
                    raise SourceError(self._message(failure)) from None
                self.retries += 1
                time.sleep(pause)
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _begin_anew(self) -> None:
        self._deadline = time.monotonic() + self._limit
        self._pause = _FIRST_PAUSE

    def _message(self, failure: _Explained) -> str:
        text = f"{self._url}: {failure.text}"
        if not failure.may_pass:
            return f"{text}; {failure.remedy}"
        times = f"{self.retries + 1} times in {self._limit:g} s"
        return f"{text}, {times}; submit again later, or tell those who run the store"


@dataclass(frozen=True, slots=True)
class _Explained:
    """What a store, or the way to it, said; and whether it may say something else later."""

    text: str
    remedy: str
    may_pass: bool = False


def _explained(error: Exception) -> _Explained:
    """Say in plain words what the library raised. No URL is repeated: it may have a signature."""
    text = str(error).partition("\n\nDebug source")[0]
    answer = _ANSWER.search(text)
    said = f" ({': '.join(filter(None, answer.groups()))})" if answer else ""
    said = printable(said)[:_MOST_SAID]
    found = _STATUS.search(text)
    answered, status = found.groups() if found else ("", "")
    if isinstance(error, FileNotFoundError) or status in ("404", "410"):
        return _Explained(f"no such object{said}", "check the URL")
    if isinstance(error, exceptions.UnauthenticatedError) or status == "401":
        return _Explained(
            f"the store does not know you{said}",
            "check that your credentials are in the job's environment, and still valid",
        )
    if isinstance(error, exceptions.PermissionDeniedError) or status == "403":
        return _Explained(
            f"you may not read it{said}",
            "check that your credentials are in the job's environment, and permit reading",
        )
    if status:
        return _Explained(
            f"the store answered with {answered}{said}",
            "tell those who run the store",
            may_pass=status in _LATER,
        )
    return _explained_connection(error)


def _explained_connection(error: Exception) -> _Explained:
    lower = str(error).lower()  # the cause is in the second part
    if "redirect" in lower:
        return _Explained("it is redirected in a circle, or too often", "check the URL")
    if "certificate" in lower or "invalid peer" in lower:
        return _Explained(
            "the server's certificate is not valid for this name, or not trusted",
            "check the URL; for an authority of the site's own, the administrator names it by "
            "ca_file in [source] of stage.toml",
        )
    if "range request" in lower or "not supported" in lower:
        return _Explained("the server cannot send parts of a file", "stage it from elsewhere")
    if "dns" in lower:
        return _Explained("its host is not known here", "check the URL", may_pass=True)
    if isinstance(error, _ShortBodyError):
        return _Explained(str(error), "", may_pass=True)
    if "timed out" in lower or "kind: timeout" in lower:
        return _Explained("the server did not answer", "", may_pass=True)
    return _Explained("the connection failed", "", may_pass=True)


def _facts(meta: Mapping[str, Any]) -> ObjectFacts:
    return ObjectFacts(meta["size"], meta["e_tag"] or "", meta["last_modified"])


def _changed(url: str) -> IntegrityError:
    return IntegrityError(f"{url} changed while it was read; submit again when nobody replaces it")


def _store(location: Location, settings: RemoteSettings) -> Any:
    """Return the library's store for a location; credentials come from the environment."""
    from obstore import store

    for port in _ports(location, settings):
        leave_untagged(port)
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=_CONNECT_TIMEOUT),
        "read_timeout": timedelta(seconds=_READ_TIMEOUT),
        "timeout": timedelta(days=1),  # of a whole answer, which may be large
        "allow_http": settings.allow_http,
        "user_agent": "slurm-stage",
    }
    if settings.proxy:
        client["proxy_url"] = settings.proxy
    if settings.ca_file:
        client["root_certificate"] = _read(settings.ca_file)
    # Repetitions are counted and bounded here.
    options: Any = {"client_options": client, "retry_config": {"max_retries": 0}}
    match location.scheme:
        case Scheme.S3:
            return store.S3Store(location.container, **options)
        case Scheme.GS:
            return store.GCSStore(location.container, **options)
        case Scheme.AZ:
            return store.AzureStore(location.container, account_name=location.account, **options)
        case _:
            base = f"{location.scheme}://{location.container}"
            return store.HTTPStore.from_url(base, **options)


def _ports(location: Location, settings: RemoteSettings) -> Iterator[int]:
    """Yield the ports to which the library will connect, besides those of the vendors."""
    web = [f"{location.scheme}://{location.container}"] if location.scheme.is_web else []
    for url in (*web, settings.proxy, *(os.environ.get(name, "") for name in ENDPOINTS)):
        with suppress(ValueError):
            if port := urlsplit(url).port:
                yield port


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise SourceError(
            f"ca_file in [source] of stage.toml, {path}: {error.strerror}; tell the administrator"
        ) from None
