"""Plan one item's transfer from the surveys of all nodes: who receives, who reads, who sends.

That is pure: every rank makes the same plan from the same surveys. A `Task` is the planned item as
one rank sees it, which writes its record.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

import xxhash

from stager.base.digest import PIECE
from stager.base.errors import BusyError, Failure, IntegrityError, StageError
from stager.base.formats import is_zip
from stager.base.options import Mode
from stager.store.record import VERSION, Record, TreeFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stager.fs.files import CopyFacts
    from stager.rank.agree import Node
    from stager.request.items import Space, StageItem
    from stager.source.description import Source
    from stager.source.endpoints import RemoteSettings
    from stager.store.cache import Cache
    from stager.store.tree_validity import Standing
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
    is_sharded: bool = False
    #: Whether all ranks see one copy, of which each byte is written once. Rank 0 makes and records
    #: it; of a file and of a folder each receiver writes a part.
    is_shared: bool = False

    @property
    def has_parts(self) -> bool:
        """Whether the copies of the receivers are parts, each of which has a record."""
        return self.is_sharded and not self.is_shared

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
    item: StageItem,
    source: Source,
    surveys: Sequence[Survey],
    readers: Sequence[int],
    *,
    is_shared: bool = False,
) -> TransferPlan:
    """Plan one item from ``surveys``, which are in rank order; ``readers`` as in `make_plan`.

    ``is_shared``: all nodes see the same copy.
    """
    size = source.facts.size
    if is_shared:
        return _plan_shared(item, source, surveys, readers)
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
    return TransferPlan(size, ranks, (), ranks, True, "", is_sharded=True)


def _plan_shared(
    item: StageItem, source: Source, surveys: Sequence[Survey], readers: Sequence[int]
) -> TransferPlan:
    """Plan what all ranks see: each reads from the source what it writes of a folder or a file.

    A tar comes to all ranks, each of which unpacks some members. What is decompressed, a zip
    archive, what a program makes, and a file of one piece is written where it is read.
    """
    ranks = tuple(range(len(surveys)))
    size = source.facts.size
    if surveys[0].current:
        return TransferPlan(size, (), ranks, ranks[:1], False, surveys[0].digest, is_shared=True)
    options = item.options
    if options.extract and not is_zip(item.source):
        return replace(make_plan(size, surveys, readers), is_shared=True)
    is_whole = options.is_unpacked or item.scheme.is_made or size <= PIECE
    if options.extract or (is_whole and not source.is_tree):
        return TransferPlan(size, ranks[:1], (), ranks[:1], True, "", is_shared=True)
    return TransferPlan(size, ranks, (), ranks, True, "", is_sharded=True, is_shared=True)


def plan_views(size: int, surveys: Sequence[Survey], *, anew: bool = False) -> TransferPlan:
    """Plan the views of an entry of ``size`` bytes: each node makes its own of what it has.

    All are made ``anew`` if what is there is of another entry.
    """
    current = tuple(rank for rank, one in enumerate(surveys) if one.current and not anew)
    receivers = tuple(rank for rank in range(len(surveys)) if rank not in current)
    return TransferPlan(size, receivers, current, (), False, "")


def joint_digest(digests: Iterable[str]) -> str:
    """Return one xxh3-128, in hexadecimal, for parts with these ``digests``."""
    return xxhash.xxh3_128_hexdigest("".join(digests).encode())


class Form(Enum):
    """What an item is at its source, and what a node makes of it.

    Only a file takes as much room on all nodes.
    """

    FILE = 0
    FOLDER = 1
    IMAGE = 2
    #: An archive that becomes a folder, and a file that becomes another one. Of a folder in which
    #: some files are decompressed, that is known file by file.
    UNPACKED = 3
    DECOMPRESSED = 4


@dataclass(frozen=True, slots=True)
class Task:
    """One planned item. All ranks have equal tasks, except for ``cache``, ``node``, ``rank``,
    ``since`` and ``standing``.

    ``item.destination`` is the final path: a file's name is appended where the user named a folder.
    ``job`` is Slurm's job id, 0 outside of Slurm. ``since`` is when this rank began to look at what
    is on the node, in nanoseconds since 1970. ``settings`` are those of this item's transfer.
    ``standing`` is how the copy of a folder was then, None if there was none. ``shown`` is the
    destination that the user named, if this is an entry of the store.
    """

    item: StageItem
    source: Source
    plan: TransferPlan
    settings: Settings
    remote: RemoteSettings
    space: Space
    job: int
    cache: Cache
    node: Node
    rank: int
    since: int
    standing: Standing | None = None
    shown: str = ""
    #: How this node makes it of an entry in its store: a `fs.clone.Way`; empty for what is no view.
    way: str = ""

    @property
    def path(self) -> str:
        """Where the copy is on this node's disk."""
        return self.cache.path_of(self.item.destination)

    @property
    def place(self) -> str:
        """The destination that messages name."""
        return self.shown or self.item.destination

    @property
    def form(self) -> Form:
        """What the item is, and becomes."""
        options = self.item.options
        if options.extract:
            return Form.UNPACKED
        if self.source.is_tree:
            return Form.FOLDER
        if self.item.scheme.is_made:
            return Form.IMAGE
        return Form.DECOMPRESSED if options.decompress else Form.FILE

    @property
    def receives(self) -> bool:
        """Whether this rank gets a new copy."""
        return self.rank in self.plan.receivers

    @property
    def is_recorder(self) -> bool:
        """Whether this rank makes, publishes and records the copy that it sees."""
        return not (self.plan.is_shared and self.rank)

    @property
    def sends(self) -> bool:
        """Whether this rank reads what is sent."""
        return self.rank in self.plan.senders

    def record(self, copy: CopyFacts, digest: str, tree: TreeFacts | None = None) -> Record:
        """Return the record of a new copy. A pin of the old one is kept."""
        now = int(time.time())
        before = self.cache.load(self.item.destination)
        return Record(
            version=VERSION,
            source=self.item.source,
            destination=self.item.destination,
            source_facts=self.source.facts,
            copy_facts=copy,
            digest=digest,
            staged_at=now,
            used_at=now,
            used_by_job=self.job,
            lifetime=self.item.options.lifetime,
            pinned=bool(before and before.pinned),
            made=self.item.options.made,
            share=self.item.options.share,
            tree=tree,
        )

    def note_use(self) -> None:
        """Write into this node's record that this job uses the copy now.

        A user cannot write the records of what another account staged for all.
        """
        record = self.cache.load(self.item.destination)
        if record is None or self.cache.uid != self.node.uid:
            return
        used = replace(
            record,
            used_at=int(time.time()),
            used_by_job=self.job,
            lifetime=self.item.options.lifetime,
        )
        with suppress(StageError):  # the copy is current whether its use is recorded or not
            self.cache.note_use(used)

    def check_unused(self) -> None:
        """Raise BusyError if a job has begun to use the copy that is to be replaced.

        Only what is for all users can be used by one who does not wait for its lock.
        """
        if self.receives and self.cache.shared:
            jobs = sorted({*self.cache.jobs().get(self.item.destination, ())} - {self.job})
            if jobs:
                several = len(jobs) > 1
                raise BusyError(
                    f"{self.item.destination} was not replaced, as meanwhile "
                    f"job{'s' * several} {','.join(map(str, jobs))} began to use it; submit again "
                    f"when {'they have' if several else 'it has'} ended"
                )

    def readback_error(self, name: str = "") -> IntegrityError:
        """Return the error for bytes that the disk returns otherwise than they were written.

        ``name`` is the file's path in a tree, with a slash before it.
        """
        text = "the bytes read back from the disk differ from those written; use another node"
        return IntegrityError(f"{self.shown or self.path}{name}: {text}")

    def mark_damaged(self) -> Failure:
        """Record that this node's copy is damaged, so that no survey finds it current again.

        Return the failure to report if no other node and no source can replace it.
        """
        record = self.cache.load(self.item.destination)
        if record:  # without its record, nobody would know that it was staged
            self.cache.save(record.as_damaged())
        text = "this copy is damaged; submit again: the next stage replaces it"
        return Failure(IntegrityError.code, f"{self.place}: {text}", self.node.name)
