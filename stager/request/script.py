"""Read the ``#STAGE`` and ``#SBATCH --stage`` lines in the head of a batch script.

The head is what sbatch looks at: the comment lines before the first command.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base.errors import DirectiveError
from stager.request.grammar import parse_line
from stager.request.lexer import split_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from stager.request.directive import Directive

_LINE = re.compile(r"#STAGE(?=\s|$)")
#: A line that asks for files, wherever it stands in the script.
_ASKS = re.compile(r"#STAGE(?=\s|$)|#SBATCH\s(?:.*\s)?--stage(?=[=\s])")

#: Comments that were probably meant to be such a line, and how that is written.
_LIKELY = (
    (re.compile(r"\s*#\s*STAGE(\s|:|=)\s*[\"']?(/|[a-z]\w*://)", re.I), "#STAGE SRC DST"),
    (re.compile(r"\s*#\s*SBATCH\s(.*\s)?--stage[=\s]", re.I), "#SBATCH --stage=SRC:DST"),
)


def is_command(line: str) -> bool:
    """Whether a line of a batch script ends its head."""
    return bool(line.strip()) and not line.lstrip().startswith("#")


def head(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a batch script up to its first command, without their line ends."""
    for line in lines:
        if is_command(line):
            return
        yield line.rstrip("\r\n")


def ignored_lines(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield the number, from 1, and the text of each line behind the head that asks for files."""
    below = False
    for number, line in enumerate(lines, 1):
        below = below or is_command(line)
        if below and _ASKS.match(line):
            yield number, line.rstrip()


def likely_mistakes(lines: Iterable[str]) -> Iterator[tuple[int, str, str]]:
    """Yield the comments in a script's head that resemble a line that asks for files.

    Yield the number of the line, from 1, how such a line is written, and the text of this one.
    """
    for number, line in enumerate(head(lines), 1):
        if _LINE.match(line) or line.startswith("#SBATCH"):
            continue
        for pattern, form in _LIKELY:
            if pattern.match(line):
                yield number, form, line.rstrip()


def parse_script(lines: Iterable[str]) -> tuple[Directive, ...]:
    """Return the directives of the ``#STAGE`` lines in a script's head. Raise DirectiveError."""
    return tuple(parse_line(line) for line in head(lines) if _LINE.match(line))


def sbatch_values(lines: Iterable[str]) -> list[str]:
    """Return the values of ``--stage`` on a script's ``#SBATCH`` lines, as sbatch reads them.

    Raise DirectiveError for a line whose quotes do not match.
    """
    return [value for line in head(lines) for value, _ in _stage_values(line)]


def cut_values(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield each ``#SBATCH`` line where a blank ends a value of ``--stage``.

    Yield the number of the line, from 1, and the word behind the blank. A line whose quotes do not
    match is left out.
    """
    for number, line in enumerate(head(lines), 1):
        with suppress(DirectiveError):
            yield from ((number, behind) for _, behind in _stage_values(line) if behind)


def _stage_values(line: str) -> Iterator[tuple[str, str]]:
    """Yield each value of ``--stage`` on a line, and the word behind it if that is no option.

    Raise DirectiveError where quotes do not match.
    """
    if not line.startswith("#SBATCH"):
        return
    words = [word.value for word in split_words(line, len("#SBATCH"), sbatch=True)]
    while words:
        word = words.pop(0)
        if word == "--stage" and words:
            value = words.pop(0)
        elif word.startswith("--stage="):
            value = word.removeprefix("--stage=")
        else:
            continue
        yield value, words[0] if words and not words[0].startswith("-") else ""


def refused_by_sbatch(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield why sbatch refuses a script as a whole, and the number of the line, from 1."""
    for number, line in enumerate(lines, 1):
        if number == 1 and not line.startswith("#!"):
            yield 1, "it does not begin with '#!' and the path of an interpreter"
        if line.endswith("\r\n"):
            yield number, "it ends in CR LF, as in Windows; convert the file with dos2unix"
            return
