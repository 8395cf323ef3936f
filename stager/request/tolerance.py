"""Read how many nodes of a job may fail its stage: a number of nodes, or a share of them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stager.base.errors import UsageError

_TEXT = re.compile(r"(\d{1,6})(%?)", re.ASCII)
_ALL = 100


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The most nodes that may fail: ``number`` of them, or that many percent of the job's nodes."""

    number: int
    is_percent: bool = False

    @classmethod
    def parse(cls, value: object) -> Tolerance:
        """Return the tolerance for a number, or a text such as ``2`` or ``10%``. Raise ValueError.

        >>> Tolerance.parse("10%")
        Tolerance(number=10, is_percent=True)
        """
        found = _TEXT.fullmatch(value if isinstance(value, str) else "")
        if type(value) is int and value >= 0:
            return cls(value)
        if not found or (found[2] and int(found[1]) > _ALL):
            raise ValueError('must be a number of nodes, or a share of them such as "10%"')
        return cls(int(found[1]), bool(found[2]))

    def __str__(self) -> str:
        return f"{self.number}{'%' if self.is_percent else ''}"

    def of(self, nodes: int) -> int:
        """Return how many of so many nodes may fail, rounded down.

        >>> Tolerance(10, is_percent=True).of(39)
        3
        """
        return nodes * self.number // _ALL if self.is_percent else min(self.number, nodes)


def asked_tolerance(text: str, option: str, default: Tolerance) -> Tolerance:
    """Return what a user's ``option`` asks for, or the site's ``default`` if it has no text.

    Raise UsageError.
    """
    try:
        return Tolerance.parse(text) if text else default
    except ValueError:
        raise UsageError(
            f"{option}={text}: write a number of nodes, or a share of the job's nodes such as 10%"
        ) from None
