"""Make the paths absolute that a user gave: nodes and ranks have other working directories."""

from __future__ import annotations

import os

from stager.base.errors import UsageError


def absolute(path: str) -> str:
    """Return the absolute form of ``path``. Raise UsageError if the current folder was deleted."""
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        raise UsageError(
            "the current folder does not exist any more; change to another one"
        ) from None
