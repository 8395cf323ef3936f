"""Patterns and a path in, whether it is to be staged out: what of a folder is left out. Pure.

A pattern reads as a line of a .gitignore does, but for ``!`` and ``#``.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from pathspec import PathSpec

from stager.tree.listing import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from stager.tree.listing import Row

_SYNTAX = "gitignore"


def is_pattern(text: str) -> bool:
    """Whether ``text`` can be read as a pattern."""
    try:
        return bool(text.strip()) and text[0] not in "!#" and bool(_spec([text]))
    except ValueError:
        return False


def _spec(patterns: Sequence[str]) -> PathSpec[Any]:
    return PathSpec.from_lines(_SYNTAX, patterns)


class Patterns:
    """Takes what matches any pattern of ``include``, or all where there is none, and leaves out
    what matches one of ``exclude``.
    """

    def __init__(self, include: Sequence[str], exclude: Sequence[str]) -> None:
        self._include = _spec(include) if include else None
        self._exclude = _spec(exclude)

    def leaves_out(self, path: bytes, *, is_folder: bool) -> bool:
        """Whether the path beneath the source is not to be staged, with all that is in it."""
        name = os.fsdecode(path) + "/" * is_folder
        if self._exclude.match_file(name):
            return True
        # What a folder holds may be included, where it is not itself.
        return self._include is not None and not is_folder and not self._include.match_file(name)

    def pruned(self, rows: Iterable[Row]) -> list[Row]:
        """The ``rows`` without those folders that are not included and lead to nothing."""
        found = list(rows)
        if self._include is None:
            return found
        needed = {b""}
        for row in found:
            is_folder = row.kind is Kind.FOLDER
            if not is_folder or self._include.match_file(os.fsdecode(row.path) + "/"):
                needed.update((row.path, *_above(row.path)))
        return [row for row in found if row.path in needed]


def _above(path: bytes) -> Iterator[bytes]:
    while (at := path.rfind(b"/")) >= 0:
        path = path[:at]
        yield path


#: Where a pattern has the number of a part.
NUMBER = "{n}"


#: What stands for it while the library reads the pattern, and what it becomes then.
_MARK = "\ue000"


_DIGITS = r"(?<![0-9])(?P<number>[0-9]+)(?![0-9])"


#: Stars in one name of a pattern: with more, a name that does not match may take very long.
_MOST_STARS = 2


def is_numbered_pattern(text: str) -> bool:
    """Whether ``text`` can be read as a pattern that tells parts by their numbers."""
    if text.count(NUMBER) != 1 or _MARK in text or text[:1] in ("!", "#"):
        return False
    if any(name.count("*") > _MOST_STARS for name in text.split("/")):
        return False
    try:
        return "number" in numbered_regex(text).groupindex
    except (ValueError, re.error):
        return False


def numbered_regex(pattern: str) -> re.Pattern[str]:
    """What the library makes of the pattern. Raises ValueError or re.error where it is none."""
    (one,) = PathSpec.from_lines("gitignore", [pattern.replace(NUMBER, _MARK)]).patterns
    if one.regex is None:
        raise ValueError("it matches nothing")
    return re.compile(one.regex.pattern.replace(_MARK, _DIGITS), re.DOTALL)
