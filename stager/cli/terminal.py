"""Print the lines of ``stagectl``: what was done on stdout, what failed on stderr.

A path or another program's output may hold control characters; none may reach the terminal. Colours
and whatever else moves on a screen are for terminals alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from stager.base.text import NOT_UTF_8, columns, folded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Self, TextIO

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


def print_json(found: Mapping[str, Any]) -> None:
    """Print what a command found, for other programs.

    The version changes when a key goes or gets another meaning; others may come at any time.
    """
    click.echo(json.dumps({"version": 1, **found}, indent=1))


def ignore(_: str) -> None:
    """Print nothing."""


def complain(text: str) -> None:
    """Print what failed."""
    name = painted("stage:", "red", sys.stderr)
    click.echo(f"{name} {printable_lines(text)}", err=True)


def watch(lines: Callable[[], list[str]], period: float) -> NoReturn:
    """Show what ``lines`` returns, every ``period`` seconds, until KeyboardInterrupt.

    The screen is then as it was before. Where stdout is no terminal, nothing is overwritten.
    """
    if is_screen(sys.stdout):
        _watch_on_screen(lines, period)
    while True:
        click.echo("\n".join([f"{_now()}:", *lines(), ""]))
        time.sleep(period)


def _watch_on_screen(lines: Callable[[], list[str]], period: float) -> NoReturn:
    from rich.console import Console  # slow to import
    from rich.text import Text

    console = Console(highlight=False)
    shown = lines()  # before the screen is cleared
    with console.screen() as screen:
        while True:
            head = f"every {period:g} s until Ctrl-C, last at {_now()}"
            text = "\n".join(frame([head, "", *shown], *console.size))
            screen.update(Text.from_ansi(text, no_wrap=True))
            time.sleep(period)
            shown = lines()


def frame(lines: Iterable[str], width: int, height: int) -> list[str]:
    """Return lines for a screen: long ones folded, and how many there is no room for.

    Lines with colours must be short enough.
    """
    found: list[str] = []
    for line in lines:
        fits = columns(click.unstyle(line)) <= width
        found += [line] if fits else folded(line, width)
    if len(found) <= height:
        return found
    return [*found[: height - 1], f"… {len(found) - height + 1} more lines"]


def _now() -> str:
    return time.strftime("%H:%M:%S")


#: Columns of a share, which leave room for paths on a terminal of 80.
_SHARE = 8


class Blocks(NamedTuple):
    """The characters to draw a share with."""

    full: str
    empty: str

    @classmethod
    def of(cls, stream: TextIO) -> Self:
        """Return what ``stream`` can show."""
        try:
            "█░".encode(stream.encoding or "ascii")
        except UnicodeEncodeError:
            return cls("#", ".")
        return cls("█", "░")

    def share(self, count: int, total: int) -> str:
        """Return a bar that is full only for all of ``total``, and empty only for none.

        >>> Blocks("#", ".").share(3, 4), Blocks("#", ".").share(1, 99)
        ('######..', '#.......')
        """
        filled = max(1, _SHARE * count // total) if count else 0
        return self.full * filled + self.empty * (_SHARE - filled)
