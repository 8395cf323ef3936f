"""Check numbers that other users or nodes wrote, and bound times. Pure."""

from __future__ import annotations

from typing import TypeGuard

#: The range of an integer: those of the kernel have 64 bits, with a sign or without.
_LEAST, _MOST = -(1 << 63), 1 << 64


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether ``value`` is an integer of 64 bits: with longer ones, arithmetic may fail.

    >>> is_integer(1 << 63), is_integer(1 << 64), is_integer(True), is_integer(1.0)
    (True, False, False, False)
    """
    return type(value) is int and _LEAST <= value < _MOST


def listed_time(nanoseconds: int) -> int:
    """Return a file's time, or the nearest one that listings and records hold, of 1677 to 2262.

    >>> listed_time(10**18), listed_time(10**19)
    (1000000000000000000, 9223372036854775807)
    """
    return min(max(nanoseconds, -(1 << 63)), (1 << 63) - 1)
