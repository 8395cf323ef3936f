"""``stagectl check``: check batch scripts and directives before they are submitted.

sbatch runs it at every submission, so it imports little.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stager.cli.console import say
from stager.cli.options import config_option
from stager.cli.script import read_head
from stager.cli.staging import build_request, parse_values
from stager.request import policy
from stager.request.resolve import resolve
from stager.request.script import parse_script, sbatch_values

if TYPE_CHECKING:
    from stager.request.directive import Directive


@click.command()
@click.argument("values", metavar="[SRC:DST[,key=value]]...", nargs=-1)
@click.option(
    "--script",
    "scripts",
    type=click.Path(path_type=Path, readable=False),
    multiple=True,
    help="Check the #STAGE and #SBATCH --stage lines of this batch script (- for stdin).",
)
@config_option
@click.option("--quiet", is_flag=True, help="Print only what is wrong.")
def check(values: tuple[str, ...], scripts: tuple[Path, ...], config: Path, quiet: bool) -> int:
    """Check batch scripts and SRC:DST values before you submit them.

    Checks how they are written, and whether the site's configuration allows the destinations.
    Whether the sources exist is checked when the job starts.
    """
    directives = parse_values(values)
    for script in scripts:
        directives += _submitted(script)
    rules = policy.load_if_present(config)
    items = resolve(directives, rules or policy.LOCAL)
    build_request(items, rules or policy.LOCAL).to_json()  # raises if it is too long
    if quiet:
        return 0
    for item in items:
        say(f"ok: {item.source} to {item.destination} ({item.options})")
    if not items:
        say("ok: nothing to stage")
    if rules is None:
        say(f"only the syntax was checked: there is no {config} here")
    return 0


def _submitted(script: Path) -> list[Directive]:
    """Return the directives of a script's #STAGE lines and of its #SBATCH --stage options."""
    lines = read_head(str(script))
    return [*parse_script(lines), *parse_values(sbatch_values(lines))]
