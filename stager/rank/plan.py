"""Plan one item's transfer from the surveys of all nodes: who receives, who reads, who sends.

Pure: every rank makes the same plan from the same surveys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import xxhash

from stager.base.options import Mode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stager.request.items import StageItem
    from stager.source.endpoints import RemoteSettings
    from stager.source.facts import Source
    from stager.store.validity import Survey
    from stager.wire.layout import Settings


#: Readers that ``auto`` stands for: so many at first, then more while that makes it faster. One
#: reads a file alone unless it proves slower than the network: with a fast source, turns only cost
#: time. Connections to a store are slower than that.
_AUTO_READERS, _AUTO_OBJECT_READERS = (1, 4), (4, 8, 16)
#: Bytes of a source that is worth more readers than one.
_WORTH_READERS = 64 << 20
#: Bytes of an object that are asked for at once by a single reader, and by each of several; and
#: the most bytes of buffers for that. All readers share the buffers of a rank.
_OBJECT_CHUNK, _OBJECT_CHUNKS, _OBJECT_MEMORY = 8 << 20, 4 << 20, 256 << 20


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """How one item of ``size`` bytes reaches all nodes. Ranks are given by number.

    The ``senders`` read the source in turns; if not ``from_source``, the only sender reads its own
    copy. Nothing is sent if there are no ``receivers``.
    """

    size: int
    receivers: tuple[int, ...]
    current: tuple[int, ...]
    senders: tuple[int, ...]
    from_source: bool
    #: Digest in the record of the sender's copy; empty if the source is read.
    digest: str
    #: How many of the senders read at first, and how many where these are too slow.
    readers: tuple[int, ...] = (1,)
    #: Whether each receiver reads its own part from the source, and nothing is broadcast.
    apart: bool = False

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part in the transfer, the senders first."""
        return self.senders + tuple(rank for rank in self.receivers if rank not in self.senders)


def settings_for(
    item: StageItem, source: Source, settings: Settings, remote: RemoteSettings, ranks: int
) -> Settings:
    """Return the transfer settings of one item in a world of so many ``ranks``."""
    settings = replace(settings, readers=_readers(item, source, settings, remote, ranks))
    if item.scheme.by_requests:
        settings = _settings_for_objects(settings, remote.requests)
    if item.options.is_unpacked:  # while it is received, so it must be written in order
        settings = replace(settings, writers=1)
    return settings


def _readers(
    item: StageItem, source: Source, settings: Settings, remote: RemoteSettings, ranks: int
) -> tuple[int, ...]:
    """Return how many ranks read the source at first, and how many where these are too slow."""
    if item.scheme.is_made:  # one node makes a file of it, and reads that
        return (1,)
    by_requests = item.scheme.by_requests
    if source.is_tree and not by_requests:  # rank 0 has listed it: its caches know of it
        return (1,)
    counts = settings.readers
    if not counts:
        auto = _AUTO_OBJECT_READERS if by_requests else _AUTO_READERS
        counts = auto if source.facts.size >= _WORTH_READERS else (1,)
    if remote.limit and by_requests:  # readers share it, so their number does not change
        counts = counts[:1]
    return tuple(dict.fromkeys(min(count, ranks) for count in counts))


def _settings_for_objects(settings: Settings, requests: int) -> Settings:
    """Return the settings for objects, with those readers for whose requests there are buffers.

    Each request takes its time, so more bytes are asked for at once.
    """
    first, most = settings.readers[0], settings.readers[-1]
    chunk = max(settings.chunk, _OBJECT_CHUNK if most == 1 else _OBJECT_CHUNKS)
    depth = min(2 * requests * most, max(2, _OBJECT_MEMORY // chunk))
    depth = max(settings.depth * settings.chunk // chunk, depth)
    readers = tuple(count for count in settings.readers if count * requests <= depth) or (first,)
    return replace(settings, readers=readers, chunk=chunk, depth=depth, requests=requests)


def settings_to_send(settings: Settings, plan: TransferPlan) -> Settings:
    """Return the ``settings`` for what is sent by ``plan``: one thread reads a node's copy.

    Only readers of stores may be called by several threads at once.
    """
    return settings if plan.from_source else replace(settings, requests=1)


def plan_item(
    item: StageItem, source: Source, surveys: Sequence[Survey], readers: Sequence[int]
) -> TransferPlan:
    """Plan one item from ``surveys``, which are in rank order; ``readers`` as in `make_plan`."""
    size = source.facts.size
    if item.options.mode is Mode.SHARD:
        return plan_parts(size, surveys)
    return make_plan(size, surveys, readers, from_copies=not item.options.is_unpacked)


def make_plan(
    size: int, surveys: Sequence[Survey], readers: Sequence[int] = (1,), *, from_copies: bool = True
) -> TransferPlan:
    """Plan an item of ``size`` bytes that every node gets whole.

    A node that has a current copy sends it, if ``from_copies``. Else the first receivers read the
    source: ``readers[0]`` of them at first, and the next number where these are too slow.
    """
    current = tuple(rank for rank, survey in enumerate(surveys) if survey.current)
    receivers = tuple(rank for rank, survey in enumerate(surveys) if not survey.current)
    holders = current if from_copies or not receivers else ()
    digest = surveys[holders[0]].digest if holders else ""
    # One holder sends alone: a second one would have to receive what the first reads.
    senders = holders[:1] or receivers[: readers[-1]]
    counts = tuple(dict.fromkeys(min(count, len(senders)) for count in readers))
    return TransferPlan(size, receivers, current, senders, not holders, digest, counts)


def plan_parts(size: int, surveys: Sequence[Survey]) -> TransferPlan:
    """Plan a folder of ``size`` bytes that is spread over the nodes.

    Nothing is sent if all nodes have their parts of one split into as many parts as there are nodes
    now. Else each node reads from the source what it lacks of its new part.
    """
    ranks = tuple(range(len(surveys)))
    split = surveys[0].split
    complete = all(survey.current and survey.split == split for survey in surveys)
    # An earlier job may have spread it over more nodes: then these have only some of its parts.
    if complete and split.partition(":")[0] == str(len(surveys)):
        digest = joint_digest(survey.digest for survey in surveys)
        return TransferPlan(size, (), ranks, ranks[:1], False, digest)
    return TransferPlan(size, ranks, (), ranks, True, "", apart=True)


def joint_digest(digests: Iterable[str]) -> str:
    """Return one xxh3-128, in hexadecimal, for parts with these ``digests``."""
    return xxhash.xxh3_128_hexdigest("".join(digests).encode())
