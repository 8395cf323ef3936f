"""Print the lines of ``stagectl``: what was done on stdout, what failed on stderr.

A path or another program's output may hold control characters; none may reach the terminal.
"""

from __future__ import annotations

import click

#: What Python decodes bytes to that are no UTF-8 (PEP 383).
_BYTES = frozenset(map(chr, range(0xDC80, 0xDD00)))


def printable_lines(text: str) -> str:
    """Replace what does not print by ``?``, but for the ends of lines.

    A byte that is no UTF-8 stays, since the stream prints it with an escape (`main`).
    """
    return "".join(c if c.isprintable() or c == "\n" or c in _BYTES else "?" for c in text)


def say(text: str) -> None:
    """Print what was done."""
    click.echo(f"stage: {printable_lines(text)}")


def complain(text: str) -> None:
    """Print what failed."""
    click.echo(f"stage: {printable_lines(text)}", err=True)
