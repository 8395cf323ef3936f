"""Split the text of directives: escapes and blanks in a ``--stage`` value, quotes in a line.

Each piece keeps its position in the text, so that `grammar` can show where a fault is.
"""

from __future__ import annotations

import re
from itertools import dropwhile
from typing import TYPE_CHECKING, NamedTuple

from stager.base.errors import DirectiveError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The characters, besides blanks, that a backslash makes part of a path in a ``--stage`` value.
ESCAPED = ":,;\\$%~"
BLANKS = " \t"
#: A shell expands ``$USER``, ``${USER}``, ``$(date)``, ``$1`` and ``~``; Slurm ``%j``, ``%4t`` and
#: ``%%`` in names of files (see "filename pattern" in sbatch(1)). A ``%`` before two hexadecimal
#: digits belongs to a percent-encoded name.
_EXPANSION = re.compile(
    r"\$(?=[A-Za-z0-9_{($@*#?!-])|%(?![0-9A-Fa-f]{2})(?=[0-9]?[AaJjNnbstux]|%)|(?<=/)~(?=/|\Z)"
)
_SEPARATOR = re.compile(r"[:,;\\]")


class Char(NamedTuple):
    """A character, its position, and whether a backslash or single quotes made it literal."""

    char: str
    at: int
    literal: bool


class Field(NamedTuple):
    """A piece of a directive, and its position in the text."""

    value: str
    at: int
    #: The positions of what a shell or Slurm would expand elsewhere.
    expansions: tuple[int, ...] = ()
    #: The position of a comma at the end of a line's word, outside of quotes; -1 without one.
    comma: int = -1
    #: The position of the ``#`` directly behind it, where sbatch begins a comment; -1 without one.
    hash: int = -1


def escape(path: str) -> str:
    """Return a path or pattern as it is written in a ``--stage`` value."""
    escaped = _EXPANSION.sub(r"\\\g<0>", _SEPARATOR.sub(r"\\\g<0>", path))
    stripped = escaped.rstrip(BLANKS)
    return stripped + "".join(f"\\{c}" for c in escaped[len(stripped) :])


def check_characters(text: str) -> None:
    """Raise DirectiveError if ``text`` has a control character other than a tab."""
    for at in range(len(text)):
        _check_character(text, at)


def _check_character(text: str, at: int) -> None:
    if text[at] < " " and text[at] != "\t":
        raise DirectiveError("a control character is not allowed in a directive", text, at)


def read_escapes(text: str) -> list[Char]:
    """Return the characters of a ``--stage`` value without its escapes. Raise DirectiveError."""
    chars: list[Char] = []
    at = 0
    while at < len(text):
        _check_character(text, at)
        char = text[at]
        if char != "\\":
            chars.append(Char(char, at, literal=False))
            at += 1
            continue
        following = text[at + 1 : at + 2]
        if not following or following not in ESCAPED + BLANKS:
            problem = "a backslash must be followed by : , ; \\ $ % ~ or a space"
            raise DirectiveError(f"{problem}; write \\\\ for a backslash in a path", text, at)
        chars.append(Char(following, at + 1, literal=True))
        at += 2
    return chars


def split(chars: list[Char], separator: str, end: int) -> list[tuple[list[Char], int]]:
    """Return the runs of ``chars`` between separators, each with the position where it ends.

    The last run ends at ``end``.
    """
    parts: list[tuple[list[Char], int]] = []
    run: list[Char] = []
    for char in chars:
        if char.char == separator and not char.literal:
            parts.append((run, char.at))
            run = []
        else:
            run.append(char)
    return [*parts, (run, end)]


def lstrip(chars: list[Char]) -> list[Char]:
    """Return ``chars`` from the first one that is no blank, or that is escaped."""
    return list(dropwhile(is_blank, chars))


def is_blank(char: Char) -> bool:
    """Whether a character is a blank that is not escaped."""
    return char.char in BLANKS and not char.literal


def path_field(chars: list[Char], end: int) -> Field:
    """Return a path as a Field, which is at ``end`` if it is empty.

    No path begins with a blank, but one may end in blanks.
    """
    path = lstrip(chars)
    return _joined(path, path[0].at if path else end)


def field(chars: list[Char], end: int) -> Field:
    """Return ``chars`` without the blanks around them as a Field, at ``end`` if that is empty."""
    last = len(chars)
    while last and is_blank(chars[last - 1]):
        last -= 1
    return path_field(chars[:last], end)


def _joined(chars: list[Char], at: int) -> Field:
    value = "".join(c.char for c in chars)
    seen = "".join("\0" if c.literal else c.char for c in chars)
    return Field(value, at, tuple(chars[m.start()].at for m in _EXPANSION.finditer(seen)))


def split_words(line: str, start: int, *, sbatch: bool) -> list[Field]:
    """Return the words of ``line`` from position ``start`` up to a comment.

    They are split as a shell splits them, or as ``sbatch`` does. Raise DirectiveError where quotes
    do not match. (The standard library's shlex keeps no positions.)
    """
    words: list[Field] = []
    word: list[tuple[Char, bool]] = []
    for char, plain in _unquote(line, start, sbatch=sbatch):
        if plain and char.char == "#" and (sbatch or not word):
            return [*words, _word(word)._replace(hash=char.at)] if word else words
        if not plain or char.char not in BLANKS:
            word.append((char, plain))
        elif word:
            words.append(_word(word))
            word = []
    return [*words, _word(word)] if word else words


def _word(chars: list[tuple[Char, bool]]) -> Field:
    """Return the word of ``chars``, each with whether it is outside of quotes and escapes."""
    joined = _joined([char for char, _ in chars if char.char], chars[0][0].at)
    last, plain = chars[-1]
    return joined._replace(comma=last.at) if plain and last.char == "," else joined


def _unquote(line: str, start: int, *, sbatch: bool) -> Iterator[tuple[Char, bool]]:
    """Yield each character, and whether it is outside of quotes and escapes.

    In a shell a backslash escapes nothing within single quotes, and within double quotes only what
    is special there; for sbatch it escapes any character everywhere. A quotation mark becomes an
    empty text, so that '' is a word.
    """
    quote = ""
    at = start
    while at < len(line):
        char = line[at]
        if char == "\\" and (sbatch or quote != "'"):
            at += 1
            if at == len(line):
                raise DirectiveError("nothing follows the backslash", line, at)
            escapes = sbatch or not quote or line[at] in '"\\$`'
            if not escapes:
                yield Char(char, at - 1, literal=False), False
            yield Char(line[at], at - escapes, literal=escapes), False
        elif char == (quote or char) and char in "\"'":
            quote = "" if quote else char
            yield Char("", at, literal=False), False
        else:
            yield Char(char, at, literal=quote == "'"), not quote
        at += 1
    if quote:
        raise DirectiveError(f"the closing {quote} is missing", line, len(line))
