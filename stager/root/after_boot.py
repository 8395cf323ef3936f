"""After a boot, remove what was being written when the node went down, for all users.

A user's own next stage on the node removes it too, but there may never be one. Root touches no
path that a user named: each user's `stager.copies.tidy` removes that user's files.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base import paths
from stager.base.node import users_of
from stager.root.folders import replace_file

if TYPE_CHECKING:
    from stager.root.headroom import Ask
    from stager.root.rules import Rules

#: Seconds after one job in which users are asked, others after the next one; and for one answer.
_LIMIT = 2.0
#: How often a user is asked who does not answer in time: there may be much to remove.
_TRIES = 5
#: The file with the users who are still to be asked, and how often. It is gone after a boot.
_WAITING = "after-boot.json"


def remove_unfinished(rules: Rules, ask: Ask, done: int) -> None:
    """Ask those users who have not answered since the boot, but for the uid ``done``.

    Raise OSError.
    """
    path = f"{paths.RUN_FOLDER}/{_WAITING}"
    before = _waiting(path)
    waiting = dict.fromkeys(_users(rules), _TRIES) if before is None else dict(before)
    waiting.pop(str(done), None)
    deadline = time.monotonic() + _LIMIT
    for uid in list(waiting):
        if time.monotonic() >= deadline:
            break
        tries = waiting.pop(uid) - 1
        if ask(int(uid), [], rules, _LIMIT) is None and tries:
            waiting[uid] = tries
    if waiting != before:
        replace_file(path, json.dumps(waiting), 0o600)


def _users(rules: Rules) -> list[str]:
    roots = (*rules.roots, *rules.shared_roots)
    return [str(uid) for uid in sorted({uid for root in roots for uid in users_of(root)})]


def _waiting(path: str) -> dict[str, int] | None:
    """Return the users whom earlier clean-ups left, and tries; None if none was since the boot."""
    with suppress(OSError, ValueError), open(path, "rb") as file:
        waiting: dict[str, int] = json.load(file)
        return waiting
    return None
