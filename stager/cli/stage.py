"""``stagectl stage``: copy files to every node of this job.

``stagectl plan``: show what ``stage`` would do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stager.cli.complete import directives
from stager.cli.options import OPTIONS_TABLE, WHICH_OPTIONS, epilog, json_option, run_options
from stager.cli.staging import stage_values

if TYPE_CHECKING:
    from stager.cli.options import RunOptions


@click.command(epilog=epilog(OPTIONS_TABLE))
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
    files (with mode=shard, its part of them).

    Run it inside a job (sbatch, salloc or srun). Without Slurm, name nodes by --hosts or
    --hostfile, or run it in a job of another scheduler (--launcher). With --local, try it on this
    machine alone.

    Where all nodes of a launcher that numbers them (dstack, an Indexed Job of Kubernetes, torchrun)
    run the same line, number 0 stages, and the others wait and end with its code.
    """
    return stage_values(values, run, as_json=as_json, verbose=verbose)


@click.command(epilog=epilog(WHICH_OPTIONS))
@click.argument(
    "values", metavar="SRC:DST[,key=value]...", shell_complete=directives, nargs=-1, required=True
)
@run_options
@json_option
def plan(values: tuple[str, ...], run: RunOptions, as_json: bool) -> int:
    """Show what `stage` would do, without doing it.

    For each SRC:DST: the nodes that would get it, from where, and why. Copies that would be evicted
    to make room are listed too. Run it inside a job, with --hosts, or with --local.
    """
    return stage_values(values, run, dry_run=True, as_json=as_json)
