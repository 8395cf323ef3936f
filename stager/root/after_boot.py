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
    from collections.abc import Callable, Sequence
    from typing import Any

    from stager.root.rules import Rules

    #: Runs `stager.copies.tidy` as a user, with options, for so many seconds.
    Ask = Callable[[int, Sequence[str], Rules, float], dict[str, Any] | None]

#: Seconds for it after one job; users who were not asked by then are asked after the next one.
_LIMIT = 2.0
#: The file with the users who are still to be asked. It is gone after a boot.
_WAITING = "after-boot.json"


def remove_unfinished(rules: Rules, ask: Ask, done: int) -> None:
    """Ask those users who have not been asked since the boot, each once, but for the uid ``done``.

    Raise OSError.
    """
    path = f"{paths.RUN_FOLDER}/{_WAITING}"
    before = _waiting(path)
    waiting = _users(rules) if before is None else list(before)
    waiting = [uid for uid in waiting if uid != done]
    deadline = time.monotonic() + _LIMIT
    while waiting and (left := deadline - time.monotonic()) > 0:
        ask(waiting.pop(0), [], rules, left)
    if waiting != before:
        replace_file(path, json.dumps(waiting), 0o600)


def _users(rules: Rules) -> list[int]:
    roots = (*rules.roots, *rules.shared_roots)
    return sorted({uid for root in roots for uid in users_of(root)})


def _waiting(path: str) -> list[int] | None:
    """Return the users whom an earlier clean-up left; None if there was none since the boot."""
    with suppress(OSError, ValueError), open(path, "rb") as file:
        waiting: list[int] = json.load(file)
        return waiting
    return None
