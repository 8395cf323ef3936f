"""Figures of jobs are summed up; what users write in their place counts for nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from stager.disk.jobs import note_figures
from stager.root.metrics import FIGURES, read_figures, textfile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NONE = dict.fromkeys(FIGURES, 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_a_jobs_figures_are_summed(
    folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(tmp_path))
    (tmp_path / "5001").mkdir()
    note_figures(5001, 17, (1, 2, 0, 0, 1.5))
    note_figures(5001, 17, (0, 0, 3, 1, 0.25))
    sums = dict(zip(FIGURES, (1, 2, 3, 1, 1.75), strict=True))
    assert read_figures(folder, "5001/17.figures") == sums


HOSTILE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "no figures": lambda path: path.write_bytes(b"all of them\n"),
    "too few": lambda path: path.write_bytes(b"1 2 3 4\n"),
    "too many": lambda path: path.write_bytes(b"1 2 3 4 5 6\n"),
    "negative": lambda path: path.write_bytes(b"-1 0 0 0 0\n"),
    "not a number": lambda path: path.write_bytes(b"nan 0 0 0 0\n"),
    "endless": lambda path: path.write_bytes(b"inf 0 0 0 0\n"),
    "huge": lambda path: path.write_bytes(b"1e300 0 0 0 0\n"),
    "of too many digits": lambda path: path.write_bytes(b"1" * 5000 + b" 0 0 0 0\n"),
    "bytes": lambda path: path.write_bytes(b"\xff\0\x80" * 1000),
    "a symlink": lambda path: path.symlink_to("/etc/passwd"),
    "a pipe": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_anything_but_figures_is_ignored(
    folder: int, tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / "17.figures")
    assert read_figures(folder, "17.figures") == NONE


def test_figures_are_written_as_prometheus_reads_them() -> None:
    totals = dict(zip(FIGURES, (1, 2, 3, 4, 5.5), strict=True))
    usage = {"5001": {"/nvme": [10, 1]}, "5002": {"/nvme": [1 << 40, 2], "/gone": [5, 5]}}
    assert (
        textfile(["/nvme", '/a"b'], totals, usage)
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
"""
    )


def test_one_job_adds_to_the_figures_up_to_a_limit_only(folder: int, tmp_path: Path) -> None:
    (tmp_path / "17.figures").write_bytes(b"1e14 0 0 0 0\n" * 100)
    assert read_figures(folder, "17.figures") == {**NONE, "hits": 1e9}
