"""``stagectl verify``: compare copies with their checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stager.cli.action import run_action
from stager.cli.complete import copies
from stager.cli.options import WHICH_NODES, epilog, json_option, node_options
from stager.copies.upkeep import Action

if TYPE_CHECKING:
    from stager.cli.options import NodeOptions


@click.command(epilog=epilog(WHICH_NODES, codes=(2, 3, 6, 7, 8, 9)))
@click.argument("destinations", metavar="[DST]...", shell_complete=copies, nargs=-1)
@node_options
@json_option
def verify(destinations: tuple[str, ...], where: NodeOptions, as_json: bool) -> int:
    """Read your copies again and compare them with their checksums.

    Reads the copies at DST, or all of your copies. If one is damaged or was changed, the exit code
    is 7, and the message says what to do. Files that were added to a folder are named, but are no
    fault of the copy.
    """
    return run_action(Action.VERIFY, destinations, where, as_json=as_json)
