"""``stagectl check``: check batch scripts and directives before they are submitted.

sbatch runs it at every submission, so it imports little.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from stager.cli.complete import directives
from stager.cli.console import complain, say
from stager.cli.options import config_option
from stager.cli.script import read_script
from stager.cli.staging import build_request, parse_values
from stager.request.resolve import resolve
from stager.request.script import ignored_lines, parse_script, sbatch_values


@click.command()
@click.argument("values", metavar="[SRC:DST[,key=value]]...", shell_complete=directives, nargs=-1)
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
    Whether the sources exist is checked when the job starts. Lines after the first command of a
    script are ignored: a warning names them.
    """
    from stager.request import policy  # neither the help nor completion needs pydantic

    lists = list(values)
    directives = parse_values(values)
    for script in scripts:
        lines = read_script(str(script))
        for number, line in ignored_lines(lines):
            complain(f"line {number} is after the first command, so it is ignored: {line}")
        in_script = sbatch_values(lines)
        directives += [*parse_script(lines), *parse_values(in_script)]
        lists += in_script
    rules = policy.load_if_present(config)
    items = resolve(directives, rules or policy.LOCAL)
    request = build_request(items, rules or policy.LOCAL)
    # As the job will send it: raises if it is too long.
    replace(request, directives=";".join(lists)).to_json()
    if quiet:
        return 0
    for item in items:
        say(f"ok: {item.source} to {item.destination} ({item.options})")
    if not items:
        say("ok: nothing to stage")
    if rules is None:
        say(f"only the syntax was checked: there is no {config} here")
    return 0
