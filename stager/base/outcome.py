"""Define the outcome of a stage, and find the nodes whose disks hold all others back. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from stager.base.codec import codec_of
from stager.base.errors import Failure  # noqa: TC001 - the codec reads the types
from stager.base.text import rate_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: A node is slow below this share of what the others do: disks of one model differ by less, also a
#: full or a worn one by a factor of two.
SHARE = 1 / 3
#: Seconds that all others must have lost by it: less may be other work on the node, and is not
#: worth an administrator's time.
LOST = 5.0


@dataclass(frozen=True, slots=True)
class Pace:
    """What one node did: ``size`` bytes in ``busy`` seconds, of which ``held`` held up the others.

    Paces can be added up over several items.
    """

    node: str
    size: int = 0
    busy: float = 0.0
    held: float = 0.0

    def __add__(self, other: Pace) -> Pace:
        return Pace(
            self.node, self.size + other.size, self.busy + other.busy, self.held + other.held
        )

    @property
    def rate(self) -> float:
        """Bytes a second while it was busy; infinite if that took no time."""
        return self.size / self.busy if self.busy > 0 else float("inf")


def slow_nodes(paces: Iterable[Pace]) -> list[Slow]:
    """Return the nodes that do less than `SHARE` of what the others do, if that cost `LOST`.

    The others are all that moved anything but itself, and count by their median. What a node cost
    is the time for which it held the others up, at most what it took longer than they would have.
    """
    active = [one for one in paces if one.size and one.busy > 0]
    return list(_slow(active)) if len(active) > 1 else []


def _slow(active: Sequence[Pace]) -> Iterator[Slow]:
    rates = sorted(one.rate for one in active)
    for one in active:
        others = _median_without(rates, one.rate)
        lost = min(one.held, one.busy - one.size / others)
        if one.rate < SHARE * others and lost >= LOST:
            yield Slow(one.node, one.rate, others, lost)


def far_below(rates: Sequence[float]) -> list[bool]:
    """Return of each rate whether it is below `SHARE` of the median of the others."""
    if len(rates) < 2:
        return [False] * len(rates)
    ordered = sorted(rates)
    return [rate < SHARE * _median_without(ordered, rate) for rate in rates]


def _median_without(rates: Sequence[float], rate: float) -> float:
    """Return the median of the sorted ``rates`` but one of them. There are thousands of nodes."""
    place = bisect_left(rates, rate)
    count = len(rates) - 1

    def at(index: int) -> float:
        return rates[index + (index >= place)]

    return (at((count - 1) // 2) + at(count // 2)) / 2


@dataclass(frozen=True, slots=True)
class Counts:
    """What happened to the files of a folder; sizes in bytes."""

    files: int
    #: Files that moved, and their bytes.
    moved: int = 0
    moved_size: int = 0
    #: Files that were deleted from the copy.
    deleted: int = 0
    #: With mode=shard, the bytes of each node's part.
    parts: tuple[int, ...] = ()


def total(parts: Sequence[Counts]) -> Counts:
    """Return the counts of a folder from those of its parts."""
    return Counts(
        sum(one.files for one in parts),
        sum(one.moved for one in parts),
        sum(one.moved_size for one in parts),
        sum(one.deleted for one in parts),
        tuple(size for one in parts for size in one.parts),
    )


class NoteKind(StrEnum):
    """What a note is about."""

    #: A copy of another source was replaced; something of the user's own was, by ``replace``.
    REPLACED = "replaced"
    CHANGED = "changed"
    #: With lifetime=job, a copy stays.
    PINNED = "pinned"
    #: Anything else.
    REMARK = "remark"


@dataclass(frozen=True, slots=True)
class Note:
    """What the user is told of an item beside its line, and the ``nodes`` if it is about some."""

    kind: NoteKind
    text: str
    nodes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ItemReport:
    """What was done for one item; sizes in bytes, times in seconds, nodes by name."""

    source: str
    destination: str
    size: int
    #: Nodes that received it, nodes that had it, and nodes whose copies were sent. There are no
    #: senders where the source was read.
    received: list[str]
    current: list[str]
    senders: list[str]
    digest: str
    source_bytes_read: int
    #: The most memory that a rank took; 0 where nothing moved.
    peak_memory: int
    seconds: float
    #: Why nodes needed it: ``absent``, ``the source changed``…
    reasons: list[str]
    #: The counts of a folder's files, None for a file.
    tree: Counts | None = None
    #: With mode=shard, the path of the list of which node holds which file.
    shard_list: str = ""
    notes: list[Note] = field(default_factory=list)
    #: Requests to a store that had to be repeated.
    retries: int = 0
    #: How it was made of what the nodes' stores keep, there where it was made: ``reflink``, ``hard
    #: link``, ``copy`` or ``symbolic link``. A dry run adds why there is no better one.
    ways: list[str] = field(default_factory=list)
    #: Whether all nodes see one copy, which was written once.
    once: bool = False


@dataclass(frozen=True, slots=True)
class Evicted:
    """A copy that was deleted on a node to free space, and the bytes that it had there."""

    node: str
    destination: str
    size: int


@dataclass(frozen=True, slots=True)
class Slow:
    """A node that held all others back for ``seconds``: bytes a second that it and they write."""

    node: str
    rate: float
    others: float
    seconds: float

    @property
    def text(self) -> str:
        """What is told of it."""
        return (
            f"{self.node} is slow: it writes {rate_text(self.rate)}, the others "
            f"{rate_text(self.others)}"
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all ranks agreed on: either all items are done, or there are failures."""

    items: list[ItemReport]
    failures: list[Failure]
    #: From the launch to the end; the ``phases`` add up to it.
    seconds: float
    dry_run: bool = False
    phases: dict[str, float] = field(default_factory=dict)
    #: Copies that were deleted to free space; that a dry run would delete.
    evicted: list[Evicted] = field(default_factory=list)
    #: Nodes whose disks held all others back.
    slow: list[Slow] = field(default_factory=list)
    #: The nodes that the stage went on without, and what failed there: the launching process alone
    #: knows, so they are not in the JSON.
    failed_nodes: list[Failure] = field(default_factory=list)

    @property
    def code(self) -> int:
        """The exit code of the first failure, 0 if there is none."""
        return self.failures[0].code if self.failures else 0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object for `from_json`."""
        data = codec_of(type(self)).to_data(self)
        del data["failed_nodes"]
        return {**data, "code": self.code}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        """Return the outcome that `to_json` wrote.

        It comes from another node. Raise ValueError if it is not valid.
        """
        known = {name: value for name, value in data.items() if name != "code"}
        return codec_of(cls).from_data({**known, "failed_nodes": []})


@dataclass(frozen=True, slots=True)
class Rate:
    """A measurement: ``size`` bytes took ``seconds`` on the slowest ``node``."""

    #: ``wire``, ``write``, ``read`` or ``source``.
    what: str
    size: int
    seconds: float
    node: str = ""
    #: With ``wire``, the algorithm of the broadcast.
    algorithm: str = ""

    @property
    def speed(self) -> float:
        """Bytes per second, on each node."""
        return self.size / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class NodeRates:
    """What `stagectl bench` measured of one node: bytes a second.

    ``network`` is the better one of the node's links from and to its neighbours, so that a slow
    node is not taken for two.
    """

    node: str
    write: float
    read: float
    network: float
