"""Read a batch script, for the commands that take ``--script``."""

from __future__ import annotations

from io import TextIOWrapper
from typing import TYPE_CHECKING

import click

from stager.base.errors import SourceError
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
