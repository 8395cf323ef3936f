"""Read the ``#STAGE`` and ``#SBATCH --stage`` lines in the head of a batch script.

The head is what sbatch looks at: the comment lines before the first command.
"""

from __future__ import annotations

import difflib
import re
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base.errors import DirectiveError, DirectiveErrors
from stager.request.grammar import parse_line
from stager.request.lexer import sbatch_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from stager.request.grammar import Directive
    from stager.request.lexer import Word
    from stager.request.names import Names

_LINE = re.compile(r"#STAGE(?=\s|$)")
#: A line that asks for files, wherever it stands in the script.
_ASKS = re.compile(r"#STAGE(?=\s|$)|#SBATCH\s(?:.*\s)?--stage(?:-tolerate)?(?=[=\s])")

_SBATCH_FORM = "#SBATCH --stage=SRC:DST"
_LINE_FORM = "#STAGE SRC:DST"
#: Comments that were probably meant to be such a line, and how that is written.
_LIKELY = (
    (re.compile(r"\s*#\s*STAGE(\s|:|=)\s*[\"']?(/|[a-z]\w*://)", re.I), _LINE_FORM),
    (re.compile(r"#STAGE[\"']?(/|[a-z]\w*://)"), _LINE_FORM),
    (re.compile(r"#STAGES(:|=)\s*[\"']?(/|[a-z]\w*://)"), _LINE_FORM),
    (re.compile(r"\s*#\s*SBATCH\s(.*\s)?--stage[=\s]", re.I), _SBATCH_FORM),
    (re.compile(r"#S(?!BATCH\s)[BATCH]{4,6}\s(.*\s)?--stage[=\s]", re.I), _SBATCH_FORM),
)
#: A word, of at most one letter more than STAGE, before a path or a URL.
_WORD = re.compile(r"#([A-Z]{4,6})\s+[\"']?(?:/|[a-z]\w*://)")
#: The options of sbatch that are read here.
_OPTIONS = ("--stage", "--stage-tolerate")
#: What an option is like that sbatch refuses or takes for another; and how alike, from 0 to 1.
_STAGE, _ALIKE = "--stage", 0.85
#: How alike `_WORD` and STAGE are: four letters of five are the same.
_WORDS_ALIKE = 0.8


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
    """Yield the lines in a script's head that resemble one that asks for files.

    Yield the number of the line, from 1, how such a line is written, and the text of this one.
    """
    for number, line in enumerate(head(lines), 1):
        if _LINE.match(line):
            continue
        if line.startswith("#SBATCH"):
            if _is_misspelled(line):
                yield number, _SBATCH_FORM, line.rstrip()
            continue
        if _is_misspelled_word(line):
            yield number, _LINE_FORM, line.rstrip()
        for pattern, form in _LIKELY:
            if pattern.match(line):
                yield number, form, line.rstrip()


def _is_misspelled(line: str) -> bool:
    with suppress(DirectiveError):
        names = {word.value.partition("=")[0] for word in _words(line)}
        return any(map(_resembles_stage, names - {*_OPTIONS}))
    return False


def _is_misspelled_word(line: str) -> bool:
    found = _WORD.match(line)
    return found is not None and _alike(found[1], "STAGE") >= _WORDS_ALIKE


def _resembles_stage(name: str) -> bool:
    return name.startswith("-") and _alike(name.lower(), _STAGE) >= _ALIKE


def _alike(word: str, other: str) -> float:
    return difflib.SequenceMatcher(None, word, other).ratio()


def may_stage(lines: Iterable[str]) -> bool:
    """Return whether `parse_script` would return directives, or raise an error."""
    for line in head(lines):
        try:
            _check_hash(line)
        except DirectiveError:
            return True
        if _LINE.match(line):
            return True
    return False


def parse_script(lines: Iterable[str], names: Names) -> tuple[Directive, ...]:
    """Return the directives of the ``#STAGE`` lines in a script's head.

    Raise DirectiveError for a line that cannot be read, or from which sbatch has cut a part of what
    it asks for; DirectiveErrors for several.
    """
    directives: list[Directive] = []
    faults: list[DirectiveError] = []
    for line in head(lines):
        try:
            _check_hash(line)
            if _LINE.match(line):
                directives += parse_line(line, names)
        except DirectiveError as error:
            faults.append(error)
    if len(faults) > 1:
        raise DirectiveErrors(faults)
    if faults:
        raise faults[0]
    return tuple(directives)


def _check_hash(line: str) -> None:
    """Raise DirectiveError for an ``#SBATCH`` line if a ``#`` cuts what it asks for.

    For sbatch a comment begins at any ``#`` outside of quotes, for a shell only at that of a word.
    """
    words: list[Word] = []
    with suppress(DirectiveError):  # which sbatch has told, or `sbatch_values` tells
        words = _words(line)
    if not words or words[-1].hash < 0:
        return
    *before, last = words
    cut = line[last.at :].partition(" #")[0]
    if "--stage" in cut or (before and before[-1].value in _OPTIONS):
        problem = "sbatch takes this '#' for the beginning of a comment"
        remedy = "put the value in quotes, or write a space before a comment"
        raise DirectiveError(f"{problem}; {remedy}", line, last.hash)


def sbatch_values(lines: Iterable[str], option: str = "--stage") -> list[str]:
    """Return the values of ``option`` on a script's ``#SBATCH`` lines, as sbatch reads them.

    Raise DirectiveError for a line whose quotes do not match, or with an option without a value.
    """
    return [value for line in head(lines) for name, value, _ in _options(line) if name == option]


def cut_values(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield each ``#SBATCH`` line where a blank ends a value of ``--stage``.

    Yield the number of the line, from 1, and the word behind the blank. A line that cannot be read
    is left out.
    """
    for number, line in enumerate(head(lines), 1):
        with suppress(DirectiveError):
            yield from (
                (number, behind)
                for name, _, behind in _options(line)
                if name == "--stage" and behind
            )


def _options(line: str) -> Iterator[tuple[str, str, str]]:
    """Yield each of the `_OPTIONS` on a line, its value, and the word behind if that is no option.

    Raise DirectiveError where quotes do not match or a value is missing.
    """
    words = _words(line)
    while words:
        word = words.pop(0)
        name, has_value, value = word.value.partition("=")
        if name not in _OPTIONS:
            continue
        if not has_value and not words:
            raise DirectiveError(f"{name} has no value", line, word.at)
        if not has_value:
            value = words.pop(0).value
        behind = words[0].value if words else ""
        yield name, value, "" if behind.startswith("-") else behind


def _words(line: str) -> list[Word]:
    """Return the words behind ``#SBATCH``. Raise DirectiveError where quotes do not match."""
    return sbatch_words(line) if line.startswith("#SBATCH") else []


def refused_by_sbatch(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield why sbatch refuses a script as a whole, and the number of the line, from 1."""
    number = 0
    for number, line in enumerate(lines, 1):
        if "\0" in line:
            yield number, "this line has a null byte; name a batch script, not a program"
            return
        if number == 1 and not line.startswith("#!"):
            yield 1, "it does not begin with '#!' and the path of an interpreter"
        if line.endswith("\r\n"):
            yield number, "this line ends in CR LF, as in Windows; convert the file with dos2unix"
            return
    if not number:
        yield 1, "it is empty"
