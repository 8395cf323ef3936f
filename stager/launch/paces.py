"""Find the nodes that hold all others back while a stage lasts, by what the pulses say of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stager.base.slow import LOST, Pace, slow_nodes

if TYPE_CHECKING:
    from stager.base.outcome import Slow


class Paces:
    """How fast each node has written so far, by its last pulse."""

    def __init__(self) -> None:
        self._of_nodes: dict[str, Pace] = {}
        self._told: set[str] = set()

    def hear(self, pulse: dict[str, Any]) -> list[Slow]:
        """Take one pulse; return the nodes that are now seen to be slow, each only once.

        The nodes, of which there may be thousands, are compared only where one has held up others.
        """
        pace = Pace(pulse["node"], *pulse["pace"])
        self._of_nodes[pace.node] = pace
        if pace.held < LOST or pace.node in self._told:
            return []
        slow = [one for one in slow_nodes(self._of_nodes.values()) if one.node not in self._told]
        self._told.update(one.node for one in slow)
        return slow
