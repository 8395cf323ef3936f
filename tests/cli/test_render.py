"""The exact lines that a user reads, and the JSON that programs read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from stager.base.errors import Failure
from stager.base.events import event
from stager.base.outcome import (
    Counts,
    Evicted,
    ItemReport,
    NodeRates,
    Note,
    NoteKind,
    Outcome,
    Rate,
    Slow,
    total,
)
from stager.base.text import bytes_text, seconds_text
from stager.cli.bench import node_lines, rate_lines
from stager.cli.render import (
    SoFar,
    failure_lines,
    phase_line,
    print_outcome,
    progress_line,
    summary,
)

MIB = 1 << 20
ALL = ["n1", "n2", "n3", "n4"]


def item(
    received: list[str],
    current: list[str],
    *senders: str,
    seconds: float = 2.0,
    reasons: list[str] | None = None,
) -> ItemReport:
    return ItemReport(
        source="/data/img",
        destination="/nvme/img",
        size=256 * MIB,
        received=received,
        current=current,
        senders=list(senders),
        digest="00112233445566778899aabbccddeeff",
        source_bytes_read=0 if senders else 256 * MIB,
        peak_memory=64 * MIB,
        seconds=seconds,
        reasons=reasons or ["absent"],
    )


def spread(tree: Counts) -> ItemReport:
    """A folder of which each node has a part."""
    return replace(item(ALL, []), tree=tree, shard_list="/nvme/img/.stage-shards.tsv")


def line(report: ItemReport, *, dry_run: bool = False) -> str:
    (only,) = summary(Outcome([report], [], 2.0, dry_run))
    return only


def test_the_nodes_that_a_stage_went_on_without_are_named_first() -> None:
    some = item(["n1", "n2"], [])
    dead, full = Failure(8, "the node failed", "n3"), Failure(5, "/nvme: no room", "n4")
    first, *_ = summary(Outcome([some], [], 2.0, failed_nodes=[dead, full]))
    assert first == "went on without n[3-4] (2 of 4 nodes): n3: the node failed; n4: /nvme: no room"
    first, *_ = summary(Outcome([some], [], 2.0, failed_nodes=[dead]))
    assert first == "went on without n3 (1 of 3 nodes): the node failed"


# one line an item


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (
            item(ALL, []),
            "/nvme/img: 256.0 MiB from /data/img to n[1-4] (4 nodes) in 2.0 s (128.0 MiB/s a node)",
        ),
        (
            item(["n1"], []),
            "/nvme/img: 256.0 MiB from /data/img to n1 in 2.0 s (128.0 MiB/s a node)",
        ),
        (
            item(["n1", "n3", "n4"], ["n2"], "n2"),
            (
                "/nvme/img: 256.0 MiB from the copy on n2 to n[1,3-4] (3 nodes) in 2.0 s "
                "(128.0 MiB/s a node); current on n2"
            ),
        ),
        (
            item(["n4"], ["n1", "n2", "n3"], "n1"),
            (
                "/nvme/img: 256.0 MiB from the copy on n1 to n4 in 2.0 s (128.0 MiB/s a node); "
                "current on n[1-3] (3 nodes)"
            ),
        ),
        (
            item(ALL, [], seconds=0.0),
            "/nvme/img: 256.0 MiB from /data/img to n[1-4] (4 nodes) in 0.0 s (?/s a node)",
        ),
        (
            item([], ALL, "n1", seconds=0.04),
            "/nvme/img: current on n[1-4] (4 nodes), nothing moved (256.0 MiB, 0.0 s)",
        ),
        (item([], ["n1"], "n1"), "/nvme/img: current on n1, nothing moved (256.0 MiB, 2.0 s)"),
    ],
    ids=["source", "one node", "copy", "one lacked it", "no time", "all current", "one current"],
)
def test_the_line_of_a_file_that_was_staged(report: ItemReport, text: str) -> None:
    assert line(report) == text


@pytest.mark.parametrize(("dry_run", "how"), [(False, "was"), (True, "would be")])
def test_that_a_copy_of_another_source_is_replaced_is_told(how: str, *, dry_run: bool) -> None:
    note = Note(NoteKind.REPLACED, f"a copy of /data/old {how} replaced", ["n1"])
    outcome = Outcome([replace(item(ALL, []), notes=[note])], [], 2.0, dry_run)
    assert summary(outcome)[1:] == [f"/nvme/img: note: a copy of /data/old {how} replaced"]


def test_a_note_names_its_nodes_and_remarks_are_told_last_on_one_line() -> None:
    notes = [
        Note(NoteKind.REMARK, "note: one"),
        Note(NoteKind.CHANGED, "what is yours there would be deleted", ["n1", "n3"]),
        Note(NoteKind.REMARK, "note: two"),
        Note(NoteKind.PINNED, "it is pinned", ["n2"]),
    ]
    outcome = Outcome([replace(item(ALL, []), notes=notes)], [], 2.0)
    assert summary(outcome)[1:] == [
        "/nvme/img: note: on n[1,3] (2 nodes), what is yours there would be deleted",
        "/nvme/img: note: it stays on n2 after the job: it is pinned",
        "/nvme/img: note: one; note: two",
    ]


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (
            item(ALL, []),
            "/nvme/img: 256.0 MiB would move from /data/img to n[1-4] (4 nodes) (absent)",
        ),
        (
            item(["n1", "n3"], ["n2"], "n2", reasons=["absent", "the copy changed"]),
            (
                "/nvme/img: 256.0 MiB would move from the copy on n2 to n[1,3] (2 nodes) "
                "(absent, the copy changed); current on n2"
            ),
        ),
        (
            item(["n1"], [], reasons=["the source changed"]),
            "/nvme/img: 256.0 MiB would move from /data/img to n1 (the source changed)",
        ),
        (
            item(["n4"], ["n1", "n2", "n3"], "n1", "n3"),
            (
                "/nvme/img: 256.0 MiB would move from the copies on n[1,3] to n4 (absent); "
                "current on n[1-3] (3 nodes)"
            ),
        ),
        (
            replace(item(["n1"], [], reasons=["the source changed"]), tree=Counts(9)),
            (
                "/nvme/img: up to 9 files, 256.0 MiB would move from /data/img to n1 (the source "
                "changed)"
            ),
        ),
        (
            replace(item(["n1"], []), tree=Counts(9)),
            "/nvme/img: 9 files, 256.0 MiB would move from /data/img to n1 (absent)",
        ),
        (item([], ALL, "n1"), "/nvme/img: current on n[1-4] (4 nodes), nothing would move"),
        (item([], ["n1"], "n1"), "/nvme/img: current on n1, nothing would move"),
    ],
    ids=["source", "copy", "one node", "copies", "folder", "new folder", "all current", "one"],
)
def test_the_line_of_a_file_that_was_only_planned(report: ItemReport, text: str) -> None:
    assert line(report, dry_run=True) == text


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (
            Counts(9, 9, 256 * MIB, 0, (64 * MIB,) * 4),
            "9 files, 256.0 MiB from /data/img spread over n[1-4] (4 nodes), 64.0 MiB on each",
        ),
        (
            Counts(9, 9, 256 * MIB, 0, (60 * MIB, 68 * MIB, 63 * MIB, 65 * MIB)),
            (
                "9 files, 256.0 MiB from /data/img spread over n[1-4] (4 nodes), "
                "60.0 MiB to 68.0 MiB on each"
            ),
        ),
        (
            Counts(9, 9, 256 * MIB, 0, (64 * MIB, 64 * MIB, 64 * MIB - 1, 64 * MIB + 1)),
            "9 files, 256.0 MiB from /data/img spread over n[1-4] (4 nodes), 64.0 MiB on each",
        ),
        (
            Counts(9, 1, 2 * MIB, 3, (256 * MIB, 0, 0, 0)),
            (
                "1 file, 2.0 MiB (8 files kept, 3 files deleted) from /data/img spread over "
                "n[1-4] (4 nodes), 0 B to 256.0 MiB on each"
            ),
        ),
    ],
    ids=["alike", "about alike", "alike as printed", "one has all"],
)
def test_the_line_of_a_folder_that_was_spread_over_the_nodes(tree: Counts, text: str) -> None:
    assert line(spread(tree)) == f"/nvme/img: {text}, in 2.0 s"


def test_the_line_of_a_folder_whose_parts_are_all_there() -> None:
    report = replace(item([], ALL, "n1"), tree=Counts(9), shard_list="/nvme/img/.stage-shards.tsv")
    assert line(report) == (
        "/nvme/img: current on n[1-4] (4 nodes), nothing moved (9 files, 256.0 MiB, 2.0 s)"
    )


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ([Counts(3, 2, 20, 1, (30,))], Counts(3, 2, 20, 1, (30,))),
        (
            [Counts(3, 2, 20, 1, (30,)), Counts(0, 0, 0, 0, (0,)), Counts(4, 4, 40, 2, (50,))],
            Counts(7, 6, 60, 3, (30, 0, 50)),
        ),
    ],
    ids=["one node", "three nodes"],
)
def test_the_counts_of_a_folder_are_those_of_its_parts(parts: list[Counts], whole: Counts) -> None:
    assert total(parts) == whole


def test_every_file_has_its_line_in_order() -> None:
    outcome = Outcome([item([], ["n2"]), item([], ["n1"])], [], 1.0)
    assert summary(outcome) == [
        "/nvme/img: current on n2, nothing moved (256.0 MiB, 2.0 s)",
        "/nvme/img: current on n1, nothing moved (256.0 MiB, 2.0 s)",
    ]


def test_an_outcome_without_files_has_no_line() -> None:
    assert summary(Outcome([], [], 1.0)) == []


# failures


@pytest.mark.parametrize(
    ("failures", "lines"),
    [
        ([Failure(5, "/nvme is full", "n1")], ["n1: /nvme is full"]),
        (
            [Failure(5, "/nvme is full", node) for node in ("n3", "n1", "n2")],
            ["n[1-3]: /nvme is full"],
        ),
        (
            [
                Failure(5, "/nvme is full", "n4"),
                Failure(4, "/data/img: gone", "n1"),
                Failure(5, "/nvme is full", "n2"),
            ],
            ["n[2,4]: /nvme is full", "n1: /data/img: gone"],
        ),
        ([Failure(5, "/nvme is full", "n1")] * 2, ["n1: /nvme is full"]),
        ([Failure(8, "MPI did not start", "")], ["MPI did not start"]),
        ([Failure(8, "MPI ended", ""), Failure(8, "MPI ended", "n1")], ["n1: MPI ended"]),
        ([], []),
    ],
    ids=["one", "folded", "two messages", "twice", "no node", "node and no node", "none"],
)
def test_failures_are_folded_by_their_message(failures: list[Failure], lines: list[str]) -> None:
    assert failure_lines(failures) == lines


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_outcome_with_failures_has_their_lines_alone(dry_run: bool) -> None:
    outcome = Outcome([item(ALL, [])], [Failure(5, "/nvme is full", "n1")], 1.0, dry_run)
    assert summary(outcome) == ["n1: /nvme is full"]


def test_the_exit_code_is_that_of_the_first_failure() -> None:
    failures = [Failure(5, "/nvme is full", "n1"), Failure(4, "/data/img: gone", "n2")]
    assert Outcome([], failures, 1.0).code == 5


def test_the_exit_code_without_failures_is_0() -> None:
    assert Outcome([item(ALL, [])], [], 1.0).code == 0


# JSON


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome([], [], 0.0),
        Outcome([item(ALL, []), item(["n1"], ["n2"], "n2")], [], 1.5),
        Outcome([item([], ALL)], [], 0.25, dry_run=True),
        Outcome([item(["n4"], ALL[:3], *ALL[:3])], [], 3.0, phases={"launch": 1.0, "end": 2.0}),
        Outcome([], [Failure(5, "/nvme is full", "n1"), Failure(4, "gone\udcff", "")], 1.0),
        Outcome([spread(Counts(9, 9, 256 * MIB, 0, (100 * MIB, 156 * MIB)))], [], 1.0),
    ],
    ids=["empty", "two files", "planned", "phases", "failed", "spread"],
)
def test_an_outcome_is_read_back_from_its_json_as_it_was(outcome: Outcome) -> None:
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome


def test_the_json_of_an_outcome() -> None:
    report = item(["n1"], ["n2"], "n2")
    assert Outcome([report], [], 2.5, phases={"survey": 0.5, "broadcast": 2.0}).to_json() == {
        "items": [
            {
                "source": "/data/img",
                "destination": "/nvme/img",
                "size": 268_435_456,
                "received": ["n1"],
                "current": ["n2"],
                "senders": ["n2"],
                "digest": "00112233445566778899aabbccddeeff",
                "source_bytes_read": 0,
                "peak_memory": 67_108_864,
                "seconds": 2.0,
                "reasons": ["absent"],
                "tree": None,
                "shard_list": "",
                "notes": [],
                "retries": 0,
                "ways": [],
                "once": False,
            }
        ],
        "failures": [],
        "seconds": 2.5,
        "dry_run": False,
        "phases": {"survey": 0.5, "broadcast": 2.0},
        "evicted": [],
        "slow": [],
        "code": 0,
    }


def test_the_json_of_a_failed_outcome() -> None:
    assert Outcome([], [Failure(5, "/nvme is full", "n1")], 2.5, dry_run=True).to_json() == {
        "items": [],
        "failures": [{"code": 5, "message": "/nvme is full", "node": "n1"}],
        "seconds": 2.5,
        "dry_run": True,
        "phases": {},
        "evicted": [],
        "slow": [],
        "code": 5,
    }


@pytest.mark.parametrize(
    ("count", "dry_run", "lines"),
    [
        (1, False, ["/nvme/0: evicted on n[1-2] (2 nodes) to make room"]),
        (
            2,
            True,
            [f"/nvme/{i}: would be evicted on n[1-2] (2 nodes) to make room" for i in (0, 1)],
        ),
        (8, False, [f"/nvme/{i}: evicted on n[1-2] (2 nodes) to make room" for i in range(8)]),
        (9, False, ["18 copies evicted on n[1-2] (2 nodes) to make room: 18.0 KiB in all"]),
    ],
)
def test_evicted_copies_are_listed_first(count: int, dry_run: bool, lines: list[str]) -> None:
    evicted = [
        Evicted(node, f"/nvme/{number}", 1024) for node in ("n1", "n2") for number in range(count)
    ]
    outcome = Outcome([item(["n1"], [])], [], 1.0, dry_run=dry_run, evicted=evicted)
    assert summary(outcome)[:-1] == lines
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome


def test_evicted_copies_are_told_though_there_was_too_little_room_even_so() -> None:
    failures = [Failure(5, "/shared/a.gz: it unpacks to more", "n1")]
    outcome = Outcome([], failures, 1.0, evicted=[Evicted("n1", "/nvme/a", 1024)])
    said: list[str] = []
    complained: list[str] = []
    print_outcome(outcome, said.append, complained.append)
    assert said == ["/nvme/a: evicted on n1 to make room"]
    assert complained == ["n1: /shared/a.gz: it unpacks to more"]


@pytest.mark.parametrize("failed", [False, True])
def test_a_slow_node_is_told_last_also_where_the_stage_failed(*, failed: bool) -> None:
    failures = [Failure(5, "/nvme is full", "n1")] if failed else []
    items = [] if failed else [item(["n1"], [])]
    outcome = Outcome(items, failures, 1.0, slow=[Slow("n17", 40e6, 900e6, 25.0)])
    first, line = summary(outcome)
    assert first.startswith("n1: /nvme is full" if failed else "/nvme/img: 256.0 MiB from ")
    assert line == (
        "n17 is slow: it writes 40 MB/s, the others 900 MB/s, which took 25.0 s more; tell the "
        "administrator"
    )
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome


def test_an_event_is_one_line_that_begins_with_its_kind() -> None:
    assert event("waiting", path="/nvme/a\nb", job=7) == (
        '{"event": "waiting", "path": "/nvme/a\\nb", "job": 7}'
    )


# numbers


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (0.9, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (MIB - 1, "1.0 MiB"),
        (MIB, "1.0 MiB"),
        (268_435_456, "256.0 MiB"),
        (1000 * MIB, "1000.0 MiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        (1 << 30, "1.0 GiB"),
        (1 << 40, "1.0 TiB"),
        (1 << 50, "1.0 PiB"),
        (1 << 60, "1024.0 PiB"),
        (123_456_789.0, "117.7 MiB"),
    ],
)
def test_bytes_are_printed_in_a_suitable_unit(count: float, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.04, "0.0 s"),
        (0.06, "0.1 s"),
        (59.9, "59.9 s"),
        (59.96, "1 min 0 s"),
        (60, "1 min 0 s"),
        (60.6, "1 min 1 s"),
        (119.4, "1 min 59 s"),
        (119.6, "2 min 0 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 0 min"),
        (3600, "1 h 0 min"),
        (5000, "1 h 23 min"),
        (90_000, "25 h 0 min"),
    ],
)
def test_seconds_are_printed_in_suitable_units(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("done", "total", "seconds", "text"),
    [
        (0, 256 * MIB, 0.0, "0 B of 256.0 MiB, 0 %, 0 B/s, ? left"),
        (0, 256 * MIB, 3.0, "0 B of 256.0 MiB, 0 %, 0 B/s, ? left"),
        (64 * MIB, 256 * MIB, 2.0, "64.0 MiB of 256.0 MiB, 25 %, 32.0 MiB/s, 6.0 s left"),
        (MIB, 1000 * MIB, 10.0, "1.0 MiB of 1000.0 MiB, 0 %, 102.4 KiB/s, 2 h 46 min left"),
        (256 * MIB - 1, 256 * MIB, 1.0, "256.0 MiB of 256.0 MiB, 99 %, 256.0 MiB/s, 0.0 s left"),
        (256 * MIB, 256 * MIB, 2.0, "256.0 MiB of 256.0 MiB, 100 %, 128.0 MiB/s, 0.0 s left"),
        (64 * MIB, 256 * MIB, 0.0, "64.0 MiB of 256.0 MiB, 25 %, 0 B/s, ? left"),
        (0, 0, 0.0, "0 B of 0 B, 100 %, 0 B/s, ? left"),
    ],
)
def test_the_line_of_progress(done: int, total: int, seconds: float, text: str) -> None:
    assert progress_line(SoFar("/nvme/img", done, total, seconds)) == f"/nvme/img: {text}"


def test_several_senders_are_named_together() -> None:
    assert line(item(["n4"], ["n1", "n2", "n3"], "n1", "n2")) == (
        "/nvme/img: 256.0 MiB from the copies on n[1-2] to n4 in 2.0 s (128.0 MiB/s a node); "
        "current on n[1-3] (3 nodes)"
    )


def test_where_the_time_went() -> None:
    phases = {"launch": 0.25, "MPI init": 0.5, "broadcast": 1.125, "end": 0.125}
    assert phase_line(Outcome([], [], 2.0, phases=phases)) == (
        "2.00 s: launch 0.25, MPI init 0.50, broadcast 1.12, end 0.12; longest: broadcast"
    )


def test_a_phase_keeps_its_place_however_long_it_was() -> None:
    phases = {"launch": 2.0, "survey": 0.0, "end": 1.0}
    assert phase_line(Outcome([], [], 3.0, phases=phases)) == (
        "3.00 s: launch 2.00, survey 0.00, end 1.00; longest: launch"
    )


@pytest.mark.parametrize(("seconds", "speed"), [(2.0, 128.0 * MIB), (0.0, 0.0)])
def test_a_rate_in_no_time_is_no_speed(seconds: float, speed: float) -> None:
    assert Rate("write", 256 * MIB, seconds).speed == speed


def test_rates_are_a_table_and_a_verdict() -> None:
    rates = [
        Rate("wire", 65536, 0.001, algorithm="bcast"),
        Rate("wire", 65536, 0.0005, algorithm="chain"),
        Rate("wire", 256 * MIB, 0.1, algorithm="bcast"),
        Rate("wire", 256 * MIB, 0.125, algorithm="chain"),
        Rate("write", 256 * MIB, 0.2, "n3"),
        Rate("read", 256 * MIB, 0.15, "n2"),
        Rate("source", 256 * MIB, 0.25, "n1"),
    ]
    assert rate_lines(rates) == [
        "  message  best time      bcast      chain",
        " 64.0 KiB     500 us  0.07 GB/s  0.13 GB/s",
        "256.0 MiB  100000 us  2.68 GB/s  2.15 GB/s",
        "disk, written and synced, slowest on n3: 1.34 GB/s",
        "disk, read without the page cache, slowest on n2: 1.79 GB/s",
        "source, one stream, read on n1: 1.07 GB/s",
        "the slowest part is the source: 1.07 GB/s a node",
    ]
    assert rate_lines(rates[:-1])[-1] == "the slowest part is the disk: 1.34 GB/s a node"
    assert rate_lines(rates[:4])[-1] == "the slowest part is the network: 2.68 GB/s a node"


def rates_of(node: str, write: float = 2e9, read: float = 3e9, network: float = 12e9) -> NodeRates:
    return NodeRates(node, write, read, network)


def test_bench_marks_the_nodes_that_are_far_below_the_others() -> None:
    nodes = [
        rates_of("n1"), rates_of("n2", write=0.7e9), rates_of("n3"),
        rates_of("n17", write=40e6, read=0.9e9), rates_of("n18", network=125e6),
    ]  # fmt: skip
    assert node_lines(nodes) == [
        "NODE     WRITE      READ   NETWORK  SLOW",
        "n17    40 MB/s  900 MB/s   12 GB/s  write, read",
        "n18   2.0 GB/s  3.0 GB/s  125 MB/s  network",
        "n1    2.0 GB/s  3.0 GB/s   12 GB/s",
        "n2    700 MB/s  3.0 GB/s   12 GB/s",
        "n3    2.0 GB/s  3.0 GB/s   12 GB/s",
    ]


def test_bench_shows_all_slow_nodes_and_not_all_others() -> None:
    assert node_lines([rates_of("n1")]) == []
    fast = [rates_of(f"n{number}") for number in range(40)]
    assert (len(node_lines(fast)), node_lines(fast)[-1]) == (18, "24 more nodes, not slow")
    slow = [rates_of(f"s{number}", read=1e6) for number in range(18)]
    _, *rows, last = node_lines([*fast, *slow])
    assert [row.split()[0] for row in rows] == [one.node for one in slow]
    assert last == "40 more nodes, not slow"


def test_nodes_that_evicted_different_files_are_listed_apart() -> None:
    evicted = [
        Evicted("n1", "/nvme/a", 1),
        Evicted("n2", "/nvme/b", 1),
        Evicted("n3", "/nvme/a", 1),
    ]
    outcome = Outcome([item(["n1"], [])], [], 1.0, evicted=evicted)
    assert summary(outcome)[:-1] == [
        "/nvme/a: evicted on n[1,3] (2 nodes) to make room",
        "/nvme/b: evicted on n2 to make room",
    ]


def test_what_all_nodes_see_is_written_once() -> None:
    report = replace(item(ALL, []), once=True)
    assert line(report) == (
        "/nvme/img: 256.0 MiB from /data/img once for n[1-4] (4 nodes) in 2.0 s (128.0 MiB/s)"
    )
    assert line(report, dry_run=True) == (
        "/nvme/img: 256.0 MiB would move from /data/img once for n[1-4] (4 nodes) (absent)"
    )
