"""Print the lines of ``stagectl``: what was done on stdout, what failed on stderr.

A path or another program's output may hold control characters; none may reach the terminal. Colours
and whatever else moves on a screen are for terminals alone.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from typing import TYPE_CHECKING

import click

from stager.base.text import NOT_UTF_8

if TYPE_CHECKING:
    from typing import TextIO

_OF_A_NAME = re.compile(r"\n(?!  )")


def printable_lines(text: str) -> str:
    """Replace what does not print by ``?``, but for the ends of lines.

    Further lines of a message begin with two blanks. Other ends of lines are those of a name, by
    which somebody could forge a message. A byte that is no UTF-8 stays, since the stream prints it
    with an escape (`main`).
    """
    lines = _OF_A_NAME.sub("?", text)
    return "".join(c if c.isprintable() or c == "\n" or c in NOT_UTF_8 else "?" for c in lines)


def is_screen(stream: TextIO) -> bool:
    """Whether a stream is a terminal that understands escape sequences."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def painted(text: str, colour: str, stream: TextIO | None = None) -> str:
    """Return ``text`` in a colour for ``stream`` (stdout), if it is a screen and NO_COLOR empty."""
    if os.environ.get("NO_COLOR") or not is_screen(stream or sys.stdout):
        return text
    return click.style(text, fg=colour)


def width() -> int:
    """Return the columns of the terminal that stdout is, or 0 if it is none: lines have no end."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def say(text: str, *, err: bool = False) -> None:
    """Print what was done; with ``err`` to stderr, where stdout is for another program."""
    click.echo(f"stage: {printable_lines(text)}", err=err)


def ignore(_: str) -> None:
    """Print nothing."""


def complain(text: str) -> None:
    """Print what failed."""
    name = painted("stage:", "red", sys.stderr)
    click.echo(f"{name} {printable_lines(text)}", err=True)
