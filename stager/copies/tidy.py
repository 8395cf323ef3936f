"""Clean up one user's caches on a node, as that user, after a job has ended.

`stager.root.epilog` runs ``python -I -m stager.copies.tidy --config stage.toml`` as the user who
owns the copies, because root touches no path that a user named. It prints one line of JSON with
numbers alone: for root to know how much there is, and what may be evicted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from stager.base import linux
from stager.base.errors import StageError
from stager.base.options import Lifetime
from stager.copies import evict
from stager.disk.cache import Cache, look_for_cache
from stager.disk.jobs import figures_of, remove_files, uses_of
from stager.disk.locks import Locks
from stager.root.rules import read_rules

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from stager.disk.record import Record
    from stager.root.rules import Rules


def main(arguments: Sequence[str] | None = None) -> int:
    """Remove and report what the arguments ask for. Return 0, even if something could not be."""
    # No other process of this user may trace this one or answer in its place.
    linux.set_dumpable(False)
    options = _parser().parse_args(arguments)
    caches = dict(_caches(read_rules(options.config)))
    uid = os.getuid()
    figures, destinations = figures_of(uid, options.job), uses_of(uid, options.job)
    remove_files(uid, options.job)  # its list, if it is there, keeps copies from being removed
    answer: dict[str, object] = {
        "removed": sum(_clean_up(cache, destinations) for cache in caches.values())
    }
    if options.job:
        answer["figures"] = figures
    if options.usage:
        answer["usage"] = {root: _usage(cache) for root, cache in caches.items()}
    if options.root in caches:
        cache = caches[options.root]
        # By time of use alone, as root compares it with that of other users' copies.
        may_go = sorted(
            evict.oldest(evict.find_candidates(cache, "")), key=lambda copy: copy.record.used_at
        )
        oldest, others = may_go[: options.oldest], may_go[options.oldest :]
        answer["evicted"] = _remove(cache, [copy.record.destination for copy in oldest])
        answer["may_go"] = [[copy.record.used_at, copy.size] for copy in others]
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stager.copies.tidy", description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--job", type=int, default=0, help="a job that has ended on this node")
    parser.add_argument("--usage", action="store_true", help="report bytes and copies by root")
    parser.add_argument("--root", default="", help="list time of use and bytes of what may go")
    parser.add_argument("--oldest", type=int, default=0, help="evict so many of these first")
    return parser


def _caches(rules: Rules) -> Iterator[tuple[str, Cache]]:
    uid = os.getuid()
    for root in rules.roots:
        with suppress(StageError):  # this user has staged nothing there
            yield root, look_for_cache(root, uid)
    for root in rules.shared_roots if uid == rules.shared_owner else ():
        with suppress(StageError):
            yield root, look_for_cache(root, uid, shared=True)


def _clean_up(cache: Cache, destinations: Collection[str]) -> int:
    """Remove partial files, and those copies with lifetime=job. Return the number of copies."""
    with suppress(OSError):
        cache.sweep()
    records = [cache.load(destination) for destination in destinations]
    return _remove(cache, [one.destination for one in records if one and _is_for_job(one)])


def _remove(cache: Cache, destinations: Sequence[str]) -> int:
    """Remove those copies that can be removed. Return their number."""
    removed = 0
    if destinations:
        # Without the lock file, as on a read-only disk, nothing can be removed.
        with suppress(StageError), closing(Locks(cache)) as locks:
            for destination in destinations:
                with suppress(OSError, StageError):
                    removed += evict.remove(cache, locks, "", destination) is not None
    return removed


def _usage(cache: Cache) -> tuple[int, int]:
    """Return the bytes and the number of all copies."""
    copies = evict.find_candidates(cache, "")
    # A job's end may have gone unnoticed, as when the node lost its power.
    ended = [copy.record.destination for copy in copies if copy.may_go and _is_for_job(copy.record)]
    if _remove(cache, ended):
        copies = evict.find_candidates(cache, "")
    return sum(copy.size for copy in copies), len(copies)


def _is_for_job(record: Record) -> bool:
    return record.lifetime == Lifetime.JOB


if __name__ == "__main__":
    sys.exit(main())
