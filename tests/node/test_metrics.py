"""Figures of jobs are summed up; what users write in their place counts for nothing."""

from __future__ import annotations

import pytest

from stager.node.metrics import FIGURES, held_by, read_figures, textfile

NONE = dict.fromkeys(FIGURES, 0.0)


def test_a_jobs_figures_are_taken() -> None:
    assert read_figures([1, 2, 3, 1, 1.75, 1], 60) == dict(
        zip(FIGURES, (1, 2, 3, 1, 1.75, 1), strict=True)
    )


@pytest.mark.parametrize(
    "answer",
    [None, 7, "1 2 3 4 5", {}, [], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7],
     [-1, "1", None, [], {}, 0], [float("nan"), float("inf"), 1e300, 10**400, 0, 0]],
    ids=str,
)  # fmt: skip
def test_anything_but_figures_is_ignored(answer: object) -> None:
    assert read_figures(answer, 60) == NONE


def test_one_job_adds_to_the_figures_up_to_a_limit_only() -> None:
    most = dict.fromkeys(FIGURES, 10_000.0) | {"seconds": 60.0}
    assert read_figures([1e14] * 6, 60) == most


def test_copies_take_no_more_than_the_disk_holds() -> None:
    usage = {"5001": {"/nvme": [9e14, 9e14]}, "5002": {"/nvme": [5, 5]}}
    text = textfile({"/nvme": (100.0, 10.0)}, NONE, usage)
    assert '_bytes{root="/nvme"} 100\n' in text
    assert '_entries{root="/nvme"} 10\n' in text


def test_what_a_disk_holds_is_known_and_a_missing_one_holds_nothing() -> None:
    held = held_by(["/", "/nowhere"])
    assert held["/"][0] > 0
    assert held["/nowhere"] == (0, 0)


def test_figures_are_written_as_prometheus_reads_them() -> None:
    totals = dict(zip(FIGURES, (1, 2, 3, 4, 5.5, 6), strict=True))
    held = {"/nvme": (1e15, 1e6), '/a"b': (0.0, 0.0)}
    usage = {"5001": {"/nvme": [10, 1]}, "5002": {"/nvme": [1 << 40, 2], "/gone": [5, 5]}}
    assert (
        textfile(held, totals, usage)
        == """\
# HELP slurm_stage_bytes Bytes of staged copies, at the end of each user's last job on this node.
# TYPE slurm_stage_bytes gauge
slurm_stage_bytes{root="/nvme"} 1099511627786
slurm_stage_bytes{root="/a\\"b"} 0
# HELP slurm_stage_entries Staged copies, at the end of each user's last job on this node.
# TYPE slurm_stage_entries gauge
slurm_stage_entries{root="/nvme"} 3
slurm_stage_entries{root="/a\\"b"} 0
# HELP slurm_stage_hits_total Requested copies that were already current on this node.
# TYPE slurm_stage_hits_total counter
slurm_stage_hits_total 1
# HELP slurm_stage_misses_total Requested copies that were transferred to this node.
# TYPE slurm_stage_misses_total counter
slurm_stage_misses_total 2
# HELP slurm_stage_evictions_total Copies that were removed to make room.
# TYPE slurm_stage_evictions_total counter
slurm_stage_evictions_total 3
# HELP slurm_stage_failures_total Stages that failed.
# TYPE slurm_stage_failures_total counter
slurm_stage_failures_total 4
# HELP slurm_stage_seconds_total Seconds that jobs waited for their stages.
# TYPE slurm_stage_seconds_total counter
slurm_stage_seconds_total 5.5
# HELP slurm_stage_slow_total Stages that this node's slow disk held back.
# TYPE slurm_stage_slow_total counter
slurm_stage_slow_total 6
"""
    )
