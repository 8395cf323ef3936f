"""Read the text of directives without its escapes, and the words of an ``#SBATCH`` line.

Each piece keeps its positions in the text, so that a fault can be shown there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from stager.base.errors import DirectiveError

if TYPE_CHECKING:
    from collections.abc import Iterator

BLANKS = " \t"
#: What separates directives, and before options; and where a source may end.
SEPARATOR = re.compile(";")
OPTION = re.compile(r",(?=[A-Za-z_]+(?:[=,]|\Z))")
SOURCE_END = re.compile(":(?=(?:shared:)?[/$])")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
#: A backslash before one of these characters takes its meaning away; elsewhere it is itself.
_ESCAPE = re.compile(r"\\([:,;\\$%])")
#: What needs one in a path or pattern: a ':' also where the next ':' might come too close.
_MEANING = re.compile(r"[;\\$%]|:(?=[/$]|[\w.+-]*\Z)|,(?=[A-Za-z_])")
#: Stands in `Piece.seen` for an escaped character: no directive has it.
_PLAIN = "\0"


def escape(path: str) -> str:
    """Return a path or pattern as it is written in a directive."""
    return _MEANING.sub(r"\\\g<0>", path)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a directive's ``text`` without its escapes."""

    text: str
    value: str
    #: The same, in which no escaped character is seen.
    seen: str
    #: The position of each character, or of the backslash before it, and that of the end.
    places: tuple[int, ...]

    @property
    def at(self) -> int:
        """The position where it begins."""
        return self.places[0]

    def part(self, start: int, end: int) -> Piece:
        """Return the characters from ``start`` to ``end``."""
        value, seen = self.value[start:end], self.seen[start:end]
        return Piece(self.text, value, seen, self.places[start : end + 1])

    def behind(self, start: int) -> Piece:
        """Return the characters from ``start`` on."""
        return self.part(start, len(self.value))

    def split(self, separator: re.Pattern[str]) -> list[Piece]:
        """Return the parts between separators that are not escaped."""
        found = [match.span() for match in separator.finditer(self.seen)]
        spans = [(0, 0), *found, (len(self.value), 0)]
        return [self.part(end, start) for (_, end), (start, _) in pairwise(spans)]

    def fault(self, problem: str, at: int = 0) -> DirectiveError:
        """Return an error for what is wrong with the character ``at`` that place."""
        return DirectiveError(problem, self.text, self.places[at])


def read(text: str, start: int = 0) -> Piece:
    """Return ``text`` from ``start`` on without its escapes.

    Raise DirectiveError for a control character other than a tab.
    """
    for at, char in enumerate(text):
        if char < " " and char != "\t":
            raise DirectiveError("a control character is not allowed in a directive", text, at)
    escapes = [match.start() for match in _ESCAPE.finditer(text, start)]
    left = {*escapes}
    kept = [at for at in range(start, len(text)) if at not in left]
    plain = {at + 1 for at in escapes}
    value = "".join(text[at] for at in kept)
    seen = "".join(_PLAIN if at in plain else text[at] for at in kept)
    places = (at - 1 if at in plain else at for at in kept)
    return Piece(text, value, seen, (*places, len(text)))


def scheme_end(piece: Piece) -> int:
    """Return the place behind the scheme of a directive's source, 0 if it has none."""
    scheme = _SCHEME.match(piece.value)
    return scheme.end() if scheme else 0


def source_end(piece: Piece) -> re.Match[str] | None:
    """Return the ':' behind a directive's source, None if there is none."""
    return SOURCE_END.search(piece.seen, scheme_end(piece))


class Word(NamedTuple):
    """A word of an ``#SBATCH`` line, and its position."""

    value: str
    at: int
    #: The position of the ``#`` directly behind it, where sbatch begins a comment; -1 without one.
    hash: int = -1


def sbatch_words(line: str) -> list[Word]:
    """Return the words behind ``#SBATCH`` up to a comment, as sbatch splits them.

    Raise DirectiveError where quotes do not match. (The standard library's shlex keeps no
    positions.)
    """
    words: list[Word] = []
    word: list[tuple[str, int]] = []
    for char, at, is_plain in _unquoted(line, len("#SBATCH")):
        if is_plain and char == "#":
            return [*words, _joined(word)._replace(hash=at)] if word else words
        if not is_plain or char not in BLANKS:
            word.append((char, at))
        elif word:
            words.append(_joined(word))
            word = []
    return [*words, _joined(word)] if word else words


def _joined(chars: list[tuple[str, int]]) -> Word:
    return Word("".join(char for char, _ in chars), chars[0][1])


def _unquoted(line: str, at: int) -> Iterator[tuple[str, int, bool]]:
    """Yield each character, its position, and whether it is outside of quotes and escapes.

    For sbatch a backslash escapes any character everywhere. A quotation mark becomes an empty text,
    so that '' is a word.
    """
    quote = ""
    while at < len(line):
        char = line[at]
        if char == "\\":
            at += 1
            if at == len(line):
                raise DirectiveError("nothing follows the backslash", line, at)
            yield line[at], at - 1, False
        elif char == (quote or char) and char in "\"'":
            quote = "" if quote else char
            yield "", at, False
        else:
            yield char, at, not quote
        at += 1
    if quote:
        raise DirectiveError(f"the closing {quote} is missing", line, len(line))
