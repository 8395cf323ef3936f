"""Run a program on a terminal of its own, and see what its screen shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, Self

import pyte

from tests.support.stagectl import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

#: Seconds for anything that a test waits for.
_PATIENCE = 30
#: The escape sequences that set colours.
COLOURS = re.compile("\x1b\\[(?:\\d+;)*(?:3[0-7]|9[0-7]|38;[25];[\\d;]+)m")


class Piece(NamedTuple):
    """A part of a line in one colour, by its name in ANSI; ``brown`` is yellow."""

    text: str
    colour: str


class Terminal:
    """A program with a controlling terminal, without echo. ``written`` is all that it has written.

    ``act`` is called in the new process just before the program starts. The methods wait for
    ``patience`` seconds at most.
    """

    def __init__(
        self,
        line: Sequence[str | Path],
        folder: Path,
        columns: int = 80,
        rows: int = 24,
        *,
        variables: Mapping[str, str] | None = None,
        act: Callable[[], None] = lambda: None,
        patience: float = _PATIENCE,
    ) -> None:
        self.written = ""
        self._patience = patience
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.Stream(self._screen)
        inherited = {**environment(), "TERM": "xterm-256color", **(variables or {})}
        if "COLUMNS" not in (variables or {}):
            del inherited["COLUMNS"]
        arguments = [*map(str, line)]
        self._pid, self._file = pty.fork()
        if not self._pid:
            try:
                size = struct.pack("HHHH", rows, columns, 0, 0)
                fcntl.ioctl(1, termios.TIOCSWINSZ, size)
                settings = termios.tcgetattr(1)
                settings[3] &= ~termios.ECHO
                termios.tcsetattr(1, termios.TCSANOW, settings)
                os.chdir(folder)
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests may run with it ignored
                act()
                os.execve(arguments[0], arguments, inherited)
            finally:
                os._exit(127)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._file)

    def press(self, keys: str) -> None:
        """Type ``keys``, such as a Ctrl-C."""
        os.write(self._file, keys.encode())

    def shown(self) -> list[str]:
        """Return the lines on the screen, without the empty ones at its end."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip().split("\n")

    def pieces(self) -> list[list[Piece]]:
        """Return the lines on the screen above the cursor, in pieces of one colour each."""
        return [self._line(number) for number in range(self._screen.cursor.y)]

    def _line(self, number: int) -> list[Piece]:
        row = self._screen.buffer[number]
        end = max((x + 1 for x, cell in row.items() if cell.data.strip()), default=0)
        runs = groupby((row[x] for x in range(end)), key=lambda cell: cell.fg)
        return [Piece("".join(cell.data for cell in cells), colour) for colour, cells in runs]

    def until(self, is_there: Callable[[list[str]], bool]) -> list[str]:
        """Return the first screen that the condition holds for. Fail if the program ends before."""
        deadline = time.monotonic() + self._patience
        while not is_there(self.shown()):
            assert time.monotonic() < deadline, self.shown()
            assert self._read(), self.shown()
        return self.shown()

    def end(self) -> int:
        """Return the exit code; 128 and more for a signal. Fail if the program does not end."""
        deadline = time.monotonic() + self._patience
        while self._read():
            assert time.monotonic() < deadline, self.shown()
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _read(self) -> bool:
        """Take what was written, in a second at most. Return false if nothing more will be."""
        if not select.select([self._file], [], [], 1)[0]:
            return True
        try:
            piece = os.read(self._file, 1 << 16).decode()
        except OSError:  # Linux: every process has closed the terminal
            return False
        self.written += piece
        self._stream.feed(piece)
        return True
