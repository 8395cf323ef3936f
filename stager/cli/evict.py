"""``stagectl evict``: delete copies from the nodes."""

from __future__ import annotations

import os
import re
import time
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING

import click

from stager.base.errors import StageError, UsageError
from stager.base.text import printable
from stager.cli.absolute import absolute
from stager.cli.action import run_action
from stager.cli.complete import copies
from stager.cli.options import WHICH_NODES, epilog, json_option, node_options
from stager.cli.whose import user_option, whose
from stager.copies.upkeep import Action
from stager.disk.cache import look_for_cache
from stager.disk.locks import Locks
from stager.launch import job
from stager.root.rules import byte_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from stager.cli.options import NodeOptions
    from stager.disk.cache import Cache
    from stager.request.policy import Policy

#: Seconds in which a step's first task begins to evict what all are told to, and between looks.
_FIRST_TASK_LIMIT, _PAUSE = 10.0, 0.1
_DURATION = re.compile(r"([0-9]{1,9})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@click.command(
    epilog=epilog(
        WHICH_NODES,
        codes=(2, 3, 5, 6, 7, 8, 9),
        own={
            3: "DST is pinned, or the site's rules forbid it",
            7: "something else is at DST, or it was changed",
            9: "a job uses DST, or it is being staged or evicted",
        },
    )
)
@click.argument("destinations", metavar="[DST]...", shell_complete=copies, nargs=-1)
@click.option(
    "--older",
    metavar="TIME",
    default="",
    help="Delete copies that were not used for this time: 90m, 12h or 7d. Of files for all users, "
    "only use by their own account counts.",
)
@click.option(
    "--to-free",
    metavar="SIZE",
    default="",
    help="Delete least recently used copies (those with lifetime=job first) until this much of "
    "each disk is free: 200G (G is 10^9 bytes) or 200GiB. A smaller copy may stay, although it is "
    "older, if larger ones free enough. None is deleted on a disk where all of them would not "
    "free enough.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, without deleting it.")
@user_option
@node_options
@json_option
def evict(
    destinations: tuple[str, ...], older: str, to_free: str, dry_run: bool,
    user: str | None, where: NodeOptions, as_json: bool,
) -> int:  # fmt: skip
    """Delete your copies from the disks of the nodes.

    Choose them by exactly one of DST, --older and --to-free. Copies that are pinned or used by a
    running job are kept. (By DST, a job may delete what it alone uses.) Files that you added or
    changed there stay. The sources on shared storage are not touched.
    """
    if sum(map(bool, (destinations, older, to_free))) != 1:
        raise UsageError("choose what to evict by exactly one of DST, --older and --to-free")
    if destinations and _does_first_task(destinations, where):
        return 0
    return run_action(
        Action.EVICT,
        destinations,
        where,
        as_json=as_json,
        older=_seconds(older) if older else 0,
        to_free=_bytes(to_free) if to_free else 0,
        dry_run=dry_run,
        user=whose(user),
    )


def _does_first_task(destinations: Iterable[str], where: NodeOptions) -> bool:
    """Wait until the copies are gone from this node, if the step's first task evicts them, too.

    As in ``srun stagectl evict DST``: each of its tasks would evict on all nodes of the job. Return
    False if they stay and nobody works on them: the first task may be another program.
    """
    if where.is_given or not job.is_later_task(os.environ):
        return False
    paths = [absolute(path) for path in destinations]
    caches = list(_caches(where.rules()))
    last_work = time.monotonic()
    with ExitStack() as stack:
        locks = [stack.enter_context(closing(Locks(cache))) for cache in caches]
        while any(cache.load(path) for cache in caches for path in paths):
            if any(lock.is_held(path) for lock in locks for path in paths):
                last_work = time.monotonic()
            elif time.monotonic() - last_work > _FIRST_TASK_LIMIT:
                return False
            time.sleep(_PAUSE)
    return True


def _caches(rules: Policy) -> Iterator[Cache]:
    for root in rules.roots:
        with suppress(StageError):  # this user never staged anything there
            yield look_for_cache(root, os.getuid())


def _seconds(text: str) -> int:
    found = _DURATION.fullmatch(text)
    if not found:
        raise UsageError(f"--older {printable(text)} is not a time; write it like 90m, 12h or 7d")
    if not int(found[1]):
        raise UsageError(
            f"--older {text} is too short: write at least 1s, or name the copies to delete (DST)"
        )
    return int(found[1]) * _SECONDS[found[2]]


def _bytes(text: str) -> int:
    size = 0
    with suppress(ValueError, OverflowError):
        size = byte_size(text)  # as in stage.toml
    if not 0 < size < 1 << 63:
        raise UsageError(f"--to-free {printable(text)} is not a size; write it like 200G or 1.5TiB")
    return size
