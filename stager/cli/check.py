"""``stagectl check``: check batch scripts and directives before they are submitted.

sbatch runs it at every submission, so it imports little.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stager.cli.complete import directives
from stager.cli.console import complain, say
from stager.cli.options import WHICH_OPTIONS, config_option, epilog
from stager.cli.script import read_script
from stager.cli.staging import build_request, parse_values
from stager.request.resolve import resolve
from stager.request.script import ignored_lines, likely_mistakes, parse_script, sbatch_values

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stager.request.items import StageItem


@click.command(epilog=epilog(WHICH_OPTIONS, codes=(2, 3, 4)))
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

    Checks how they are written, and whether the site's configuration allows the destinations. A
    warning names each source that this machine does not see (without --quiet), and each line of a
    script that is ignored: one after the first command, or a misspelt #STAGE or #SBATCH line.
    Warnings do not change the exit code.
    """
    if not values and not scripts:
        raise click.UsageError("Name what to check: SRC:DST, or a batch script by --script FILE.")
    from stager.request import policy  # neither the help nor completion needs pydantic

    directives, lists = parse_values(values), list(values)
    for script in scripts:
        lines = read_script(str(script))
        _warn_of_lines(lines)
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
    _warn_of_sources(items)
    return 0


def _warn_of_lines(lines: list[str]) -> None:
    for number, form, line in likely_mistakes(lines):
        complain(f"line {number} is only a comment; to stage, write '{form}': {line}")
    for number, line in ignored_lines(lines):
        complain(f"line {number} is after the first command, so it is ignored: {line}")


def _warn_of_sources(items: Iterable[StageItem]) -> None:
    from stager.cli.seen import unseen  # sbatch does not look: it must not wait

    for source, reason in unseen(item.source for item in items):
        complain(
            f"{source}: not seen from this machine ({reason}); check the path, and that the "
            "compute nodes mount this filesystem"
        )
