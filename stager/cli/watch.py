"""Show lines that change again and again: on the whole terminal, else one after the other."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, NoReturn

import click

from stager.base.text import columns, folded
from stager.cli.console import is_screen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


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
