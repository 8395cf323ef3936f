"""Evict the least recently used copies of all users until the site's headroom is free.

Root touches no path that a user named: it compares times and sizes, and asks `stager.copies.tidy`
of each user to remove the oldest.
"""

from __future__ import annotations

import os
import syslog
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from stager.base import paths
from stager.root.folders import locked
from stager.root.untrusted import as_number, or_zero

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stager.root.rules import Rules

    #: Runs `stager.copies.tidy` as a user, with options.
    Ask = Callable[[int, Sequence[str], Rules], dict[str, Any]]

#: Seconds in which users are asked what may be evicted. Copies of the others stay.
_ASK_LIMIT = 25.0


def make_headroom(rules: Rules, ask: Ask) -> int:
    """Evict copies until the site's headroom is free beneath each root. Return their number.

    ``ask`` runs `stager.copies.tidy` as a user with options, and returns its answer.
    """
    if not rules.headroom:
        return 0
    gone = 0
    # One at a time: two that run together would evict twice as much.
    with locked(f"{paths.RUN_FOLDER}/headroom.lock"):
        for root in rules.roots:
            gone += _make_headroom(root, rules, ask)
    if gone:
        syslog.syslog(syslog.LOG_INFO, f"{gone} copies evicted to make headroom")
    return gone


def _make_headroom(root: str, rules: Rules, ask: Ask) -> int:
    if (goal := shortfall(root, rules)) <= 0:
        return 0
    deadline = time.monotonic() + _ASK_LIMIT
    may_go: dict[int, list[tuple[float, float]]] = {}
    for uid in users_of(root):
        if time.monotonic() < deadline:
            may_go[uid] = _pairs(ask(uid, ["--root", root], rules).get("may_go"))
    gone = 0
    for uid, count in shares(may_go, goal).items():
        answer = ask(uid, ["--root", root, "--oldest", str(count)], rules)
        gone += int(or_zero(answer.get("evicted")))
    return gone


def shortfall(root: str, rules: Rules) -> int:
    """Return how many bytes too few are free beneath ``root`` after a job."""
    try:
        room = os.statvfs(root)
    except FileNotFoundError:
        return 0  # this node does not have the disk
    share = int(room.f_blocks * room.f_frsize * rules.keep_free_percent / 100)
    return max(rules.keep_free, share) + rules.headroom - room.f_bavail * room.f_frsize


def users_of(root: str) -> list[int]:
    """Return the users that have a folder beneath ``root``."""
    try:
        return sorted(
            int(name)
            for name in os.listdir(f"{root}/{paths.RECORDS_FOLDER}")
            if name.isdecimal() and int(name)  # root stages nothing
        )
    except OSError:
        return []


def shares(may_go: dict[int, list[tuple[float, float]]], goal: float) -> dict[int, int]:
    """Choose how many copies of each user to evict for ``goal`` bytes, the oldest first. Pure.

    ``may_go`` has the time of use and the bytes of each user's copies, the oldest first.
    """
    counts: dict[int, int] = {}
    every = sorted((pair[0], uid, pair[1]) for uid, pairs in may_go.items() for pair in pairs)
    for _, uid, size in every:
        if goal <= 0:
            break
        counts[uid] = counts.get(uid, 0) + 1
        goal -= size
    return counts


def _pairs(answer: object) -> list[tuple[float, float]]:
    pairs: list[tuple[float, float]] = []
    for one in answer if isinstance(answer, list) else ():
        with suppress(ValueError, TypeError):
            used_at, size = map(as_number, one)
            pairs.append((used_at, size))
    return pairs
