"""``stagectl demo``: show what slurm-stage does, on one machine and without Slurm."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

from stager.cli.options import RunOptions, epilog
from stager.cli.scope import Scope
from stager.cli.staging import stage_values
from stager.cli.status import show_status

#: Bytes of the file that is staged.
_SIZE = 256 << 20


@click.command(epilog=epilog(codes=(5, 6, 8)))
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
    from stager.request.policy import LOCAL  # neither the help nor completion needs pydantic

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
