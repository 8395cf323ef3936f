"""What version of an object is in a store, or on the web, and how is a range of it read?

The library speaks to the store. This module decides what identifies a version of an object, and
that every byte is of that version; `retry` decides what is tried again for how long.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import obstore
import xxhash
from obstore import exceptions

from stager.base.errors import IntegrityError, SourceError
from stager.base.extents import Extent
from stager.base.telemetry import Kind, count, doing
from stager.base.text import printable, showable
from stager.source.description import Source, SourceFacts
from stager.source.endpoints import ASKED_FOR_KEYS, GOOGLE, Secret, secrets_of
from stager.source.retry import (
    NOWHERE,
    TO_STORE,
    TO_WEB,
    NoObjectError,
    Pace,
    Patience,
    RefusedError,
    changed,
    cut_short,
    has_to_be_asked_for_a_byte,
    is_beyond_end,
    is_denied,
)
from stager.source.schemes import Location, Scheme

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from stager.source.endpoints import RemoteSettings

T = TypeVar("T")

#: Bytes that the library hands over at a time. They are a sign of life.
_BLOCK = 256 << 10
#: Most seconds for a connection, and without a byte on one.
_CONNECT_TIMEOUT, _READ_TIMEOUT = 10, 20
#: Objects in one answer of a store that lists them: the most that all stores give.
_PAGE = 1000
#: The most objects that are listed beneath a URL, in some 4 GiB.
MOST_OBJECTS = 10_000_000
#: The metadata by which Azure's tools mark the empty object that stands for a folder.
_MARK = "hdi_isfolder"
#: A key in the library's message, and what makes a part of it no name.
_KEY = re.compile(r'Path "(.*)"(?: contained|: Encountered)', re.DOTALL)
_ODD_PART = re.compile(r"\A\.{0,2}\Z|[\x00-\x1f\x7f]")
#: How often a range is asked for until a server answers that knows the object by the same ETag.
_MOST_SERVERS = 30
#: Permissions of the copy of an object: what opens the object is a credential of the user's.
MODE = 0o600
#: A value of the environment, and the path of a file, in what the library says of them.
_VALUE = re.compile(r'(?<=").*(?=")|(?<=from )/.*(?=: )')
_SECOND = 10**9
#: The last second of a time in 64 bits of nanoseconds, with a sign.
_LATEST = (2**63 - 1) // _SECOND


@dataclass(frozen=True, slots=True)
class Version:
    """What identifies a version of an object: its size in bytes, its time, and its ETag.

    The ETag is as the store gave it, or empty; ``tag`` is a number made from it.
    """

    size: int
    mtime_ns: int
    tag: int
    #: Not compared: what lists objects may write it otherwise.
    etag: str = field(default="", compare=False)

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Version:
        """Return the version that a store's answer describes."""
        etag = meta["e_tag"] or ""
        # Some answers have fractions of seconds.
        seconds = min(int(meta["last_modified"].timestamp()), _LATEST)
        return cls(meta["size"], seconds * _SECOND, tag_of(etag), etag)

    @classmethod
    def recorded(cls, facts: SourceFacts) -> Version:
        """Return the version that was found, and recorded, as ``facts``."""
        return cls(facts.size, facts.mtime_ns, tag_of(facts.revision), facts.revision)

    @property
    def facts(self) -> SourceFacts:
        """What is recorded of it."""
        return SourceFacts(self.size, self.mtime_ns, 0, 0, self.etag)

    @property
    def condition(self) -> dict[str, Any]:
        """What a request for a range must demand, so that it is of this version."""
        if self.etag and not self.etag.startswith("W/"):
            return {"if_match": self.etag}
        return {"if_unmodified_since": datetime.fromtimestamp(self.mtime_ns / _SECOND, UTC)}


def tag_of(etag: str) -> int:
    """Return a number for an ETag; some stores write it without quotes where they list it."""
    return xxhash.xxh3_64_intdigest(etag.strip('"').encode())


def look_at_object(url: str, settings: RemoteSettings) -> Source:
    """Look at the object that ``url`` names. Raise SourceError."""
    store = Store(url, settings)
    try:
        found = store.look()
    except NoObjectError:
        if not store.has_any_beneath():
            raise
        raise SourceError(
            f"{url}: no such object, but there are objects beneath it; for all of these, write a "
            "'/' at its end"
        ) from None
    if not found.etag and found.mtime_ns <= 0:
        raise SourceError(
            f"{url}: the server gives neither an ETag nor a date (Last-Modified), so its versions "
            "cannot be told apart; stage it from elsewhere"
        )
    return Source(found.facts, MODE, os.getegid(), found.size)


class OddKeyError(SourceError):
    """An object's key cannot be the path of a file."""


def _odd_key(url: str, above: str, said: str) -> str:
    """Return the message for a key that the library refuses, by what it ``said``. Pure."""
    found = _KEY.search(said)
    key = found[1].removeprefix(above) if found else "?"
    parts = key.split("/")
    odd = next((at for at, part in enumerate(parts) if _ODD_PART.search(part)), 0)
    folder = "/".join(parts[:odd])
    # The library cannot list the folder that it is in, even without it.
    remedy = f", or leave out its folder with exclude=/{folder}/" if folder else ""
    return f"{url}{printable(key)} cannot be the path of a file; rename that object{remedy}"


class Store:
    """The store, or web server, that ``url`` leads to.

    The methods raise SourceError if the store refuses, or fails for too long; IntegrityError if an
    object is another version than the one that is asked for. Several threads may call them.
    """

    def __init__(self, url: str, settings: RemoteSettings) -> None:
        self._url = url
        self.location = Location.parse(url)
        #: The object's path for the library, which is given a whole URL of the web as it is.
        self.key = "" if self.location.scheme.is_web else self.location.path
        #: What a request for the object has besides: the version that the URL names.
        self._named = {"version": version} if (version := self.location.revision) else {}
        self._settings = settings
        self._pace = Pace(settings.limit)
        try:
            self._store = _store(url, self.location, settings)
        except (exceptions.BaseError, ValueError) as error:  # such as half of a key
            text = str(error).partition("\n")[0]
            said = _VALUE.sub("…", text.partition(" error: ")[2] or text)
            problem = printable(showable(said))
            raise SourceError(f"{url}: {problem}; check your credentials") from None

    def look(self) -> Version:
        """Return the version of the object that the URL names."""
        with doing(Kind.READ, self._url):
            return self._patience(self._url).keep(lambda _: self._head(self.key))

    def _head(self, path: str) -> Version:
        try:
            return Version.of(self._get(path, head=True).meta)
        except (exceptions.BaseError, FileNotFoundError) as error:
            if not has_to_be_asked_for_a_byte(error, is_web=self.location.scheme.is_web):
                raise
        try:
            return Version.of(self._get(path, range=(0, 1)).meta)
        except exceptions.BaseError as error:
            if not is_beyond_end(error):
                raise
        return Version.of(self._get(path).meta)  # it is empty

    def _get(self, path: str, **more: Any) -> Any:
        options: Any = {**self._named, **more}
        return obstore.get(self._store, path, options=options)

    def has_any_beneath(self) -> bool:
        """Whether there are objects beneath the URL, as far as the store tells."""
        if self.location.scheme.is_web:
            return False
        with suppress(exceptions.BaseError, OSError), doing(Kind.READ, self._url):
            pages = obstore.list(self._store, self.location.path, chunk_size=1)
            return any(pages)
        return False

    def list(
        self, leaves_out: Callable[[str], bool] | None = None
    ) -> Sequence[tuple[str, Version]]:
        """Return all objects beneath the URL, by path in the store.

        A path has no slash at its end, also where the object's key has one: two can be the same.
        If there is a key that is no path, folders that ``leaves_out`` names are not looked into.
        """
        try:
            return self._list_all()
        except OddKeyError:
            if not leaves_out:
                raise
            found = deque[tuple[str, Version]]()
            for one in self._walk(self.location.path, leaves_out):
                found.append(one)
                self._check_number(len(found))
            return found

    def _check_number(self, objects: int) -> None:
        if objects > MOST_OBJECTS:
            raise SourceError(
                f"{self._url}: more than {MOST_OBJECTS:,} objects are beneath it, too many for one "
                "stage; stage the folders in it one by one, or put the objects into archives"
            )

    def _list_all(self) -> Sequence[tuple[str, Version]]:
        found: list[tuple[str, Version]] = []

        def read(again: Callable[[], None]) -> None:
            # What was listed already is not asked for again, but for some keys with a slash.
            last, known = max((path for path, _ in found), default=None), frozenset(found)
            prefix = self.location.path or None
            for page in obstore.list(self._store, prefix, offset=last, chunk_size=_PAGE):
                listed = ((one["path"], Version.of(one)) for one in page)
                found.extend(one for one in listed if one not in known)
                self._check_number(len(found))
                count()
                again()

        self._keep_listing(read)
        return found

    def _walk(
        self, folder: str, leaves_out: Callable[[str], bool]
    ) -> Iterator[tuple[str, Version]]:
        """Yield what lies beneath a folder, and empty objects in the places of the folders."""
        found: Any = self._keep_listing(
            lambda _: obstore.list_with_delimiter(self._store, folder or None)
        )
        count()
        for one in found["objects"]:
            yield one["path"], Version.of(one)
        for path in found["common_prefixes"]:
            if not leaves_out(path):
                yield path, Version(0, 0, 0)
                yield from self._walk(path, leaves_out)

    def _keep_listing(self, act: Callable[[Callable[[], None]], T]) -> T:
        """Return what ``act`` lists. Raise OddKeyError too."""

        def read(again: Callable[[], None]) -> T:
            try:
                return act(again)
            except exceptions.InvalidPathError as error:
                raise OddKeyError(_odd_key(self._url, self.location.above, str(error))) from None

        with doing(Kind.READ, self._url):
            return self._patience(self._url).keep(read)

    def marks(
        self, above: str, folders: Iterable[tuple[bytes, Sequence[bytes], int]]
    ) -> Iterator[bytes]:
        """Yield the paths of those empty objects that are signs of empty folders.

        ``folders``, which are beneath ``above``, are those with empty objects: their own paths,
        those of the objects, and how many entries they have. The key of a sign ends in a slash, or
        Azure's metadata say so. What the store does not give, such as an archived object, is an
        empty file: it need not be read.
        """
        jobs: list[Callable[[], Iterable[bytes]]] = []
        for folder, paths, entries in folders:
            # A page of a listing tells of more objects than an answer, but not their metadata.
            if self.location.scheme is Scheme.AZ or entries > _PAGE * len(paths):
                jobs += (partial(self._mark, above, path) for path in paths)
            else:
                jobs.append(partial(self._marks_in, above, folder, frozenset(paths)))
        with ThreadPoolExecutor(self._settings.requests) as pool:
            for found in pool.map(lambda job: job(), jobs):
                yield from found

    def _marks_in(self, above: str, folder: bytes, paths: frozenset[bytes]) -> Iterable[bytes]:
        """Return those ``paths`` in a folder that it lists as folders."""
        place = f"{above}{os.fsdecode(folder)}".rstrip("/") or None
        found: Any = self._keep_listing(lambda _: obstore.list_with_delimiter(self._store, place))
        count()
        subfolders = (os.fsencode(one.removeprefix(above)) for one in found["common_prefixes"])
        return paths.intersection(subfolders)

    def _mark(self, above: str, path: bytes) -> Iterable[bytes]:
        """Return the ``path`` if the empty object there is a sign."""
        name = os.fsdecode(path)
        with doing(Kind.READ, self._url):
            patience = self._patience(f"{self._url}{name}")
            is_mark = patience.keep(lambda _: self._is_mark(f"{above}{name}"))
        return [path] if is_mark else []

    def _is_mark(self, path: str) -> bool:
        try:
            said = obstore.get(self._store, path).attributes
        except FileNotFoundError:  # it was listed: its key ends in a slash
            return True
        except exceptions.BaseError as error:
            if not is_denied(error):
                raise
            return False
        finally:
            count()
        return any(
            name.lower() == _MARK and value.lower() == "true" for name, value in said.items()
        )

    def fetch(
        self, path: str, version: Version, buffer: memoryview, offset: int
    ) -> tuple[Version, int]:
        """Fill ``buffer`` from a version of the object at ``path``, from ``offset`` bytes on.

        Return the version with its ETag, and how often a request was repeated.
        """
        url = self._url + path[len(self.key) :].lstrip("/")
        repeated = 0

        def ask(done: int) -> Iterator[memoryview]:
            nonlocal version, repeated
            begin, length = offset + done, len(buffer) - done
            version, blocks, more = self._ask(url, path, version, begin, length)
            repeated += more
            return blocks

        try:
            retries = fill(buffer, url, ask, self._patience(url), self._pace)
        except NoObjectError:
            if not self._has_slash(path):
                raise
            raise SourceError(
                f"{url}/ is an object with data whose name ends in '/', so it cannot be a file; "
                f"leave it out with exclude=/{path.removeprefix(self.location.above)}"
            ) from None
        return version, retries + repeated

    def _has_slash(self, path: str) -> bool:
        """Whether the key of an object that was listed at ``path`` ends in a slash."""
        if not self.location.is_folder:
            return False
        with suppress(exceptions.BaseError, OSError), doing(Kind.READ, self._url):
            first = next(obstore.list(self._store, path, chunk_size=1), ())
            return any(one["path"] == path for one in first)
        return False

    def _patience(self, url: str) -> Patience:
        access = TO_WEB if self.location.scheme.is_web else TO_STORE
        return Patience(url, self._settings.patience, access)

    def _ask(
        self, url: str, path: str, version: Version, offset: int, length: int
    ) -> tuple[Version, Iterator[memoryview], int]:
        """Ask for a range. Return its version with the ETag, the bytes, and how often it was asked
        for in vain: the servers behind a URL may each have an ETag of their own.
        """
        store, other, condition = self._store, version, version.condition
        for repeated in range(_MOST_SERVERS):
            try:
                also = {**self._named, **condition}
                found, blocks = ask_range(store, path, offset, length, also)
                now = Version.of(found.meta)
                if found.range != (offset, offset + length):
                    raise changed(url)
                if now == version:
                    return now, blocks, repeated
            except exceptions.PreconditionError:
                now, condition = self._head(path), {}  # its answer tells, too, of what it is
            except exceptions.BaseError as error:
                if is_beyond_end(error):
                    raise changed(url) from None
                raise
            if (now.size, now.mtime_ns) != (version.size, version.mtime_ns):
                raise changed(url)
            other = now if now != version else other
            count()
            # Maybe a connection to another server.
            store = _store(self._url, self.location, self._settings)
        etags = version.etag or "another one", other.etag
        raise changed(url, etags if other != version else None)


def ask_range(
    store: Any, path: str, offset: int, length: int, condition: Mapping[str, Any]
) -> tuple[Any, Iterator[memoryview]]:
    """Ask a store of the library for a range. Return its answer, and the bytes."""
    options: Any = {"range": (offset, offset + length), **condition}
    found = obstore.get(store, path, options=options)
    return found, map(memoryview, found.stream(min_chunk_size=_BLOCK))


def fill(
    buffer: memoryview,
    url: str,
    ask: Callable[[int], Iterator[memoryview]],
    patience: Patience,
    pace: Pace,
) -> int:
    """Fill ``buffer`` with what ``ask`` yields; it is told how many bytes are there already.

    Return how often a request was repeated. Raise SourceError, also if there is more, and what
    ``ask`` raises of an object that changed.
    """
    done = 0

    def read(again: Callable[[], None]) -> None:
        nonlocal done
        for block in ask(done):
            if done + len(block) > len(buffer):
                raise RefusedError(
                    "it sends more bytes than it was asked for", "tell those who run the store"
                )
            buffer[done : done + len(block)] = block
            done += len(block)
            count()
            again()
            if pause := pace.pause(len(block), time.monotonic()):
                time.sleep(pause)  # the server waits, too, when the connection's buffers are full
        if done < len(buffer):
            raise cut_short()

    with doing(Kind.READ, url):
        patience.keep(read)
    return patience.retries


class ObjectReader:
    """Reads one version of an object; several threads may read at once.

    ``bytes_read`` counts the bytes, and ``retries`` the requests that were repeated.
    """

    def __init__(self, url: str, source: Source, settings: RemoteSettings) -> None:
        self._url = url
        self._store = Store(url, settings)
        self._version = Version.recorded(source.facts)
        self._lock = threading.Lock()
        self._changed: IntegrityError | None = None
        self.bytes_read = self.retries = 0

    def extents(self, size: int) -> Iterator[Extent]:
        """Yield the extent of the whole object: stores know no holes."""
        if size:
            yield Extent(0, size)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` bytes on.

        Raise IntegrityError if the object is another version now, SourceError if it cannot be read.
        """
        path = self._store.key
        try:
            _, retries = self._store.fetch(path, self._version, buffer, offset)
        except IntegrityError as error:
            self._changed = error
            raise
        with self._lock:
            self.bytes_read += len(buffer)
            self.retries += retries

    def check(self) -> None:
        """Raise IntegrityError if it was another version when it was read."""
        if self._changed:
            raise self._changed

    def close(self) -> None:
        """Do nothing: the library closes its connections."""


def _store(url: str, location: Location, settings: RemoteSettings) -> Any:
    """Return the library's store for a URL; credentials come from the environment."""
    from obstore import store

    secret = secrets_of(os.environ).get(url, Secret())
    only = _hosts(location, has_query=bool(secret.query))
    options = library_options(settings, only=only, **secret.headers)
    match location.scheme:
        case Scheme.S3:
            return store.S3Store(location.container, **options)
        case Scheme.GS:
            # Without it, the file of a key could name a server that the site does not allow.
            base = os.environ.get("GOOGLE_BASE_URL") or GOOGLE
            return store.GCSStore(location.container, base_url=base, **options)
        case Scheme.AZ:
            return store.AzureStore(location.container, account_name=location.account, **options)
        case _:
            query = f"?{secret.query}" if secret.query else ""
            return store.HTTPStore.from_url(f"{location.web_url}{query}", **options)


def library_options(
    settings: RemoteSettings, *, only: Iterable[str] = (), **headers: str
) -> dict[str, Any]:
    """Return the options of the library's stores; ``headers`` go with each request.

    Repetitions are not left to the library: they are counted and bounded here. If ``only`` has
    hosts, or domains, no redirection to others is followed: it would take a secret there, in
    Referer or in another header than Authorization. The library cannot be told so. But what it is
    to send by a proxy where none can listen, it does not send. (With a proxy of the site's, which
    then decides, it follows.)
    """
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=min(_CONNECT_TIMEOUT, settings.patience)),
        "read_timeout": timedelta(seconds=min(_READ_TIMEOUT, settings.patience)),
        "timeout": timedelta(days=1),  # of a whole answer, which may be large
        "allow_http": settings.allow_http,
        "user_agent": "slurm-stage",
    }
    if settings.proxy:
        client["proxy_url"] = settings.proxy
    elif hosts := ",".join(only):
        client |= {"proxy_url": f"http://{NOWHERE}", "proxy_excludes": hosts}
    if settings.ca_file:
        client["root_certificate"] = read_authorities(settings.ca_file)
    if headers:
        client["default_headers"] = headers
    return {"client_options": client, "retry_config": {"max_retries": 0}}


def _hosts(location: Location, *, has_query: bool) -> list[str]:
    """Return the hosts and domains that a store's secrets may go to; none if it has none.

    These are the endpoint that the environment names, or else the vendor's domains; who is asked
    for keys; and a web server's own, if the query of its URL is secret. (Others get no
    Authorization anyway.)
    """
    if location.scheme.is_web:
        host = urlsplit(f"//{location.container}").hostname
        return [host] if host and has_query else []
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return [
        *(_named_by(location.scheme.endpoints) or location.scheme.vendors),
        *(keeper.format(region=region) for keeper in location.scheme.keepers),
        *_named_by(ASKED_FOR_KEYS),
    ]


def _named_by(variables: Iterable[str]) -> list[str]:
    """Return the hosts that these variables of the environment name."""
    hosts: list[str] = []
    for name in variables:
        with suppress(ValueError):
            hosts.append(urlsplit(os.environ.get(name, "")).hostname or "")
    return [*filter(None, hosts)]


def read_authorities(path: str) -> bytes:
    """Return what is in the file with the certificates of the site's own authorities."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise SourceError(
            f"ca_file in [source] of stage.toml, {path}: {error.strerror}; tell the administrator"
        ) from None
