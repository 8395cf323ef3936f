"""``stagectl bench``: measure the network, the disks and the source of a job's nodes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from stager.base.errors import PolicyRefusal
from stager.base.options import Options
from stager.base.outcome import Rate
from stager.base.text import printable
from stager.cli.absolute import absolute
from stager.cli.console import complain, say
from stager.cli.options import json_option, run_options
from stager.cli.render import rate_lines
from stager.cli.staging import build_request, find_nodes, print_outcome
from stager.request.items import StageItem

if TYPE_CHECKING:
    from stager.cli.options import RunOptions
    from stager.request.policy import Policy


@click.command()
@click.option(
    "--source",
    metavar="FILE",
    default="",
    help="A file on shared storage; one node measures how fast it can be read.",
)
@click.option(
    "--root",
    metavar="FOLDER",
    default="",
    help="Measure the disk of this staging folder (one of `roots` in stage.toml).  "
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
    slowest of them. Nothing is staged, and the files that are written are removed. Run it inside a
    job, or with --local.
    """
    rates: list[Rate] = []

    def on_event(event: dict[str, Any]) -> None:
        if event.pop("event") == "rate":
            rates.append(Rate(**event))

    nodes = find_nodes(run)
    request = build_request((_item(source, root, nodes.rules),), nodes.rules)
    outcome = nodes.run(replace(request, bench=size << 20), on_event)
    if as_json:
        measured = {**outcome.to_json(), "rates": [asdict(rate) for rate in rates]}
        click.echo(json.dumps(measured, indent=1))
    elif outcome.failures:
        print_outcome(outcome, say, complain)
    else:
        for line in rate_lines(rates):
            click.echo(printable(line))
    return outcome.code


def _item(source: str, root: str, rules: Policy) -> StageItem:
    """Return what to measure: the source and a staging folder. Raise PolicyRefusal."""
    roots = {known or "/": known for known in rules.roots}
    if root and root not in roots:
        known = " or ".join(roots)
        raise PolicyRefusal(
            f"{root} is not a staging folder (one of `roots` in stage.toml); use --root {known}"
        )
    root = roots[root] if root else rules.roots[0]
    return StageItem(absolute(source) if source else "", f"{root}/bench", root, Options())
