"""How stagectl ends: a wrong command line, output that goes nowhere, signals."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stager.base import linux
from tests.support.desk import JOB, Desk, call
from tests.support.stagectl import STAGECTL, Ran, environment, run

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize(
    ("arguments", "usage"),
    [
        ([], "Usage: stagectl [OPTIONS] COMMAND [ARGS]...\n"),
        (["polish"], "Usage: stagectl [OPTIONS] COMMAND [ARGS]...\n"),
        (["stage"], "Usage: stagectl stage [OPTIONS] SRC:DST[,key=value]...\n"),
        (["stage", "--local", "-1", "/a:/b"],
         "Usage: stagectl stage [OPTIONS] SRC:DST[,key=value]...\n"),
        (["check", "--loud"], "Usage: stagectl check [OPTIONS] [SRC:DST[,key=value]]...\n"),
    ],
    ids=["no command", "an unknown command", "no value", "a bad number", "an unknown option"],
)  # fmt: skip
def test_a_wrong_command_line_ends_with_2_and_the_usage(arguments: list[str], usage: str) -> None:
    ran = run([*STAGECTL, *arguments])
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(usage)


def test_a_mistyped_command_is_corrected() -> None:
    ran = run([*STAGECTL, "stag"])
    assert ran.code == 2
    assert "Did you mean one of: 'stage', 'status'?" in ran.err


OK = "stage: ok: /usr to /nvme/b (validate=stat)\n"


def test_a_reader_that_has_left_the_pipe_is_no_failure_to_report(desk: Desk) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*STAGECTL, "check", "--config", desk.config, "/a:/nvme/b"],
        stdout=writing, stderr=subprocess.PIPE, text=True, check=False, env=environment(),
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("closed", "out"),
    [("<&-", OK), (">&-", ""), ("2>&-", OK), ("<&- >&- 2>&-", "")],
    ids=["stdin", "stdout", "stderr", "all"],
)
def test_with_a_closed_stream_the_others_are_written_as_always(
    desk: Desk, closed: str, out: str
) -> None:
    shell = ["/bin/sh", "-c", f'"$@" {closed}', "sh"]
    check = [*STAGECTL, "check", "--config", str(desk.config), "/usr:/nvme/b"]
    assert run([*shell, *check]) == Ran(0, out, "")


def test_a_full_disk_for_the_output_is_reported_on_stderr(desk: Desk) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*STAGECTL, "check", "--config", desk.config, "/a:/nvme/b"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment(),
        )  # fmt: skip
    assert done.stderr == "stage: the output cannot be written: No space left on device\n"
    assert done.returncode == 8


def test_an_error_of_a_file_that_no_command_expects_names_the_file(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", b"/some/file")

    monkeypatch.setattr("stager.cli.check.parse_value", fail)
    message = "stage: /some/file: Permission denied\n"
    assert desk.stagectl("check", "/a:/nvme/b") == Ran(8, "", message)


@pytest.mark.parametrize(
    "arguments",
    [
        ["evict", "a"], ["status", "--local-root", "nodes"],
        ["stage", "--local", "2", "/a:/nvme/b"], ["bench", "--local", "2", "--source", "a"],
        ["pack", "a"],
    ],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_in_a_deleted_folder_a_relative_path_is_refused(desk: Desk, arguments: list[str]) -> None:
    command, *values = arguments
    config = [] if command == "pack" else ["--config", str(desk.config)]
    script = 'mkdir gone; cd gone; rmdir ../gone; exec "$@"'
    line = [*STAGECTL[:1], "-P", *STAGECTL[1:], command, *config, *values]
    ran = run(["/bin/sh", "-c", script, "sh", *line], desk.folder)
    message = "stage: the current folder does not exist any more; change to another one\n"
    assert ran == Ran(2, "", message)


def test_no_control_character_of_a_path_reaches_the_terminal(desk: Desk) -> None:
    folder = desk.folder / "\x1b]0;x\x07\u202e"
    folder.mkdir()
    shown = f"{desk.folder}/?]0;x??"
    ran = call(["pack", str(folder)], desk.folder)
    assert ran.out.startswith(f"stage: {shown}.tar.zst: 0 files, 0 B packed into ")
    ran = call(["pack", str(folder / "none")], desk.folder)
    assert ran.err.startswith(f"stage: {shown}/none")
    assert "\x1b" not in ran.err


def test_the_caret_below_a_directive_stays_on_a_line_of_its_own(desk: Desk) -> None:
    ran = desk.stagectl("check", "/a:/nvme/b,x")
    assert ran.err.splitlines()[1:] == ["  /a:/nvme/b,x", "             ^"]


def _as_from_a_terminal() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell starts jobs in the background without it
    if os.getuid() == 0:
        linux.leave_network()


@contextmanager
def waiting(job: Desk) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A stagectl that waits for its srun, and the srun's process number."""
    (job.folder / "srun").write_text(
        f"#!/bin/sh\ncd {job.folder}\necho $$ >pid\nmv pid started\nexec sleep 600\n"
    )
    with subprocess.Popen(
        [*STAGECTL, "stage", "--config", job.config, f"{job.source}:{job.folder}/nvme/img"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=job.folder, env=environment(**JOB),
        preexec_fn=_as_from_a_terminal,  # noqa: PLW1509 - no threads
    ) as process:  # fmt: skip
        try:
            started = job.folder / "started"
            for _ in range(500):
                if started.exists():
                    break
                time.sleep(0.01)
            yield process, int(started.read_text())
        finally:
            process.kill()


@pytest.mark.parametrize(
    # A terminal shows ^C, which wants a line of its own.
    ("number", "ended"), [(signal.SIGTERM, Ran(143, "", "")), (signal.SIGINT, Ran(130, "", "\n"))]
)  # fmt: skip
def test_a_signal_ends_the_launcher_and_then_stagectl(job: Desk, number: int, ended: Ran) -> None:
    with waiting(job) as (process, launcher):
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert Ran(process.returncode, out, err) == ended
    assert not Path(f"/proc/{launcher}").exists()


@pytest.mark.parametrize(
    ("arguments", "spared"),
    [
        (["--help"], ["stager.cli.check", "pydantic", "ClusterShell", "rich"]),
        (["node", "--help"], ["pydantic", "ClusterShell", "rich"]),
        (["check", "--help"], ["stager.store", "stager.node", "ClusterShell", "rich"]),
        (["gate", "--help"], ["stager.store", "stager.node.agent", "ClusterShell", "rich"]),
    ],
    ids=["help", "node", "check", "gate"],
)
def test_a_command_imports_no_more_than_it_needs(arguments: list[str], spared: list[str]) -> None:
    script = (
        "import sys; from stager.cli.main import cli; "
        "cli.main(sys.argv[1:], standalone_mode=False); print('imported:', *sys.modules)"
    )
    ran = run([sys.executable, "-c", script, *arguments])
    imported = ran.out.rpartition("imported: ")[2].split()
    assert (ran.code, ran.err) == (0, "")
    assert [name for name in spared if name in imported] == []
