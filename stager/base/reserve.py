"""Tell how much of a disk the site keeps free. Pure."""

from __future__ import annotations


def kept_free(disk: int, least: int, percent: float) -> int:
    """Return the bytes that stay free of a disk of ``disk`` bytes.

    ``least`` is ``keep_free`` in stage.toml, in bytes, ``percent`` is ``keep_free_percent``: the
    larger one counts.

    >>> kept_free(1000, 50, 10.0), kept_free(1000, 200, 10.0)
    (100, 200)
    """
    return max(least, int(disk * percent / 100))
