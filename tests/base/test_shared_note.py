"""Root's note about the filesystem of a job's own disks, and what a stage makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stager.base.errors import DestinationError
from stager.base.shared_note import FAILED, READY, STARTING, SharedNote
from stager.rank.shared_mount import check_note

if TYPE_CHECKING:
    from pathlib import Path


def test_a_note_is_read_as_it_was_written(tmp_path: Path) -> None:
    note = SharedNote(READY, {"STAGE_JOB": "17", "STAGE_NODES": "a b"})
    (tmp_path / "17").write_text(note.to_json())
    assert SharedNote.read(17, str(tmp_path)) == note
    assert SharedNote.read(18, str(tmp_path)) is None


@pytest.mark.parametrize(
    ("state", "problem"),
    [(STARTING, "its driver did not end in time"), (f"{FAILED}no port: é\nx", "no port: é\nx")],
)
def test_a_filesystem_that_did_not_start_is_refused_with_the_reason(
    state: str, problem: str
) -> None:
    with pytest.raises(DestinationError) as caught:
        check_note(SharedNote(state, {}), "/mnt/17")
    assert str(caught.value) == (
        f"/mnt/17: the filesystem of the job's disks did not start: {problem}; tell the "
        "administrator"
    )


def test_one_that_is_ready_and_mounted_is_used(tmp_path: Path) -> None:
    ready = SharedNote(READY, {})
    check_note(ready, "/proc")
    with pytest.raises(DestinationError) as caught:
        check_note(ready, str(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path}: the driver of [shared_fs] has mounted nothing there; tell the administrator "
        "to look at it"
    )


def test_one_that_nobody_started_is_refused() -> None:
    with pytest.raises(DestinationError, match="no filesystem of the job's disks was started"):
        check_note(None, "/mnt/17")
