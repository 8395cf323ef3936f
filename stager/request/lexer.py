"""TODO."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stager.base.errors import DirectiveError

if TYPE_CHECKING:
    from collections.abc import Iterator

ESCAPED = ":,;\\"
BLANKS = " \t"


class Char(NamedTuple):
    """A character of a value, where it stood, and whether a backslash made it literal."""

    char: str
    at: int
    literal: bool


class Field(NamedTuple):
    """A piece of a directive and where it stood in the text."""

    value: str
    at: int


def escape(path: str) -> str:
    """A path or pattern as it stands in a ``--stage`` value."""
    escaped = "".join(f"\\{c}" if c in ESCAPED else c for c in path)
    stripped = escaped.rstrip(BLANKS)
    return stripped + "".join(f"\\{c}" for c in escaped[len(stripped) :])


def read_escapes(text: str) -> list[Char]:
    chars: list[Char] = []
    at = 0
    while at < len(text):
        char = text[at]
        if ord(char) < ord(" ") and char != "\t":
            raise DirectiveError("a control character is not allowed in a directive", text, at)
        if char != "\\":
            chars.append(Char(char, at, literal=False))
            at += 1
            continue
        following = text[at + 1 : at + 2]
        if not following or following not in ESCAPED + BLANKS:
            raise DirectiveError("a backslash stands before : , ; \\ or a blank only", text, at)
        chars.append(Char(following, at + 1, literal=True))
        at += 2
    return chars


def split(chars: list[Char], separator: str, end: int) -> list[tuple[list[Char], int]]:
    """The runs of ``chars`` between separators, each with the position where it ended."""
    parts: list[tuple[list[Char], int]] = []
    run: list[Char] = []
    for char in chars:
        if char.char == separator and not char.literal:
            parts.append((run, char.at))
            run = []
        else:
            run.append(char)
    return [*parts, (run, end)]


def strip(chars: list[Char]) -> list[Char]:
    def blank(char: Char) -> bool:
        return char.char in BLANKS and not char.literal

    first, last = 0, len(chars)
    while first < last and blank(chars[first]):
        first += 1
    while last > first and blank(chars[last - 1]):
        last -= 1
    return chars[first:last]


def field(chars: list[Char], end: int) -> Field:
    stripped = strip(chars)
    at = stripped[0].at if stripped else end
    return Field("".join(c.char for c in stripped), at)


def split_words(line: str, start: int, *, sbatch: bool) -> list[Field]:
    """The words of ``line`` from ``start`` on, up to a comment, as a shell or ``sbatch`` splits it.

    (The standard library's splitter tells no positions, and knows comments only as sbatch does.)
    """
    words: list[Field] = []
    word: Field | None = None
    for text, at, plain in _unquote(line, start, sbatch=sbatch):
        if plain and text == "#" and (sbatch or word is None):
            break
        if plain and text in BLANKS:
            words += [word] if word else []
            word = None
        else:
            word = Field(word.value + text, word.at) if word else Field(text, at)
    return [*words, word] if word else words


def _unquote(line: str, start: int, *, sbatch: bool) -> Iterator[tuple[str, int, bool]]:
    """Each character with its position, and whether it stands outside of quotes and escapes.

    A backslash takes the next character as it is: for a shell not within single quotes, and within
    double ones only what would have a meaning there. A quote itself becomes an empty text.
    """
    quote = ""
    at = start
    while at < len(line):
        char = line[at]
        if char == "\\" and (sbatch or quote != "'"):
            at += 1
            if at == len(line):
                raise DirectiveError("no escaped character", line, at)
            kept = "" if sbatch or not quote or line[at] in '"\\$`' else char
            yield kept + line[at], at - 1, False
        elif char == (quote or char) and char in "\"'":
            quote = "" if quote else char
            yield "", at, False
        else:
            yield char, at, not quote
        at += 1
    if quote:
        raise DirectiveError("no closing quotation", line, len(line))
