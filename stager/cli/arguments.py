"""Read what commands are given besides their options: a batch script, the user of ``--user``."""

from __future__ import annotations

import os
import pwd
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

import click

from stager.base.errors import SourceError, UsageError
from stager.base.text import printable
from stager.base.users import LARGEST_UID
from stager.request.script import head

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def read_head(path: str) -> list[str]:
    """Return the comment lines at the head of a batch script; ``-`` is stdin. Raise SourceError."""
    return _read(path, head)


def read_script(path: str) -> list[str]:
    """Return all lines of a batch script; ``-`` is stdin. Raise SourceError."""
    return _read(path, iter)


def _read(path: str, lines_of: Callable[[Iterable[str]], Iterable[str]]) -> list[str]:
    try:
        with click.open_file(path, "rb") as file:
            # A line ends where it does for sbatch, which refuses CR LF.
            lines = TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="\n")
            try:
                return list(lines_of(lines))
            finally:
                lines.detach()  # else it closes stdin, too
    except OSError as error:
        raise SourceError(f"the batch script {path} cannot be read: {error.strerror}") from None


user_option: Callable[[Any], Any] = click.option(
    "--user",
    metavar="NAME",
    help="For root: use the copies of this user instead of your own.",
)


def whose(name: str | None) -> int | None:
    """Return the uid that ``--user`` means, None for this user.

    Raise UsageError if there is no such user, PolicyRefusal if this user may not ask.
    """
    if name is None:
        return None
    if not name:
        raise UsageError("--user is empty; name a user, or leave the option out")
    from stager.node.agent import check_may_ask  # few commands need it

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
