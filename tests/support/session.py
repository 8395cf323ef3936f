"""Run a document's commands in one shell, on a terminal, in the home of a user.

What a document shows is compared with what is printed today by `without_figures`: figures that
differ from run to run are those of `FIGURES`, all else must be the same.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.support.terminal import Piece, Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

REPOSITORY = Path(__file__).parents[2]
#: The home that documents name. That of a session has as many characters, so that tables line up.
HOME = "/home/alice"
#: The columns that programs fit their tables to. The terminal has more, so that no line is folded.
COLUMNS, _UNFOLDED = 120, 400
_ROWS = 500
#: Seconds for all commands together, on a machine that does much else.
_PATIENCE = 300
_MARK = "end of command"
#: bash would set COLUMNS to those of the terminal.
_FIXED_WIDTH = "shopt -u checkwinsize"

#: What differs from run to run, and what stands for it where texts are compared.
FIGURES = (
    # Seconds, rates, free space.
    (r"\b(?:\d+\.\d|\d+ min \d+) s\b", "SECONDS"),
    (r"\b\d[\d.]* [KMG]?i?B/s", "RATE"),
    (
        r"\b[\d.]+ [KMGTP]iB(?: to [\d.]+ [KMGTP]iB)? free of [\d.]+ [KMGTP]iB",
        "SIZE free of SIZE",
    ),
    # The lines of --verbose: the bars, and what they show.
    (r"(?m)^stage:(?: (?:MPI init|[a-z]+) [▏▎▍▌▋▊▉█]+){2,}$", "stage: PHASES"),
    (r"\b\d+\.\d\d\b", "SECONDS"),
    (r"longest: (?:MPI init|[a-z]+)", "longest: PHASE"),
    # What other releases of Python, pip and zstd make larger or smaller, and sums with it.
    (r"\b\d+ files, [\d.]+ MiB(?= from \S+/env to )", "FILES, SIZE"),
    (r"(?m)^(/nvme/env) +\d+ files, [\d.]+ MiB", r"\1 FILES, SIZE"),
    (r"(?<=packed into )[\d.]+ KiB", "SIZE"),
    (r"\b[\d.]+ KiB(?= from \S+\.tar\.zst )", "SIZE"),
    (r"\b[\d.]+ MiB in all", "SIZE in all"),
)  # fmt: skip


def without_figures(text: str) -> str:
    """Replace what differs from run to run."""
    for pattern, name in FIGURES:
        text = re.sub(pattern, name, text)
    return text


class Step(NamedTuple):
    """A command, and the lines that it printed in their colours."""

    command: str
    lines: list[list[Piece]]

    @property
    def text(self) -> str:
        return "".join("".join(piece.text for piece in line) + "\n" for line in self.lines)


@contextmanager
def new_home() -> Iterator[Path]:
    """Make a folder whose path is as long as `HOME`, and remove it at the end."""
    home = Path("/tmp") / secrets.token_hex((len(HOME) - len("/tmp/")) // 2)
    home.mkdir(mode=0o755)
    try:
        yield home
    finally:
        shutil.rmtree(home)


def run_session(commands: Sequence[str], home: Path, folder: Path = REPOSITORY) -> list[Step]:
    """Run ``commands`` from ``folder`` on; stagectl is this environment's. `HOME` is the home."""
    # The mark keeps the exit code for a command that prints it.
    marks = f"mark() {{ local code=$?; echo {shlex.quote(_MARK)}; return $code; }}"
    script = "\n".join([_FIXED_WIDTH, marks, *(f"{command}\nmark" for command in commands)])
    variables = {
        "HOME": str(home), "COLUMNS": str(COLUMNS),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    line = ["/bin/bash", "--norc", "-c", script]
    with Terminal(
        line, folder, _UNFOLDED, _ROWS, variables=variables, patience=_PATIENCE
    ) as terminal:
        terminal.end()
        found = _steps(commands, terminal.pieces())
    return [_as_in_documents(step, str(home)) for step in found]


def _steps(commands: Sequence[str], lines: Sequence[list[Piece]]) -> Iterator[Step]:
    rest = list(lines)
    for command in commands:
        end = rest.index([Piece(_MARK, "default")])
        yield Step(command, rest[:end])
        rest = rest[end + 1 :]


def _as_in_documents(step: Step, home: str) -> Step:
    return Step(
        step.command,
        [[Piece(p.text.replace(home, HOME), p.colour) for p in line] for line in step.lines],
    )
