"""``stagectl stage``, ``plan`` and ``demo``: copy files to every node, or show what would move."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stager.cli.command import Command
from stager.cli.complete import directives
from stager.cli.progress import Progress
from stager.cli.render import phase_line, print_outcome
from stager.cli.shared_options import RunOptions, json_option, run_options
from stager.cli.terminal import complain, ignore, print_json, say

if TYPE_CHECKING:
    from collections.abc import Sequence


@click.command(cls=Command, topics=("directives", "nodes"))
@click.argument(
    "values", metavar="SRC:DST[,key=value]...", shell_complete=directives, nargs=-1, required=True
)
@run_options
@json_option
@click.option("--verbose", "-v", is_flag=True, help="Also print where the time went.")
def stage(values: tuple[str, ...], run: RunOptions, as_json: bool, verbose: bool) -> int:
    """Copy files to every node of this job.

    SRC is a file or folder on shared storage, DST its path on the local disk of every node. Nodes
    that have an up-to-date copy are skipped. When the command ends with code 0, every node has the
    files, or with mode=shard its part of them.

    Run it inside a job. Without Slurm, name nodes by --hosts or --hostfile, or run it in a job of
    another scheduler. With --local, try it on this machine alone.

    Where all nodes of dstack, of an Indexed Job of Kubernetes or of torchrun run the same line,
    number 0 stages, and the others wait for it.
    """
    return stage_values(values, run, as_json=as_json, verbose=verbose)


@click.command(cls=Command, topics=("directives", "nodes"))
@click.argument(
    "values", metavar="SRC:DST[,key=value]...", shell_complete=directives, nargs=-1, required=True
)
@run_options
@json_option
def plan(values: tuple[str, ...], run: RunOptions, as_json: bool) -> int:
    """Show what `stage` would do, without doing it.

    For each SRC:DST: the nodes that would get it, from where, and why. Copies that would be evicted
    to make room are listed too.
    """
    return stage_values(values, run, dry_run=True, as_json=as_json)


#: Bytes of the file that is staged.
_SIZE = 256 << 20


@click.command(cls=Command)
@click.option(
    "--nodes",
    type=click.IntRange(1, 64),
    default=4,
    metavar="N",
    show_default=True,
    help="Number of simulated nodes.",
)
def demo(nodes: int) -> int:
    """Stage 256 MiB to simulated nodes on this machine, twice.

    The second time every node has the file, so nothing moves. Needs neither Slurm nor root.
    """
    from stager.cli.status import show_status
    from stager.launch.nodes import Scope
    from stager.request.policy import LOCAL

    with tempfile.TemporaryDirectory(prefix="stage-demo-") as folder:
        source = Path(folder) / "img.sqsh"
        source.touch(mode=0o600)  # as nobody else may enter this folder
        with source.open("wb") as file:
            for _ in range(_SIZE >> 20):
                file.write(os.urandom(1 << 20))
        root = Path(folder) / "nodes"
        value = f"{source}:/nvme/img.sqsh"
        # No file is there: the rules of this machine's site may not allow the destination.
        options = RunOptions(nodes, root, Path(folder) / "stage.toml")
        for title in ("no node has the file", "every node has it, nothing moves"):
            click.echo(f"\n# {title}\n$ stagectl stage --local {nodes} {value}")
            code = stage_values([value], options)
            if code:
                return code
        click.echo(f"\n# what the nodes hold\n$ stagectl status --local-root {root}")
        show_status(Scope.of_simulated(root), LOCAL)
    return 0


def stage_values(
    values: Sequence[str],
    options: RunOptions,
    *,
    dry_run: bool = False,
    as_json: bool = False,
    verbose: bool = False,
) -> int:
    """Stage what ``values`` ask for, print the outcome and return its exit code.

    Raise StageError if the ranks cannot be started at all.
    """
    from stager.launch import targets  # neither the help nor completion needs it

    nodes = options.find(values)
    tell, screen = (ignore, None) if as_json else (say, sys.stdout)
    told: dict[str, str] = {}
    with Progress(tell, bars=screen, verbose=verbose) as progress:

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "hosts":
                told["launcher"] = event["line"]
            progress.show(event)

        outcome = targets.stage(values, nodes, dry_run=dry_run, on_event=on_event)
    if as_json:
        print_json(outcome.to_json() | told)
    else:
        print_outcome(outcome, say, complain)
        if verbose:
            say(phase_line(outcome))
    return outcome.code
