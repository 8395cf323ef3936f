"""Find the nodes that hold all others back while a stage lasts, by what the pulses say of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stager.base.slow import LOST, Pace, slow_nodes
from stager.base.text import rate_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stager.base.outcome import Slow


class Paces:
    """How fast each node has written so far, by its last pulse.

    Slow nodes have to be given up when one has cost the others ``patience`` seconds, if they are at
    most so many; and never ``own``, on which this process runs.
    """

    def __init__(self, patience: float = 0.0, most: int = 0, own: str = "") -> None:
        self._patience = patience
        self._most = most if patience else 0
        self._own = own
        self._of_nodes: dict[str, Pace] = {}
        self._told: set[str] = set()
        #: The nodes that have to be given up.
        self.too_slow: list[Slow] = []

    def hear(self, pulse: dict[str, Any]) -> list[Slow]:
        """Take one pulse; return the nodes that are now seen to be slow, each only once.

        The nodes, of which there may be thousands, are compared only where one has held up others.
        """
        pace = Pace(pulse["node"], *pulse["pace"])
        self._of_nodes[pace.node] = pace
        is_due = self._most > 0 and pace.held >= self._patience
        if not is_due and (pace.held < LOST or pace.node in self._told):
            return []
        slow = slow_nodes(self._of_nodes.values())
        others = [one for one in slow if one.node != self._own]
        if len(others) <= self._most and any(one.seconds >= self._patience for one in others):
            self.too_slow = others
        new = [one for one in slow if one.node not in self._told]
        self._told.update(one.node for one in new)
        return new


def too_slow_text(slow: Sequence[Slow]) -> str:
    """Return why nodes that are ``slow`` were given up."""
    fastest = max(slow, key=lambda one: one.rate)
    rate, others = rate_text(fastest.rate), rate_text(fastest.others)
    most = "" if len(slow) == 1 else "at most "
    lost = seconds_text(min(one.seconds for one in slow))
    return f"too slow: it writes {most}{rate}, the others {others}, and cost them {lost}"
