"""When progress is shown as lines, and what they say."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from stager.base.errors import LaunchError
from stager.base.outcome import Evicted
from stager.cli.progress import Progress


class Clock:
    """A clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def sent(count: int) -> dict[str, object]:
    """The event of a file of 4 MiB of which ``count`` MiB were sent, in as many seconds."""
    return {
        "event": "progress", "destination": "/nvme/a", "sent": count << 20, "size": 4 << 20,
        "seconds": float(count),
    }  # fmt: skip


def waiting(seconds: float) -> dict[str, object]:
    return {
        "event": "waiting", "destination": "/nvme/a", "holder": "job 17", "node": "n2",
        "seconds": seconds,
    }  # fmt: skip


def test_progress_is_a_line_every_five_seconds(clock: Clock) -> None:
    lines: list[str] = []
    with Progress(lines.append, bars=None) as progress:
        for second in (1, 2, 3):
            clock.now += 2.5
            progress.show(sent(second))
    assert lines == ["/nvme/a: 2.0 MiB of 4.0 MiB, 50 %, 1.0 MiB/s, 2.0 s left"]


def test_that_nothing_moves_is_said_instead_of_a_rate(clock: Clock) -> None:
    lines: list[str] = []
    with Progress(lines.append, bars=None) as progress:
        for seconds in (2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0):
            clock.now += 2
            sent_by_then = min(seconds, 4.0 if seconds < 13 else 5.0)
            progress.show({**sent(0), "sent": int(sent_by_then) << 19, "seconds": seconds})
            if seconds == 12.0:
                clock.now += 4
    assert lines == [
        "/nvme/a: 2.0 MiB of 4.0 MiB, 50 %, 341.3 KiB/s, 6.0 s left",
        "/nvme/a: 2.0 MiB of 4.0 MiB, 50 %, no data for 8.0 s",
        "/nvme/a: 2.5 MiB of 4.0 MiB, 62 %, 182.9 KiB/s, 8.4 s left",
    ]


def test_once_all_is_sent_nothing_is_said_of_what_does_not_move(clock: Clock) -> None:
    lines: list[str] = []
    with Progress(lines.append, bars=None) as progress:
        progress.show(sent(4))
        clock.now += 20
        progress.show({**sent(4), "seconds": 24.0})
    assert lines == ["/nvme/a: 4.0 MiB of 4.0 MiB, 100 %, 170.7 KiB/s, 0.0 s left"]


def test_the_node_that_does_not_answer_is_named_while_nothing_moves(clock: Clock) -> None:
    lines: list[str] = []
    with Progress(lines.append, bars=None) as progress:
        for seconds in (1.0, 7.0, 8.0):
            clock.now += 6
            sent_by_then = int(seconds == 8.0)
            progress.show({**sent(sent_by_then), "seconds": seconds, "quiet": ["n3", "n4"]})
    assert lines == [
        "/nvme/a: 0 B of 4.0 MiB, 0 %, 0 B/s, ? left",
        "/nvme/a: 0 B of 4.0 MiB, 0 %, no data for 7.0 s, no answer from n[3-4]",
        "/nvme/a: 1.0 MiB of 4.0 MiB, 25 %, 128.0 KiB/s, 24.0 s left",
    ]


def test_of_the_next_item_nothing_moved_since_its_beginning(clock: Clock) -> None:
    lines: list[str] = []
    with Progress(lines.append, bars=None) as progress:
        progress.show(sent(3))
        clock.now += 6
        progress.show({**sent(0), "destination": "/nvme/b", "seconds": 6.0})
    assert lines == ["/nvme/b: 0 B of 4.0 MiB, 0 %, no data for 6.0 s"]


def test_a_wait_is_reported_at_once_and_then_every_five_seconds(clock: Clock) -> None:
    lines: list[str] = []
    with Progress(lines.append, bars=None) as progress:
        for second in range(7):
            progress.show(waiting(second))
            clock.now += 1
    assert lines == [
        "/nvme/a: waiting for job 17 on n2",
        "/nvme/a: waiting for job 17 on n2, 5.0 s so far",
    ]


def test_that_an_image_is_made_is_a_line_every_five_seconds(clock: Clock) -> None:
    lines: list[str] = []
    with Progress(lines.append, bars=None) as progress:
        for second in (2.0, 4.0, 6.0, 8.0):
            clock.now += 2
            event = {"event": "making", "destination": "/nvme/a", "node": "n2", "seconds": second}
            progress.show(event)
    assert lines == ["/nvme/a: n2 makes a file of the image, 6.0 s so far"]


@pytest.mark.usefixtures("clock")
def test_a_second_start_is_told() -> None:
    lines: list[str] = []
    with Progress(lines.append, bars=None) as progress:
        progress.show({"event": "restarted", "why": "MPI does not start"})
    assert lines == ["MPI does not start; the staging starts again"]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("absent", "what"),
    [(["n2", "n3"], "the staging process on n[2-3] to begin"), ([], "MPI to start")],
)
def test_what_the_start_waits_for_is_told(absent: list[str], what: str) -> None:
    lines: list[str] = []
    with Progress(lines.append, bars=None) as progress:
        progress.show({"event": "starting", "nodes": absent, "seconds": 30.2})
    assert lines == [f"waiting for {what}, 30.2 s so far"]


def test_a_slow_node_is_told_while_the_stage_lasts() -> None:
    lines: list[str] = []
    with Progress(lines.append, bars=None) as progress:
        progress.show({"event": "slow", "text": "n2 is slow: it writes 4 MB/s, the others 80 MB/s"})
    assert lines == ["n2 is slow: it writes 4 MB/s, the others 80 MB/s; they wait for it"]


def test_other_events_are_ignored() -> None:
    lines: list[str] = []
    with Progress(lines.append, bars=None) as progress:
        progress.show({"event": "started", "nodes": 4})
    assert lines == []


@pytest.mark.parametrize(
    ("named", "line"),
    [
        (False, (
            "the ranks watch each other over the network 10.1.0.0/16, on n1 by hsn0 (Slingshot, "
            "200 Gbit/s)"
        )),
        (True, (
            "the ranks use the network 10.1.0.0/16, on n1 by hsn0 (Slingshot, 200 Gbit/s), as "
            "stage.toml says"
        )),
    ],
)  # fmt: skip
def test_the_network_is_told_where_that_is_asked_for(line: str, *, named: bool) -> None:
    event = {
        "event": "network", "node": "n1", "name": "hsn0", "type": "Slingshot", "speed": 200_000,
        "network": "10.1.0.0/16", "named": named,
    }  # fmt: skip
    lines: list[str] = []
    for verbose in (False, True):
        with Progress(lines.append, bars=None, verbose=verbose) as progress:
            progress.show(event)
    assert lines == [line]


@pytest.mark.usefixtures("clock")
def test_nodes_that_do_not_watch_each_other_are_named_where_that_is_asked_for() -> None:
    unwatched = {"event": "unwatched", "node": "n2", "neighbour": "n3"}
    lines: list[str] = []
    for verbose in (False, True):
        with Progress(lines.append, bars=None, verbose=verbose) as progress:
            progress.show(unwatched)
    line = (
        "n2 does not watch n3: no TCP connection could be made; if that node fails, the stage ends "
        "only after stall_timeout"
    )
    assert lines == [line]


def test_it_is_told_what_starts_the_ranks_and_which_hosts_are_waited_for() -> None:
    lines: list[str] = []
    with Progress(lines.append, bars=None) as progress:
        progress.show({"event": "hosts", "line": "by flux run on 4 nodes, from FLUX_JOB_NODELIST"})
        progress.show({"event": "silent", "nodes": ["n3", "n4"], "seconds": 10.0})
    assert lines == [
        "by flux run on 4 nodes, from FLUX_JOB_NODELIST",
        "waiting for n[3-4] to answer, 10.0 s so far",
    ]


def test_of_small_files_the_time_left_is_not_said(clock: Clock) -> None:
    lines: list[str] = []
    with Progress(lines.append, bars=None) as progress:
        clock.now += 6
        progress.show({**sent(2), "steady": False})
    assert lines == ["/nvme/a: 2.0 MiB of 4.0 MiB, 50 %, 1.0 MiB/s"]


def test_what_the_ranks_do_is_a_line_every_five_seconds(clock: Clock) -> None:
    lines: list[str] = []
    with Progress(lines.append, bars=None) as progress:
        for seconds in (6.0, 8.0, 14.0):
            clock.now = 100 + seconds
            event = {"event": "working", "text": "n[1-2] are writing /nvme/a", "seconds": seconds}
            progress.show(event)
    assert lines == [
        "n[1-2] are writing /nvme/a, 6.0 s since the start",
        "n[1-2] are writing /nvme/a, 14.0 s since the start",
    ]


def end_after_an_eviction(lines: list[str], by: BaseException | None) -> None:
    """Show that a copy was removed on two nodes, and end by an exception, if there is one."""
    with Progress(lines.append, bars=None) as progress:
        for node in ("n1", "n2"):
            progress.show({"event": "evicted", "copy": Evicted(node, "/nvme/old", 1 << 20)})
        if by:
            raise by


@pytest.mark.parametrize("by", [SystemExit(143), KeyboardInterrupt()])
def test_a_cancelled_stage_names_the_copies_that_it_had_removed(by: BaseException) -> None:
    lines: list[str] = []
    with pytest.raises(type(by)):
        end_after_an_eviction(lines, by)
    assert lines == ["/nvme/old: evicted on n[1-2] (2 nodes) to make room"]


@pytest.mark.parametrize("by", [None, LaunchError("the ranks ended")])
def test_copies_that_were_removed_are_otherwise_left_to_the_outcome(
    by: BaseException | None,
) -> None:
    lines: list[str] = []
    with suppress(LaunchError):
        end_after_an_eviction(lines, by)
    assert lines == []
