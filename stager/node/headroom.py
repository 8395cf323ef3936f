"""Evict the least recently used copies of all users until the site's headroom is free.

Of the store, evict entries until those of all users take no more than its size.

Root touches no path that a user named: it compares times and sizes, and asks `stager.node.tidy`
of each user to remove the oldest.
"""

from __future__ import annotations

import json
import os
import syslog
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from stager.base import paths
from stager.base.mounts import stranger_at
from stager.base.rules import amount_of
from stager.base.users import users_of
from stager.node.as_user import as_number, or_zero
from stager.node.folders import locked, replace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stager.base.rules import Rules

    #: Time of use and bytes of each copy of a user.
    Pairs = list[tuple[float, float]]
    #: Runs `stager.node.tidy` as a user, with options, for so many seconds. Returns its answer,
    #: None if it has none.
    Ask = Callable[[int, Sequence[str], Rules, float], dict[str, Any] | None]

#: Seconds for all users and roots together, and for one answer of one user. Copies of users who
#: are not asked in time stay until the next job has ended.
_LIMIT, _ASK_LIMIT = 25.0, 5.0
#: Seconds in all after which a user is slow: users can stop their process that answers for a while.
_SLOW = 2.0
#: The file with the users who did not answer, or were slow: they are asked last the next time.
_SILENT = "silent.json"


def make_headroom(rules: Rules, ask: Ask) -> int:
    """Evict copies until the site's headroom is free beneath each root, and the store is no larger
    than its size. Return their number.
    """
    if not (rules.headroom or rules.store_size):
        return 0
    run = _Run(rules, ask)
    # One at a time: two that run together would evict twice as much.
    with locked(f"{paths.RUN_FOLDER}/headroom.lock", _LIMIT):
        run.slow_before = _load_silent()
        for root in rules.roots if rules.headroom else ():
            run.make_room(root)
        if rules.store_size:
            run.limit_store()
        if run.slow != run.slow_before:
            replace_file(f"{paths.RUN_FOLDER}/{_SILENT}", json.dumps(sorted(run.slow)), 0o600)
    if run.gone:
        syslog.syslog(syslog.LOG_INFO, f"{run.gone} copies evicted to make headroom")
    return run.gone


class _Run:
    """Evictions beneath several roots, for a limited time.

    A user who is silent is asked once, and one who is slow after all others.
    """

    def __init__(self, rules: Rules, ask: Ask) -> None:
        self._rules = rules
        self._ask = ask
        self._deadline = time.monotonic() + _LIMIT
        self.gone = 0
        self.silent: set[int] = set()
        #: The users who were slow or silent now, and the last time.
        self.slow: set[int] = set()
        self.slow_before: set[int] = set()
        self._seconds: dict[int, float] = {}

    def make_room(self, root: str) -> None:
        """Evict beneath ``root`` until its disk says that there is room, whatever users said."""
        goal = shortfall(root, self._rules)
        if goal <= 0:
            return
        may_go: dict[int, Pairs] = {}
        for uid in sorted(users_of(root), key=self._is_slow):
            answer = self._answer(uid, ["--root", root])
            may_go[uid] = _pairs(answer.get("may_go"))
        while counts := shares(may_go, goal):
            for uid in sorted(counts, key=self._is_slow):  # else the oldest copy first
                count = counts[uid]
                oldest = ["--oldest", str(count), "--free", str(goal)]
                answer = self._answer(uid, ["--root", root, *oldest])
                self.gone += int(min(or_zero(answer.get("evicted")), count))
                # What is left counts for nothing: this user's figures were not enough once.
                may_go[uid] = [(used_at, 0.0) for used_at, _ in may_go[uid][count:]]
                goal = shortfall(root, self._rules)
                if goal <= 0:
                    return

    def limit_store(self) -> None:
        """Evict entries of the store until those of all users take no more than its size.

        Users may lie of what they have. So who claims more than all may have loses that much first,
        and takes no more from others than who has pinned as much as all may have.
        """
        store = self._rules.store
        size = disk_size(store)
        most = amount_of(self._rules.store_size, size) if size else 0
        entries: dict[int, Pairs] = {}
        counts: dict[int, int] = {}
        over = float(-most)
        for uid in sorted(users_of(store), key=self._is_slow) if most else ():
            answer = self._answer(uid, ["--root", store, "--entries"])
            taken, pairs = or_zero(answer.get("taken")), _pairs(answer.get("may_go"))
            counts |= shares({uid: pairs}, taken - most)
            over += min(taken, most)
            entries[uid] = pairs[counts.get(uid, 0) :]
        for uid, count in shares(entries, over).items():
            counts[uid] = counts.get(uid, 0) + count
        for uid, count in counts.items():
            chosen = ["--entries", "--oldest", str(count)]
            answer = self._answer(uid, ["--root", store, *chosen])
            self.gone += int(min(or_zero(answer.get("evicted")), count))

    def _is_slow(self, uid: int) -> bool:
        return uid in self.slow or uid in self.slow_before

    def _answer(self, uid: int, options: Sequence[str]) -> dict[str, Any]:
        left = self._deadline - time.monotonic()
        if uid in self.silent or left <= 0:
            return {}
        begun = time.monotonic()
        answer = self._ask(uid, options, self._rules, min(left, _ASK_LIMIT))
        self._seconds[uid] = self._seconds.get(uid, 0.0) + time.monotonic() - begun
        if answer is None:
            self.silent.add(uid)
        if answer is None or self._seconds[uid] > _SLOW:
            self.slow.add(uid)
        return answer or {}


def _load_silent() -> set[int]:
    with suppress(OSError, ValueError), open(f"{paths.RUN_FOLDER}/{_SILENT}", "rb") as file:
        return set(json.load(file))
    return set()


def shortfall(root: str, rules: Rules) -> int:
    """Return how many bytes too few are free beneath ``root`` after a job.

    Return 0 if ``keep_free`` is as large as the disk, by mistake: no eviction reaches that.
    """
    try:
        if stranger_at(root):
            return 0  # nor has it here: a user took the name
        room = os.statvfs(root)
    except FileNotFoundError:
        return 0  # this node does not have the disk
    whole = room.f_blocks * room.f_frsize
    reserve = (room.f_bfree - room.f_bavail) * room.f_frsize
    kept = amount_of(rules.keep_free, whole)
    wanted = kept + amount_of(rules.headroom, whole)
    return wanted - room.f_bavail * room.f_frsize if kept < whole - reserve else 0


def disk_size(root: str) -> int:
    """Return the bytes of the disk of ``root``; 0 if the node does not have it."""
    with suppress(FileNotFoundError):
        if not stranger_at(root):
            room = os.statvfs(root)
            return room.f_blocks * room.f_frsize
    return 0


def shares(may_go: dict[int, Pairs], goal: float) -> dict[int, int]:
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


def _pairs(answer: object) -> Pairs:
    pairs: Pairs = []
    for one in answer if isinstance(answer, list) else ():
        with suppress(ValueError, TypeError):
            used_at, size = map(as_number, one)
            pairs.append((used_at, size))
    return pairs
