"""What running jobs use on a node is known to their user and to root."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import DestinationError
from stager.store.leases import (
    figures_of,
    jobs_are_known,
    jobs_using,
    note_uses,
    remove_files,
    uses_of,
)
from tests.support.users import OWNER, USER, as_user, ordinary_home

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


@pytest.mark.root
def test_what_running_jobs_use_is_known_to_their_user_and_to_root(run: Path) -> None:
    for name in AWKWARD_NAMES:
        note_uses(5001, 17, [name])
    note_uses(5001, 18, ["/nvme/ended"])
    note_uses(5002, 19, ["/nvme/others"])
    for mark in ("17.5001", "19.5002"):
        (run / "jobs" / mark).touch()
    give(run)
    assert as_user(5001, lambda: set(jobs_using(5001))) == {*AWKWARD_NAMES, "/nvme/ended"}
    assert as_user(5002, lambda: set(jobs_using(5002))) == {"/nvme/others"}
    assert set(jobs_using(5001)) == set(AWKWARD_NAMES)
    assert set(jobs_using(None)) == {*AWKWARD_NAMES, "/nvme/others"}
    assert uses_of(5001, 18) == {"/nvme/ended"}
    assert as_user(5003, lambda: set(jobs_using(5003))) == set()


@pytest.mark.root
def test_the_account_that_stages_for_all_reads_what_is_opened_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ordinary_home("/dev/shm") as run:  # which has access control lists
        monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(run))
        run.chmod(0o755)
        for uid in (USER, USER + 2, USER + 3):
            (run / str(uid)).mkdir(mode=0o700)
            os.chown(run / str(uid), uid, uid)
        as_user(USER, lambda: note_uses(USER, 17, ["/nvme/shared/a"], OWNER))
        as_user(USER, lambda: note_uses(USER, 18, ["/nvme/shared/a", "/nvme/b"], OWNER))
        as_user(USER + 2, lambda: note_uses(USER + 2, 19, ["/nvme/c"]))
        shared = {"/nvme/shared/a": [17, 18], "/nvme/b": [18]}
        assert as_user(OWNER, lambda: jobs_using(None)) == shared
        assert as_user(USER, lambda: jobs_using(USER)) == shared
        assert as_user(USER + 3, lambda: jobs_using(None)) == {}
        for path in (run / f"{USER}/17.uses", run / f"{USER}/new"):
            with pytest.raises(PermissionError):
                as_user(OWNER, partial(path.write_bytes, b"forged"))


@pytest.mark.root
def test_of_a_users_endless_lists_the_account_takes_little(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks before each copy that it removes. All of the lists would take 800 MiB and 9 s."""
    monkeypatch.setattr("stager.store.leases._MOST_FOREIGN", 3)
    for job in range(10, 13):
        lines = (b"/nvme/%d\0/nvme/shared/%d\0" % (number, number) for number in range(40_000))
        (run / f"5001/{job}.uses").write_bytes(b"".join(lines))
    (run / "5002/17.uses").write_bytes(b"/nvme/shared\0/nvme/shared/a\0x/nvme/shared/b\0/nvme/sha")
    give(run)
    for path in (*run.glob("500?"), *run.glob("500?/*")):
        path.chmod(0o755)
    shared = {f"/nvme/shared/{number}": [10] for number in range(3)} | {"/nvme/shared/a": [17]}
    assert as_user(OWNER, lambda: jobs_using(None, "/nvme/shared")) == shared


def give(run: Path) -> None:
    """Give the users their folders, as root does."""
    for parent in (run, *run.parents[:2]):
        parent.chmod(0o755)
    for uid in (5001, 5002):
        os.chown(run / str(uid), uid, uid)
        (run / str(uid)).chmod(0o700)
        for path in (run / str(uid)).iterdir():
            os.chown(path, uid, uid, follow_symlinks=False)


@pytest.mark.root
def test_users_who_do_not_answer_use_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note_uses(5001, 17, ["/nvme/a"])
    (run / "jobs/17.5001").touch()
    give(run)
    monkeypatch.setattr("stager.store.leases._OWNER_LIMIT", 0)
    assert set(jobs_using(None)) == set()


def test_the_files_of_an_ended_job_are_removed_and_no_others(run: Path) -> None:
    for name in ("17.0", "17.0.4", "17.uses", "17.figures", "170.uses", "18.0"):
        (run / "5001" / name).touch()
    (run / "5001/17.folder").mkdir()
    remove_files(5001, 17)
    left = sorted(path.name for path in (run / "5001").iterdir())
    assert left == ["17.folder", "170.uses", "18.0"]
    remove_files(5003, 17)


@pytest.mark.parametrize(
    ("text", "sums"),
    [
        (b"1 2 0 0 1.5\n0 0 3 1 0.25\n", [1, 2, 3, 1, 1.75]),
        (b"all of them\n1 1\n", [1, 1]),
        (b"", []),
        (b"\xff\0\x80" * 1000, []),
    ],
    ids=["two stages", "a line that has no figures", "nothing", "bytes"],
)
def test_the_figures_of_a_job_are_summed(run: Path, text: bytes, sums: list[float]) -> None:
    (run / "5001/17.figures").write_bytes(text)
    assert figures_of(5001, 17) == sums


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
    make(run / "5001/17.uses")
    assert uses_of(5001, 17) == set()


@pytest.mark.parametrize("job", ["0", "017", "99999999999", "9" * 60, "\uff11\uff17", "-1", "a"])
def test_a_list_under_a_name_that_is_no_jobs_counts_for_nothing(run: Path, job: str) -> None:
    (run / f"5001/{job}.uses").write_bytes(b"/nvme/a\0")
    assert as_user(5001, lambda: set(jobs_using(5001))) == set()


def test_an_endless_list_is_read_up_to_the_limit(run: Path) -> None:
    (run / "5001/17.uses").write_bytes(b"/nvme/a\0" * 300_000 + b"/nvme/b\0")
    assert uses_of(5001, 17) == {"/nvme/a"}


def test_nothing_is_noted_where_root_made_no_folder(run: Path) -> None:
    note_uses(5003, 17, ["/nvme/a"])
    assert sorted(path.name for path in run.iterdir()) == ["5001", "5002", "jobs"]
    assert jobs_are_known()
    (run / "jobs").rmdir()
    assert not jobs_are_known()
    assert set(jobs_using(5001)) == set(jobs_using(None)) == set()


@pytest.mark.root
def test_no_list_is_written_through_a_link(run: Path) -> None:
    victim = run / "victim"
    victim.write_text("mine")
    (run / "5001/17.uses").symlink_to(victim)
    with pytest.raises(DestinationError) as caught:
        note_uses(5001, 17, ["/nvme/a"])
    assert str(caught.value) == f"{run}/5001/17.uses: Too many levels of symbolic links"
    assert victim.read_text() == "mine"
