"""Read the head of a batch script, for the commands that take ``--script``."""

from __future__ import annotations

import click

from stager.base.errors import SourceError
from stager.request.script import head


def read_head(path: str) -> list[str]:
    """Return the comment lines at the head of a batch script; ``-`` is stdin. Raise SourceError."""
    try:
        with click.open_file(path, encoding="utf-8", errors="surrogateescape") as lines:
            return list(head(lines))
    except OSError as error:
        raise SourceError(f"the batch script {path} cannot be read: {error.strerror}") from None
