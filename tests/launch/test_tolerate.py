"""Which nodes a stage goes on without, and what becomes of it if it cannot go on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.base.errors import Failure, LaunchError
from stager.base.outcome import Evicted, Outcome
from stager.launch.run import EndedError
from stager.launch.tolerate import Crew, refusal, stage_tolerantly, variables_without

if TYPE_CHECKING:
    from collections.abc import Callable

CREW = Crew(("n1", "n2", "n3", "n4"), "n1", most=1, asked="--stage-tolerate=1")
DONE = Outcome([], [], 2.0, phases={"launch": 0.5, "survey": 1.5})
TOO_MANY = "2 of 4 nodes have failed, and only 1 may (--stage-tolerate=1)"
BATCH_HOST = "the job's script is to run on n1, which therefore cannot leave the job"


def full(node: str) -> Failure:
    return Failure(5, "/nvme: not enough room", node)


def dead(node: str) -> Failure:
    return Failure(8, "the node failed", node)


class Starts:
    """What each start is to end with, and the nodes that it was for."""

    def __init__(self, *ends: Outcome | LaunchError) -> None:
        self.ends = [*ends]
        self.nodes: list[list[str]] = []
        self.lost: list[list[str]] = []

    def __call__(self, nodes: list[str], lost: list[Failure]) -> Outcome:
        self.nodes.append([*nodes])
        self.lost.append([one.node for one in lost])
        end = self.ends.pop(0)
        if isinstance(end, LaunchError):
            raise end
        return end


def failed(*failures: Failure) -> Outcome:
    return Outcome([], [*failures], 1.0)


def ended(message: str, *blamed: Failure) -> EndedError:
    return EndedError(message, blamed)


NODES = [f"n{number}" for number in range(1, 9)]
FAILURES = st.builds(
    Failure,
    st.sampled_from([2, 3, 4, 5, 6, 7, 8, 9]),
    st.just("why"),
    st.sampled_from(["", *NODES]),
)


@given(
    most=st.integers(0, 8),
    own=st.sampled_from(["login", *NODES]),
    lost=st.lists(st.sampled_from(NODES), unique=True),
    failures=st.lists(FAILURES),
)
def test_a_stage_never_goes_on_without_the_batch_host_nor_without_too_many(
    most: int, own: str, lost: list[str], failures: list[Failure]
) -> None:
    crew = Crew(tuple(NODES), own, most, "--stage-tolerate=N")
    if refusal(crew, [dead(node) for node in lost], failures) is None:
        gone = {*lost, *(one.node for one in failures)}
        assert failures
        assert own not in {one.node for one in failures}
        assert len(lost) < len(gone) <= most
        assert gone <= {*NODES}
        assert {one.code for one in failures} <= {5, 6, 8}


@given(most=st.integers(0, 8), names=st.sets(st.sampled_from(NODES[1:]), min_size=1))
def test_a_stage_goes_on_without_nodes_that_may_fail(most: int, names: set[str]) -> None:
    crew = Crew(tuple(NODES), "n1", most, "--stage-tolerate=N")
    may_go_on = refusal(crew, [], [full(node) for node in names]) is None
    assert may_go_on is (len(names) <= most)


@pytest.mark.parametrize(
    ("failures", "why"),
    [
        ([dead("n3"), full("n4")], TOO_MANY),
        ([dead("n1")], BATCH_HOST),
        ([full("n3"), Failure(4, "/shared/data: Input/output error", "n3")], ""),
        ([Failure(7, "a digest differed", "n3")], ""),
        ([dead("elsewhere")], ""),
        ([dead("")], ""),
        ([], ""),
    ],
)  # fmt: skip
def test_why_a_stage_cannot_go_on(failures: list[Failure], why: str) -> None:
    assert refusal(CREW, [], failures) == why


def test_where_no_node_may_fail_that_is_said() -> None:
    said = refusal(replace(CREW, most=0, asked="--stage-tolerate=10%"), [], [dead("n3")])
    assert said == "1 of 4 nodes has failed, and none may (--stage-tolerate=10%)"


def test_without_a_failure_nothing_is_started_again() -> None:
    starts = Starts(DONE)
    assert stage_tolerantly(CREW, starts) == DONE
    assert (starts.nodes, starts.lost) == ([["n1", "n2", "n3", "n4"]], [[]])


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (failed(full("n3")), full("n3")),
        (ended("staging ended early: n3: the node failed", dead("n3")), dead("n3")),
    ],
)
def test_the_other_nodes_start_again(first: Outcome | LaunchError, reason: Failure) -> None:
    starts = Starts(first, DONE)
    outcome = stage_tolerantly(CREW, starts)
    assert starts.nodes == [["n1", "n2", "n3", "n4"], ["n1", "n2", "n4"]]
    assert starts.lost == [[], ["n3"]]
    assert (outcome.failures, outcome.failed_nodes) == ([], [reason])
    assert sum(outcome.phases.values()) == pytest.approx(outcome.seconds)
    assert outcome.seconds >= DONE.seconds


def test_several_may_fail_one_after_the_other() -> None:
    starts = Starts(failed(full("n2")), ended("why", dead("n4")), DONE)
    outcome = stage_tolerantly(replace(CREW, most=2), starts)
    assert starts.nodes[1:] == [["n1", "n3", "n4"], ["n1", "n3"]]
    assert outcome.failed_nodes == [full("n2"), dead("n4")]


def test_the_second_of_two_that_fail_is_named_with_the_first() -> None:
    starts = Starts(ended("staging ended early: n3", dead("n3")), ended("why", dead("n4")))
    outcome = stage_tolerantly(CREW, starts)
    assert outcome.failures == [dead("n4"), dead("n3"), Failure(8, TOO_MANY, "")]
    assert outcome.failed_nodes == []


def test_a_source_that_fails_then_is_told_first() -> None:
    source = Failure(4, "/shared/data: Input/output error", "n1")
    outcome = stage_tolerantly(CREW, Starts(failed(full("n3")), failed(source)))
    assert outcome.failures == [source, full("n3")]
    assert outcome.code == 4


def test_an_end_that_nobody_is_blamed_for_is_told_with_the_node_that_failed_before() -> None:
    starts = Starts(failed(full("n3")), ended("MPI did not start"))
    assert stage_tolerantly(CREW, starts).failures == [
        Failure(8, "MPI did not start", ""), full("n3")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ended("MPI did not start"), "MPI did not start"),
        (ended("n1: the node failed", dead("n1")), f"n1: the node failed\n  {BATCH_HOST}"),
        (
            ended("n[3-4]: no answer", dead("n3"), dead("n4")),
            f"n[3-4]: no answer\n  {TOO_MANY}",
        ),
        (LaunchError("srun cannot be started"), "srun cannot be started"),
    ],
)
def test_a_first_failure_that_is_not_tolerated_is_told_as_without_the_option(
    error: LaunchError, message: str
) -> None:
    with pytest.raises(LaunchError) as told:
        stage_tolerantly(CREW, Starts(error))
    assert str(told.value) == message


GONE = Evicted("n2", "/nvme/a", 1)


def test_what_ranks_evicted_before_they_ended_is_told() -> None:
    error = EndedError("n3: the node failed; submit again", [dead("n3")], [GONE])
    outcome = stage_tolerantly(replace(CREW, most=0, asked="0"), Starts(error))
    assert (outcome.evicted, outcome.failures[0]) == ([GONE], Failure(8, error.message, ""))


def test_what_was_evicted_is_told_though_the_second_start_is_refused() -> None:
    first = replace(failed(full("n2")), evicted=[GONE])
    outcome = stage_tolerantly(CREW, Starts(first, LaunchError("srun cannot be started")))
    refused = Failure(8, "srun cannot be started", "")
    assert (outcome.evicted, outcome.failures) == ([GONE], [refused, full("n2")])


def test_nodes_that_are_away_are_left_out_before_the_start() -> None:
    starts = Starts(DONE)
    away: Callable[[list[str]], list[Failure]] = lambda nodes: [  # noqa: E731
        dead(node) for node in nodes if node == "n4"
    ]
    assert stage_tolerantly(CREW, starts, away).failed_nodes == [dead("n4")]
    assert starts.nodes == [["n1", "n2", "n3"]]


@pytest.mark.parametrize("second", [DONE, failed(full("n3"))], ids=["goes on", "fails"])
def test_what_earlier_attempts_evicted_is_told(second: Outcome) -> None:
    gone = [Evicted("n2", "/nvme/a", 1), Evicted("n3", "/nvme/b", 1)]
    first = replace(failed(full("n2")), evicted=gone[:1])
    starts = Starts(first, replace(second, evicted=gone[1:]))
    assert stage_tolerantly(CREW, starts).evicted == gone


LISTED = "n[1-4]"
JOB = {
    "SLURM_NODELIST": LISTED, "SLURM_JOB_NODELIST": LISTED, "SLURM_NNODES": "4",
    "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_CPUS_PER_NODE": "5,1(x3)",
    "SLURM_TASKS_PER_NODE": "5,1(x3)", "SLURM_CPUS_ON_NODE": "5", "HOME": "/home/alice",
}  # fmt: skip


def test_the_variables_of_a_job_that_two_nodes_have_left() -> None:
    assert variables_without(JOB, CREW.nodes, ["n3", "n2"]) == {
        "SLURM_NODELIST": "n[1,4]", "SLURM_JOB_NODELIST": "n[1,4]", "SLURM_NNODES": "2",
        "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "5,1",
        "SLURM_TASKS_PER_NODE": "5,1", "STAGE_FAILED_NODES": "n[2-3]",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "gone", "left", "tasks"),
    [
        ("5,1(x3)", ["n3"], "5,1(x2)", "7"),
        ("2(x4)", ["n2", "n4"], "2(x2)", "4"),
        ("4,3,2,1", ["n4"], "4,3,2", "9"),
        ("2,1,2(x2)", ["n2"], "2(x3)", "6"),
    ],
)
def test_tasks_stay_where_they_were_to_be(
    numbers: str, gone: list[str], left: str, tasks: str
) -> None:
    asked = {"SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_TASKS_PER_NODE": numbers}
    assert variables_without(asked, CREW.nodes, gone) == {
        "SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks, "SLURM_TASKS_PER_NODE": left,
        "STAGE_FAILED_NODES": ",".join(gone) if len(gone) == 1 else "n[2,4]",
    }  # fmt: skip
