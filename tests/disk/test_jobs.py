"""What running jobs use on a node is known to their user and to root."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import DestinationError
from stager.disk.jobs import jobs_are_known, note_uses, uses, uses_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /run/slurm-stage, where root marks jobs."""
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(tmp_path))
    monkeypatch.setattr("stager.base.paths.JOBS_FOLDER", str(tmp_path / "jobs"))
    for name in ("jobs", "5001", "5002"):
        (tmp_path / name).mkdir()
    return tmp_path


AWKWARD_NAMES = ["/nvme/a", "/nvme/new\nline", "/nvme/\udcff", "/nvme/é"]


def test_what_running_jobs_use_is_known_to_their_user_and_to_root(run: Path) -> None:
    for name in AWKWARD_NAMES:
        note_uses(5001, 17, [name])
    note_uses(5001, 18, ["/nvme/ended"])
    note_uses(5002, 19, ["/nvme/others"])
    for mark in ("17.5001", "19.5002"):
        (run / "jobs" / mark).touch()
    assert uses(5001) == frozenset(AWKWARD_NAMES)
    assert uses(5002) == {"/nvme/others"}
    assert uses(None) == {*AWKWARD_NAMES, "/nvme/others"}
    assert uses_of(5001, 18) == {"/nvme/ended"}
    assert uses(5003) == frozenset()


def test_the_mark_of_another_users_job_does_not_count_for_a_user(run: Path) -> None:
    note_uses(5001, 19, ["/nvme/a"])
    (run / "jobs/19.5002").touch()
    assert uses(5001) == frozenset()


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        lambda path: path.mkdir(),
        lambda path: path.symlink_to("/etc/passwd"),
        lambda path: path.write_bytes(b"cut short"),
    ],
    ids=["a pipe", "a folder", "a symlink", "no end"],
)
def test_anything_but_a_list_of_destinations_names_none(
    run: Path, make: Callable[[Path], object]
) -> None:
    (run / "jobs/17.5001").touch()
    make(run / "5001/17.uses")
    assert uses(5001) == uses(None) == frozenset()


def test_an_endless_list_is_read_up_to_the_limit(run: Path) -> None:
    (run / "jobs/17.5001").touch()
    (run / "5001/17.uses").write_bytes(b"/nvme/a\0" * 300_000)
    assert uses(5001) == {"/nvme/a"}


def test_nothing_is_noted_where_root_made_no_folder(run: Path) -> None:
    note_uses(5003, 17, ["/nvme/a"])
    assert sorted(path.name for path in run.iterdir()) == ["5001", "5002", "jobs"]
    assert jobs_are_known()
    (run / "jobs").rmdir()
    assert not jobs_are_known()
    assert uses(5001) == uses(None) == frozenset()


@pytest.mark.root
def test_no_list_is_written_through_a_link(run: Path) -> None:
    victim = run / "victim"
    victim.write_text("mine")
    (run / "5001/17.uses").symlink_to(victim)
    with pytest.raises(DestinationError) as caught:
        note_uses(5001, 17, ["/nvme/a"])
    assert str(caught.value) == f"{run}/5001/17.uses: Too many levels of symbolic links"
    assert victim.read_text() == "mine"
