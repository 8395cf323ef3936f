"""``stagectl plan``: show what ``stage`` would do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stager.cli.complete import directives
from stager.cli.options import WHICH_OPTIONS, epilog, json_option, run_options
from stager.cli.staging import stage_values

if TYPE_CHECKING:
    from stager.cli.options import RunOptions


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
