"""Find out whose copies a command is about: ``--user NAME``."""

from __future__ import annotations

import os
import pwd
from typing import TYPE_CHECKING, Any

import click

from stager.base.errors import UsageError
from stager.base.text import printable
from stager.base.users import LARGEST_UID
from stager.copies.as_owner import check_may_ask

if TYPE_CHECKING:
    from collections.abc import Callable

user_option: Callable[[Any], Any] = click.option(
    "--user",
    metavar="NAME",
    help="For root: use the copies of this user (a name or a uid) instead of your own.",
)


def whose(name: str | None) -> int | None:
    """Return the uid that ``--user`` means, None for this user.

    Raise UsageError if there is no such user, PolicyRefusal if this user may not ask.
    """
    if name is None:
        return None
    if not name:
        raise UsageError("--user is empty; name a user, or leave the option out")
    uid = _uid(name)
    check_may_ask(uid)
    return None if uid == os.getuid() else uid


def _uid(name: str) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        if name.isascii() and name.isdecimal() and len(name) <= 10 and int(name) <= LARGEST_UID:
            return int(name)
    raise UsageError(
        f"--user {printable(name)}: this machine has no such user; of a user without an account, "
        "write the number (uid)"
    )
