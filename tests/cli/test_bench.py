"""``stagectl bench``: rates of network, disks and source."""

from __future__ import annotations

import json
import re
import socket
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from tests.support.desk import JOB, OUTSIDE, Desk
from tests.support.stagectl import STAGECTL, Ran, run
from tests.support.web import web_server

if TYPE_CHECKING:
    from pathlib import Path


def test_bench_measures_and_leaves_no_file(desk: Desk) -> None:
    ran = desk.local("bench", "--size", "1", "--source", str(desk.source), "--json")
    rates: list[dict[str, Any]] = json.loads(ran.out)["rates"]
    assert (ran.code, ran.err) == (0, "")
    assert [(rate["what"], rate["size"], rate["algorithm"]) for rate in rates] == [
        ("write", 1 << 20, ""), ("read", 1 << 20, ""), ("source", 300_000, ""),
        *(
            ("wire", size, algorithm)
            for size in (1 << 16, 1 << 18, 1 << 20)
            for algorithm in ("bcast", "ibcast", "chain", "tree")
        ),
    ]  # fmt: skip
    assert all(0 < rate["seconds"] < 30 for rate in rates)
    assert {rate["node"] for rate in rates[:2]} <= {"node1", "node2", "node3"}
    assert {rate["node"] for rate in rates[2:3]} == {"node1"}
    nodes = json.loads(ran.out)["nodes"]
    assert [one["node"] for one in nodes] == ["node1", "node2", "node3"]
    assert all(1e3 < one[what] < 1e12 for one in nodes for what in ("write", "read", "network"))
    assert [path for path in desk.nodes.rglob("*") if not path.is_dir()] == []


def test_bench_is_a_table_and_a_verdict(job: Desk) -> None:
    arguments = ["--size", "1", "--root", f"{job.folder}/nvme", "--plot", "a.svg"]
    ran = job.stagectl("bench", *arguments, **JOB)
    node = socket.gethostname()
    table = re.sub(r"\d+ us", "T us", re.sub(r"\d+\.\d\d GB/s", "R", ran.out))
    assert (ran.code, ran.err) == (0, "")
    lines = [re.sub(r" +", " ", line.strip()) for line in table.splitlines()]
    assert lines[:-1] == [
        "message best time bcast ibcast chain tree",
        "64.0 KiB T us R R R R",
        "256.0 KiB T us R R R R",
        "1.0 MiB T us R R R R",
        f"disk, written and synced, slowest on {node}: R",
        f"disk, read without the page cache, slowest on {node}: R",
    ]
    assert lines[-1] in [
        f"the slowest part is the {part}: R a node" for part in ("disk", "network")
    ]
    assert {
        "64 KiB", "256 KiB", "1 MiB", "bcast", "ibcast", "chain", "tree",
        f"disk, written and synced, slowest on {node}",
    } <= texts(job.folder / "a.svg")  # fmt: skip


def test_bench_of_a_source_that_is_not_there_ends_with_4(desk: Desk) -> None:
    message = "stage: node1: /nowhere/img: No such file or directory\n"
    assert desk.local("bench", "--size", "1", "--source", "/nowhere/img") == Ran(4, "", message)
    ran = desk.local("bench", "--size", "1", "--source", "/nowhere/img", "--json")
    printed = json.loads(ran.out)
    assert (ran.code, ran.err, printed["code"], printed["rates"]) == (4, "", 4, [])
    failure = {"code": 4, "message": "/nowhere/img: No such file or directory", "node": "node1"}
    assert printed["failures"] == [failure]


@pytest.mark.parametrize("here", [[], ["--here"]])
def test_bench_does_not_fill_the_disk(job: Desk, here: list[str]) -> None:
    ran = job.stagectl("bench", *here, "--size", str(1 << 24), **JOB)
    node = "" if here else f"{socket.gethostname()}: "
    free = r"[0-9.]+ [KMGT]iB free(, of which this site keeps [0-9.]+ [KMGT]iB free)?"
    assert (ran.code, ran.out) == (5, "")
    assert re.fullmatch(
        rf"stage: {node}{job.folder}/nvme: not enough room: 16.0 TiB needed, {free}; measure with "
        r"a smaller --size, or remove copies \(stagectl evict\)\n",
        ran.err,
    )


def test_bench_measures_once_where_all_nodes_run_it(job: Desk) -> None:
    rank = {"DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2", "DSTACK_NODE_RANK": "1"}
    said = (
        "stage: DSTACK_NODE_RANK is 1, but one process measures all nodes: run stagectl bench on "
        "the first alone\n"
    )
    assert job.stagectl("bench", **rank) == Ran(2, "", said)


def test_bench_outside_of_a_job_says_what_to_use_first(desk: Desk) -> None:
    assert desk.stagectl("bench") == Ran(2, "", f"stage: {OUTSIDE}\n")


@pytest.mark.parametrize(("site", "known"), [(True, "/nvme"), (False, "/")])
def test_bench_of_a_folder_that_is_no_cache_root_ends_with_3(
    desk: Desk, site: bool, known: str
) -> None:
    if not site:
        desk.config.unlink()
    message = f"/b is not a staging folder (one of `roots` in stage.toml); use --root {known}"
    ran = desk.local("bench", "--root", "/b")
    assert ran == Ran(3, "", f"stage: {message}\n")
    assert not desk.nodes.exists()


def texts(picture: Path) -> set[str | None]:
    """Return the words in a picture."""
    return {text.text for text in ElementTree.parse(picture).iter() if text.tag.endswith("text")}


TABLE = ["BLOCK THREADS RATE IOPS P50 P99 RETRIES"]


def plain(text: str) -> list[str]:
    """Return the lines with one blank between words, and without what was measured."""
    text = re.sub(r"\d+\.\d [MG]B/s|\d+\.\d\d GB/s", "R", text)
    text = re.sub(r"R +\d+ +\d+\.\d\d ms +\d+\.\d\d ms", "R N T T", text)
    return [re.sub(r" +", " ", line.strip()) for line in text.splitlines()]


def test_bench_here_measures_a_source_by_blocks_and_threads(desk: Desk) -> None:
    arguments = ["--here", "--blocks", "4K,1M", "--threads", "1,2", "--seconds", "0.1"]
    ran = desk.stagectl("bench", "--source", str(desk.source), "--plot", "a.svg", *arguments)
    assert (ran.code, ran.err) == (0, "")
    assert {"4 KiB", "1 MiB", "read, 1 thread", "read, 2 threads"} <= texts(desk.folder / "a.svg")
    lines = plain(ran.out)
    assert lines[:-1] == [
        f"{desk.source}: 293.0 KiB, in order; each row for at most 0.1 s or 256.0 MiB",
        *TABLE,
        "read 4.0 KiB 1 R N T T 0", "read 4.0 KiB 2 R N T T 0",
        "read 1.0 MiB 1 R N T T 0", "read 1.0 MiB 2 R N T T 0",
    ]  # fmt: skip
    assert re.match(r"read: fastest is R with [12] threads? and blocks of \d\.0 [KM]iB", lines[-1])


def test_bench_of_a_folder_needs_no_job(desk: Desk) -> None:
    (desk.folder / "set").mkdir()
    (desk.folder / "set/a").write_bytes(b"x" * 5000)
    (desk.folder / "set/b").write_bytes(b"x")
    ran = desk.stagectl("bench", "--source", "set", "--threads", "1", "--blocks", "4K",
                        "--seconds", "0.01", "--random")  # fmt: skip
    assert (ran.code, ran.err) == (0, "")
    assert plain(ran.out) == [
        (
            f"{desk.folder}/set: 2 files, 4.9 KiB, in random order; each row for at most 0.01 s or "
            "256.0 MiB"
        ),
        *TABLE,
        "read 4.0 KiB 1 R N T T 0",
        "read: fastest is R with 1 thread and blocks of 4.0 KiB",
    ]  # fmt: skip


def test_bench_of_a_url_asks_for_ranges(desk: Desk) -> None:
    arguments = ["--size", "2", "--threads", "2", "--blocks", "1M", "--json"]
    # Not in a fork of this process: the threads of the library that reads URLs would be missing.
    with web_server() as web:
        web.data = bytes(2_000_000)
        ran = run([*STAGECTL, "bench", "--source", web.url, *arguments], desk.folder)
    printed = json.loads(ran.out)
    assert (ran.code, ran.err, printed["direct"]) == (0, "", True)
    [row] = printed["measured"]
    assert {key: row[key] for key in ("what", "block", "threads", "requests", "size")} == {
        "what": "read", "block": 1 << 20, "threads": 2, "requests": 2, "size": 2_000_000,
    }  # fmt: skip
    assert sorted(web.log) == ["HEAD", "bytes=0-1048575", "bytes=1048576-1999999"]


def test_bench_here_measures_a_disk_and_leaves_nothing(job: Desk) -> None:
    ran = job.stagectl("bench", "--here", "--size", "1", "--threads", "1", "--blocks", "64K")
    assert (ran.code, ran.err) == (0, "")
    assert plain(ran.out) == [
        f"the disk of {job.folder}/nvme: 1.0 MiB, in order; each row for at most 2 s or 1.0 MiB",
        *TABLE,
        "write 64.0 KiB 1 R N T T 0",
        "read 64.0 KiB 1 R N T T 0",
        "write: fastest is R with 1 thread and blocks of 64.0 KiB",
        "read: fastest is R with 1 thread and blocks of 64.0 KiB",
    ]
    assert [path for path in (job.folder / "nvme").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["--here", "--local", "3"], 2,
            "stage: --here measures this machine itself: remove --local\n",
        ),
        (["--source", "s3:///x"], 2, "stage: s3:///x is not complete; write s3://BUCKET/KEY\n"),
        (
            ["--source", "/nowhere/a", "--here"], 4,
            (
                "stage: /nowhere/a: No such file or directory; check the path, and that the "
                "compute nodes mount this filesystem\n"
            ),
        ),
        (
            ["--here", "--root", "/b"], 3,
            (
                "stage: /b is not a staging folder (one of `roots` in stage.toml); use --root "
                "/nvme\n"
            ),
        ),
        (
            ["--plot", "rates.png"], 2,
            (
                "Usage: stagectl bench [OPTIONS]\nTry 'stagectl bench --help' for help.\n\nError: "
                "Invalid value for '--plot': rates.png does not end in .svg, which is what is "
                "drawn\n"
            ),
        ),
        (
            ["--plot", "none/rates.svg"], 2,
            (
                "Usage: stagectl bench [OPTIONS]\nTry 'stagectl bench --help' for help.\n\nError: "
                "Invalid value for '--plot': none/rates.svg cannot be written\n"
            ),
        ),
        (
            ["--blocks", "5K"], 2,
            (
                "Usage: stagectl bench [OPTIONS]\nTry 'stagectl bench --help' for help.\n\nError: "
                "Invalid value for '--blocks': 5K is not a size from 4K to 1G that is a multiple "
                "of 4K; write 4K,128K,1M\n"
            ),
        ),
        (
            ["--threads", "1,x"], 2,
            (
                "Usage: stagectl bench [OPTIONS]\nTry 'stagectl bench --help' for help.\n\nError: "
                "Invalid value for '--threads': 1,x is not a list of numbers; write 1,4,16\n"
            ),
        ),
        (
            ["--threads", "0"], 2,
            (
                "Usage: stagectl bench [OPTIONS]\nTry 'stagectl bench --help' for help.\n\nError: "
                "Invalid value for '--threads': 0 has a number that is not from 1 to 1024\n"
            ),
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_here_is_told(
    desk: Desk, arguments: list[str], code: int, message: str
) -> None:
    assert desk.stagectl("bench", *arguments) == Ran(code, "", message)
