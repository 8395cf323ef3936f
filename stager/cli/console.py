"""Print the lines of ``stagectl``: what was done on stdout, what failed on stderr."""

from __future__ import annotations

import click


def say(text: str) -> None:
    """Print what was done."""
    click.echo(f"stage: {text}")


def complain(text: str) -> None:
    """Print what failed."""
    click.echo(f"stage: {text}", err=True)
