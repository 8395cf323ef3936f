"""All nodes' surveys of one item in, a TransferPlan out: who needs it, who reads, who sends.

Pure: every rank makes the same plan from the same surveys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stager.copies.survey import Survey


#: Readers that ``auto`` stands for, and bytes of a file that is worth more than one. The first
#: reads alone unless it proves slower than the wire: with a fast source, turns only cost time.
_AUTO_READERS = 4
_WORTH_READERS = 64 << 20


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Ranks by number. The ``senders`` read the source in turns, or one reads its own copy if not
    ``from_source``. Nothing moves where there are no ``receivers``.
    """

    size: int
    receivers: tuple[int, ...]
    current: tuple[int, ...]
    senders: tuple[int, ...]
    from_source: bool
    #: Digest that the sender's copy has by its record; empty when the source is read.
    digest: str
    #: Whether each receiver reads for itself, its own part.
    apart: bool = False

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part in moving the bytes, the senders first."""
        return self.senders + tuple(rank for rank in self.receivers if rank not in self.senders)


def make_plan(
    size: int, surveys: Sequence[Survey], readers: int = 0, *, from_copies: bool = True
) -> TransferPlan:
    """The plan for an item of ``size`` bytes; ``surveys[rank]`` is that rank's.

    A node with a current copy of the very source sends; without one, or if not ``from_copies``, the
    first that need the file read it, up to ``readers`` of them, 0 for what is best.
    """
    current = tuple(rank for rank, survey in enumerate(surveys) if survey.current)
    receivers = tuple(rank for rank, survey in enumerate(surveys) if not survey.current)
    # A copy that passes for current by its size alone would come to others as what it is not.
    fresh = tuple(rank for rank in current if surveys[rank].fresh and from_copies)
    holders = fresh if receivers else current
    digest = surveys[holders[0]].digest if holders else ""
    most = readers or (_AUTO_READERS if size >= _WORTH_READERS else 1)
    # One holder sends alone: others would have to receive what it reads, and pass it on.
    senders = holders[:1] or receivers[:most]
    return TransferPlan(size, receivers, current, senders, not holders, digest)


def plan_parts(size: int, surveys: Sequence[Survey]) -> TransferPlan:
    """The plan for a folder of ``size`` bytes that is spread over the nodes.

    Where they have not all parts of one split, each once, all read anew what they lack then.
    """
    ranks = tuple(range(len(surveys)))
    split = surveys[0].split
    whole = all(survey.current and survey.split == split for survey in surveys)
    # The nodes that once shared it may be more than these, each part of which is current.
    if whole and split.partition(":")[0] == str(len(surveys)):
        digest = joint_digest(survey.digest for survey in surveys)
        return TransferPlan(size, (), ranks, ranks[:1], False, digest)
    return TransferPlan(size, ranks, (), ranks, True, "", apart=True)


def joint_digest(digests: Iterable[str]) -> str:
    """The xxh3-128 of all parts, in hexadecimal, from the ``digests`` of each."""
    return xxhash.xxh3_128_hexdigest("".join(digests).encode())
