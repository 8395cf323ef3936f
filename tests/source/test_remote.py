"""Read objects from a real web server, also one that fails."""

from __future__ import annotations

import os
import re
import ssl
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import IntegrityError, SourceError
from stager.source import remote
from stager.source.endpoints import URL_SECRETS, RemoteSettings, Secret, as_text
from stager.source.remote import ObjectReader, look_at_object
from stager.source.schemes import Location
from tests.support.web import Handler, web_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.web import Fault, Web

SETTINGS = RemoteSettings(patience=5, allow_http=True)


@pytest.fixture
def web() -> Iterator[Web]:
    with web_server() as server:
        server.data = os.urandom(3_000_000)
        yield server


def read(web: Web, settings: RemoteSettings = SETTINGS) -> tuple[bytes, ObjectReader]:
    """Read all of the object by two requests."""
    source = look_at_object(web.url, settings)
    reader = ObjectReader(web.url, source, settings)
    buffer = bytearray(source.facts.size)
    middle = len(buffer) // 2
    reader.read_into(memoryview(buffer)[:middle], 0)
    reader.read_into(memoryview(buffer)[middle:], middle)
    return bytes(buffer), reader


def test_an_object_is_identified_by_size_time_and_etag(web: Web) -> None:
    source = look_at_object(web.url, SETTINGS)
    assert (source.facts.size, source.facts.revision) == (3_000_000, '"1"')
    assert source.facts.mtime_ns == 1_795_255_200 * 10**9
    assert (source.mode, source.is_tree, source.allocated) == (0o600, False, 3_000_000)
    web.etag = '"2"'
    assert look_at_object(web.url, SETTINGS).facts == replace(source.facts, revision='"2"')


def test_each_byte_is_asked_for_once(web: Web) -> None:
    data, reader = read(web)
    assert data == web.data
    assert web.log == ["HEAD", "bytes=0-1499999", "bytes=1500000-2999999"]
    assert (web.sent, reader.bytes_read, reader.retries) == (3_000_000, 3_000_000, 0)


@pytest.mark.parametrize(
    ("faults", "retries"),
    [
        ([lambda handler: handler.refuse(503)] * 3, 3),
        ([lambda handler: handler.refuse(429)], 1),
        ([lambda handler: handler.refuse(500)], 1),
        ([Handler.cut_off], 1),
        ([Handler.cut_off] * 4, 4),
        ([Handler.reset], 1),
        ([Handler.say_less], 1),
    ],
)
def test_what_may_pass_is_tried_again(web: Web, faults: list[Fault], retries: int) -> None:
    web.faults = list(faults)
    data, reader = read(web)
    assert data == web.data
    assert (reader.retries, reader.bytes_read) == (retries, 3_000_000)


def test_what_follows_an_answer_is_not_part_of_it(web: Web) -> None:
    web.faults = [Handler.send_more_than_it_says]
    data, reader = read(web)
    assert data == web.data
    # If the connection is used again, what follows there is no answer.
    assert reader.retries <= 1


def test_after_a_short_body_only_the_rest_is_asked_for(web: Web) -> None:
    web.faults = [Handler.cut_off]
    read(web)
    assert web.log[1:] == ["bytes=0-1499999", web.log[2], "bytes=1500000-2999999"]
    assert int(web.log[2].removeprefix("bytes=").partition("-")[0]) > 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda handler: handler.refuse(404), "no such object; check the URL"),
        (
            lambda handler: handler.refuse(
                403, b"<Error><Code>AccessDenied</Code><Message>Not you</Message></Error>"
            ),
            (
                "you may not read it (AccessDenied: Not you); check the URL (in its file, if it "
                "has a secret), and ~/.netrc"
            ),
        ),
        (
            lambda handler: handler.refuse(401),
            (
                "the server does not know you; check the URL (in its file, if it has a secret), "
                "and ~/.netrc"
            ),
        ),
        (
            lambda handler: handler.refuse(418),
            "the store answered with 418 I'm a teapot; tell those who run the store",
        ),
        (
            Handler.send_more,
            "it sends more bytes than it was asked for; tell those who run the store",
        ),
        (
            Handler.give_no_size,
            (
                "the server's answer cannot be used (Failed to parse value for CONTENT_RANGE "
                'header: "bytes 0-1499999/*"); stage it from elsewhere, or tell those who run the '
                "server"
            ),
        ),
        (
            Handler.redirect_in_circle,
            "it is redirected in a circle, or too often; check the URL",
        ),
        (
            Handler.redirect_nowhere,
            (
                "it is redirected, but not told where to; check the URL, and for s3: that "
                "AWS_REGION is the region of the bucket"
            ),
        ),
    ],
)
def test_what_will_not_pass_is_told_at_once(web: Web, fault: Fault, message: str) -> None:
    web.faults = [fault]
    with pytest.raises(SourceError) as caught:
        read(web)
    assert str(caught.value) == f"{web.url}: {message}"


def test_a_redirect_to_a_url_without_tls_is_told(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
         "-addext", "basicConstraints=critical,CA:FALSE", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with web_server(tls) as server:
        url = f"https://localhost:{server.port}/object"
        server.refusal, server.faults = 405, [Handler.redirect_to_http]
        with pytest.raises(SourceError) as caught:
            look_at_object(url, RemoteSettings(patience=5, ca_file=certificate))
    assert str(caught.value) == f"{url}: it is redirected to a URL that is not https; check the URL"


@pytest.mark.parametrize("status", [403, 405, 501])
def test_a_server_that_gives_no_headers_alone_is_asked_for_a_byte(web: Web, status: int) -> None:
    """As some do, and what signs only requests for data."""
    web.refusal = status
    data, _ = read(web)
    assert data == web.data
    assert web.log[:2] == ["HEAD", "bytes=0-0"]
    web.data = b""
    assert look_at_object(web.url, SETTINGS).facts.size == 0


def test_an_answer_whose_headers_cannot_be_used_is_told_at_once(web: Web) -> None:
    web.modified = "yesterday"
    with pytest.raises(SourceError) as caught:
        read(web)
    assert str(caught.value) == (
        f"{web.url}: the server's answer cannot be used (Invalid last modified 'yesterday': input "
        "contains invalid characters); stage it from elsewhere, or tell those who run the server"
    )
    assert web.log == ["HEAD"]


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (
            400,
            b"<Code>ExpiredToken</Code><Message>It has expired.</Message><Token-0>x</Token-0>",
            (
                "your credentials have expired (ExpiredToken: It has expired.); renew them and "
                "submit again"
            ),
        ),
        (
            403,
            (
                b"<Code>AuthenticationFailed</Code><Message>It failed.\nRequestId:1</Message>"
                b"<Detail>Signature not valid in the specified time frame: Expiry [then]</Detail>"
            ),
            (
                "your credentials have expired (AuthenticationFailed: It failed.: Signature not "
                "valid in the specified time frame: Expiry [then]); renew them and submit again"
            ),
        ),
        (
            400,
            b"<Code>AuthorizationHeaderMalformed</Code><Message>expecting 'us-east-1'</Message>",
            (
                "the store answered with 400 Bad Request (AuthorizationHeaderMalformed: expecting "
                "'us-east-1'); set AWS_REGION to the region of the bucket"
            ),
        ),
        (
            403,
            b"<Code>AccessDenied</Code>",
            (
                "you may not read it (AccessDenied); check the URL (in its file, if it has a "
                "secret), and ~/.netrc"
            ),
        ),
    ],
)
def test_a_refusal_is_told_in_the_stores_words(
    web: Web, status: int, text: bytes, message: str
) -> None:
    web.refusal = status

    def refuse(handler: Handler) -> bool:
        return handler.refuse(status, text)

    web.faults = [refuse]
    with pytest.raises(SourceError) as caught:
        look_at_object(web.url, SETTINGS)
    assert str(caught.value) == f"{web.url}: {message}"


def test_a_server_that_hangs_is_given_up(web: Web) -> None:
    web.faults = [Handler.hang] * 9
    with pytest.raises(SourceError) as caught:
        read(web, replace(SETTINGS, patience=0.5))
    assert re.sub(r"\d+ s", "N s", str(caught.value)) == (
        f"{web.url}: the server did not answer, once in N s; submit again later, or tell those who "
        "run the store"
    )


def test_a_store_that_fails_for_too_long_is_given_up(web: Web) -> None:
    web.faults = [lambda handler: handler.refuse(503, b"<Code>SlowDown</Code>")] * 100
    with pytest.raises(SourceError) as caught:
        read(web, replace(SETTINGS, patience=1))
    text, _, end = str(caught.value).partition(", ")
    assert text == f"{web.url}: the store answered with 503 Service Unavailable (SlowDown)"
    times, rest = end.split(" ", 1)
    assert int(times) > 1
    assert rest == "times in 1 s; submit again later, or tell those who run the store"


@pytest.mark.parametrize("path", ["x", "redirect/certificate.pem"])
def test_a_server_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(SourceError) as caught:
        look_at_object(f"http://127.0.0.1:1/{path}", replace(SETTINGS, patience=0.2))
    assert str(caught.value).startswith(f"http://127.0.0.1:1/{path}: the connection failed, ")


def test_a_name_that_does_not_resolve_is_told() -> None:
    with pytest.raises(SourceError) as caught:
        look_at_object("http://no-such-host.invalid/x", replace(SETTINGS, patience=0.2))
    assert "its host is not known here" in str(caught.value)


def test_an_object_that_is_replaced_is_not_mixed(web: Web) -> None:
    source = look_at_object(web.url, SETTINGS)
    reader = ObjectReader(web.url, source, SETTINGS)
    buffer = memoryview(bytearray(1000))
    reader.read_into(buffer, 0)
    web.etag = '"2"'
    message = (
        f'{web.url} changed while it was read: its ETag was "1" and is "2", with the same size and '
        "date; submit again when nobody replaces it, or have its servers give one ETag"
    )
    with pytest.raises(IntegrityError) as caught:
        reader.read_into(buffer, 1000)
    assert str(caught.value) == message
    with pytest.raises(IntegrityError) as caught:
        reader.check()
    assert str(caught.value) == message


def test_an_object_of_another_date_has_changed_at_once(web: Web) -> None:
    source = look_at_object(web.url, SETTINGS)
    reader = ObjectReader(web.url, source, SETTINGS)
    web.modified, web.etag = "Sat, 21 Nov 2026 10:00:01 GMT", '"2"'
    with pytest.raises(IntegrityError) as caught:
        reader.read_into(memoryview(bytearray(1000)), 0)
    assert str(caught.value) == (
        f"{web.url} changed while it was read; submit again when nobody replaces it"
    )
    assert web.log == ["HEAD", "bytes=0-999", "HEAD"]


def test_servers_with_an_etag_each_are_asked_again_until_one_has_the_first(web: Web) -> None:
    web.faults = [Handler.answer_as_another_server] * 5
    data, reader = read(web)
    assert data == web.data
    assert (reader.retries, reader.bytes_read) == (5, 3_000_000)
    assert web.log[1:] == ["bytes=0-1499999", "HEAD", *["bytes=0-1499999"] * 5,
                           "bytes=1500000-2999999"]  # fmt: skip


def test_a_server_that_refuses_its_own_etag_is_asked_without_it(web: Web) -> None:
    def refuse(handler: Handler) -> bool:
        return "If-Match" in handler.headers and handler.refuse(412)

    web.faults = [refuse] * 9
    data, reader = read(web)
    assert data == web.data
    assert reader.retries == 2


def test_an_object_that_becomes_empty_has_changed(web: Web) -> None:
    source = look_at_object(web.url, SETTINGS)
    reader = ObjectReader(web.url, source, SETTINGS)
    web.data = b""
    with pytest.raises(IntegrityError) as caught:
        reader.read_into(memoryview(bytearray(1000)), 0)
    assert str(caught.value) == (
        f"{web.url} changed while it was read; submit again when nobody replaces it"
    )


def test_a_server_that_tells_no_versions_apart_is_refused(web: Web) -> None:
    web.etag = web.modified = ""
    with pytest.raises(SourceError) as caught:
        look_at_object(web.url, SETTINGS)
    assert str(caught.value) == (
        f"{web.url}: the server gives neither an ETag nor a date (Last-Modified), so its versions "
        "cannot be told apart; stage it from elsewhere"
    )


def test_without_an_etag_the_time_tells_versions_apart(web: Web) -> None:
    web.etag = ""
    data, _ = read(web)
    assert data == web.data


@pytest.mark.parametrize(
    ("url", "job"),
    [
        (
            "s3://bucket/x",
            {
                "AWS_ENDPOINT_URL": "{}", "AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": "S",
                "AWS_SESSION_TOKEN": "secret",
            },
        ),
        (
            "az://account/container/x",
            {"AZURE_STORAGE_ENDPOINT": "{}", "AZURE_STORAGE_SAS_TOKEN": "sig=secret"},
        ),
        ("gs://bucket/x", {"GOOGLE_BASE_URL": "{}", "GOOGLE_SKIP_SIGNATURE": "true"}),
    ],
)  # fmt: skip
def test_no_secret_follows_a_redirection_of_a_store(
    url: str, job: dict[str, str], web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one to the vendor's domains, where anybody may have an account, from another endpoint."""
    for name, value in job.items():
        monkeypatch.setenv(name, value.format(f"http://127.0.0.1:{web.port}"))
    web.refusal = 405
    for host in (
        "localhost",
        "bucket.s3.amazonaws.com",
        "x.blob.core.windows.net",
        "x.googleapis.com",
    ):
        web.faults, web.log = [Handler.redirect_elsewhere], []
        with web_server() as other:
            web.elsewhere, web.elsewhere_host = other.port, host
            with pytest.raises(SourceError) as caught:
                look_at_object(url, SETTINGS)
        assert (other.log, len(web.log)) == ([], 2)
        assert str(caught.value) == (
            f"{url}: it is redirected to another server, which must not get your credentials; name "
            "that server's own URL, or tell those who run the store"
        )


@pytest.mark.parametrize(
    ("url", "job", "hosts"),
    [
        ("s3://bucket/x", {}, ["amazonaws.com", "amazonaws.com.cn", "sts.us-east-1.amazonaws.com"]),
        (
            "s3://bucket/x",
            {"AWS_ENDPOINT_URL": "https://S3.site:9000", "AWS_REGION": "eu-west-1"},
            ["s3.site", "sts.eu-west-1.amazonaws.com"],
        ),
        ("az://account/c/x", {}, ["windows.net", "microsoftonline.com"]),
        (
            "az://account/c/x",
            {"AZURE_ENDPOINT": "https://x.site", "AZURE_AUTHORITY_HOST": "https://login.site"},
            ["x.site", "microsoftonline.com", "login.site"],
        ),
        (
            "gs://bucket/x",
            {"GOOGLE_BASE_URL": "https://gs.site"},
            ["gs.site", "accounts.google.com", "oauth2.googleapis.com", "metadata.google.internal"],
        ),
    ],
)
def test_secrets_go_to_the_endpoint_or_the_vendor_and_to_who_is_asked_for_keys(
    url: str, job: dict[str, str], hosts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    found = remote._hosts(Location.parse(url), has_query=False)
    assert [host for host in found if host not in ("169.254.0.0/16", "fd00:ec2::254")] == hosts


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ("projects/group%2Fname/raw", "projects/group%2Fname/raw"),
        ("a%20b%2Bc", "a%20b%2Bc"),
        ("a b+c@1,d;e=f(g)", "a%20b+c@1,d;e=f(g)"),
        ("100%/ä[1]", "100%25/%C3%A4%5B1%5D"),
    ],
)
def test_the_path_of_a_url_is_sent_as_it_is_written(written: str, sent: str, web: Web) -> None:
    url = f"http://127.0.0.1:{web.port}/{written}"
    source = look_at_object(url, SETTINGS)
    buffer = bytearray(9)
    ObjectReader(url, source, SETTINGS).read_into(memoryview(buffer), 0)
    assert (bytes(buffer), web.path) == (web.data[:9], f"/{sent}")


def test_azure_is_asked_for_the_version_that_a_url_names(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{web.port}")
    monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "true")
    url = "az://account/container/x?versionid=2026-11-28T14:30:05.1234567Z"
    source = look_at_object(url, SETTINGS)
    buffer = bytearray(9)
    ObjectReader(url, source, SETTINGS).read_into(memoryview(buffer), 0)
    assert (bytes(buffer), web.path) == (
        web.data[:9],
        "/container/x?versionid=2026-11-28T14%3A30%3A05.1234567Z",
    )


@pytest.mark.parametrize("refusal", [0, 404, 405])
def test_what_answers_no_request_for_headers_alone_is_read(refusal: int, web: Web) -> None:
    web.tells_length, web.refusal = False, refusal
    data, _ = read(web)
    assert data == web.data
    assert web.log == ["HEAD", "bytes=0-0", "bytes=0-1499999", "bytes=1500000-2999999"]


def test_what_is_secret_in_a_url_is_sent_and_goes_nowhere_else(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query goes to the server alone; another one gets neither user nor password."""
    path = "/folder/object.bin"
    monkeypatch.setenv(URL_SECRETS, as_text({web.url: Secret("me:word", "a=%2F&sig=secret")}))
    data, _ = read(web)
    assert (data, web.path) == (web.data, f"{path}?a=%2F&sig=secret")
    assert web.headers["authorization"] == "Basic bWU6d29yZA=="
    web.refusal = 405
    with web_server() as other:
        other.data, web.elsewhere = b"other", other.port
        web.faults = [Handler.redirect_elsewhere]
        with pytest.raises(SourceError) as caught:
            look_at_object(web.url, SETTINGS)
        assert other.log == []
        assert str(caught.value) == (
            f"{web.url}: it is redirected to another server, which must not get your credentials; "
            "name that server's own URL, or tell those who run the store"
        )
        monkeypatch.setenv(URL_SECRETS, as_text({web.url: Secret("me:word")}))
        web.faults = [Handler.redirect_elsewhere]
        assert look_at_object(web.url, SETTINGS).facts.size == 5
        assert (other.path, "authorization" in other.headers) == (path, False)


@pytest.mark.parametrize("status", [302, 400, 401, 403, 404, 418])
def test_a_refusal_does_not_show_what_is_secret(
    status: int, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URL_SECRETS, as_text({web.url: Secret("me:word", "sig=5ec2e7")}))
    web.refusal = 405
    web.faults = [lambda handler: handler.refuse(status, b"no")]
    with pytest.raises(SourceError) as caught:
        look_at_object(web.url, SETTINGS)
    assert "5ec2e7" not in str(caught.value)
    assert str(caught.value).startswith(f"{web.url}: ")


def test_a_web_server_may_send_to_another_one(web: Web) -> None:
    web.refusal = 405
    web.faults = [Handler.redirect_elsewhere]
    with web_server() as other:
        other.data = b"other"
        web.elsewhere = other.port
        assert look_at_object(web.url, SETTINGS).facts.size == 5


@pytest.mark.parametrize("url", ["s3://bucket/x", "az://account/container/x", "gs://bucket/x"])
def test_without_credentials_it_is_told_how_to_give_them(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer comes from where a cloud's machine would find its own."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(SourceError) as caught:
        look_at_object(url, replace(SETTINGS, proxy="http://127.0.0.1:1", patience=0.2))
    assert str(caught.value) == (
        f"{url}: no credentials were found for it; put yours into the job's environment, or, for "
        "what is public, AWS_SKIP_SIGNATURE=true (AZURE_SKIP_SIGNATURE, GOOGLE_SKIP_SIGNATURE)"
    )
