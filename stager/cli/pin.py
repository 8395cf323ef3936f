"""``stagectl pin`` and ``stagectl unpin``: protect copies from eviction, or no longer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stager.cli.action import run_action
from stager.cli.complete import copies
from stager.cli.options import WHICH_NODES, epilog, json_option, node_options
from stager.cli.whose import user_option, whose
from stager.copies.upkeep import Action

if TYPE_CHECKING:
    from stager.cli.options import NodeOptions


@click.command(epilog=epilog(WHICH_NODES, codes=(2, 3, 5, 6, 8, 9)))
@click.argument("destinations", metavar="DST...", shell_complete=copies, nargs=-1, required=True)
@node_options
@json_option
def pin(destinations: tuple[str, ...], where: NodeOptions, as_json: bool) -> int:
    """Protect your copies at DST from eviction.

    Until you unpin them, they are not removed, whatever space is needed. Staging to DST still
    replaces them.
    """
    return run_action(Action.PIN, destinations, where, as_json=as_json)


@click.command(epilog=epilog(WHICH_NODES, codes=(2, 3, 5, 6, 8, 9)))
@click.argument("destinations", metavar="DST...", shell_complete=copies, nargs=-1, required=True)
@user_option
@node_options
@json_option
def unpin(
    destinations: tuple[str, ...], user: str | None, where: NodeOptions, as_json: bool
) -> int:
    """Allow your copies at DST to be evicted again.

    They are then kept or removed as any other copy.
    """
    return run_action(Action.UNPIN, destinations, where, as_json=as_json, user=whose(user))
