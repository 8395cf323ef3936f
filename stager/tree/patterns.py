"""Match paths in a folder against the patterns that users write.

A pattern is a line of a .gitignore that does not begin with ``!`` or ``#``. The patterns of
``include`` and ``exclude`` select what of a folder is staged. With ``mode=shard``, the pattern of
``by`` has ``{n}`` where the path of a file has its number.

The library that reads patterns takes long to import, so import this module only if there are any.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from pathspec import PathSpec

from stager.tree.listing import Kind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from stager.tree.listing import Row

#: Stands for a number in the pattern of ``by``.
NUMBER = "{n}"
#: Stands for it while the library reads the pattern, in which braces may have a meaning, and the
#: expression that takes its place: all the digits that stand together, or those that follow digits
#: of the pattern itself.
_MARK, _DIGITS = "\ue000", r"(?P<number>[0-9]+)(?![0-9])"
#: Stars in one name of a pattern with a number. With more, to find that a long name does not match
#: may take very long.
_MOST_STARS = 2


def is_pattern(text: str) -> bool:
    """Whether ``text`` is a pattern."""
    try:
        return _is_line(text) and bool(_read([text]))
    except ValueError:
        return False


def is_numbered_pattern(text: str) -> bool:
    """Whether ``text`` is a pattern with one ``{n}`` that matches fast."""
    if text.count(NUMBER) != 1 or _MARK in text or not _is_line(text):
        return False
    if any(name.count("*") > _MOST_STARS for name in text.split("/")):
        return False
    try:
        return "number" in numbered_regex(text).groupindex
    except (ValueError, re.error):
        return False


def numbered_regex(pattern: str) -> re.Pattern[str]:
    """Return the expression for a pattern with ``{n}``; its group ``number`` is the number.

    Raise ValueError or re.error if it is no such pattern.
    """
    (one,) = _read([pattern.replace(NUMBER, _MARK)]).patterns
    if one.regex is None:
        raise ValueError("it matches nothing")
    follows_digit = re.search(rf"[0-9]{re.escape(NUMBER)}", pattern)
    digits = _DIGITS if follows_digit else rf"(?<![0-9]){_DIGITS}"
    return re.compile(one.regex.pattern.replace(_MARK, digits), re.DOTALL)


def _is_line(text: str) -> bool:
    """Whether ``text`` is neither blank, nor a comment, nor a negated pattern."""
    return bool(text.strip()) and text[0] not in "!#"


def _read(patterns: Sequence[str]) -> PathSpec[Any]:
    return PathSpec.from_lines("gitignore", patterns)


class Patterns:
    """Select the paths that match a pattern of ``include``, or all paths if there is none, without
    those that match a pattern of ``exclude``.
    """

    def __init__(self, include: Sequence[str], exclude: Sequence[str]) -> None:
        #: The patterns of ``include`` that match none of the rows given to `pruned`.
        self.unmatched: tuple[str, ...] = tuple(include)
        #: Whether ``exclude`` matched something, and left nothing but folders to `pruned`.
        self.excludes_all = False
        self._has_excluded = False
        self._include = _read(include) if include else None
        self._exclude = _read(exclude)

    def leaves_out(self, path: bytes, *, is_folder: bool) -> bool:
        """Whether the path beneath the source is not staged, nor anything in it."""
        name = os.fsdecode(path) + "/" * is_folder
        if self._exclude.match_file(name):
            self._has_excluded = True
            return True
        # A folder that is not included may contain something that is.
        return self._include is not None and not is_folder and not self._include.match_file(name)

    def pruned(self, rows: Iterable[Row]) -> list[Row]:
        """Return the ``rows`` without the folders that are not included and contain nothing."""
        found = list(rows)
        self.excludes_all = self._has_excluded and all(row.kind is Kind.FOLDER for row in found)
        if self._include is None:
            return found
        needed = {b""}
        for row in found:
            is_folder = row.kind is Kind.FOLDER
            if not is_folder or self._include.match_file(os.fsdecode(row.path) + "/"):
                needed.update((row.path, *_above(row.path)))
        left = [row for row in found if row.path in needed]
        names = [
            os.fsdecode(row.path) + "/" * (row.kind is Kind.FOLDER) for row in left if row.path
        ]
        self.unmatched = unmatched(self.unmatched, names)
        return left


def unmatched(patterns: Sequence[str], paths: Collection[str]) -> tuple[str, ...]:
    """Return those of the ``patterns`` that match none of the ``paths``; folders end in a slash."""
    return tuple(
        text
        for text in patterns
        if not any(one.match_file(path) for one in _read([text]).patterns for path in paths)
    )


def _above(path: bytes) -> Iterator[bytes]:
    """Yield the folders above ``path``, from its own upwards."""
    while (at := path.rfind(b"/")) >= 0:
        path = path[:at]
        yield path
