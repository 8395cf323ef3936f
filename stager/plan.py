"""All nodes' surveys of one item in, a TransferPlan out: who needs it, who reads, who sends.

Pure: every rank makes the same plan from the same surveys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stager.errors import Failure, SpaceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stager.survey import Survey


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Ranks by number. ``sender`` reads its own copy, or the source if ``from_source``.

    Nothing moves where there are no ``receivers``.
    """

    size: int
    receivers: tuple[int, ...]
    current: tuple[int, ...]
    sender: int
    from_source: bool
    #: Digest that the sender's copy has by its record; empty when the source is read.
    digest: str

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part in moving the bytes, the sender first."""
        return (self.sender, *(rank for rank in self.receivers if rank != self.sender))


def make_plan(size: int, surveys: Sequence[Survey]) -> TransferPlan:
    """The plan for an item of ``size`` bytes; ``surveys[rank]`` is that rank's.

    A node with a current copy sends; without one, the first node that needs the file reads it.
    """
    current = tuple(rank for rank, survey in enumerate(surveys) if survey.current)
    receivers = tuple(rank for rank, survey in enumerate(surveys) if not survey.current)
    if current:
        sender = current[0]
        return TransferPlan(size, receivers, current, sender, False, surveys[sender].digest)
    return TransferPlan(size, receivers, (), receivers[0], True, "")


def shortages(
    plans: Sequence[TransferPlan], surveys: Sequence[Sequence[Survey]], roots: Sequence[str]
) -> list[Failure]:
    """A failure for every node and root without room for all that it is to receive.

    ``plans[i]`` and ``roots[i]`` are of item i; ``surveys[rank][i]`` is that rank's.
    """
    failures: list[Failure] = []
    for rank, answers in enumerate(surveys):
        wanted: dict[str, int] = {}
        free: dict[str, int] = {}
        for plan, answer, root in zip(plans, answers, roots, strict=True):
            free[root] = answer.free
            if rank in plan.receivers:
                wanted[root] = wanted.get(root, 0) + plan.size
        failures += [
            Failure(SpaceError.code, _shortage(root, need, free[root]), answers[0].node)
            for root, need in wanted.items()
            if need > free[root]
        ]
    return failures


def _shortage(root: str, need: int, free: int) -> str:
    return (
        f"{root}: {need} bytes are needed and {free} free, {need - free} too few; "
        "make room or ask for nodes with more"
    )
