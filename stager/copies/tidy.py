"""Clean up one user's caches on a node, as that user, after a job has ended.

`stager.root.epilog` starts ``python -I -m stager.copies.tidy --config stage.toml`` as the user who
owns the copies: root itself touches no path that a user named. The answer is one line of JSON that
holds numbers for each of the site's roots and nothing else.
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
from stager.disk.jobs import uses_of
from stager.disk.locks import Locks
from stager.root.rules import read_rules

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stager.root.rules import Rules


def main(arguments: Sequence[str] | None = None) -> int:
    """Remove and tell what the arguments ask for; 0, whatever could not be removed."""
    # No other process of this user may trace this one or answer in its place.
    linux.set_dumpable(False)
    parser = argparse.ArgumentParser(prog="stager.copies.tidy", description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--job", type=int, default=0, help="a job that has ended on this node")
    parser.add_argument("--usage", action="store_true", help="tell bytes and copies by root")
    parser.add_argument("--root", default="", help="tell what may go there: time of use, bytes")
    parser.add_argument("--oldest", type=int, default=0, help="remove so many of these")
    options = parser.parse_args(arguments)
    caches = dict(_caches(read_rules(options.config)))
    told: dict[str, object] = {
        "removed": sum(_end(cache, options.job) for cache in caches.values())
    }
    if options.usage:
        told["usage"] = {root: _usage(cache) for root, cache in caches.items()}
    if options.root in caches:
        cache = caches[options.root]
        # By time of use alone, as root compares it with that of other users' copies.
        may_go = sorted(evict.oldest(evict.look(cache, "")), key=lambda one: one.record.used_at)
        told["evicted"] = _remove(
            cache, [one.record.destination for one in may_go[: options.oldest]]
        )
        told["may_go"] = [[one.record.used_at, one.size] for one in may_go[options.oldest :]]
    sys.stdout.write(json.dumps(told) + "\n")
    return 0


def _caches(rules: Rules) -> Iterator[tuple[str, Cache]]:
    uid = os.getuid()
    for root in rules.roots:
        with suppress(StageError):  # nothing was ever staged there by this user
            yield root, look_for_cache(root, uid)
    for root in rules.shared_roots if uid == 0 else ():
        with suppress(StageError):
            yield root, look_for_cache(root, uid, shared=True)


def _end(cache: Cache, job: int) -> int:
    """Remove what is left of the job: partial files, and copies that were to stay no longer."""
    with suppress(OSError):
        cache.sweep()
    records = [cache.load(destination) for destination in uses_of(os.getuid(), job)]
    ended = [one.destination for one in records if one and one.lifetime == Lifetime.JOB]
    return _remove(cache, ended)


def _remove(cache: Cache, destinations: Sequence[str]) -> int:
    removed = 0
    if destinations:
        with closing(Locks(cache)) as locks:
            for destination in destinations:
                with suppress(OSError, StageError):
                    removed += evict.remove(cache, locks, "", destination) is not None
    return removed


def _usage(cache: Cache) -> tuple[int, int]:
    kept = evict.look(cache, "")
    # Those of a job whose end nobody noticed, as when the node lost its power.
    ended = {one.record.destination for one in kept if one.may_go and _is_for_a_job(one)}
    _remove(cache, sorted(ended))
    kept = [one for one in kept if one.record.destination not in ended]
    return sum(one.size for one in kept), len(kept)


def _is_for_a_job(one: evict.Candidate) -> bool:
    return one.record.lifetime == Lifetime.JOB


if __name__ == "__main__":
    sys.exit(main())
