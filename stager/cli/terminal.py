"""Print the lines of ``stagectl``: what was done on stdout, what failed on stderr.

A path or another program's output may hold control characters; none may reach the terminal. Colours
and whatever else moves on a screen are for terminals alone.

Show lines that change again and again: on the whole terminal, else one after the other.

Draw shares and lengths by block characters, or by ASCII where a terminal has no others. Pure.
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
    from collections.abc import Callable, Iterable, Mapping, Sequence
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
#: Of a scale, the fewest columns of bars, and the part of its width that they have at least.
_FEWEST, _THIRD = 10, 3
#: The name of all those that have no name of their own.
_OTHERS = "others"


class Blocks(NamedTuple):
    """The characters to draw with: ``parts`` of a column from the least to a whole; ``empty``."""

    parts: str
    empty: str

    @classmethod
    def of(cls, stream: TextIO) -> Self:
        """Return what ``stream`` can show."""
        try:
            "█▏░".encode(stream.encoding or "ascii")
        except UnicodeEncodeError:
            return cls("#", ".")
        return cls("▏▎▍▌▋▊▉█", "░")

    def share(self, count: int, total: int) -> str:
        """Return a bar that is full only for all of ``total``, and empty only for none.

        >>> Blocks("#", ".").share(3, 4), Blocks("#", ".").share(1, 99)
        ('######..', '#.......')
        """
        filled = max(1, _SHARE * count // total) if count else 0
        return self.parts[-1] * filled + self.empty * (_SHARE - filled)

    def scale(self, lengths: Mapping[str, float], width: int) -> str:
        """Return the names of ``lengths``, each with its bar, in one line of ``width`` columns.

        Bars are in proportion. Where there is no room for all names, or a bar would be too short to
        be seen, the shortest are drawn as one, at the end; what has no length is left out. Return
        an empty text if ``width`` is too small even so.

        >>> Blocks("#", ".").scale({"read": 1, "sync": 0, "write": 2}, 34)
        'read ####### write #############'
        """
        ranked = sorted(lengths, key=lengths.__getitem__, reverse=True)
        for count in range(len(ranked), 0, -1):
            shown = _together(lengths, ranked[:count])
            # Blanks around each bar, and a column more for the part of one that it may end in.
            room = width + 1 - sum(columns(name) + 3 for name in shown)
            shortest = lengths[ranked[count - 1]] * room / (sum(lengths.values()) or 1)
            if room >= max(_FEWEST, width // _THIRD) and shortest * len(self.parts) >= 1:
                return self._line(shown, room)
        return ""

    def _line(self, lengths: Mapping[str, float], room: int) -> str:
        total = sum(lengths.values())
        bars = (f"{name} {self._bar(room * each / total)}" for name, each in lengths.items())
        return " ".join(bars)

    def _bar(self, length: float) -> str:
        """Return a bar of so many columns, to the next part of one; at least one part."""
        each = len(self.parts)
        whole, part = divmod(max(1, round(length * each)), each)
        return self.parts[-1] * whole + (self.parts[part - 1] if part else "")


def _together(lengths: Mapping[str, float], named: Sequence[str]) -> dict[str, float]:
    """Return the ``named`` lengths in the order of all, and the sum of the others at the end."""
    shown = {name: length for name, length in lengths.items() if name in named}
    others = sum(length for name, length in lengths.items() if name not in named)
    return shown | ({_OTHERS: others} if others else {})
