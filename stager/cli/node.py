"""``stagectl node``: what stagectl calls on other nodes."""

from __future__ import annotations

import os

import click

from stager.launch import job
from stager.launch.nodes import frames, hello
from stager.node.agent import answer, command_of


@click.command(hidden=True)
@click.argument("command")
@click.argument("name", default="")
def node(command: str, name: str) -> int:
    """Carry out a command of stagectl on another node, and print the answer for it.

    The other node may know this one by another NAME, such as its address.
    """
    name = name or job.own_name(os.environ)
    received = command_of(command)
    click.echo(hello(name))
    for line in frames(name, answer(received, "")):
        click.echo(line)
    return 0
