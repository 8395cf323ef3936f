"""``stagectl bench``: measure the network, the disks and the source of a job's nodes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from stager.base.errors import PolicyRefusal, UsageError
from stager.base.options import Options
from stager.base.outcome import NodeRates, Rate, far_below
from stager.base.text import bytes_text, printable, rate_text, showable
from stager.cli.command import Command
from stager.cli.complete import files, roots
from stager.cli.render import print_outcome
from stager.cli.shared_options import json_option, run_options
from stager.cli.tables import table
from stager.cli.terminal import complain, print_json, say, width
from stager.request.items import StageItem, Work
from stager.request.names import absolute
from stager.request.resolve import build_request
from stager.source.schemes import Scheme

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stager.cli.shared_options import RunOptions
    from stager.request.policy import Policy

#: Nodes of which the rates are shown, unless more are slow.
_MOST_NODES = 16


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

    Each is measured by itself, with the code that a stage uses: the slowest limits a stage. A node
    is marked as slow if it does less than a third of what the others do. The files that are written
    are removed.
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


def rate_lines(rates: Sequence[Rate], width: int = 0) -> list[str]:
    """Return the rates of the network as a table, the other rates, and which part is slowest.

    The table is within ``width`` columns, unless that is 0.
    """
    wire = [rate for rate in rates if rate.what == "wire"]
    algorithms = list(dict.fromkeys(rate.algorithm for rate in wire))
    headers = ("message", "best time", *algorithms)
    rows = []
    for size in dict.fromkeys(rate.size for rate in wire):
        row = {rate.algorithm: rate for rate in wire if rate.size == size}
        best = 1e6 * min(rate.seconds for rate in row.values())
        speeds = (_speed(row[name].speed) if name in row else "-" for name in algorithms)
        rows.append((bytes_text(size), f"{best:.0f} us", *speeds))
    others = [rate for rate in rates if rate.what != "wire"]
    named = [f"{_RATES[rate.what]} {rate.node}: {_speed(rate.speed)}" for rate in others]
    return [*table(headers, rows, width, right=headers), *named, _verdict(wire, others)]


def node_lines(nodes: Sequence[NodeRates], width: int = 0) -> list[str]:
    """Return the rates of each node as a table within ``width`` columns, and what is slow there.

    Slow nodes come first; of more than `_MOST_NODES` the others are left out. One node has none.
    """
    if len(nodes) < 2:
        return []
    slow: dict[str, list[str]] = {one.node: [] for one in nodes}
    for what in ("write", "read", "network"):
        for one, is_slow in zip(nodes, far_below([getattr(n, what) for n in nodes]), strict=True):
            slow[one.node] += [what] if is_slow else []
    ordered = sorted(nodes, key=lambda one: not slow[one.node])
    shown = ordered[: max(_MOST_NODES, sum(map(bool, slow.values())))]
    headers = ("NODE", "WRITE", "READ", "NETWORK", "SLOW")
    rows = [
        (one.node, *map(rate_text, (one.write, one.read, one.network)), ", ".join(slow[one.node]))
        for one in shown
    ]
    left = len(nodes) - len(shown)
    more = [f"{left} more {'node' if left == 1 else 'nodes'}, not slow"] if left else []
    return [*table(headers, rows, width, right=headers[1:4]), *more]


#: What a rate of a disk or of the source is of.
_RATES = {
    "write": "disk, written and synced, slowest on",
    "read": "disk, read without the page cache, slowest on",
    "source": "source, one stream, read on",
}


def _verdict(wire: Sequence[Rate], others: Sequence[Rate]) -> str:
    """Return which part is the slowest."""
    largest = max(rate.size for rate in wire)
    speeds = {"the network": max(rate.speed for rate in wire if rate.size == largest)}
    names = {"write": "the disk", "source": "the source"}
    speeds |= {names[rate.what]: rate.speed for rate in others if rate.what in names}
    slowest = min(speeds, key=speeds.__getitem__)
    return f"the slowest part is {slowest}: {_speed(speeds[slowest])} a node"


def _speed(rate: float) -> str:
    """Return a rate in decimal units, as vendors of networks and disks use them."""
    return f"{rate / 1e9:.2f} GB/s"
