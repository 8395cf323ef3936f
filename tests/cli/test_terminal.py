"""What a terminal shows: bars, colours, tables that fit, and a status that is watched."""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest

from stager.base import linux
from stager.base.text import columns
from tests.support.desk import JOB, Desk
from tests.support.stagectl import STAGECTL, Ran, run
from tests.support.terminal import COLOURS, Terminal

if TYPE_CHECKING:
    from pathlib import Path

CTRL_C = "\x03"
CURSOR_HIDDEN, CURSOR_SHOWN = "\x1b[?25l", "\x1b[?25h"
ESCAPE = "\x1b"

#: Shows the events of a stage of two items; each at the press of Enter.
EVENTS = """\
import sys
from stager.cli.terminal import say
from stager.cli.progress import Progress
first = {"destination": "/nvme/alice/a/long/folder/img.sqsh"}
second = {"destination": "/nvme/alice/weights"}
with Progress(say, bars=sys.stdout) as progress:
    for event in (
        {"event": "waiting", "holder": "job 17", "node": "n2", "seconds": 0.0, **first},
        {"event": "progress", "sent": 1 << 28, "size": 1 << 30, "seconds": 0.5, **first},
        {"event": "progress", "sent": 3 << 20, "size": 4 << 20, "seconds": 1.0, **second},
        {"event": "progress", "sent": 3 << 20, "size": 4 << 20, "seconds": 13.0, **second},
    ):
        progress.show(event)
        input()
say("over")
"""


def has(words: str, lines: list[str]) -> bool:
    return words in "".join(lines)


def bars(folder: Path, width: int, **variables: str) -> tuple[list[list[str]], str]:
    """Return the screen at each event and at the end, and all that was written."""
    line = [sys.executable, "-c", EVENTS]
    variables["PYTHONPATH"] = os.getcwd()
    with Terminal(line, folder, width, variables=variables) as terminal:
        screens = []
        for words in ("waiting for", "25 %", "75 %", "no data"):
            screens.append(terminal.until(partial(has, words)))
            terminal.press("\n")
        assert terminal.end() == 0
        return [*screens, terminal.shown()], terminal.written


def test_each_item_has_a_bar_of_its_own(tmp_path: Path) -> None:
    (waits, moves, ends, stops, after), written = bars(tmp_path, 80)
    pulse = "━" * 16
    assert waits == [f"/nvme/a…/folder/img.sqsh {pulse} waiting for job 17 on n2"]
    assert moves == [f"/nvme/a…/folder/img.sqsh ━━━━╺{'━' * 11}  25 %  512.0 MiB/s  1.5 s left"]
    assert ends == [
        f"/nvme/a…/folder/img.sqsh {pulse} 100 %",
        f"/nvme/alice/weights      {'━' * 12}╺━━━  75 %  3.0 MiB/s  0.3 s left",
    ]
    assert stops[1].endswith("  75 %  no data for 12.0 s")
    assert after == ["stage: over"]
    assert COLOURS.search(written)
    assert written.count(CURSOR_HIDDEN) == written.count(CURSOR_SHOWN) == 1


def test_a_bar_fits_a_narrow_terminal(tmp_path: Path) -> None:
    (waits, moves, ends, stops, after), _ = bars(tmp_path, 40)
    assert waits == [f"/nv…img.sqsh {'━' * 12} waiting for j…"]
    assert moves == [f"/nv…img.sqsh ━━━╺{'━' * 8}  25 %"]
    assert ends == [f"/nv…img.sqsh {'━' * 12} 100 %", f"/nv…/weights {'━' * 9}╺━━  75 %"]
    assert stops == [ends[0], f"{ends[1]}  no data"]
    assert after == ["stage: over"]


def test_bars_have_no_colours_if_the_user_wants_none(tmp_path: Path) -> None:
    screens, written = bars(tmp_path, 80, NO_COLOR="1")
    assert screens[1][0].endswith("  25 %  512.0 MiB/s  1.5 s left")
    assert COLOURS.search(written) is None
    assert not re.search(f"{ESCAPE}\\[2K *━", written)  # no bar is drawn before it has its name


@pytest.mark.parametrize("kind", ["dumb", ""])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(tmp_path: Path, kind: str) -> None:
    script = EVENTS.replace("        input()\n", "")
    line = [sys.executable, "-c", script]
    variables = {"TERM": kind, "PYTHONPATH": os.getcwd()}
    with Terminal(line, tmp_path, variables=variables) as terminal:
        assert terminal.end() == 0
    assert terminal.written == (
        "stage: /nvme/alice/a/long/folder/img.sqsh: waiting for job 17 on n2\r\nstage: over\r\n"
    )


def test_packing_shows_how_far_it_is(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_bytes(os.urandom(6 << 20))  # xz takes a second
    line = [*STAGECTL, "pack", "folder", "folder.tar.xz"]
    with Terminal(line, tmp_path, 100, variables={"PYTHONPATH": os.getcwd()}) as terminal:
        bar = re.compile(r"folder\.tar\.xz +━.*  +\d+ %  .* [KM]iB/s  .* left *")
        terminal.until(lambda lines: bool(bar.fullmatch(lines[0])))
        assert terminal.end() == 0
    assert terminal.shown()[0].startswith(
        "stage: folder.tar.xz: 1 file, 6.0 MiB packed into 6.0 Mi"
    )


#: An srun whose ranks report how far they are and then no more.
SLOW = """\
#!/bin/sh
echo '{"event": "progress", "destination": "/nvme/img", "sent": 1, "size": 2, "seconds": 1}'
exec sleep 600
"""


def _alone() -> None:
    if os.getuid() == 0:
        linux.leave_network()


def test_ctrl_c_gives_the_terminal_back(job: Desk) -> None:
    (job.folder / "srun").write_text(SLOW)
    value = f"{job.source}:{job.folder}/nvme/img"
    line = [*STAGECTL, "stage", "--config", str(job.config), value]
    with Terminal(line, job.folder, variables=JOB, act=_alone) as terminal:
        terminal.until(lambda lines: "50 %" in lines[0])
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert terminal.shown() == [""]
    assert terminal.written.endswith(f"{CURSOR_SHOWN}\r{ESCAPE}[1A{ESCAPE}[2K\r\n")


def test_what_failed_is_said_in_red_on_a_terminal_alone(desk: Desk) -> None:
    line = [*STAGECTL, "check", "--config", str(desk.config), "/a"]
    message = run(line, desk.folder).err
    assert message.startswith("stage: ")
    names = ((None, f"{ESCAPE}[31mstage:{ESCAPE}[0m"), ("NO_COLOR", "stage:"), ("TERM", "stage:"))
    for variable, name in names:
        variables = {variable: "dumb"} if variable else {}
        with Terminal(line, desk.folder, 200, variables=variables) as terminal:
            assert terminal.end() == 2
        assert terminal.written.replace("\r\n", "\n") == message.replace("stage:", name, 1)


def status(desk: Desk, *more: str) -> list[str]:
    """Return the command line of a status of simulated nodes."""
    where = ["--config", str(desk.config), "--local-root", str(desk.nodes)]
    return [*STAGECTL, "status", *where, *more]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (
            80,
            [
                "NODE DST SIZE STAGED STATE KEPT LAST JOB", " SOURCE",
                "node[1-3] /nvme/img.sqsh 293.0 KiB T ago ready - -", " {source}",
            ],
        ),
        (
            40,
            [
                "NODE node[1-3]", "DST /nvme/img.sqsh", "SIZE 293.0 KiB", "STAGED T ago",
                "STATE ready", "KEPT -", "SOURCE {source}", "LAST JOB -",
            ],
        ),
    ],
)  # fmt: skip
def test_the_status_fits_the_terminal(
    staged: tuple[Desk, Ran], width: int, lines: list[str]
) -> None:
    desk, _ = staged
    with Terminal(status(desk), desk.folder, width) as terminal:
        assert terminal.end() == 0
    table = terminal.written.replace("\r\n", "\n").partition("1 file, 3 copies")[0]
    assert max(map(columns, table.splitlines())) <= width
    together = re.sub(r"\n {5,}", "", re.sub(r"\d+ (s|min) ago", "T ago", table))
    assert re.sub(" +", " ", together).splitlines() == [
        line.format(source=desk.source) for line in lines
    ]


BAR_OF_2_OF_3 = f"{'█' * 5}{'░' * 3} 2 of 3"


def test_by_file_a_bar_fits_the_terminal(copies: Desk) -> None:
    copies.copy(2).unlink()
    in_pipe = run(status(copies, "--by", "file"), copies.folder)
    assert re.sub(" +", " ", in_pipe.out).startswith(
        "DST SIZE NODES STATE KEPT SOURCE\n"
        f"/nvme/img.sqsh 293.0 KiB 3 2 ready, 1 missing - {copies.source}\n"
    )
    screens = {}
    for width in (80, 40):
        with Terminal(status(copies, "--by", "file"), copies.folder, width) as terminal:
            assert terminal.end() == 0
        screens[width] = terminal.shown()
        assert COLOURS.findall(terminal.written) == [f"{ESCAPE}[36m", f"{ESCAPE}[33m"]
        assert f"{ESCAPE}[36m{BAR_OF_2_OF_3}{ESCAPE}[0m" in terminal.written
    assert [screens[80][0], screens[80][2]] == [
        f"DST                  SIZE  ON NODES         {'STATE':<20}KEPT",
        f"/nvme/img.sqsh  293.0 KiB  {BAR_OF_2_OF_3}  2 ready, 1 missing  -",
    ]
    assert screens[40][:5] == [
        "DST       /nvme/img.sqsh", "SIZE      293.0 KiB", f"ON NODES  {BAR_OF_2_OF_3}",
        "STATE     2 ready, 1 missing", "KEPT      -",
    ]  # fmt: skip
    variables = {"NO_COLOR": "1"}
    with Terminal(status(copies, "--by", "file"), copies.folder, variables=variables) as terminal:
        assert terminal.end() == 0
    assert (terminal.shown()[:-1], ESCAPE in terminal.written) == (screens[80][:-1], False)


def test_a_copy_that_is_not_ready_is_coloured(copies: Desk) -> None:
    copies.source.write_bytes(b"changed")
    with Terminal(status(copies), copies.folder, 200) as terminal:
        assert terminal.end() == 0
    assert f"  {ESCAPE}[33moutdated{ESCAPE}[0m  -" in terminal.written


def test_a_status_is_watched_until_ctrl_c(copies: Desk) -> None:
    with Terminal(status(copies, "--watch=1"), copies.folder, 200) as terminal:
        lines = terminal.until(lambda lines: " ready " in "".join(lines))
        assert re.fullmatch(r"every 1 s until Ctrl-C, last at \d\d:\d\d:\d\d", lines[0])
        copies.copy(2).unlink()
        beginnings = ["NODE ", "node[1,3] ", "node2 "]
        terminal.until(lambda lines: [*map(str.startswith, lines[2:5], beginnings)] == [True] * 3)
        terminal.until(lambda lines: " missing " in lines[4])
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert "Traceback" not in terminal.written
    assert terminal.written.count(f"{ESCAPE}[?1049h") == 1
    assert terminal.written.index(f"{ESCAPE}[?1049l") > terminal.written.index(CURSOR_HIDDEN)
    assert terminal.written.rstrip().endswith(CURSOR_SHOWN)


def test_a_status_that_is_watched_in_a_pipe_is_printed_again_and_again(copies: Desk) -> None:
    script = 'timeout --signal INT 25 "$@" --watch 1 | head -9'
    ran = run(["/bin/sh", "-c", script, "sh", *status(copies)], copies.folder)
    lines = ran.out.splitlines()
    assert [bool(re.fullmatch(r"\d\d:\d\d:\d\d:", line)) for line in lines] == [
        *(True, False, False, False, False), False, True, False, False,
    ]  # fmt: skip
    assert ESCAPE not in ran.out


def test_json_is_not_watched(desk: Desk) -> None:
    message = "stage: --watch shows text; leave out --json\n"
    assert desk.stagectl("status", "--json", "--watch") == Ran(2, "", message)
