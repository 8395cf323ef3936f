"""Programs that a rank runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import SpaceError
from stager.base.telemetry import counted
from stager.source.tool import Finished, run

if TYPE_CHECKING:
    from collections.abc import Callable

ENVIRONMENT = {"PATH": os.environ["PATH"], "GIVEN": "1"}
#: A process that runs a program and tells its process id.
RANK = """
import os
from stager.source.tool import run
run(["sh", "-c", "echo $$ >{folder}/pid; exec sleep 60"], os.environ, "{folder}")
"""


def shell(script: str, folder: Path, limit: float = 0) -> Finished:
    return run(["sh", "-c", script], ENVIRONMENT, str(folder), limit)


def test_a_program_gets_its_folder_and_environment_and_nothing_else(tmp_path: Path) -> None:
    os.environ["STAGE_TEST_SECRET"] = "x"
    done = shell("pwd; env | sort; cat; echo oh >&2; exit 3", tmp_path)
    lines = done.output.decode().splitlines()
    assert (done.code, lines[0], done.errors) == (3, str(tmp_path), "oh\n")
    assert "GIVEN=1" in lines
    assert not [line for line in lines if "SECRET" in line]
    left = shell("ls /proc/self/fd", tmp_path).output.split()
    assert left == [b"0", b"1", b"2", b"3"]  # the last is what ls reads


def test_the_end_of_a_signal_is_told(tmp_path: Path) -> None:
    assert shell("kill -9 $$", tmp_path) == (-signal.SIGKILL, b"", "")


def test_a_missing_program_is_told_as_a_shell_does(tmp_path: Path) -> None:
    done = run(["no-such-program"], ENVIRONMENT, str(tmp_path))
    assert done == (127, b"", "no-such-program: No such file or directory\n")


def test_only_the_end_of_what_it_complains_of_is_kept(tmp_path: Path) -> None:
    done = shell("yes complaint | head -c 3000000 >&2; echo end >&2", tmp_path)
    assert len(done.errors) == 16 << 10
    assert done.errors.endswith("complaint\nend\n")


def test_what_it_reads_and_writes_counts_though_it_is_silent(tmp_path: Path) -> None:
    before = counted()
    shell("for i in 1 2 3; do head -c 1000000 /dev/zero >>file; sleep 0.6; done", tmp_path)
    assert counted() - before >= 3


def test_single_bytes_do_not_count(tmp_path: Path) -> None:
    before = counted()
    shell("for i in 1 2 3; do echo >>file; sleep 0.6; done", tmp_path)
    assert counted() - before <= 1  # the start of Python reads more than that


def test_a_program_that_hangs_is_killed(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        shell("echo $$ >pid; exec sleep 60", tmp_path, limit=1)
    assert time.monotonic() - begun < 10
    assert_gone(tmp_path)


def test_a_check_that_fails_kills_the_program(tmp_path: Path) -> None:
    def check() -> None:
        if (tmp_path / "pid").exists():
            raise SpaceError("full")

    with pytest.raises(SpaceError):
        run(["sh", "-c", "echo $$ >pid; exec sleep 60"], ENVIRONMENT, str(tmp_path), check=check)
    assert_gone(tmp_path)


def test_a_program_ends_with_its_rank(tmp_path: Path) -> None:
    script = RANK.format(folder=tmp_path)
    with subprocess.Popen([sys.executable, "-c", script]) as rank:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
        rank.kill()
    wait_for(lambda: not Path(f"/proc/{pid_in(tmp_path)}/status").exists())


def pid_in(folder: Path) -> int:
    return int((folder / "pid").read_text())


def assert_gone(folder: Path) -> None:
    assert not Path(f"/proc/{pid_in(folder)}").exists()


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)
