"""``stagectl bench``: measure the network, the disks and the source of a job's nodes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from stager.base.errors import PolicyRefusal, UsageError
from stager.base.options import Options
from stager.base.outcome import NodeRates, Rate
from stager.base.text import printable, showable
from stager.cli.command import Command
from stager.cli.complete import files, roots
from stager.cli.render import node_lines, print_outcome, rate_lines
from stager.cli.shared_options import json_option, run_options
from stager.cli.terminal import complain, print_json, say, width
from stager.request.items import StageItem, Work
from stager.request.names import absolute
from stager.request.resolve import build_request
from stager.source.schemes import Scheme

if TYPE_CHECKING:
    from stager.cli.shared_options import RunOptions
    from stager.request.policy import Policy


@click.command(cls=Command, topics=("nodes",))
@click.option(
    "--source",
    metavar="SRC",
    default="",
    shell_complete=files,
    help="Measure how fast this file on shared storage is read.",
)
@click.option(
    "--root",
    metavar="FOLDER",
    default="",
    shell_complete=roots,
    help="Measure the disk of this staging folder, one of `roots` in stage.toml.  "
    "[default: the first one]",
)
@click.option(
    "--size",
    type=click.IntRange(1, 1 << 24),
    default=256,
    metavar="MIB",
    show_default=True,
    help="Size in MiB of the test file and of the largest block that is sent.",
)
@run_options
@json_option
def bench(source: str, root: str, size: int, run: RunOptions, as_json: bool) -> int:
    """Measure the network, the disks and the source of this job's nodes.

    Each is measured by itself, with the code that a stage uses. Staging cannot be faster than the
    slowest of them, except if several nodes read a slow source. A node is marked as slow if it does
    less than a third of what the others do. Nothing is staged, and the files that are written
    are removed. Run it inside a job, with --hosts, or with --local.
    """
    if Scheme.of(source).is_url:
        raise UsageError(f"{showable(source)}: bench reads a file on shared storage, no URL")
    rates: list[Rate] = []
    of_nodes: list[NodeRates] = []

    def on_event(event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "rate":
            rates.append(Rate(**event))
        elif kind == "node_rates":
            of_nodes.append(NodeRates(**event))

    nodes = run.find()
    if nodes.waits_for:
        raise UsageError(
            f"{nodes.waits_for}, but one process measures all nodes: run stagectl bench on the "
            "first alone"
        )
    items = (_item(source, root, nodes.rules),)
    request = build_request(items, nodes.rules, Work.MEASURE, bench=size << 20)
    outcome = nodes.run(request, on_event)
    if as_json:
        measured = {**outcome.to_json(), "rates": [asdict(rate) for rate in rates]}
        measured["nodes"] = [asdict(one) for one in of_nodes]
        print_json(measured)
    elif outcome.failures:
        print_outcome(outcome, say, complain)
    else:
        for line in (*rate_lines(rates, width()), *node_lines(of_nodes, width())):
            click.echo(printable(line))
    return outcome.code


def _item(source: str, root: str, rules: Policy) -> StageItem:
    """Return what to measure: the source and a staging folder. Raise PolicyRefusal."""
    root = _root(root, rules)
    return StageItem(absolute(source) if source else "", f"{root}/bench", root, Options())


def _root(root: str, rules: Policy) -> str:
    """Return the staging folder to measure. Raise PolicyRefusal."""
    roots = {known or "/": known for known in rules.open_roots}
    if not roots:
        absent = " or ".join(rules.absent_roots)
        raise PolicyRefusal(f"{absent}: there in a job only; measure in a job")
    if root and root not in roots:
        known = " or ".join(roots)
        raise PolicyRefusal(
            f"{root} is not a staging folder (one of `roots` in stage.toml); use --root {known}"
        )
    return roots[root] if root else rules.open_roots[0]
