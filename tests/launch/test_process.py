"""Child processes: their lines, how long they are awaited, and how they end."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stager.base.errors import LaunchError
from stager.launch.process import Process


def shell(script: str) -> Process:
    return Process(["/bin/sh", "-c", script], {"PATH": "/usr/bin:/bin"})


def all_lines(process: Process) -> list[str]:
    lines: list[str] = []
    while process.is_open:
        lines += process.read_lines(None)
    return lines


def test_the_lines_of_both_streams_are_read_and_the_last_needs_no_newline() -> None:
    with shell("printf 'one\\n\\ntw'; echo three >&2; sleep 0.1; printf o; exit 3") as process:
        lines = all_lines(process)
    assert sorted(lines) == ["", "", "one", "three", "two"]
    assert [line for line in lines if line not in ("", "three")] == ["one", "two"]
    assert process.code == 3


def test_it_does_not_need_the_folder_that_stagectl_was_called_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with Process(["/usr/bin/pwd"], {}) as process:
        assert all_lines(process)[0] == "/"


def test_reading_ends_with_its_time() -> None:
    with shell("printf part; exec sleep 60") as process:
        begun = time.monotonic()
        assert process.read_lines(0.2) == []
        assert process.read_lines(0.2) == []
        assert process.read_lines(-1) == []
        assert time.monotonic() - begun < 2
        process.end(5)
    assert process.code == -15


def test_one_that_ignores_being_terminated_is_killed() -> None:
    with shell("trap '' TERM; echo ready; while true; do sleep 0.05; done") as process:
        assert process.read_lines(10) == ["ready"]
        assert not process.ends_within(0)
        process.end(0.2)
    assert process.code == -9


def test_one_that_ends_is_awaited() -> None:
    with shell("sleep 0.1") as process:
        assert process.ends_within(10)
    assert process.code == 0


def test_nothing_stays_open() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with shell("echo one") as process:
        assert all_lines(process)[0] == "one"
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_one_that_cannot_be_started_is_named() -> None:
    with pytest.raises(LaunchError) as caught:
        Process(["/nowhere/srun"], {})
    assert str(caught.value) == "/nowhere/srun cannot be started: No such file or directory"


@pytest.mark.parametrize("when", ["while its streams are registered", "while it is used"])
def test_one_that_is_left_by_an_exception_is_ended(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    started: list[int] = []
    start = subprocess.Popen.__init__

    def noting(child: Any, *arguments: Any, **settings: Any) -> None:
        start(child, *arguments, **settings)
        started.append(child.pid)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "__init__", noting)
    if when.endswith("registered"):
        monkeypatch.setattr(selectors.DefaultSelector, "register", interrupted)
    with pytest.raises(KeyboardInterrupt), Process(["sleep", "60"], {"PATH": os.defpath}):
        interrupted()
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


#: Starts a launcher, prints its process id, and is killed.
KILLED = """
import os, signal
from stager.launch.process import Process
with Process(["/bin/sh", "-c", "trap 'echo ended >%s; exit' TERM; echo $$; \
while :; do sleep 0.05; done"], {"PATH": os.defpath}, bound=True) as process:
    print(process.read_lines(10)[0], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_is_terminated_if_stagectl_is_killed(tmp_path: Path) -> None:
    script = KILLED % (tmp_path / "said")
    line = [sys.executable, "-c", script]
    killed = subprocess.run(line, capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    launcher = Path(f"/proc/{int(killed.stdout)}")
    deadline = time.monotonic() + 10
    try:
        while launcher.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(killed.stdout), signal.SIGKILL)
    assert (tmp_path / "said").read_text() == "ended\n"
