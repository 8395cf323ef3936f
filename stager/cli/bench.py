"""``stagectl bench``: measure the network, the disks and the source of a job's nodes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stager.base.errors import PolicyRefusal, UsageError
from stager.base.options import Options
from stager.base.outcome import NodeRates, Rate
from stager.base.text import printable
from stager.cli.absolute import absolute
from stager.cli.bench_here import Sweep, measure_disk, measure_source, numbers, sizes
from stager.cli.complete import files, roots
from stager.cli.console import complain, say, width
from stager.cli.options import epilog, json_option, load_policy, run_options
from stager.cli.plot import svg
from stager.cli.render import named_rate, node_lines, rate_lines
from stager.cli.staging import build_request, find_nodes, print_outcome, same_line
from stager.request.items import StageItem
from stager.source.location import is_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stager.cli.on_hosts import HostNodes
    from stager.cli.options import RunOptions
    from stager.cli.staging import JobNodes, SimulatedNodes
    from stager.request.policy import Policy


def _picture(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Return the file to draw in, so that nothing is measured in vain."""
    if path and path.suffix != ".svg":
        raise click.BadParameter(f"{path} does not end in .svg, which is what is drawn")
    if path and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise click.BadParameter(f"{path} cannot be written")
    return path


@click.command(epilog=epilog(codes=(2, 3, 4, 5, 6, 8)))
@click.option(
    "--source",
    metavar="SRC",
    default="",
    shell_complete=files,
    help="Measure how fast this file on shared storage is read. A URL or a folder is measured "
    "as with --here.",
)
@click.option(
    "--root",
    metavar="FOLDER",
    default="",
    shell_complete=roots,
    help="Measure the disk of this staging folder (one of `roots` in stage.toml).  "
    "[default: the first one]",
)
@click.option(
    "--size",
    type=click.IntRange(1, 1 << 24),
    default=256,
    metavar="MIB",
    show_default=True,
    help="Size in MiB of the test file and of the largest block that is sent. With --here, the "
    "most that is read or written for each row.",
)
@click.option(
    "--here",
    is_flag=True,
    help="Measure this machine alone, by block size and number of threads: the source, or "
    "without --source the disk.",
)
@click.option(
    "--blocks",
    metavar="LIST",
    default="",
    callback=sizes,
    help="With --here, the sizes of blocks, such as 4K,1M; of a URL, how much a request asks for.",
)
@click.option(
    "--threads",
    metavar="LIST",
    default="",
    callback=numbers,
    help="With --here, the numbers of threads, or of requests at once.  [default: 1,4,16]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.01, 3600),
    default=2,
    metavar="S",
    show_default=True,
    help="With --here, the most seconds for each row.",
)
@click.option("--random", is_flag=True, help="With --here, take blocks in random order.")
@click.option(
    "--plot",
    metavar="FILE.svg",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_picture,
    help="Also draw the rates by size of the message or block in this file, which is replaced.",
)
@run_options
@json_option
def bench(
    source: str,
    root: str,
    size: int,
    here: bool,
    blocks: tuple[int, ...],
    threads: tuple[int, ...],
    seconds: float,
    random: bool,
    plot: Path | None,
    run: RunOptions,
    as_json: bool,
) -> int:
    """Measure the network, the disks and the source of this job's nodes.

    Each is measured by itself, with the code that a stage uses. Staging cannot be faster than the
    slowest of them, except if several nodes read a slow source. A node is marked as slow if it does
    less than a third of what the others do. Nothing is staged, and the files that are written
    are removed. Run it inside a job, with --hosts, or with --local.

    With --here, and for a URL or a folder, this machine alone reads blocks of several sizes with
    several threads (on its own disk, it writes them before), without the page cache, which helps to
    choose values for stage.toml. That needs no job.
    """
    if here or is_url(source) or os.path.isdir(source):
        sweep = Sweep(blocks, threads, random, seconds, size << 20)
        return _bench_here(source, root, sweep, run, plot, as_json=as_json)
    rates: list[Rate] = []
    of_nodes: list[NodeRates] = []

    def on_event(event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "rate":
            rates.append(Rate(**event))
        elif kind == "node_rates":
            of_nodes.append(NodeRates(**event))

    nodes = _find_nodes(run)
    request = build_request((_item(source, root, nodes.rules),), nodes.rules)
    outcome = nodes.run(replace(request, bench=size << 20), on_event)
    if plot and not outcome.failures:
        plot.write_text(_plotted(rates))
    if as_json:
        measured = {**outcome.to_json(), "rates": [asdict(rate) for rate in rates]}
        measured["nodes"] = [asdict(one) for one in of_nodes]
        click.echo(json.dumps(measured, indent=1))
    elif outcome.failures:
        print_outcome(outcome, say, complain)
    else:
        for line in (*rate_lines(rates, width()), *node_lines(of_nodes, width())):
            click.echo(printable(line))
    return outcome.code


def _find_nodes(run: RunOptions) -> JobNodes | SimulatedNodes | HostNodes:
    """Return the nodes. Raise UsageError if this process is not the first of several that do so."""
    nodes = find_nodes(run)
    line = same_line(nodes, ())
    if line and line.later:
        raise UsageError(
            f"{line.later}, but one process measures all nodes: run stagectl bench on the first "
            "alone"
        )
    return nodes


def _plotted(rates: Sequence[Rate]) -> str:
    """Return the picture of what the ranks measured."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for rate in rates:
        if rate.what == "wire":
            lines.setdefault(rate.algorithm, []).append((rate.size, rate.speed))
    limits = dict(named_rate(rate) for rate in rates if rate.what != "wire")
    return svg("broadcast to all nodes of the job", "size of the message", lines, limits)


def _bench_here(
    source: str, root: str, sweep: Sweep, run: RunOptions, plot: Path | None, *, as_json: bool
) -> int:
    """Measure the source, or the disk of a staging folder, from this machine."""
    if run.local:
        raise UsageError("--here measures this machine itself: remove --local")
    if source:
        rules = load_policy(run.config, simulated=True)
        return measure_source(
            source if is_url(source) else absolute(source), rules, sweep, plot, as_json=as_json
        )
    rules = load_policy(run.config, simulated=False)
    return measure_disk(_root(root, rules), rules, sweep, plot, as_json=as_json)


def _item(source: str, root: str, rules: Policy) -> StageItem:
    """Return what to measure: the source and a staging folder. Raise PolicyRefusal."""
    root = _root(root, rules)
    return StageItem(absolute(source) if source else "", f"{root}/bench", root, Options())


def _root(root: str, rules: Policy) -> str:
    """Return the staging folder to measure. Raise PolicyRefusal."""
    roots = {known or "/": known for known in rules.roots}
    if not roots:
        absent = " or ".join(rules.absent_roots)
        raise PolicyRefusal(f"{absent}: there in a job only; measure in a job")
    if root and root not in roots:
        known = " or ".join(roots)
        raise PolicyRefusal(
            f"{root} is not a staging folder (one of `roots` in stage.toml); use --root {known}"
        )
    return roots[root] if root else rules.roots[0]
