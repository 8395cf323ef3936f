"""List and read what lies beneath a folder of a store, on a real server of S3."""

from __future__ import annotations

import logging
import os
import re
import urllib.parse
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import obstore
import pytest
import xxhash
from moto.server import ThreadedMotoServer
from obstore import exceptions

from stager.base.errors import IntegrityError, SourceError
from stager.source import remote
from stager.source.description import EVERYTHING, Listings, Selection
from stager.source.endpoints import RemoteSettings
from stager.source.prefix import ObjectsReader, list_objects, look_at_prefix, open_prefix
from stager.source.remote import ObjectReader, Store, Version, look_at_object
from stager.source.retry import is_denied
from stager.tree.listing import Kind
from stager.tree.patterns import Patterns
from stager.tree.stream import Stream
from tests.support.web import web_server

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS = RemoteSettings(patience=5, allow_http=True, requests=4)
URL = "s3://bucket/folder/"
#: Objects beneath the folder, with their sizes.
SIZES = {"a.bin": 3_000_000, "empty": 0, "below/b": 10, "below/deep/c": 70_000, "é ü+%41": 5}


class Bucket:
    """A bucket; keys are relative to it."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self.store = obstore.store.S3Store("bucket", client_options={"allow_http": True})

    def put(self, key: str, data: bytes, **more: str) -> str:
        """Write an object by a plain request: the key may be one that the library refuses.

        Return its version, if the bucket keeps some.
        """
        quoted = urllib.parse.quote(key)
        url = f"{self._endpoint}/bucket/{quoted}"
        headers = {"Content-Type": "application/octet-stream", **more}
        request = urllib.request.Request(url, data, headers, method="PUT")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(answer.headers["x-amz-version-id"])

    def keep_versions(self) -> None:
        """Have it keep all versions of its objects."""
        on = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
        headers = {"Content-Type": "application/xml"}
        url = f"{self._endpoint}/bucket?versioning"
        request = urllib.request.Request(url, on, headers, method="PUT")
        urllib.request.urlopen(request, timeout=30).close()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for url in (f"{endpoint}/moto-api/reset", f"{endpoint}/bucket"):
        method = "POST" if url.endswith("reset") else "PUT"
        urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=30).close()
    return Bucket(endpoint)


@pytest.fixture
def contents(bucket: Bucket) -> dict[bytes, bytes]:
    data = {name: os.urandom(size) for name, size in SIZES.items()}
    for name, one in data.items():
        bucket.put(f"folder/{name}", one)
    bucket.put("folder-beside/x", b"not beneath it")
    return {os.fsencode(name): one for name, one in data.items()}


def opened(*, is_only: bool = False) -> tuple[Stream, ObjectsReader]:
    """List all that lies beneath the folder, and open it to be read."""
    listings = Listings()
    look_at_prefix(URL, EVERYTHING, listings, SETTINGS)
    listing = listings.get(URL)
    assert listing
    stream = Stream(listing, b"\1" * len(listing))
    return stream, open_prefix(URL, stream, SETTINGS, is_only=is_only)


def test_what_lies_beneath_is_a_folder(contents: dict[bytes, bytes]) -> None:
    listings = Listings()
    source = look_at_prefix(URL, EVERYTHING, listings, SETTINGS)
    listing = listings.get(URL)
    assert listing
    found = {listing.paths[row]: listing.sizes[row] for row in listing.rows(Kind.FILE)}
    assert found == {path: len(data) for path, data in contents.items()}
    folders = [listing.paths[row] for row in listing.rows(Kind.FOLDER)]
    assert folders == [b"", b"below", b"below/deep"]
    assert (source.files, source.facts.size, source.mode) == (5, 3_070_015, 0o700)
    assert set(listing.modes) == {0o600, 0o700}


def test_a_folder_is_the_same_until_an_object_changes(
    bucket: Bucket, contents: dict[bytes, bytes]
) -> None:
    def look() -> str:
        return look_at_prefix(URL, EVERYTHING, Listings(), SETTINGS).listing

    before = look()
    assert look() == before
    bucket.store.put("folder/below/b", b"0123456789")
    assert look() != before


def test_an_empty_object_that_is_archived_is_an_empty_file(bucket: Bucket) -> None:
    bucket.put("folder/a", b"a")
    bucket.put("folder/b", b"", **{"x-amz-storage-class": "GLACIER"})
    with pytest.raises(exceptions.PermissionDeniedError, match="InvalidObjectState"):
        obstore.get(bucket.store, "folder/b")
    listings = Listings()
    look_at_prefix(URL, EVERYTHING, listings, SETTINGS)
    listing = listings.get(URL)
    assert listing
    assert [listing.paths[row] for row in listing.rows(Kind.FILE)] == [b"a", b"b"]


@pytest.mark.parametrize("status", [403, 409])
def test_what_the_store_does_not_give_of_an_object_is_known(status: int) -> None:
    """Also as Azure refuses what is archived."""
    with web_server() as web:
        web.faults = [lambda handler: handler.refuse(status)]
        url = f"http://127.0.0.1:{web.port}"
        options: Any = {"allow_http": True}
        store: Any = obstore.store.HTTPStore.from_url(url, client_options=options)
        with pytest.raises(exceptions.BaseError) as caught:
            obstore.get(store, "x")
    assert is_denied(caught.value)


@pytest.mark.parametrize("size", [1 << 20, 8 << 20])
def test_a_stream_is_read_from_objects(contents: dict[bytes, bytes], size: int) -> None:
    stream, reader = opened()
    listing = stream.listing
    buffer = memoryview(bytearray(stream.size))
    for offset in range(0, stream.size, size):
        reader.read_into(buffer[offset : offset + size], offset)
    reader.close()
    whole = b"".join(contents[listing.paths[row]] for row in listing.rows(Kind.FILE))
    assert xxhash.xxh3_128_hexdigest(buffer) == xxhash.xxh3_128_hexdigest(whole)
    assert (reader.bytes_read, reader.retries) == (len(whole), 0)


def test_the_only_reader_asks_once_for_each_object(
    contents: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fetch(store: Store, path: str, *rest: Any) -> tuple[Version, int]:
        asked.append(path)
        return real(store, path, *rest)

    real = Store.fetch
    monkeypatch.setattr(Store, "fetch", fetch)
    stream, reader = opened(is_only=True)
    buffer, size = memoryview(bytearray(stream.size)), 1 << 20

    def read(at: int) -> None:
        reader.read_into(buffer[at : at + size], at)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(0, stream.size, size)))
    reader.close()
    rows = list(stream.listing.rows(Kind.FILE))
    assert buffer == b"".join(contents[stream.listing.paths[row]] for row in rows)
    assert len(asked) == len(set(asked)) == sum(bool(stream.listing.sizes[row]) for row in rows)
    assert reader.bytes_read == stream.size


@pytest.mark.parametrize("part", [1_000, 3_000_000])
def test_an_object_that_was_replaced_is_not_mixed(
    bucket: Bucket, contents: dict[bytes, bytes], part: int
) -> None:
    _, reader = opened()
    buffer = memoryview(bytearray(part))
    reader.read_into(buffer, 0)
    bucket.store.put("folder/a.bin", os.urandom(3_000_001))
    with pytest.raises(IntegrityError) as caught:
        reader.read_into(buffer, 0)
    reader.close()
    assert str(caught.value) == (
        f"{URL}a.bin changed while it was read; submit again when nobody replaces it"
    )


def test_patterns_select_objects(contents: dict[bytes, bytes]) -> None:
    listings, selection = Listings(), Selection(("/below/**",), ("deep/",))
    look_at_prefix(URL, selection, listings, SETTINGS)
    listing = listings.get(URL, selection)
    assert listing
    assert listing.paths == [b"", b"below", b"below/b"]


def test_an_object_that_is_decompressed_is_read_by_its_own_name(bucket: Bucket) -> None:
    bucket.put("folder/a.gz", b"compressed")
    listings, selection = Listings(), Selection(decompress=("*",))
    look_at_prefix(URL, selection, listings, SETTINGS)
    listing = listings.get(URL, selection)
    assert listing
    assert listing.paths == [b"", b"a"]
    reader = open_prefix(URL, Stream(listing, b"\1\1"), SETTINGS)
    buffer = bytearray(10)
    reader.read_into(memoryview(buffer), 0)
    reader.close()
    assert buffer == b"compressed"


def test_marks_of_folders_are_no_files(bucket: Bucket) -> None:
    bucket.put("folder/", b"")
    bucket.put("folder/sub/", b"")
    bucket.put("folder/sub/a", b"a")
    listings = Listings()
    look_at_prefix(URL, EVERYTHING, listings, SETTINGS)
    listing = listings.get(URL)
    assert listing
    assert listing.paths == [b"", b"sub", b"sub/a"]
    assert list(listing.rows(Kind.FILE)) == [2]


def test_a_mark_with_nothing_beneath_it_is_an_empty_folder(bucket: Bucket) -> None:
    """Its key ends in a slash; others are files. (Azure's metadata: `test_stores`.)"""
    for key in ("a", "b/", "c/d/", "e", "e/", "left/", "f", "f/g"):
        bucket.put(f"folder/{key}", b"")
    listings, selection = Listings(), Selection(exclude=("left/",))
    look_at_prefix(URL, selection, listings, SETTINGS)
    listing = listings.get(URL, selection)
    assert listing
    files = [listing.paths[row] for row in listing.rows(Kind.FILE)]
    assert files == [b"a", b"f/g"]
    folders = [listing.paths[row] for row in listing.rows(Kind.FOLDER)]
    assert folders == [b"", b"b", b"c", b"c/d", b"e", b"f"]


@pytest.mark.parametrize(("page", "requests"), [(1000, {"": 3}), (3, {"": 2, "/folder/e": 1})])
def test_a_page_tells_which_empty_objects_are_marks_unless_they_are_few_in_a_large_folder(
    bucket: Bucket,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    page: int,
    requests: dict[str, int],
) -> None:
    for key in ("a", "b", "c", "e/", "f/1", "f/2", "f/3/"):
        bucket.put(f"folder/{key}", b"x" if key in "abc" else b"")
    monkeypatch.setattr(remote, "_PAGE", page)
    listings = Listings()
    with caplog.at_level(logging.INFO, "werkzeug"):
        look_at_prefix(URL, EVERYTHING, listings, SETTINGS)
    listing = listings.get(URL)
    assert listing
    assert [listing.paths[row] for row in listing.rows(Kind.FOLDER)] == [b"", b"e", b"f", b"f/3"]
    asked = (re.search(r"GET /bucket([^ ?]*)", record.getMessage()) for record in caplog.records)
    assert Counter(one[1] for one in asked if one) == requests


@pytest.mark.parametrize(
    ("objects", "other"),
    [
        ({"x": b"12345", "x/": b""}, "x/"),
        ({"x": b"12345", "x/": b"", "x/child": b"1"}, "x/child"),
        ({"x": b"", "x/": b"12345"}, "x/"),
        ({"x": b"12345", "x!": b"", "x/": b"123"}, "x/"),
    ],
)
def test_a_file_and_a_folder_of_one_name_are_refused(
    bucket: Bucket, objects: dict[str, bytes], other: str
) -> None:
    for key, data in objects.items():
        bucket.put(f"folder/{key}", data)
    with pytest.raises(SourceError) as caught:
        look_at_prefix(URL, EVERYTHING, Listings(), SETTINGS)
    assert str(caught.value) == (
        f"{URL}x and {URL}{other} are both objects, but a file and a folder cannot have one name; "
        "leave out the folder with exclude=/x/, or both with exclude=/x"
    )
    listings, selection = Listings(), Selection(exclude=("/x/",))
    look_at_prefix(URL, selection, listings, SETTINGS)
    listing = listings.get(URL, selection)
    assert listing
    assert b"x" in [listing.paths[row] for row in listing.rows(Kind.FILE)]


def test_an_object_with_data_whose_key_ends_in_a_slash_is_named(bucket: Bucket) -> None:
    bucket.put("folder/n/", b"12345")
    _, reader = opened()
    with pytest.raises(SourceError) as caught:
        reader.read_into(memoryview(bytearray(5)), 0)
    reader.close()
    assert str(caught.value) == (
        f"{URL}n/ is an object with data whose name ends in '/', so it cannot be a file; leave it "
        "out with exclude=/n"
    )


def test_an_object_with_data_in_the_place_of_the_folder_is_refused(bucket: Bucket) -> None:
    bucket.put("folder/", b"12345")
    with pytest.raises(SourceError) as caught:
        look_at_prefix(URL, EVERYTHING, Listings(), SETTINGS)
    assert str(caught.value) == (
        f"{URL} is a folder, and also the key of an object of 5 bytes, which cannot be a file in "
        "it; rename that object"
    )


def test_all_of_a_bucket_is_a_folder(contents: dict[bytes, bytes]) -> None:
    source = look_at_prefix("s3://bucket/", EVERYTHING, Listings(), SETTINGS)
    assert source.files == 6


def test_more_objects_than_one_answer_has(bucket: Bucket) -> None:
    for number in range(1001):
        bucket.put(f"folder/{number}", b"x")
    assert look_at_prefix(URL, EVERYTHING, Listings(), SETTINGS).files == 1001


def test_a_date_far_away_is_taken_as_the_last_that_a_file_can_have() -> None:
    when = datetime(9999, 12, 31, tzinfo=UTC)
    version = Version.of({"size": 1, "e_tag": None, "last_modified": when})
    assert list_objects(URL, {b"a": version}).mtimes[1] == 9_223_372_036 * 10**9


@pytest.mark.parametrize("exclude", [(), ("/below/",)])
def test_more_objects_than_one_stage_may_have_are_told(
    bucket: Bucket,
    contents: dict[bytes, bytes],
    exclude: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "MOST_OBJECTS", 2)
    if exclude:
        bucket.put("folder/below//x", b"")
    with pytest.raises(SourceError) as caught:
        look_at_prefix(URL, Selection(exclude=exclude), Listings(), SETTINGS)
    assert str(caught.value) == (
        f"{URL}: more than 2 objects are beneath it, too many for one stage; stage the folders in "
        "it one by one, or put the objects into archives"
    )


def test_nothing_beneath_is_told(bucket: Bucket) -> None:
    with pytest.raises(SourceError) as caught:
        look_at_prefix(URL, EVERYTHING, Listings(), SETTINGS)
    assert str(caught.value) == f"{URL}: there are no objects beneath it; check the URL"


def test_a_folder_without_its_slash_is_told(contents: dict[bytes, bytes]) -> None:
    for url in ("s3://bucket/folder", "s3://bucket/folder/below"):
        with pytest.raises(SourceError) as caught:
            look_at_object(url, SETTINGS)
        assert str(caught.value) == (
            f"{url}: no such object, but there are objects beneath it; for all of these, write a "
            "'/' at its end"
        )
    with pytest.raises(SourceError) as caught:
        look_at_object("s3://bucket/fold", SETTINGS)
    assert str(caught.value) == "s3://bucket/fold: no such object; check the URL"


def test_half_of_a_key_is_told(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(SourceError) as caught:
        look_at_prefix(URL, EVERYTHING, Listings(), SETTINGS)
    assert str(caught.value) == f"{URL}: Missing SecretAccessKey; check your credentials"


def test_a_value_of_the_environment_is_not_told(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "secret")
    with pytest.raises(SourceError) as caught:
        look_at_prefix(URL, EVERYTHING, Listings(), SETTINGS)
    assert str(caught.value) == f'{URL}: failed to parse "…" as boolean; check your credentials'


@pytest.mark.parametrize("part", [1_000, 3_000_000])
def test_the_version_that_a_url_names_is_read_whatever_the_object_is_now(
    bucket: Bucket, part: int
) -> None:
    bucket.keep_versions()
    data = os.urandom(3_000_000)
    url = f"s3://bucket/a?versionId={bucket.put('a', data)}"
    before = look_at_object(url, SETTINGS)
    bucket.store.put("a", b"another version")
    obstore.delete(bucket.store, "a")
    source = look_at_object(url, SETTINGS)
    assert source == before
    reader = ObjectReader(url, source, SETTINGS)
    buffer = memoryview(bytearray(part))
    reader.read_into(buffer, len(data) - part)
    reader.check()
    assert buffer == data[-part:]
    with pytest.raises(SourceError, match=r"^s3://bucket/a: no such object; check the URL$"):
        look_at_object("s3://bucket/a", SETTINGS)


def test_a_version_that_is_not_there_is_told(bucket: Bucket) -> None:
    bucket.keep_versions()
    bucket.put("a", b"data")
    url = "s3://bucket/a?versionId=none"
    with pytest.raises(SourceError) as caught:
        look_at_object(url, SETTINGS)
    assert str(caught.value) == f"{url}: no such object; check the URL"


@pytest.mark.parametrize(
    ("key", "named", "remedy"),
    [
        ("a//b", "a//b", ", or leave out its folder with exclude=/a/"),
        ("a/./b", "a/./b", ", or leave out its folder with exclude=/a/"),
        ("a/b/../c", "a/b/../c", ", or leave out its folder with exclude=/a/b/"),
        ('a/x"\ty/b', 'a/x"?y/b', ", or leave out its folder with exclude=/a/"),
        ("a\tb", "a?b", ""),
        ("/b", "/b", ""),
    ],
)
def test_a_key_that_is_no_path_is_named_and_may_be_left_out(
    bucket: Bucket, key: str, named: str, remedy: str
) -> None:
    for other in ("aa/x", "b", "empty/", "zz/deep/y"):
        bucket.put(f"folder/{other}", b"x" * (other != "empty/"))
    bucket.put(f"folder/{key}", b"x")
    with pytest.raises(SourceError) as caught:
        look_at_prefix(URL, EVERYTHING, Listings(), SETTINGS)
    assert str(caught.value) == (
        f"{URL}{named} cannot be the path of a file; rename that object{remedy}"
    )
    if remedy:
        listings, selection = Listings(), Selection(exclude=("/a/",))
        look_at_prefix(URL, selection, listings, SETTINGS)
        listing = listings.get(URL, selection)
        assert listing
        assert listing.paths == [
            b"", b"aa", b"aa/x", b"b", b"empty", b"zz", b"zz/deep", b"zz/deep/y",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (
            [b"a", b"a/b"],
            (
                f"{URL}a and {URL}a/b are both objects, but a file and a folder cannot have one "
                "name; leave out the folder with exclude=/a/, or both with exclude=/a"
            ),
        ),
        (
            [b"x/../b"],
            f"{URL}x/../b cannot be the path of a file; leave it out with exclude=/x/../b",
        ),
        (
            [b"x/a\nb"],
            f"{URL}x/a?b cannot be the path of a file; leave it out with exclude=/x/a?b",
        ),
        (
            [b"n" * 256],
            (
                f"{URL}{'n' * 256} cannot be the path of a file: a name in it has more than 255 "
                f"bytes; leave it out with exclude=/{'n' * 256}"
            ),
        ),
    ],
)
def test_what_cannot_be_a_file_is_told(paths: list[bytes], message: str) -> None:
    version = Version(1, 10**18, 5)
    with pytest.raises(SourceError) as caught:
        list_objects(URL, dict.fromkeys(paths, version))
    assert str(caught.value) == message
    listing = list_objects(URL, dict.fromkeys(paths, version), Patterns((), ("a", "x/", "n*")))
    assert listing.files == 0
    assert replace(version, etag='"etag"') == version
