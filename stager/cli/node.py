"""``stagectl node``: what stagectl calls on other nodes."""

from __future__ import annotations

import os

import click

from stager.cli.scope import answer
from stager.copies.upkeep import Command
from stager.launch import gather, job


@click.command(hidden=True)
@click.argument("command")
def node(command: str) -> int:
    """Carry out a command of stagectl on another node, and print the answer for it."""
    name = job.own_name(os.environ)
    received = Command.from_text(command)
    click.echo(gather.hello(name))
    for line in gather.frames(name, answer(received, "")):
        click.echo(line)
    return 0
