"""``stagectl prepare`` and ``node``: make nodes ready; what stagectl calls on other nodes."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from stager.base.errors import Failure, LaunchError, PolicyRefusal, UsageError
from stager.cli.command import Command
from stager.cli.render import failure_lines, nodes_text
from stager.cli.shared_options import json_option, real_node_options
from stager.cli.terminal import complain, print_json, say
from stager.launch.job import own_name
from stager.launch.nodes import frames, hello, read_answers
from stager.node.agent import Prepare, answer, command_of
from stager.node.user_folders import NodePrepared

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stager.cli.shared_options import NodeOptions

_TAKEN = "; .slurm-stage belongs to you, so no other user can stage beneath it"
#: What nobody does where root's part does not run.
_MISSING = (
    "without root's part, it is not known which copies are in use, so none is removed to make room "
    "(stagectl evict DST removes one), and lifetime=job removes nothing"
)


@click.command(cls=Command, topics=("nodes",))
@real_node_options
@json_option
def prepare(where: NodeOptions, as_json: bool) -> int:
    """Make ready nodes on which root's part does not run.

    Root's part is slurm-stage's plugin for Slurm, or a prolog of the site. Where neither runs, this
    makes the folders that staging needs beneath each staging root, as far as you may.
    """
    if where.local_root:
        raise UsageError("simulated nodes need nothing to be made ready; leave out --local-root")
    if os.getuid() == 0:
        raise PolicyRefusal(
            "root prepares a node for one user, there: "
            f"{sys.executable} -I -m stager.node.prolog --config {where.config} UID"
        )
    rules = where.rules()
    scope = where.scope(rules)
    lasting = tuple(root for root in rules.open_roots if root not in rules.private_roots)
    command = Prepare(lasting, str(where.config))
    answers = scope.ask(command, rules, os.environ)
    nodes, problems = read_answers(answers, NodePrepared)
    failures = [
        Failure(root.code, root.problem, name)
        for name, node in nodes.items()
        for root in node.roots
        if root.problem
    ]
    failures += [Failure(LaunchError.code, text, name) for name, text in problems.items()]
    code = failures[0].code if failures else 0
    if as_json:
        told = [
            {"node": answer.node, "problem": problems.get(answer.node, ""),
             "roots": [asdict(root) for root in nodes[answer.node].roots]
             if answer.node in nodes else []}
            for answer in answers
        ]  # fmt: skip
        print_json({"nodes": told, "code": code})
        return code
    for line in _lines(nodes):
        say(line)
    for line in failure_lines(failures):
        complain(line)
    return code


def _lines(nodes: Mapping[str, NodePrepared]) -> list[str]:
    """Return a line for each root and what became of it, with its nodes."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, node in nodes.items():
        for root in node.roots:
            if not root.problem:
                made = f"made {', '.join(root.made)}" if root.made else "nothing had to be made"
                text = f"{made}{_TAKEN if root.taken else ''}"
                found.setdefault((root.root or "/", text), []).append(name)
    lines = [
        f"{root}: ready on {nodes_text(names)}: {text}" for (root, text), names in found.items()
    ]
    unmarked = [name for name, node in nodes.items() if not node.marks]
    if unmarked and lines:
        lines.append(f"note: on {nodes_text(unmarked)}, {_MISSING}")
    return lines


@click.command(hidden=True)
@click.argument("command")
@click.argument("name", default="")
def node(command: str, name: str) -> int:
    """Carry out a command of stagectl on another node, and print the answer for it.

    The other node may know this one by another NAME, such as its address.
    """
    name = name or own_name(os.environ)
    received = command_of(command)
    click.echo(hello(name))
    for line in frames(name, answer(received, "")):
        click.echo(line)
    return 0
