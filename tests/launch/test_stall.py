"""When a stage counts as stalled, and which node is named for it."""

from __future__ import annotations

from typing import Any

import pytest

from stager.base.telemetry import Kind
from stager.launch.health import Pulses, RunningClock

REMEDY = "submit again; if it fails again, use other nodes (--exclude) and tell the administrator"
NODES = ["n1", "n2", "n3"]
#: What a silent node may suffer from.
SILENT = (
    "no answer for 10 s: the node or its network has failed, or the staging process there is "
    "stopped"
)


class Stage:
    """A stage of three nodes, launched from n1, with a limit of 10 s; time begins at 0."""

    def __init__(self, own: str = "n1", limit: float = 10) -> None:
        self.pulses = Pulses(lambda: NODES, own, limit)
        self.pulses.begin(0)
        self.counts = dict.fromkeys(NODES, 0)

    def hear(self, at: float, *nodes: str, moves: bool = True) -> None:
        for node in nodes or NODES:
            self.counts[node] += moves
            self.does(at, node, Kind.WAIT, "waiting for other nodes")

    def does(self, at: float, node: str, activity: Kind, doing: str) -> None:
        pulse = {"node": node, "count": self.counts[node], "activity": activity, "doing": doing}
        self.pulses.hear(pulse, at)

    def verdict(self, at: float) -> str:
        stall = self.pulses.verdict(at)
        said = str(stall) if stall else ""
        assert said.endswith(f"; {REMEDY}") or not said
        return said.removesuffix(f"; {REMEDY}")


def test_a_stage_that_moves_is_no_stall() -> None:
    stage = Stage()
    for second in range(100):
        assert stage.verdict(second) == ""
        stage.hear(second)


def test_progress_on_one_node_is_enough_while_all_answer() -> None:
    stage = Stage()
    for second in range(100):
        stage.hear(second, "n1", "n3", moves=False)
        stage.hear(second, "n2")
        assert stage.verdict(second) == ""


def test_the_nodes_that_all_others_wait_for_are_named_with_what_they_do() -> None:
    stage = Stage(limit=60)
    assert stage.pulses.work(1) == ""
    stage.hear(1)
    assert stage.pulses.work(2) == ""
    stage.does(10, "n2", Kind.READ, "reading /shared/a")
    stage.does(11, "n1", Kind.WRITE, "writing /nvme/a")
    stage.does(11, "n3", Kind.WRITE, "writing /nvme/a")
    assert stage.pulses.work(22) == "n2 is reading /shared/a"
    assert stage.pulses.work(22.5) == "n[1,3] are writing /nvme/a", "n2 is overdue"


def test_a_node_that_all_others_wait_for_does_not_answer() -> None:
    stage = Stage(limit=60)
    stage.does(1, "n2", Kind.WRITE, "writing /nvme/a")
    for at in (1, 11, 21):
        stage.hear(at, "n1", "n3")
    assert stage.pulses.work(11) == "n2 is writing /nvme/a"
    assert stage.pulses.work(20) == "", "it is only late"
    assert stage.pulses.work(22) == "n2 does not answer"


@pytest.mark.parametrize("wrong", [{"node": 5}, {"doing": None}])
def test_a_pulse_that_tells_anything_else_is_refused(wrong: dict[str, Any]) -> None:
    pulse = {"node": "n1", "count": 1, "activity": Kind.WAIT, "doing": "waiting", **wrong}
    with pytest.raises(TypeError):
        Stage().pulses.hear(pulse, 1)


def test_a_short_stage_needs_no_pulse() -> None:
    assert Stage().verdict(10) == ""


def test_nodes_are_quiet_after_a_third_of_the_limit_unless_all_are() -> None:
    stage = Stage()
    stage.hear(1, "n1", "n2")
    stage.hear(4, "n1")
    assert stage.pulses.quiet(4.3) == []
    assert stage.pulses.quiet(4.4) == ["n2"]
    assert stage.pulses.quiet(8) == [], "the launcher or this node may be at fault"
    assert Stage(limit=0).pulses.quiet(8) == []


def test_a_node_that_falls_silent_is_named_though_others_move() -> None:
    stage = Stage()
    stage.hear(1)
    for second in range(2, 12):
        stage.hear(second, "n1", "n3")
        assert stage.verdict(second) == ""
    assert stage.verdict(11.6) == f"n2: {SILENT}"


@pytest.mark.parametrize("limit", [60, 0])
def test_a_silent_node_may_have_less_time_than_one_that_stands_still(limit: float) -> None:
    stage = Stage(limit=limit)
    stage.pulses.silence = 10
    for second in range(1, 50):
        stage.hear(second, moves=second == 1)
        assert stage.verdict(second) == ""
    for second in range(50, 60):
        stage.hear(second, "n1", "n3", moves=False)
        assert stage.verdict(second) == ""
    assert stage.verdict(60.5) == f"n2: {SILENT}"


@pytest.mark.parametrize(
    ("kind", "is_nodes_own"),
    [(Kind.READ, False), (Kind.WRITE, True), (Kind.STEP, True), (Kind.RECEIVE, False)],
)
def test_a_node_is_itself_at_fault_if_its_disk_stands_still(kind: Kind, is_nodes_own: bool) -> None:
    stage = Stage()
    for second in (1, 5, 11):
        stage.hear(second, moves=second == 1)
        stage.does(second, "n2", kind, "at work")
    stall = stage.pulses.verdict(11.5)
    assert stall
    assert (stall.nodes, stall.is_nodes_own) == (("n2",), is_nodes_own)


def test_a_node_that_was_never_heard_is_named() -> None:
    stage = Stage()
    stage.hear(5, "n1", "n2")
    assert stage.verdict(10.5) == f"n3: {SILENT}"


def test_silent_nodes_are_named_together() -> None:
    stage = Stage(own="login")
    stage.hear(1)
    stage.hear(9, "n1")
    assert stage.verdict(12) == f"n[2-3]: {SILENT}"


def test_where_only_the_own_node_answers_its_network_is_suspected() -> None:
    stage = Stage()
    stage.hear(1)
    stage.hear(9, "n1")
    assert stage.verdict(12) == (
        "n1: no other node has answered for 10 s: the network of this node has probably failed"
    )


@pytest.mark.parametrize(("own", "where"), [("n1", "on n1"), ("", "here")])
def test_where_no_node_answers_the_launching_node_is_suspected(own: str, where: str) -> None:
    stage = Stage(own)
    stage.hear(1)
    said = f"no node has answered for 10 s: the network or srun has failed {where}"
    assert stage.verdict(12) == said


@pytest.mark.parametrize(
    ("activities", "said"),
    [
        (
            [(Kind.READ, "reading /s"), (Kind.RECEIVE, "receiving /n"), (Kind.WAIT, "waiting")],
            "n1: no progress for 10 s while reading /s",
        ),
        (
            [(Kind.SEND, "sending /n"), (Kind.RECEIVE, "receiving /n"), (Kind.STEP, "syncing /n")],
            "n3: no progress for 10 s while syncing /n",
        ),
        (
            [(Kind.SEND, "sending /n"), (Kind.RECEIVE, "receiving /n"), (Kind.WRITE, "writing /n")],
            "n3: no progress for 10 s while writing /n",
        ),
        (
            [(Kind.SEND, "sending /n"), (Kind.RECEIVE, "receiving /n"), (Kind.WAIT, "waiting")],
            "n2: no progress for 10 s while receiving /n",
        ),
        (
            [(Kind.WAIT, "waiting for other nodes")] * 3,
            "n[1-3]: no progress for 10 s while waiting for other nodes",
        ),
        (
            [(Kind.WAIT, "waiting"), (Kind.WRITE, "writing /b"), (Kind.WRITE, "writing /a")],
            "n[2-3]: no progress for 10 s while writing /a or writing /b",
        ),
    ],
)
def test_of_nodes_that_stand_still_the_one_that_the_others_wait_for_is_named(
    activities: list[tuple[Kind, str]], said: str
) -> None:
    stage = Stage()
    for second in range(11):
        assert stage.verdict(second) == ""
        for node, (activity, doing) in zip(NODES, activities, strict=True):
            stage.does(second, node, activity, doing)
    assert stage.verdict(11) == said


def test_a_suspended_job_is_no_stall_though_this_process_runs() -> None:
    stage = Stage(own="login")
    stage.hear(1)
    stage.pulses.is_suspended = lambda: True
    assert [stage.verdict(second) for second in range(2, 100)] == [""] * 98
    stage.pulses.is_suspended = lambda: False
    stage.hear(105, "n1", "n3")
    assert stage.verdict(111) == f"n2: {SILENT}"


def test_nobody_asks_for_suspended_jobs_while_a_node_answers() -> None:
    def is_suspended() -> bool:
        raise AssertionError("asked")

    stage = Stage()
    stage.pulses.is_suspended = is_suspended
    stage.hear(9, "n1", "n2")
    assert stage.verdict(12) == f"n3: {SILENT}"


def test_without_a_limit_nothing_is_a_stall() -> None:
    stage = Stage(limit=0)
    assert stage.verdict(1e9) == ""


def test_the_names_of_nodes_are_not_looked_up_before_the_limit() -> None:
    def names() -> list[str]:
        raise AssertionError("looked up")

    assert Pulses(names, "n1", 10).verdict(10) is None


def test_the_clock_stands_still_while_the_process_is_suspended() -> None:
    times = iter([0.0, 1.0, 2.0, 3600.0, 3601.0])
    clock = RunningClock(lambda: next(times))
    assert [clock.seconds() for _ in range(4)] == [1, 2, 5, 6]


def test_a_node_whose_network_fails_names_itself_whichever_node_it_heard_last() -> None:
    stage = Stage()
    stage.hear(1)
    stage.hear(2.5, "n1", "n3")  # no node sends its pulses when another does
    for tenth in range(30, 126):
        stage.hear(tenth / 10, "n1")
        assert stage.verdict(tenth / 10) == ""
    assert stage.verdict(13.1) == (
        "n1: no other node has answered for 10 s: the network of this node has probably failed"
    )


def test_a_late_node_that_answers_leaves_the_silent_one_to_be_named() -> None:
    stage = Stage()
    stage.hear(1)
    stage.hear(5, "n3")
    for second in range(6, 14):
        stage.hear(second, "n1")
        assert stage.verdict(second) == ""
    stage.hear(14, "n3")
    assert stage.verdict(14.1) == f"n2: {SILENT}"


def test_a_silent_node_is_named_after_one_and_a_half_limits_though_another_is_late() -> None:
    stage = Stage()
    stage.hear(1)
    stage.hear(9, "n3")
    stage.hear(15, "n1")
    assert stage.verdict(15.9) == ""
    assert stage.verdict(16.5) == f"n2: {SILENT}"


def test_a_suspended_job_is_no_stall_though_its_nodes_fall_silent_in_turn() -> None:
    pulses = Pulses(lambda: NODES, "login", 10, is_suspended=lambda: True)
    pulses.begin(0)
    pulse = {"count": 1, "activity": Kind.WAIT, "doing": "waiting"}
    for at, node in enumerate(NODES, 1):
        pulses.hear({"node": node, **pulse}, at)
    assert [pulses.verdict(at / 10) for at in range(40, 220)] == [None] * 180
