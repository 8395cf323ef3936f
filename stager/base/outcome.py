"""Define the outcome of a stage."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from stager.base.errors import Failure
from stager.base.numbers import is_integer
from stager.base.text import rate_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


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
    #: A remark for the user.
    note: str = ""
    #: Requests to a store that had to be repeated.
    retries: int = 0
    #: Nodes on which something of the user's own was replaced, by the option ``replace``.
    changed: list[str] = field(default_factory=list)
    #: With lifetime=job, nodes whose copy stays, as it is pinned.
    pinned: list[str] = field(default_factory=list)
    #: The source of a copy that was replaced, if that was another one.
    replaced: str = ""


@dataclass(frozen=True, slots=True)
class Evicted:
    """A copy that was deleted on a node to free space, and the bytes that it had there."""

    node: str
    destination: str
    size: int

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Evicted:
        """Return what a rank told. Raise ValueError or TypeError if it is not valid."""
        return _checked(cls(**data))


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
    #: The nodes that the stage went on without, and what failed there.
    failed_nodes: list[Failure] = field(default_factory=list)

    @property
    def code(self) -> int:
        """The exit code of the first failure, 0 if there is none."""
        return self.failures[0].code if self.failures else 0

    @property
    def shard_lists(self) -> list[str]:
        """The paths of the shard lists of all items with mode=shard."""
        return [item.shard_list for item in self.items if item.shard_list]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object for `from_json`."""
        return {**asdict(self), "code": self.code}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        """Return the outcome that `to_json` wrote.

        It comes from another node. Raise ValueError, TypeError or KeyError if it is not valid.
        """
        return _checked(
            cls(
                [_read_item(item) for item in data["items"]],
                [_checked(Failure(**failure)) for failure in data["failures"]],
                data["seconds"],
                data["dry_run"],
                data["phases"],
                [Evicted.from_json(one) for one in data["evicted"]],
                [_checked(Slow(**one)) for one in data["slow"]],
                [_checked(Failure(**failure)) for failure in data["failed_nodes"]],
            )
        )


def _read_item(data: dict[str, Any]) -> ItemReport:
    tree = data["tree"]
    counts = _checked(Counts(**{**tree, "parts": tuple(tree["parts"])})) if tree else None
    return _checked(ItemReport(**{**data, "tree": counts}))


#: The types of the fields that hold plain values, as they are annotated above.
_VALUES: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: type(value) is str,
    "int": is_integer,
    "bool": lambda value: type(value) is bool,
    "float": lambda value: type(value) in (int, float),
    "list[str]": lambda value: type(value) is list and all(type(one) is str for one in value),
    "tuple[int, ...]": lambda value: all(map(is_integer, value)),
    "dict[str, float]": lambda value: (
        type(value) is dict and all(type(one) in (int, float) for one in value.values())
    ),
}


def _checked(read: T) -> T:
    """Return a dataclass as it is. Raise ValueError if a field is not of its type."""
    for one in fields(read):  # type: ignore[arg-type]
        is_valid = _VALUES.get(str(one.type))
        if is_valid and not is_valid(getattr(read, one.name)):
            raise ValueError(f"{one.name} is not {one.type}")
    return read


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
