"""List and read models and data sets of a real server that speaks as a hub does."""

from __future__ import annotations

import hashlib
import os
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from obstore import exceptions

from stager.base.errors import IntegrityError, SourceError
from stager.source import hub as module
from stager.source.access import look_at, open_tree
from stager.source.description import EVERYTHING, Listings, Selection
from stager.source.endpoints import RemoteSettings
from stager.source.hub import HubFiles, _file, _server
from stager.source.remote import ask_range
from stager.tree.listing import Kind
from stager.tree.stream import Stream
from tests.support.hub import Hub, serving
from tests.support.web import Handler, web_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stager.source.access import TreeReader
    from stager.source.description import Source
    from stager.tree.listing import Listing

SETTINGS = RemoteSettings(patience=5, allow_http=True, requests=4)
URL = "hf://org/model"
TOKEN = "hf_kTQXbGVexample"
#: Files of the model, with their sizes: more than a page of the server lists.
SIZES = {
    "weights.bin": 300_000, "config.json": 700, "empty": 0, ".gitattributes": 20,
    "below/deep/part é+%41.bin": 50_000, "below/b": 10,
}  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub(tmp_path / "hub")
    made.create()
    with serving(made):
        monkeypatch.setenv("HF_ENDPOINT", f"{made.endpoint}/")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield made


@pytest.fixture
def files(hub: Hub) -> dict[str, bytes]:
    data = {path: os.urandom(size) for path, size in SIZES.items()}
    hub.commit("models/org/model", data)
    return data


def look(url: str = URL, selection: Selection = EVERYTHING) -> tuple[Source, Listing]:
    listings = Listings()
    source = look_at(url, selection, listings, SETTINGS)
    listing = listings.get(url, selection)
    assert listing
    return source, listing


def opened(
    source: Source, listing: Listing, settings: RemoteSettings = SETTINGS
) -> tuple[Stream, TreeReader]:
    stream = Stream(listing, b"\1" * len(listing))
    return stream, open_tree(URL, source, stream, settings, EVERYTHING)


def read(size: int, settings: RemoteSettings = SETTINGS) -> tuple[dict[str, bytes], TreeReader]:
    """Read all files, ``size`` bytes of the stream at a time."""
    source, listing = look()
    stream, reader = opened(source, listing, settings)
    buffer = memoryview(bytearray(stream.size))
    try:
        for offset in range(0, stream.size, size):
            reader.read_into(buffer[offset : offset + size], offset)
    finally:
        reader.close()
    found = {os.fsdecode(listing.paths[row]): b"" for row in stream.rows}
    for part in stream.parts(0, stream.size):
        path = os.fsdecode(listing.paths[part.row])
        found[path] += buffer[part.start : part.start + part.length]
    return found, reader


def test_the_files_of_a_commit_are_a_folder(hub: Hub, files: dict[str, bytes]) -> None:
    source, listing = look()
    found = {os.fsdecode(listing.paths[row]): listing.sizes[row] for row in listing.rows(Kind.FILE)}
    assert found == SIZES
    assert [listing.paths[row] for row in listing.rows(Kind.FOLDER)] == [
        b"",
        b"below",
        b"below/deep",
    ]
    commit = hub.state["repositories"]["models/org/model"]["branches"]["main"]
    assert (source.files, source.mode, source.facts.revision) == (6, 0o700, commit)
    assert set(listing.mtimes) == {315_619_200 * 10**9}
    assert [one["path"].partition("/models/")[2] for one in hub.asked()] == [
        "org/model/revision/main",
        f"org/model/tree/{commit}?recursive=true",
        f"org/model/tree/{commit}?recursive=true&cursor=3",
        f"org/model/tree/{commit}?recursive=true&cursor=6",
    ]


@pytest.mark.parametrize("size", [8 << 20, 65_536])
def test_each_byte_is_read_once(hub: Hub, files: dict[str, bytes], size: int) -> None:
    found, reader = read(size)
    assert found == files
    assert (reader.bytes_read, reader.retries) == (350_730, 0)
    assert sum(hub.served().values()) == 350_730


def test_the_hub_is_asked_once_where_a_file_that_is_read_in_parts_is(
    hub: Hub, files: dict[str, bytes]
) -> None:
    read(50_000)
    assert len(hub.asked("cdn", "weights.bin")) == 7
    assert len(hub.asked("hub", "weights.bin")) == 1


def test_a_signed_url_that_expires_is_asked_for_again(hub: Hub, files: dict[str, bytes]) -> None:
    stream, reader = opened(*look())
    buffer = memoryview(bytearray(stream.size))
    middle = stream.size - 100_000
    reader.read_into(buffer[:middle], 0)
    hub.set(signature="2")
    reader.read_into(buffer[middle:], middle)
    reader.close()
    assert reader.retries == 0
    assert bytes(buffer[-300_000:]) == files["weights.bin"]


def test_only_what_a_commit_changed_is_another_version(hub: Hub, files: dict[str, bytes]) -> None:
    _, before = look()
    hub.commit("models/org/model", {**files, "config.json": b"x" * 700})
    _, after = look()
    names = [os.fsdecode(path) for path in before.paths]
    differ = [names[row] for row in range(len(names)) if before.inodes[row] != after.inodes[row]]
    assert (after.paths, after.mtimes, differ) == (before.paths, before.mtimes, ["config.json"])


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub, files: dict[str, bytes]) -> None:
    first = hub.state["repositories"]["models/org/model"]["branches"]["main"]
    second = hub.commit("models/org/model", {"a": b"1"}, "refs/pr/1")
    found = [look(f"{URL}{at}")[0] for at in ("", "@refs/pr/1", f"@{first}")]
    assert [(one.facts.revision, one.files) for one in found] == [
        (first, 6), (second, 1), (first, 6)
    ]  # fmt: skip


def test_a_data_set_is_read_as_a_model_is(hub: Hub) -> None:
    hub.commit("datasets/org/set", {"train.parquet": b"rows"})
    source, listing = look("hf://datasets/org/set")
    stream = Stream(listing, b"\1" * len(listing))
    reader = open_tree("hf://datasets/org/set", source, stream, SETTINGS, EVERYTHING)
    buffer = bytearray(4)
    reader.read_into(memoryview(buffer), 0)
    reader.close()
    assert buffer == b"rows"
    assert hub.asked()[-1]["path"].startswith("/datasets/org/set/resolve/")


def test_patterns_select_files(files: dict[str, bytes]) -> None:
    _, listing = look(selection=Selection(("*.json", "/below/**"), ("deep/",)))
    assert listing.paths == [b"", b"below", b"below/b", b"config.json"]


@pytest.mark.parametrize("size", [8 << 20, 65_536])
def test_the_token_goes_to_the_hub_and_to_no_other_server(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    hub.set(token=TOKEN)
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}\n")
    found, _ = read(size)
    assert found == files
    assert {one["authorization"] for one in hub.asked("hub")} == {f"Bearer {TOKEN}"}
    assert {one["authorization"] for one in hub.asked("cdn")} == {None}


def test_a_model_that_was_renamed_is_found_with_the_token(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.set(token=TOKEN, renamed={"org/old": "org/model"})
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert look("hf://org/old")[0].files == 6


@pytest.mark.parametrize(
    ("url", "old", "new"),
    [
        ("hf://gpt2", "/gpt2/", "/openai-community/gpt-2/"),
        ("hf://datasets/squad", "/squad/", "/rajpurkar/squad-1/"),
    ],
)
def test_what_has_no_organization_is_found(hub: Hub, url: str, old: str, new: str) -> None:
    kind = "datasets" if "datasets" in url else "models"
    hub.commit(kind + new.removesuffix("/"), {"part": b"rows"})
    hub.set(renamed={old: new})
    source, listing = look(url)
    stream = Stream(listing, b"\1" * len(listing))
    buffer = bytearray(4)
    with closing(open_tree(url, source, stream, SETTINGS, EVERYTHING)) as reader:
        reader.read_into(memoryview(buffer), 0)
    assert buffer == b"rows"


def test_a_hub_that_is_elsewhere_gets_no_token_there(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.set(token=TOKEN, renamed={"/api/models/org/model": f"{hub.cdn}/x"})
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(SourceError) as caught:
        look()
    assert str(caught.value) == (
        f"{URL}: the store answered with 302 Found (it is redirected to 127.0.0.1); tell those who "
        "run the store"
    )
    assert hub.asked("cdn") == []


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (
            "",
            (
                "it does not exist, or is not shown to you (as the hub says); check the URL, and "
                "that HF_TOKEN is in the job's environment and still valid"
            ),
        ),
        (
            "hf_other",
            (
                "you may not read it (as the hub says); ask for access on its page, with the "
                "account that HF_TOKEN in the job's environment is of"
            ),
        ),
    ],
)
def test_a_model_that_is_closed_is_told(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, token: str, message: str
) -> None:
    source, listing = look()
    hub.set(token=TOKEN)
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(SourceError) as caught:
        look()
    assert str(caught.value) == f"{URL}: {message}"
    _, reader = opened(source, listing)
    with pytest.raises(SourceError) as caught:
        reader.read_into(memoryview(bytearray(20)), 0)
    reader.close()
    assert str(caught.value) == f"{URL}/.gitattributes: {message}".replace(" (as the hub says)", "")


@pytest.mark.parametrize("token", ["a b", "a\nb", "tök"])
def test_what_cannot_be_a_token_is_refused_and_not_repeated(
    files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(SourceError) as caught:
        look()
    assert str(caught.value) == (
        "HF_TOKEN in the job's environment has blanks or other characters that "
        "no token has; set it to the token alone"
    )


def test_what_is_not_there_is_told(hub: Hub, files: dict[str, bytes]) -> None:
    for url in ("hf://org/absent", f"{URL}@absent"):
        with pytest.raises(SourceError) as caught:
            look(url)
        assert str(caught.value) == f"{url}: no such object (as the hub says); check the URL"
    hub.commit("models/org/empty", {})
    with pytest.raises(SourceError) as caught:
        look("hf://org/empty")
    assert str(caught.value) == "hf://org/empty: there are no files in it; check the URL"


def test_a_hub_that_lists_without_end_is_given_up(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_ENTRIES", 7)
    with pytest.raises(SourceError) as caught:
        look()
    assert str(caught.value) == (
        f"{URL}: {hub.endpoint} lists more than 7 files and folders, too many for one stage; tell "
        "those who keep it to put them into archives"
    )


def test_an_answer_that_is_no_hubs_is_told(hub: Hub, files: dict[str, bytes]) -> None:
    repositories = hub.state["repositories"]
    repositories["models/org/model"]["branches"]["main"] = "../x"
    repositories["models/org/model"]["commits"]["../x"] = {}
    hub.set(repositories=repositories)
    with pytest.raises(SourceError) as caught:
        look()
    assert str(caught.value) == (
        f"{URL}: {hub.endpoint} does not answer as a hub does; check HF_ENDPOINT in the job's "
        "environment"
    )


def test_what_may_pass_is_tried_again(hub: Hub, files: dict[str, bytes]) -> None:
    hub.faults = [503, 429]
    source, listing = look()
    assert source.files == 6
    hub.faults = [500, 503]
    _, reader = opened(source, listing)
    reader.read_into(memoryview(bytearray(20)), 0)
    reader.close()
    assert reader.retries == 2


def test_a_hub_that_fails_for_too_long_is_given_up(hub: Hub) -> None:
    hub.faults = [503] * 100
    with pytest.raises(SourceError) as caught:
        look_at(URL, EVERYTHING, Listings(), replace(SETTINGS, patience=0.3))
    text, _, end = str(caught.value).partition(", ")
    assert text == (f"{URL}: the store answered with 503 Service Unavailable (as the hub says)")
    assert end.endswith(" times in 0 s; submit again later, or tell those who run the store")


def test_a_hub_that_cannot_be_reached_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint, text in (
        ("http://no-such-host.invalid", "its host is not known here, "),
        ("http://127.0.0.1:1", "the connection failed, "),
    ):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(SourceError) as caught:
            look_at(URL, EVERYTHING, Listings(), replace(SETTINGS, patience=0.2))
        assert str(caught.value).startswith(f"{URL}: {text}")


def test_a_file_of_another_size_than_was_listed_is_refused(
    hub: Hub, files: dict[str, bytes]
) -> None:
    source, listing = look()
    stream, reader = opened(source, listing)
    tree = hub.state["repositories"]["models/org/model"]["commits"][source.facts.revision]
    (hub.folder / "blobs" / tree["weights.bin"]).write_bytes(b"long" * 100_000)
    with pytest.raises(IntegrityError) as caught:
        reader.read_into(memoryview(bytearray(100)), stream.size - 100)
    reader.close()
    assert str(caught.value) == (
        f"{URL}/weights.bin changed while it was read; submit again when nobody replaces it"
    )


def test_a_model_can_be_laid_out_as_in_the_hubs_own_cache(hub: Hub) -> None:
    data = {"a.bin": os.urandom(50_000), "below/b": b"b", "same": b"b", "c.txt": b"no"}
    commit = hub.commit("models/org/model", data)
    selection = Selection(exclude=("*.txt",), as_cache=True)
    listings = Listings()
    source = look_at(URL, selection, listings, SETTINGS)
    listing = listings.get(URL, selection)
    assert listing
    tree = hub.state["repositories"]["models/org/model"]["commits"][commit]
    above, large = f"snapshots/{commit}", hashlib.sha256(data["a.bin"]).hexdigest()
    names = list(map(os.fsdecode, listing.paths))
    assert {names[row]: listing.sizes[row] for row in listing.rows(Kind.FILE)} == {
        f"blobs/{large}": 50_000, f"blobs/{tree['same']}": 1, "refs/main": 40,
    }  # fmt: skip
    assert {names[row]: target.decode() for row, target in listing.targets.items()} == {
        f"{above}/a.bin": f"../../blobs/{large}",
        f"{above}/same": f"../../blobs/{tree['same']}",
        f"{above}/below/b": f"../../../blobs/{tree['same']}",
    }  # fmt: skip
    assert [os.fsdecode(listing.paths[row]) for row in listing.rows(Kind.FOLDER)] == [
        "", "blobs", "refs", "snapshots", above, f"{above}/below"
    ]  # fmt: skip
    stream = Stream(listing, b"\1" * len(listing))
    reader = open_tree(URL, source, stream, SETTINGS, Selection(as_cache=True))
    buffer = memoryview(bytearray(stream.size))
    for offset in range(0, stream.size, 30_000):
        reader.read_into(buffer[offset : offset + 30_000], offset)
    reader.close()
    found: dict[str, bytes] = {}
    for part in stream.parts(0, stream.size):
        name = os.fsdecode(listing.paths[part.row])
        found[name] = bytes(buffer[part.start : part.start + part.length])
    assert found == {
        f"blobs/{large}": data["a.bin"], f"blobs/{tree['same']}": b"b",
        "refs/main": commit.encode(),
    }  # fmt: skip


def test_the_cache_of_a_commit_or_of_a_deep_branch_has_its_refs(hub: Hub) -> None:
    commit = hub.commit("models/org/model", {"a": b"a"}, "refs/pr/1")
    selection = Selection(as_cache=True)
    deep = ["refs", "refs/refs", "refs/refs/pr", "refs/refs/pr/1"]
    for revision, refs in (("refs/pr/1", deep), (commit, [])):
        listings = Listings()
        url = f"{URL}@{revision}"
        look_at(url, selection, listings, SETTINGS)
        listing = listings.get(url, selection)
        assert listing
        assert [path.decode() for path in listing.paths if path.startswith(b"refs")] == refs


@pytest.mark.parametrize(
    "change",
    [{"path": "a\ud800"}, {"size": 2**70}, {"size": -1}, {"size": True}, {"oid": "x"}, {"path": 5}],
)
def test_an_odd_entry_of_a_listing_is_no_file(change: dict[str, object]) -> None:
    entry = {"path": "a", "size": 1, "oid": "0" * 40}
    assert _file(entry).path == "a"
    with pytest.raises((ValueError, TypeError)):
        _file({**entry, **change})


def test_a_signed_url_follows_no_redirection_to_a_third_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    files = HubFiles("hf://org/model", "0" * 40, RemoteSettings(allow_http=True))
    with web_server() as web, web_server() as third:
        web.elsewhere, web.faults = third.port, [Handler.redirect_elsewhere]
        with pytest.raises(exceptions.GenericError):
            ask_range(files._store(f"{web.url}?sig=secret"), "", 0, 1, {})
        assert (web.log, third.log) == (["bytes=0-0"], [])


def test_a_redirection_to_no_url_leads_to_no_server() -> None:
    for url in ("https://h:99999/x", "https://[bad/x"):
        assert _server(url) == ("", None, None)
