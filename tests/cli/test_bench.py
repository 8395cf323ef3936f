"""``stagectl bench``: rates of network, disks and source."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import pytest

from tests.support.desk import JOB, OUTSIDE, Desk
from tests.support.stagectl import Ran


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
    arguments = ["--size", "1", "--root", f"{job.folder}/nvme"]
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


def test_bench_of_a_source_that_is_not_there_ends_with_4(desk: Desk) -> None:
    message = "stage: node1: /nowhere/img: No such file or directory\n"
    assert desk.local("bench", "--size", "1", "--source", "/nowhere/img") == Ran(4, "", message)
    ran = desk.local("bench", "--size", "1", "--source", "/nowhere/img", "--json")
    printed = json.loads(ran.out)
    assert (ran.code, ran.err, printed["code"], printed["rates"]) == (4, "", 4, [])
    failure = {"code": 4, "message": "/nowhere/img: No such file or directory", "node": "node1"}
    assert printed["failures"] == [failure]


def test_bench_does_not_fill_the_disk(job: Desk) -> None:
    ran = job.stagectl("bench", "--size", str(1 << 24), **JOB)
    node = f"{socket.gethostname()}: "
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


def test_bench_reads_no_url(desk: Desk) -> None:
    message = "s3://store/set: bench reads a file on shared storage, no URL"
    assert desk.local("bench", "--source", "s3://store/set") == Ran(2, "", f"stage: {message}\n")
