"""Print the lines of ``stagectl``: what was done on stdout, what failed on stderr.

A path or another program's output may hold control characters; none may reach the terminal.
"""

from __future__ import annotations

import re

import click

_OF_A_NAME = re.compile(r"\n(?!  )")
#: What Python decodes bytes to that are no UTF-8 (PEP 383).
_BYTES = frozenset(map(chr, range(0xDC80, 0xDD00)))


def printable_lines(text: str) -> str:
    """Replace what does not print by ``?``, but for the ends of lines.

    Further lines of a message begin with two blanks. Other ends of lines are those of a name, by
    which somebody could forge a message. A byte that is no UTF-8 stays, since the stream prints it
    with an escape (`main`).
    """
    lines = _OF_A_NAME.sub("?", text)
    return "".join(c if c.isprintable() or c == "\n" or c in _BYTES else "?" for c in lines)


def say(text: str) -> None:
    """Print what was done."""
    click.echo(f"stage: {printable_lines(text)}")


def complain(text: str) -> None:
    """Print what failed."""
    click.echo(f"stage: {printable_lines(text)}", err=True)
