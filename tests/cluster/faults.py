"""The plan of a campaign: a seed comes in, an endless list of faults goes out. Pure.

Each fault says what is done, when, to which node, and what is staged at that time by whom; `KINDS`
says what may become of the job.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from tests.cluster.cluster import USERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Of the moments of one kind, the transfer is taken so many times as often as another.
TRANSFER_WEIGHT = 3
#: What is staged: one file; a folder; a .tar that is unpacked; a folder spread over the nodes.
CARGOES = ("file", "folder", "archive", "shards")
#: A share of the jobs that stage a file or a folder have lifetime=job.
LIFETIME_SHARE = 0.2


class Moment(StrEnum):
    """When a fault happens."""

    #: Before the job is submitted.
    BEFORE = "before"
    #: When the job's gate has begun, or a little later, when the victim's rank has.
    START = "start"
    #: When the victim's rank has a part of its bytes.
    TRANSFER = "transfer"
    #: When the first node has published its copy.
    PUBLICATION = "publication"
    #: When the job's script runs.
    SCRIPT = "script"


COMPLETED, CANCELLED, REQUEUED = "completed", "cancelled", "completed after a requeue"


@dataclass(frozen=True)
class Kind:
    """What a kind of fault may lead to, for the job that it hits.

    ``moments`` are those at which it makes sense; ``outcomes`` are the ends that keep the contract,
    of which `COMPLETED` always is one. If ``spares_others``, jobs of other users must complete.
    """

    moments: tuple[Moment, ...]
    outcomes: frozenset[str]
    spares_others: bool = False


def _kind(moments: Sequence[Moment], *outcomes: str, spares_others: bool = False) -> Kind:
    return Kind(tuple(moments), frozenset({COMPLETED, *outcomes}), spares_others)


_STAGING = (Moment.START, Moment.TRANSFER, Moment.PUBLICATION)
#: A gate or a batch step that is killed ends the job by that signal.
_KILLED = "signal 9"

KINDS = {
    "rank killed": _kind(_STAGING, "code 8", spares_others=True),
    "slurmstepd killed": _kind(_STAGING, "code 8", spares_others=True),
    "gate killed": _kind(_STAGING, _KILLED, spares_others=True),
    "helper killed": _kind(_STAGING, "code 137", spares_others=True),
    "srun killed": _kind(_STAGING, "code 8", spares_others=True),
    "rank stopped": _kind(_STAGING, "code 8", spares_others=True),
    "rank paused": _kind((Moment.START, Moment.TRANSFER), spares_others=True),
    "link down": _kind((*_STAGING, Moment.SCRIPT), "code 8"),
    "link flaps": _kind((Moment.START, Moment.TRANSFER), "code 8"),
    "disk full": _kind((Moment.BEFORE, Moment.TRANSFER), "code 5"),
    "disk read-only": _kind((Moment.BEFORE, Moment.TRANSFER, Moment.PUBLICATION), "code 6"),
    "disk errors": _kind((Moment.TRANSFER, Moment.PUBLICATION), "code 6"),
    "disk stutters": _kind((Moment.TRANSFER,), "code 8"),
    "source errors": _kind((Moment.START, Moment.TRANSFER), "code 4"),
    "source replaced": _kind((Moment.START, Moment.TRANSFER), "code 7", spares_others=True),
    "slurmctld restarted": _kind((*_STAGING, Moment.SCRIPT)),
    "slurmd restarted": _kind((*_STAGING, Moment.SCRIPT), "code 8"),
    "node rebooted": _kind(
        (Moment.START, Moment.TRANSFER, Moment.SCRIPT),
        "code 8",
        "code 137",
        "node failed",
        REQUEUED,
    ),
    "job preempted": _kind((Moment.START, Moment.TRANSFER, Moment.SCRIPT), REQUEUED),
    "job requeued": _kind(
        (Moment.START, Moment.TRANSFER, Moment.SCRIPT), REQUEUED, spares_others=True
    ),
    "job cancelled": _kind((*_STAGING, Moment.SCRIPT), CANCELLED, spares_others=True),
    "memory short": _kind((Moment.TRANSFER,), "code 8", spares_others=True),
}


@dataclass(frozen=True)
class Fault:
    """One fault. ``share``, from 0 to 1, is how much of the transfer is done when it happens.

    ``users`` each stage the same kind of files to the same nodes at the same time. The processes
    and sources that are hit are those of the first.
    """

    number: int
    kind: str
    moment: Moment
    share: float
    nodes: tuple[str, ...]
    victim: str
    cargo: str
    lifetime: bool
    users: tuple[str, ...]


def plan(seed: int, nodes: Sequence[str]) -> Iterator[Fault]:
    """Yield faults without end: all kinds at all of their moments in random order, again and again.

    The first faults of a longer plan are those of a shorter one with the same seed.
    """
    dice = random.Random(f"faults of {seed}")
    number = 0
    while True:
        deck = [
            (kind, moment)
            for kind, facts in KINDS.items()
            for moment in facts.moments
            for _ in range(TRANSFER_WEIGHT if moment == Moment.TRANSFER else 1)
        ]
        dice.shuffle(deck)
        for kind, moment in deck:
            yield _fault(dice, number, kind, moment, nodes)
            number += 1


def _fault(
    dice: random.Random, number: int, kind: str, moment: Moment, nodes: Sequence[str]
) -> Fault:
    chosen = tuple(sorted(dice.sample(nodes, dice.randint(2, len(nodes)))))
    cargo = dice.choice(CARGOES)
    return Fault(
        number=number,
        kind=kind,
        moment=moment,
        share=dice.random(),
        nodes=chosen,
        victim=dice.choice(chosen),
        cargo=cargo,
        lifetime=cargo in ("file", "folder") and dice.random() < LIFETIME_SHARE,
        users=tuple(dice.sample(sorted(USERS), dice.choices((1, 2, 3), (5, 2, 1))[0])),
    )
