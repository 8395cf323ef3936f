"""Read numbers from what users' programs wrote. Everything else that they may write is refused."""

from __future__ import annotations

import math

#: No number counts further.
MOST = 1e15


def as_number(value: object) -> float:
    """Return a number from 0 to `MOST`. Raise ValueError for anything else."""
    try:
        number = float(value) if isinstance(value, bytes | int | float) else math.nan
    except OverflowError:
        number = math.inf
    if not 0 <= number <= MOST:
        raise ValueError("not a number in the range that counts")
    return number


def or_zero(value: object) -> float:
    """Return a number from 0 to `MOST`, or 0 for anything else."""
    try:
        return as_number(value)
    except ValueError:
        return 0.0
