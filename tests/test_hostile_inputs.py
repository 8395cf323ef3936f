"""Whatever another user or node wrote: it is read or refused, in bounded memory, never a traceback.

Each parser gets at least 30 hostile variants of a valid text. It may raise the errors by which its
callers know what is not valid, and no other. (Archives: archive/test_unpack.py and here.)
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tracemalloc
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

import pytest

from stager.base import paths
from stager.base.codec import codec_of
from stager.base.errors import Failure, LaunchError, StageError
from stager.base.events import event
from stager.base.outcome import Outcome
from stager.cli.progress import Progress
from stager.launch.health import Pulses
from stager.launch.nodes import Mailbox, frames
from stager.launch.run import run
from stager.node.agent import Done, Enough, Evict, NodeResult, Refused, Stays, command_of, text_of
from stager.store.leases import uses_of
from stager.store.record import Record
from stager.store.states import DiskRoom, Entry, NodeStatus, Unread
from stager.tree.listing import Listing
from stager.tree.table import Table
from stager.tree.walk import walk
from tests.support.archives import NO_LIMITS, pack, unpack
from tests.support.hostile import json_variants, variants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

COUNT = 60
#: Bytes of memory that a parser may take for an input of at most half a megabyte.
MOST_MEMORY = 48 << 20


def read_all(
    parse: Callable[[bytes], object],
    inputs: Iterable[bytes],
    *refusals: type[Exception],
) -> int:
    """Parse all ``inputs``. Return how many were refused; any other exception fails the test."""
    refused = 0
    for text in inputs:
        tracemalloc.start()
        try:
            parse(text)
        except refusals:
            refused += 1
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < MOST_MEMORY + 20 * len(text), text[:100]
    return refused


def of_json(text: str) -> Iterable[bytes]:
    """Return variants of a JSON text, of its values and of its bytes."""
    values = (one.encode() for one in json_variants(text, COUNT))
    return chain(values, variants(text.encode(), COUNT))


@pytest.fixture
def listing(tmp_path: Path) -> Listing:
    """Return the listing of a folder with an entry of each kind."""
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/file").write_bytes(b"data" * 1000)
    os.link(folder / "sub/file", folder / "second")
    (folder / "link").symlink_to("sub/file")
    with (folder / "sparse").open("wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"data")
    return walk(str(folder))


RECORD = """{"version": 8, "source": "/data/img", "destination": "/nvme/img",
 "source_facts": {"size": 10, "mtime_ns": -20, "ctime_ns": 30, "inode": 40, "revision": ""},
 "copy_facts": {"size": 10, "mtime_ns": -20, "inode": 50, "owner": 60},
 "digest": "00112233445566778899aabbccddeeff", "staged_at": 70, "used_at": 80, "used_by_job": 90,
 "lifetime": "cache", "pinned": false, "made": "", "share": "none", "tree": null}"""


def test_records() -> None:
    Record.from_json(RECORD)
    assert read_all(Record.from_json, of_json(RECORD), ValueError) > COUNT


def test_listings(listing: Listing) -> None:
    text = listing.to_bytes()
    assert Listing.from_bytes(text) == listing
    assert read_all(Listing.from_bytes, variants(text, 3 * COUNT), ValueError) > COUNT


def test_tables(listing: Listing) -> None:
    text = Table.of(listing, listing, bytes(16 * len(listing)), {1: b"data"}).to_bytes()
    Table.from_bytes(text)
    assert read_all(Table.from_bytes, variants(text, 3 * COUNT), ValueError) > COUNT


def test_lists_of_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "RUN_FOLDER", str(tmp_path))
    (tmp_path / "7").mkdir()
    file = tmp_path / "7/17.uses"

    def parse(text: bytes) -> None:
        file.write_bytes(text)
        uses_of(7, 17)

    assert read_all(parse, variants(b"/nvme/a\0/nvme/b\0" * 100, COUNT)) == 0
    file.unlink()
    os.mkfifo(file)
    assert uses_of(7, 17) == frozenset()


STATUS = NodeStatus(
    [Entry("/nvme/a", "/data/a", 1, "0" * 32, 2, 3, 4, "cache", False, [5], "ready", 6, False)],
    [DiskRoom("/nvme", 1, 2)],
    [Unread("/nvme/x", "why")],
)
RESULT = NodeResult(
    [Done("/nvme/a", 1)],
    [Refused(2, "why", "/nvme/b")],
    [Stays("/nvme/c", "pinned")],
    [Enough("/nvme", 1)],
)


@pytest.mark.parametrize("kind", [NodeStatus, NodeResult])
def test_what_nodes_answer(kind: type[NodeStatus | NodeResult]) -> None:
    answer = STATUS if kind is NodeStatus else RESULT
    whole = json.dumps(codec_of(type(answer)).to_data(answer))

    def parse(text: bytes) -> None:
        content = json.loads(text)
        if isinstance(content, dict):  # as Mailbox makes sure
            codec_of(kind).from_data(content)

    assert read_all(parse, (one.encode() for one in json_variants(whole, COUNT)), ValueError) > 20


ENTRY = list(STATUS.entries[0])
DONE = {"destination": "/nvme/a", "size": 1, "gone": False, "kept": False}


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1" + "0" * 400, "1e999"])
@pytest.mark.parametrize(
    ("answer", "change"),
    [
        (STATUS, {"silent": ["huge"]}),
        (STATUS, {"rooms": [["/nvme", "huge", 2]]}),
        (STATUS, {"entries": [[*ENTRY[:2], "huge", *ENTRY[3:]]]}),
        (STATUS, {"entries": [[*ENTRY[:9], ["huge"], *ENTRY[10:]]]}),
        (RESULT, {"enough": [{"root": "/nvme", "free": "huge"}]}),
        (RESULT, {"stay": [{"destination": "huge", "why": ""}]}),
        (RESULT, {"done": [{**DONE, "size": "huge"}]}),
        (RESULT, {"done": [{**DONE, "kept": "huge"}]}),
        (RESULT, {"done": [{**DONE, "gone": "huge"}]}),
    ],
)
def test_numbers_with_which_arithmetic_fails(
    answer: NodeStatus | NodeResult, change: dict[str, object], number: str
) -> None:
    text = json.dumps(codec_of(type(answer)).to_data(answer) | change).replace('"huge"', number)
    with pytest.raises(ValueError, match=r"is not (int|str|bool)|the value of \w+ is not valid"):
        codec_of(type(answer)).from_data(json.loads(text))


def test_lines_of_answers() -> None:
    lines = "\n".join(frames("n1", codec_of(NodeStatus).to_data(STATUS))).encode()

    def parse(text: bytes) -> None:
        mailbox = Mailbox(["n1", "n2"])
        for line in text.decode(errors="replace").split("\n"):
            mailbox.take(line, "n1")
        assert mailbox.answers.keys() <= {"n1", "n2"}

    assert read_all(parse, variants(lines, 3 * COUNT)) == 0


def test_an_answer_that_would_grow_is_refused() -> None:
    grown = json.loads('{"a": [' + "[]," * 4_000_000 + "[]]}")
    lines = list(frames("n1", grown))

    def parse(_: bytes) -> None:
        mailbox = Mailbox(["n1"])
        for line in lines:
            mailbox.take(line, "n1")
        assert mailbox.answers["n1"].problem == "its answer cannot be read"

    read_all(parse, [bytes(12 << 20)])


EVENTS = (
    event("started", nodes=2),
    event("waiting", destination="/nvme/a", node="n1", holder="job 17", seconds=1.0),
    event("progress", destination="/nvme/a", done=1, size=2),
    event("pulse", node="n1", count=1, activity=0, doing="reading /data/a", pace=[9, 9.0, 9.0]),
    event("pulse", node="n2", count=1, activity=0, doing="", pace=[9000, 9.0, 9.0]),
    event("slow", text="n1 is slow"),
    event("unwatched", node="n1", neighbour="n2"),
    event(
        "network",
        node="n1",
        name="hsn0",
        type="Slingshot",
        speed=200_000,
        network="10.1.0.0/16",
        named=True,
    ),
    event("alive", node="n1"),
    event("crashed", node="n1", error="why", by="n2"),
    event("result", outcome=Outcome([], [Failure(4, "why", "n1")], 1.0).to_json()),
)


@pytest.mark.parametrize("whole", EVENTS)
def test_events_of_ranks(tmp_path: Path, whole: str) -> None:
    """A launcher that prints them all; the result is none, so that the stage fails."""
    hostile = [*json_variants(whole, COUNT), *(whole[: 10 + n] for n in range(0, 30, 3))]
    (tmp_path / "lines").write_text("\n".join(hostile), errors="surrogatepass")
    pulses = Pulses(lambda: ["n1"], "n1", limit=60)
    with Progress(lambda _: None, bars=None, verbose=True) as progress, suppress(LaunchError):
        run(["/bin/cat", str(tmp_path / "lines")], {}, 30, progress.show, pulses)


def test_commands() -> None:
    text = text_of(Evict(("/nvme",))).encode()

    def parse(one: bytes) -> None:
        command_of(one.decode("latin-1"))

    assert read_all(parse, variants(text, COUNT), StageError) > 20


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tar.xz", ".tar.zst", ".zip"])
def test_archives(tmp_path: Path, suffix: str) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "sub").mkdir(parents=True)
    (source / "sub/file").write_bytes(os.urandom(5000))
    (source / "link").symlink_to("sub/file")

    def parse(text: bytes) -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        unpack(io.BytesIO(text), f"/data/x{suffix}", os.fsencode(out), NO_LIMITS)

    assert read_all(parse, variants(pack(source, suffix), COUNT), StageError) > 20
    assert set(os.listdir(tmp_path)) <= {"made.zip", "out", "source"}
