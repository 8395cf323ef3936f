"""What a rank's pulses say, and what of its disks they count."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from stager.base.telemetry import Activity, Kind, Phase
from stager.rank.pulse import disk_files, requests_done, text_of

if TYPE_CHECKING:
    from pathlib import Path

DST = "/nvme/data"


@pytest.mark.parametrize(
    ("activity", "phase", "text"),
    [
        (Activity(Kind.READ, "/shared/data"), Phase.BROADCAST, "reading /shared/data"),
        (Activity(Kind.WRITE, DST), Phase.BROADCAST, "writing /nvme/data"),
        (Activity(Kind.RECEIVE, DST), Phase.BROADCAST, "receiving /nvme/data"),
        (Activity(Kind.SEND, DST), Phase.BROADCAST, "sending /nvme/data"),
        (Activity(Kind.STEP, DST), Phase.OPEN, "preparing /nvme/data"),
        (Activity(Kind.STEP, DST), Phase.FSYNC, "syncing /nvme/data"),
        (Activity(Kind.STEP, DST), Phase.VERIFY, "reading back /nvme/data"),
        (Activity(Kind.STEP, DST), Phase.PUBLISH, "publishing /nvme/data"),
        (Activity(Kind.STEP), Phase.SURVEY, "using its disks"),
        (Activity(Kind.WAIT, DST), Phase.PUBLISH, "waiting for other nodes"),
    ],
)
def test_what_a_rank_does_is_said_in_words(activity: Activity, phase: Phase, text: str) -> None:
    assert text_of(activity, phase) == text


def test_a_disk_that_syncs_gets_something_done(tmp_path: Path) -> None:
    files = disk_files([str(tmp_path), f"{tmp_path}/none"])
    assert len(files) == 1
    before = requests_done(files)
    with open(tmp_path / "data", "wb") as file:
        file.write(os.urandom(1 << 20))
        os.fsync(file.fileno())
    assert requests_done(files) > before


def test_a_filesystem_without_a_disk_of_its_own_counts_all_disks() -> None:
    assert disk_files(["/proc"]) == ["/proc/vmstat"]
    assert requests_done(["/proc/vmstat"]) > 0


def test_a_disk_that_is_gone_counts_nothing() -> None:
    assert requests_done(["/sys/dev/block/999:999/stat"]) == 0
