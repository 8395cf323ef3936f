"""Define a Directive, and print directives as a ``--stage`` value, which `grammar` reads back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stager.base.options import DEFAULT_OPTIONS, Options
from stager.request.lexer import escape

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Directive:
    """What a user asks for: a copy of ``source`` at ``destination`` on every node."""

    source: str
    destination: str
    options: Options = DEFAULT_OPTIONS

    def __str__(self) -> str:
        """Return the directive as it is written in a ``--stage`` value."""
        options = (
            f",{key}={escape(value)}" if value else f",{key}" for key, value in self.options.given()
        )
        return f"{escape(self.source)}:{escape(self.destination)}{''.join(options)}"


def print_value(directives: Iterable[Directive]) -> str:
    """Return the ``--stage`` value that `grammar.parse_value` reads back as ``directives``.

    >>> print_value([Directive("/shared/a:/b", "/nvme/a"), Directive("/shared/c,d", "/nvme/")])
    '/shared/a\\\\:/b:/nvme/a;/shared/c\\\\,d:/nvme/'
    """
    return ";".join(str(directive) for directive in directives)
