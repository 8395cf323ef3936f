"""The ranks' outcome in, one summary line a file or one message a failure out. Pure.

Ranks speak to the process that launched them by events, one line of JSON each on stdout:
``started``, ``waiting``, ``progress``, and last ``result``; or ``crashed``, unforeseen.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from stager.errors import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Fold = Callable[[list[str]], str]

#: Evicted files that are named one by one.
_MOST_EVICTED = 8
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


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


def summary(outcome: Outcome, fold: Fold) -> list[str]:
    """The lines for the job's output: one an item, or one a failure."""
    if outcome.failures:
        return failure_lines(outcome.failures, fold)
    tell = _planned_line if outcome.dry_run else _item_line
    evicted = _evicted_lines(outcome, fold)
    notes = [f"{item.destination}: {item.note}" for item in outcome.items if item.note]
    return [*evicted, *(tell(item, fold) for item in outcome.items), *notes]


def phase_line(outcome: Outcome) -> str:
    """Where the time went, and what took most of it."""
    times = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in outcome.phases.items())
    longest = max(outcome.phases, key=outcome.phases.__getitem__)
    return f"{outcome.seconds:.2f} s: {times}; bounded by {longest}"


def failure_lines(failures: Sequence[Failure], fold: Fold) -> list[str]:
    """Each different message once, led by all the nodes that it comes from."""
    nodes: dict[str, list[str]] = {}
    for failure in failures:
        nodes.setdefault(failure.message, []).append(failure.node)
    return [
        f"{fold(where)}: {message}" if any(where) else message for message, where in nodes.items()
    ]


def bytes_text(count: float) -> str:
    """``268435456`` → ``256.0 MiB``."""
    unit = 0
    while round(count, 1) >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.1f} {_UNITS[unit]}" if unit else f"{int(count)} B"


def seconds_text(seconds: float) -> str:
    """``5000`` → ``1 h 23 min``; below a minute with one digit."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _item_line(item: ItemReport, fold: Fold) -> str:
    if not item.received:
        return (
            f"{item.destination}: current on {_nodes(item.current, fold)}, nothing moved "
            f"({_size(item)}, {seconds_text(item.seconds)})"
        )
    origin = _origin(item, fold)
    if item.tree and item.tree.parts:
        return _spread_line(item, fold)
    moved = item.tree.moved_size if item.tree else item.size
    rate = bytes_text(moved / item.seconds) if item.seconds > 0 else "?"
    line = (
        f"{item.destination}: {_moved(item)} from {origin} "
        f"to {_nodes(item.received, fold)} in {seconds_text(item.seconds)} ({rate}/s a node)"
    )
    return f"{line}; current on {_nodes(item.current, fold)}" if item.current else line


def _spread_line(item: ItemReport, fold: Fold) -> str:
    assert item.tree is not None
    least, most = (bytes_text(part(item.tree.parts)) for part in (min, max))
    part = least if least == most else f"{least} to {most}"
    return (
        f"{item.destination}: {_moved(item)} from {item.source} spread over "
        f"{_nodes(item.received, fold)}, {part} on each, in {seconds_text(item.seconds)}"
    )


def _size(item: ItemReport) -> str:
    size = bytes_text(item.size)
    return f"{files_text(item.tree.files)}, {size}" if item.tree else size


def _moved(item: ItemReport) -> str:
    """What moved; of a tree of which a part is there already, that part and what was deleted."""
    tree = item.tree
    if tree is None or (tree.moved == tree.files and not tree.deleted):
        return _size(item)
    kept = f", {files_text(tree.files - tree.moved)} kept" if tree.moved < tree.files else ""
    deleted = f", {files_text(tree.deleted)} deleted" if tree.deleted else ""
    return f"{files_text(tree.moved)}, {bytes_text(tree.moved_size)}{kept}{deleted}"


def files_text(count: int) -> str:
    """``1 file``, ``2 files``."""
    return f"{count} file" if count == 1 else f"{count} files"


def _evicted_lines(outcome: Outcome, fold: Fold) -> list[str]:
    """What had to go, each file once with its nodes; a long list in one line."""
    gone = "would be evicted" if outcome.dry_run else "evicted"
    nodes: dict[str, list[str]] = {}
    for one in outcome.evicted:
        nodes.setdefault(one.destination, []).append(one.node)
    if len(nodes) > _MOST_EVICTED:
        total = bytes_text(sum(one.size for one in outcome.evicted))
        everywhere = _nodes(sorted({one.node for one in outcome.evicted}), fold)
        return [f"{len(nodes)} files {gone} on {everywhere} to make room: {total} in all"]
    return [
        f"{path}: {gone} on {_nodes(where, fold)} to make room" for path, where in nodes.items()
    ]


def _planned_line(item: ItemReport, fold: Fold) -> str:
    if not item.received:
        return f"{item.destination}: current on {_nodes(item.current, fold)}, nothing would move"
    origin = _origin(item, fold)
    would = "would be spread" if item.shard_list else "would move"
    way = "over" if item.shard_list else "to"
    line = (
        f"{item.destination}: {_size(item)} {would} from {origin} "
        f"{way} {_nodes(item.received, fold)} ({', '.join(item.reasons)})"
    )
    return f"{line}; current on {_nodes(item.current, fold)}" if item.current else line


def rate_lines(rates: Sequence[Rate]) -> list[str]:
    """A table of the wire by size and algorithm, the rates beside it, and what bounds a stage."""
    wire = [rate for rate in rates if rate.what == "wire"]
    algorithms = list(dict.fromkeys(rate.algorithm for rate in wire))
    lines = [f"{'message':>10}{'best time':>14}" + "".join(f"{name:>12}" for name in algorithms)]
    for size in dict.fromkeys(rate.size for rate in wire):
        row = [rate for rate in wire if rate.size == size]
        best = 1e6 * min(rate.seconds for rate in row)
        speeds = "".join(f"{_speed(rate.speed):>12}" for rate in row)
        lines.append(f"{bytes_text(size):>10}{best:>11.0f} us{speeds}")
    others = [rate for rate in rates if rate.what != "wire"]
    lines += [f"{_RATES[rate.what]} {rate.node}: {_speed(rate.speed)}" for rate in others]
    return [*lines, _verdict(wire, others)]


_RATES = {
    "write": "disk, written and synced, slowest on",
    "read": "disk, read past its cache, slowest on",
    "source": "source, one stream, read on",
}


def _verdict(wire: Sequence[Rate], others: Sequence[Rate]) -> str:
    """What is slowest of what a stage needs."""
    largest = max(rate.size for rate in wire)
    speeds = {"the wire": max(rate.speed for rate in wire if rate.size == largest)}
    names = {"write": "the disk", "source": "the source"}
    speeds |= {names[rate.what]: rate.speed for rate in others if rate.what in names}
    slowest = min(speeds, key=speeds.__getitem__)
    return f"a stage is bounded by {slowest}: {_speed(speeds[slowest])} a node"


def _speed(rate: float) -> str:
    """In decimal units, as vendors of wires and disks give theirs."""
    return f"{rate / 1e9:.2f} GB/s"


def _origin(item: ItemReport, fold: Fold) -> str:
    if not item.senders:
        return item.source
    return f"the {'copies' if len(item.senders) > 1 else 'copy'} on {fold(item.senders)}"


def _nodes(names: list[str], fold: Fold) -> str:
    return f"{fold(names)} ({len(names)} nodes)" if len(names) > 1 else names[0]


def progress_line(destination: str, done: int, total: int, seconds: float) -> str:
    """How far a transfer is: bytes, share, rate and time left."""
    rate = done / seconds if seconds > 0 else 0.0
    left = seconds_text((total - done) / rate) if rate else "?"
    share = 100 * done // total if total else 100
    return (
        f"{destination}: {bytes_text(done)} of {bytes_text(total)}, {share} %, "
        f"{bytes_text(rate)}/s, {left} left"
    )
