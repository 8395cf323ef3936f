"""A user's room beneath /run is bounded, and goes with the user's last job."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

from stager.base import paths
from stager.base.users import marked_jobs
from stager.node.prolog import main
from stager.node.runtime import begin_job, end_job, forget_job, remove_rooms
from tests.support.disks import owners
from tests.support.users import USER, as_user, on_tmpfs

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
pytestmark = pytest.mark.root
GROUP = 47111
ROOM = Path(paths.RUN_FOLDER, str(USER))


def on_node(act: Callable[[], T]) -> T:
    """Return what ``act`` returns on a node with an empty /run."""
    return on_tmpfs(Path("/run"), "mode=755", act)


def test_a_room_is_the_users_alone_and_bounded() -> None:
    def act() -> tuple[object, ...]:
        begin_job(17, USER, GROUP)
        facts, disk = ROOM.stat(), os.statvfs(ROOM)
        unsafe = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC
        room = disk.f_blocks * disk.f_frsize, disk.f_files, disk.f_flag & unsafe == unsafe
        return facts.st_uid, facts.st_gid, oct(facts.st_mode), room

    assert on_node(act) == (USER, GROUP, "0o40700", (16 << 20, 4096, True))


def fill() -> list[int]:
    """Fill the room with bytes, then with files. Return the errors that end it."""
    errors = []
    for write in (lambda number: (ROOM / "one").open("ab").write(bytes(1 << 20)),
                  lambda number: (ROOM / f"{number}").touch()):  # fmt: skip
        try:
            for number in range(10_000):
                write(number)
        except OSError as error:
            errors.append(error.errno or 0)
    return errors


def test_a_user_cannot_fill_run() -> None:
    def act() -> tuple[list[int], bool]:
        begin_job(17, USER, GROUP)
        free = os.statvfs("/run")
        errors = as_user(USER, fill)
        now = os.statvfs("/run")
        return errors, (free.f_bfree, free.f_ffree) == (now.f_bfree, now.f_ffree)

    assert on_node(act) == ([errno.ENOSPC, errno.ENOSPC], True)


def mounts() -> int:
    return Path("/proc/self/mountinfo").read_text().count(f" {ROOM} ")


def end(job: int) -> None:
    """Mark a job as ended, and its clean-up as done."""
    end_job(job, USER)
    forget_job(job, USER)


def test_a_room_goes_with_the_last_job_of_its_user() -> None:
    def act() -> list[tuple[int, bool]]:
        seen = []
        begin_job(17, USER, GROUP)
        begin_job(18, USER, GROUP)
        (ROOM / "file").touch()
        for job in (17, 18):
            end(job)
            remove_rooms()
            seen.append((mounts(), ROOM.exists()))
        begin_job(19, USER, GROUP)
        return [*seen, (mounts(), (ROOM / "file").exists())]

    assert on_node(act) == [(1, True), (0, False), (1, False)]


def test_a_room_stays_while_a_job_that_ended_is_cleaned_up() -> None:
    def act() -> list[bool]:
        seen = []
        for job in (17, 18):
            begin_job(job, USER, GROUP)
        for job in (17, 18):
            end_job(job, USER)
        assert marked_jobs() == []
        for job in (17, 18):
            forget_job(job, USER)
            remove_rooms()
            seen.append(ROOM.exists())
        assert os.listdir(paths.JOBS_FOLDER) == []
        return seen

    assert on_node(act) == [True, False]


def test_a_clean_up_that_was_killed_does_not_keep_a_room_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stager.node.runtime._LONGEST_ENDING", 0)

    def act() -> bool:
        begin_job(17, USER, GROUP)
        end_job(17, USER)
        remove_rooms()
        return ROOM.exists()

    assert not on_node(act)


def test_what_a_user_mounted_over_a_room_goes_too() -> None:
    def act() -> tuple[int, bool]:
        begin_job(17, USER, GROUP)
        os.mkdir(ROOM / "inner")
        for place in (ROOM / "inner", ROOM, ROOM):
            os.system(f"mount -t tmpfs theirs {place}")
        before = mounts()
        end(17)
        remove_rooms()
        return before, mounts() == 0 and not ROOM.exists()

    assert on_node(act) == (3, True)


def test_only_root_may_look_for_marked_jobs() -> None:
    def act() -> tuple[dict[str, tuple[int, int, str]], list[tuple[int, int]]]:
        begin_job(17, USER, GROUP)
        with pytest.raises(PermissionError):
            as_user(USER, lambda: os.stat(f"{paths.JOBS_FOLDER}/17.{USER}"))
        return owners(Path(paths.JOBS_FOLDER).parent), marked_jobs()

    made, marked = on_node(act)
    assert made["jobs"] == (0, 0, "drwx------")
    assert made[f"jobs/17.{USER}"] == (0, 0, "-rw-------")
    assert marked == [(17, USER)]


def test_a_prolog_marks_the_job_and_makes_the_room(tmp_path: Path) -> None:
    config = tmp_path / "stage.toml"
    config.write_text("roots = []")

    def act() -> tuple[int, list[tuple[int, int]], bool]:
        code = main(["--config", str(config), "--job=17", "65534"])
        return code, marked_jobs(), os.path.ismount(f"{paths.RUN_FOLDER}/65534")

    assert on_node(act) == (0, [(17, 65534)], True)


def test_where_nothing_can_be_mounted_the_room_is_a_plain_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[str] = []
    monkeypatch.setattr("syslog.syslog", lambda _, text: logged.append(text))
    monkeypatch.setattr("stager.node.runtime._SIZE", "size=nothing")

    def act() -> tuple[tuple[int, bool], list[str], bool]:
        begin_job(17, USER, GROUP)
        (ROOM / "file").touch()
        begin_job(18, USER, GROUP)
        found = ROOM.stat().st_uid, (ROOM / "file").exists()
        end(17)
        end(18)
        remove_rooms()
        return found, logged, ROOM.exists()

    found, told, still = on_node(act)
    assert found == (USER, True)
    assert told[0] == (
        f"no filesystem can be mounted at {ROOM}: Invalid argument; the user can fill /run"
    )
    assert still, "the user's own files are left"


def test_the_time_since_the_mark_is_known_at_the_end() -> None:
    def act() -> tuple[float, float]:
        begin_job(17, USER, GROUP)
        os.utime(f"{paths.JOBS_FOLDER}/17.{USER}", (1, 1))
        return end_job(17, USER), end_job(17, USER)

    seconds, again = on_node(act)
    assert seconds > 1e9
    assert again == 0
