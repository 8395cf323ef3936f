"""TODO."""

from __future__ import annotations

import os
import syslog
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from stager.base import paths
from stager.root.metrics import as_number, locked, or_zero

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stager.root.rules import Rules

#: Seconds in which users' parts are asked what may go; what is not known then stays.
_ASKING = 25.0


def make_headroom(rules: Rules, ask: Callable[[int, Sequence[str], Rules], dict[str, Any]]) -> int:
    """Have the least recently used copies of any user removed until the site's headroom is free.

    Returns how many went. Users' parts tell of times and sizes only, and remove by their number.
    """
    if not rules.headroom:
        return 0
    gone = 0
    # One at a time: two that do not know of each other would remove twice as much.
    with locked(f"{paths.RUN_FOLDER}/headroom.lock"):
        for root in rules.roots:
            gone += _make_headroom(root, rules, ask)
    if gone:
        syslog.syslog(syslog.LOG_INFO, f"{gone} copies evicted to make headroom")
    return gone


def _make_headroom(
    root: str, rules: Rules, ask: Callable[[int, Sequence[str], Rules], dict[str, Any]]
) -> int:
    if (goal := shortfall(root, rules)) <= 0:
        return 0
    deadline = time.monotonic() + _ASKING
    may_go: dict[int, list[tuple[float, float]]] = {}
    for uid in users_of(root):
        if time.monotonic() < deadline:
            may_go[uid] = _pairs(ask(uid, ["--root", root], rules).get("may_go"))
    gone = 0
    for uid, count in shares(may_go, goal).items():
        said = ask(uid, ["--root", root, "--oldest", str(count)], rules)
        gone += int(or_zero(said.get("evicted")))
    return gone


def shortfall(root: str, rules: Rules) -> int:
    """Bytes that lack beneath ``root`` of what is to be free there after a job."""
    try:
        room = os.statvfs(root)
    except FileNotFoundError:
        return 0  # this node lacks the disk
    share = int(room.f_blocks * room.f_frsize * rules.keep_free_percent / 100)
    return max(rules.keep_free, share) + rules.headroom - room.f_bavail * room.f_frsize


def users_of(root: str) -> list[int]:
    """The users that have a folder beneath ``root``."""
    try:
        return sorted(
            int(name) for name in os.listdir(f"{root}/{paths.RECORDS_FOLDER}") if name.isdecimal()
        )
    except OSError:
        return []


def shares(may_go: dict[int, list[tuple[float, float]]], goal: float) -> dict[int, int]:
    """How many of each user's copies are to go for ``goal`` bytes, the oldest of all first. Pure.

    ``may_go`` has each user's (time of use, bytes), in the order in which they would go.
    """
    counts: dict[int, int] = {}
    every = sorted((pair[0], uid, pair[1]) for uid, pairs in may_go.items() for pair in pairs)
    for _, uid, size in every:
        if goal <= 0:
            break
        counts[uid] = counts.get(uid, 0) + 1
        goal -= size
    return counts


def _pairs(said: object) -> list[tuple[float, float]]:
    pairs: list[tuple[float, float]] = []
    for one in said if isinstance(said, list) else ():
        with suppress(ValueError, TypeError):
            used_at, size = map(as_number, one)
            pairs.append((used_at, size))
    return pairs
