"""Clean up one user's caches on a node, as that user, after a job has ended.

`stager.node.epilog` runs ``python -I -m stager.node.tidy --config stage.toml`` as the user who
owns the copies, because root touches no path that a user named. It prints one line of JSON with
numbers alone: for root to know how much there is, and what may be evicted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from stager.base import linux
from stager.base.errors import StageError
from stager.base.options import Lifetime
from stager.base.rules import read_rules
from stager.store import removal, space
from stager.store.cache import Cache, caches_in
from stager.store.entries import is_entry
from stager.store.leases import figures_of, has_made_lists, remove_files, remove_list, uses_of
from stager.store.locks import Locks
from stager.store.parents import remove_parents

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from stager.base.rules import Rules
    from stager.store.record import Record
    from stager.store.space import Candidate

#: Seconds in which a command of the user, or the clean-up of another job that ends now, may have a
#: copy; and between looks.
_TURNS, _PAUSE = 2.0, 0.02


def main(arguments: Sequence[str] | None = None) -> int:
    """Remove and report what the arguments ask for. Return 0, even if something could not be."""
    # No other process of this user may trace this one or answer in its place.
    linux.set_dumpable(False)
    options = _parser().parse_args(arguments)
    uid = os.getuid()
    figures, destinations = figures_of(uid, options.job), uses_of(uid, options.job)
    has_lists = has_made_lists(options.job)
    remove_files(uid, options.job)  # its list, if it is there, keeps copies from being removed
    if not options.config:
        sys.stdout.write("{}\n")
        return 0
    rules = read_rules(options.config)
    caches = dict(_caches(rules))
    for cache in caches.values() if has_lists else ():
        remove_list(cache.folder, options.job)
    answer: dict[str, object] = {
        "removed": sum(_clean_up(cache, destinations) for cache in caches.values())
    }
    if options.job:
        answer["figures"] = figures
    if options.usage:
        usage = {root: _usage(cache) for root, cache in caches.items()}
        answer["usage"] = usage
    if options.root in caches:
        cache = caches[options.root]
        found = space.find_candidates(
            cache, lambda record: not options.entries or is_entry(record.destination)
        )
        if options.entries:
            answer["taken"] = sum(copy.size for copy in found)
        # By time of use alone, as root compares it with that of other users' copies.
        may_go = sorted(space.oldest(found), key=lambda copy: copy.record.used_at)
        answer["evicted"], others = _evict(cache, may_go, options.oldest, options.free)
        answer["may_go"] = [[copy.record.used_at, copy.size] for copy in others]
        if options.usage and answer["evicted"]:
            usage[options.root] = _usage(cache)
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stager.node.tidy", description=__doc__)
    parser.add_argument("--config", default="", help="without it, no copy is looked at")
    parser.add_argument("--job", type=int, default=0, help="a job that has ended on this node")
    parser.add_argument("--usage", action="store_true", help="report bytes and copies by root")
    parser.add_argument("--root", default="", help="list time of use and bytes of what may go")
    parser.add_argument("--entries", action="store_true", help="of these, entries of a store alone")
    parser.add_argument("--oldest", type=int, default=0, help="evict so many of these first")
    parser.add_argument(
        "--free", type=float, default=math.inf, help="stop when so many more bytes are free"
    )
    return parser


def _caches(rules: Rules) -> Iterator[tuple[str, Cache]]:
    uid = os.getuid()
    for root in rules.roots:
        yield from ((root, cache) for cache in caches_in([root], uid))
    for root in rules.shared_roots if uid == rules.shared_owner else ():
        yield from ((root, cache) for cache in caches_in([root], uid, shared=True))


def _clean_up(cache: Cache, destinations: Collection[str]) -> int:
    """Remove partial files, and copies with lifetime=job that no job uses. Return their number.

    ``destinations`` are what a job used that has ended.
    """
    with suppress(OSError):
        cache.sweep()
    records = [cache.load(destination) for destination in destinations]
    ended = [one.destination for one in records if one and _is_for_job(one)]
    removed = _remove(cache, ended) + _remove(cache, _unnoticed(cache))
    in_use = cache.jobs() if destinations else ()
    for destination in destinations:  # a stage that was killed has left folders, too
        remove_parents(cache, destination, in_use)
    return removed


def _unnoticed(cache: Cache) -> list[str]:
    """Return the copies with lifetime=job whose jobs ended without a clean-up.

    So it is when the node loses its power, or the administrator removes the mark of a job.
    """
    copies = space.find_candidates(cache, _is_for_job)
    return [copy.destination for copy in copies if copy.may_go]


def _remove(cache: Cache, destinations: Sequence[str]) -> int:
    """Remove those copies that can be removed. Return their number."""
    removed = 0
    if destinations:
        # Without the lock file, as on a read-only disk, nothing can be removed.
        deadline = time.monotonic() + _TURNS
        with suppress(StageError), closing(Locks(cache)) as locks:
            for destination in destinations:
                with suppress(OSError, StageError):
                    _await_turn(locks, destination, deadline)
                    removed += _remove_one(cache, locks, destination)
    return removed


def _await_turn(locks: Locks, destination: str, deadline: float) -> None:
    """Take the destination's lock, if it is free before the ``deadline``.

    Nobody would remove a copy with lifetime=job after this clean-up. Raise StageError.
    """
    while not locks.take(destination) and time.monotonic() < deadline:
        time.sleep(_PAUSE)


def _evict(
    cache: Cache, copies: Sequence[Candidate], count: int, goal: float
) -> tuple[int, Sequence[Candidate]]:
    """Evict the first ``count`` copies that can be. Return their number, and the copies behind.

    Stop as soon as the disk has ``goal`` more bytes free, as it says itself: what a copy frees may
    be less than its size.
    """
    removed = at = 0
    before = _free(cache)
    try:
        with closing(Locks(cache)) as locks:
            while count and at < len(copies) and _free(cache) - before < goal:
                at += 1
                count -= 1
                with suppress(OSError, StageError):
                    removed += _remove_one(cache, locks, copies[at - 1].destination)
    except StageError:  # without the lock file, as on a read-only disk, nothing can be removed
        at = count
    return removed, copies[at:]


def _free(cache: Cache) -> int:
    """Return the free bytes of the disk."""
    room = os.statvfs(cache.root)
    return room.f_bavail * room.f_frsize


def _remove_one(cache: Cache, locks: Locks, destination: str) -> bool:
    """Remove a copy. Return whether it could be. Raise as `removal.remove` does."""
    return removal.remove(cache, locks, destination) is not None


def _usage(cache: Cache) -> tuple[int, int]:
    """Return the bytes and the number of all copies."""
    copies = space.find_candidates(cache)
    return sum(copy.size for copy in copies), len(copies)


def _is_for_job(record: Record) -> bool:
    return record.lifetime == Lifetime.JOB


if __name__ == "__main__":
    sys.exit(main())
