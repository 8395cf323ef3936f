"""TODO."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from stager.base.errors import Failure

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Counts:
    """Of the ``files`` of a tree so many moved, of so many bytes; others were ``deleted``."""

    files: int
    moved: int = 0
    moved_size: int = 0
    deleted: int = 0
    #: Of a folder that is spread over the nodes, the bytes of each one's part.
    parts: tuple[int, ...] = ()


def total(parts: Sequence[Counts]) -> Counts:
    """The counts of a folder from those of its parts."""
    return Counts(
        sum(one.files for one in parts),
        sum(one.moved for one in parts),
        sum(one.moved_size for one in parts),
        sum(one.deleted for one in parts),
        tuple(size for one in parts for size in one.parts),
    )


@dataclass(frozen=True, slots=True)
class ItemReport:
    """What was done for one file; node names, bytes, seconds.

    ``senders`` are the nodes whose copies were sent, none where ``source`` was read.
    """

    source: str
    destination: str
    size: int
    received: list[str]
    current: list[str]
    senders: list[str]
    digest: str
    source_bytes_read: int
    #: The most memory that a rank took; 0 where nothing moved.
    peak_memory: int
    seconds: float
    #: Why the receivers needed it: ``absent``, ``the source changed``…
    reasons: list[str]
    #: The files of a folder.
    tree: Counts | None = None
    #: Where the list of what each node holds is, of a folder that is spread.
    shard_list: str = ""
    #: What its user should know of it besides.
    note: str = ""


@dataclass(frozen=True, slots=True)
class Evicted:
    """A copy that had to go on a node to make room, and the bytes that it took there."""

    node: str
    destination: str
    size: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all ranks agreed on: the files done, or the failures; never both in part."""

    items: list[ItemReport]
    failures: list[Failure]
    #: From the launch to the end; ``phases`` says where they went, and adds up to them.
    seconds: float
    dry_run: bool = False
    phases: dict[str, float] = field(default_factory=dict)
    #: The copies that had to go to make room.
    evicted: list[Evicted] = field(default_factory=list)

    @property
    def code(self) -> int:
        """The exit code: that of the first failure, else 0."""
        return self.failures[0].code if self.failures else 0

    @property
    def shard_lists(self) -> list[str]:
        """The lists of what each node holds of the folders that are spread."""
        return [item.shard_list for item in self.items if item.shard_list]

    def to_json(self) -> dict[str, Any]:
        """A JSON object, which `from_json` reads back."""
        return {**asdict(self), "code": self.code}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        """The outcome that `to_json` wrote."""
        return cls(
            [_read_item(item) for item in data["items"]],
            [Failure(**failure) for failure in data["failures"]],
            data["seconds"],
            data["dry_run"],
            data["phases"],
            [Evicted(**one) for one in data["evicted"]],
        )


def _read_item(data: dict[str, Any]) -> ItemReport:
    tree = data["tree"]
    counts = Counts(**{**tree, "parts": tuple(tree["parts"])}) if tree else None
    return ItemReport(**{**data, "tree": counts})


@dataclass(frozen=True, slots=True)
class Rate:
    """``size`` bytes took ``seconds``; ``what`` is ``wire``, ``write``, ``read`` or ``source``.

    ``node`` is the slowest one; ``algorithm`` is that of the wire.
    """

    what: str
    size: int
    seconds: float
    node: str = ""
    algorithm: str = ""

    @property
    def speed(self) -> float:
        """Bytes a second, on each node."""
        return self.size / self.seconds if self.seconds > 0 else 0.0


def event(kind: str, **fields: Any) -> str:
    """One event as a line of JSON, without its newline."""
    return json.dumps({"event": kind, **fields})
