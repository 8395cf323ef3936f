"""``stagectl doctor``: how findings are printed. What is found is in tests/doctor."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import termios
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.support.stagectl import STAGECTL, Ran

if TYPE_CHECKING:
    from tests.support.desk import Desk


def test_a_stage_toml_that_is_not_there_is_a_problem_among_the_findings(desk: Desk) -> None:
    desk.config.unlink()
    ran = desk.stagectl("doctor")
    assert (ran.code, ran.err) == (1, "")
    text = f"problem  {desk.config} is missing: slurm-config/stage.toml is a template for it"
    assert text in ran.out.splitlines()


def test_an_srun_that_is_not_there_is_a_problem(desk: Desk) -> None:
    desk.config.write_text('roots = ["/nvme"]\n[launch]\nsrun = "/nowhere/srun"\n')
    ran = desk.stagectl("doctor")
    assert (ran.code, ran.err) == (1, "")
    assert (
        "problem  /nowhere/srun, which stage.toml names, is not there or cannot be run: correct "
        "srun in [launch]"
    ) in ran.out.splitlines()


def test_findings_as_json_are_those_of_the_text(desk: Desk) -> None:
    text, data = desk.stagectl("doctor"), desk.stagectl("doctor", "--json")
    assert text.code == data.code
    findings = json.loads(data.out)["findings"]
    here = os.uname().nodename
    assert text.out.splitlines()[:-1] == [
        f"{one['state']:<8} {here + ': ' if one['nodes'] else ''}{one['text']}"
        + (f": {one['remedy']}" if one["remedy"] else "")
        for one in findings
    ]
    assert all(list(one) == ["name", "state", "nodes", "text", "remedy"] for one in findings)


def test_simulated_nodes_have_nothing_to_check(desk: Desk) -> None:
    message = "stage: simulated nodes have nothing to check; leave out --local-root\n"
    assert desk.simulated("doctor") == Ran(2, "", message)


def test_on_a_terminal_lines_are_folded_to_its_width(desk: Desk) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 60))
    line = [*STAGECTL, "doctor", "--config", str(desk.config)]
    environment = {name: text for name, text in os.environ.items() if name != "COLUMNS"}
    environment["NO_COLOR"] = "1"
    subprocess.run(line, stdout=theirs, env=environment, check=False)
    os.close(theirs)
    told = b""
    with suppress(OSError):  # EIO: all was read
        while block := os.read(ours, 1 << 16):
            told += block
    os.close(ours)
    lines = told.decode().splitlines()
    (start,) = (n for n, line in enumerate(lines) if line.startswith("note     MPI was not tried"))
    of_user = ["note     MPI was not tried: run this in a job, if you can", "         of two nodes"]
    of_root = [
        "note     MPI was not tried: root starts no ranks; run this",
        "         as an ordinary user, in a job",
    ]
    assert lines[start : start + 2] == (of_user if os.getuid() else of_root)
    assert max(map(len, lines)) <= 60
