"""TODO."""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING

from stager.request.directive import Directive, parse_line
from stager.request.lexer import split_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_LINE = re.compile(r"#STAGE(?=\s|$)")


def head(lines: Iterable[str]) -> Iterator[str]:
    """The lines of a batch script that sbatch looks at: comments up to the first command."""
    for line in lines:
        if line.strip() and not line.lstrip().startswith("#"):
            return
        yield line.rstrip("\r\n")


def parse_script(lines: Iterable[str]) -> tuple[Directive, ...]:
    """The directives of the ``#STAGE`` lines in a batch script's head. Raises DirectiveError."""
    return tuple(parse_line(line) for line in head(lines) if _LINE.match(line))


def sbatch_values(lines: Iterable[str]) -> list[str]:
    """The values of ``--stage`` on a batch script's ``#SBATCH`` lines, as sbatch reads them.

    Raises DirectiveError for a line whose quotes do not match.
    """
    values: list[str] = []
    for line in head(lines):
        if not line.startswith("#SBATCH"):
            continue
        words = iter(split_words(line, len("#SBATCH"), sbatch=True))
        for word in words:
            if word.value.startswith("--stage="):
                values.append(word.value.removeprefix("--stage="))
            elif word.value == "--stage":
                values += [value.value for value in islice(words, 1)]
    return values
