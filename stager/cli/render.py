"""Make the lines that users read from an outcome, its failures, rates and progress. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stager.base.outcome import NoteKind
from stager.base.text import bytes_text, files_text, seconds_text
from stager.launch.job import fold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stager.base.errors import Failure
    from stager.base.outcome import Evicted, ItemReport, Outcome, Slow

#: Evicted files that are named one by one.
_MOST_EVICTED = 8


def summary(outcome: Outcome) -> list[str]:
    """Return the lines for the job's output: one an item, or one a failure; then slow nodes."""
    slow = [slow_line(one) for one in outcome.slow]
    if outcome.failures:
        return [*failure_lines(outcome.failures), *slow]
    line = _planned_line if outcome.dry_run else _item_line
    left_out = [_left_out_line(outcome)] if outcome.failed_nodes else []
    evicted = evicted_lines(outcome.evicted, dry_run=outcome.dry_run)
    lines = [line(item) for item in outcome.items]
    notes = [line for item in outcome.items for line in _note_lines(item)]
    remarks = [line for item in outcome.items for line in _remark_line(item)]
    return [*left_out, *evicted, *lines, *notes, *remarks, *slow]


def print_outcome(
    outcome: Outcome, say: Callable[[str], None], complain: Callable[[str], None]
) -> None:
    """Print one line for each item by ``say``, or one for each failure by ``complain``.

    Nodes that the stage went on without have failed. Copies that were evicted are told also if the
    stage failed then.
    """
    for line in evicted_lines(outcome.evicted) if outcome.failures else ():
        say(line)
    lines = summary(outcome)
    failed = len(lines) if outcome.failures else bool(outcome.failed_nodes)
    for number, line in enumerate(lines):
        (complain if number < failed else say)(line)


def slow_line(slow: Slow) -> str:
    """Return what a user is told of a slow node, and what it cost."""
    cost = seconds_text(slow.seconds)
    return f"{slow.text}, which took {cost} more; tell the administrator"


def _left_out_line(outcome: Outcome) -> str:
    """Return which nodes the stage went on without, and why."""
    names = [one.node for one in outcome.failed_nodes]
    staged = {node for item in outcome.items for node in (*item.received, *item.current)}
    of_all = f"{len(names)} of {len(names) + len(staged)} nodes"
    messages = {one.message for one in outcome.failed_nodes}
    reasons = messages if len(messages) == 1 else failure_lines(outcome.failed_nodes)
    return f"went on without {fold(names)} ({of_all}): {'; '.join(reasons)}"


def phase_line(outcome: Outcome) -> str:
    """Return where the time went, and what took most of it."""
    times = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in outcome.phases.items())
    longest = max(outcome.phases, key=outcome.phases.__getitem__)
    return f"{outcome.seconds:.2f} s: {times}; longest: {longest}"


def failure_lines(failures: Sequence[Failure]) -> list[str]:
    """Return each different message once, after the nodes that it comes from."""
    nodes: dict[str, list[str]] = {}
    for failure in failures:
        nodes.setdefault(failure.message, []).append(failure.node)
    return [
        f"{fold(where)}: {message}" if any(where) else message for message, where in nodes.items()
    ]


def _item_line(item: ItemReport) -> str:
    if not item.received:
        return (
            f"{item.destination}: current on {nodes_text(item.current)}, nothing moved "
            f"({_size(item)}{_ways(item)}, {seconds_text(item.seconds)})"
        )
    origin = _origin(item)
    if item.tree and item.tree.parts:
        return _spread_line(item)
    rate = bytes_text(_moved_size(item) / item.seconds) if item.seconds > 0 else "?"
    line = (
        f"{item.destination}: {_moved(item)} from {origin} "
        f"{_to(item)} in {seconds_text(item.seconds)} ({rate}/s{'' if item.once else ' a node'})"
    )
    if item.retries:
        line += f", {item.retries} {'retry' if item.retries == 1 else 'retries'}"
    return f"{line}; current on {nodes_text(item.current)}" if item.current else line


def _to(item: ItemReport) -> str:
    """Return which nodes received an item, or see the one that was written."""
    return f"{'once for' if item.once else 'to'} {nodes_text(item.received)}"


def _ways(item: ItemReport) -> str:
    """Return how an item is made of what the nodes keep of it, if it is."""
    return f", {' or '.join(item.ways)} of the node's copy" if item.ways else ""


def _note_lines(item: ItemReport) -> Iterator[str]:
    """Yield what a user is told beside the item's line, except for remarks, which come last."""
    for note in item.notes:
        if note.kind is not NoteKind.REMARK:
            nodes = nodes_text(note.nodes)
            yield f"{item.destination}: {_NOTES[note.kind].format(nodes=nodes, text=note.text)}"


#: How a note is told.
_NOTES = {
    NoteKind.REPLACED: "note: {text}",
    NoteKind.CHANGED: "note: on {nodes}, {text}",
    NoteKind.PINNED: "note: it stays on {nodes} after the job: {text}",
}


def _remark_line(item: ItemReport) -> Iterator[str]:
    if remarks := [note.text for note in item.notes if note.kind is NoteKind.REMARK]:
        yield f"{item.destination}: {'; '.join(remarks)}"


def _spread_line(item: ItemReport) -> str:
    assert item.tree is not None
    least, most = (bytes_text(part(item.tree.parts)) for part in (min, max))
    part = least if least == most else f"{least} to {most}"
    return (
        f"{item.destination}: {_moved(item)} from {item.source} spread over "
        f"{nodes_text(item.received)}, {part} on each, in {seconds_text(item.seconds)}"
    )


def _size(item: ItemReport) -> str:
    size = bytes_text(item.size)
    return f"{files_text(item.tree.files)}, {size}" if item.tree else size


def _moved(item: ItemReport) -> str:
    """Return what moved, and what was kept and deleted of a folder that was there in part."""
    tree = item.tree
    if tree is None or (tree.moved == tree.files and not tree.deleted):
        return _size(item)
    counts = {"kept": tree.files - tree.moved, "deleted": tree.deleted}
    others = ", ".join(f"{files_text(count)} {what}" for what, count in counts.items() if count)
    return f"{files_text(tree.moved)}, {bytes_text(_moved_size(item))} ({others})"


def _moved_size(item: ItemReport) -> int:
    """Return the bytes that moved; of a file, or of all files of a folder, with their holes."""
    tree = item.tree
    return item.size if tree is None or tree.moved == tree.files else tree.moved_size


def evicted_lines(evicted: Sequence[Evicted], *, dry_run: bool = False) -> list[str]:
    """Return what was evicted, each file once with its nodes; one line for a long list."""
    done = "would be evicted" if dry_run else "evicted"
    nodes: dict[str, list[str]] = {}
    for one in evicted:
        nodes.setdefault(one.destination, []).append(one.node)
    if len(nodes) > _MOST_EVICTED:
        total = bytes_text(sum(one.size for one in evicted))
        everywhere = nodes_text(sorted({one.node for one in evicted}))
        copies = f"{len(evicted)} copies"
        return [f"{copies} {done} on {everywhere} to make room: {total} in all"]
    return [f"{path}: {done} on {nodes_text(where)} to make room" for path, where in nodes.items()]


def _planned_line(item: ItemReport) -> str:
    if not item.received:
        current = nodes_text(item.current)
        return f"{item.destination}: current on {current}, nothing would move{_ways(item)}"
    origin = _origin(item)
    # What of a folder is there already is looked up by the stage alone.
    is_exact = item.reasons == ["absent"] and not item.shard_list
    most = "up to " if item.tree and not is_exact else ""
    would = "would be spread" if item.shard_list else "would move"
    where = f"over {nodes_text(item.received)}" if item.shard_list else _to(item)
    line = (
        f"{item.destination}: {most}{_size(item)} {would} from {origin} "
        f"{where} ({', '.join(item.reasons)}{_ways(item)})"
    )
    return f"{line}; current on {nodes_text(item.current)}" if item.current else line


def _origin(item: ItemReport) -> str:
    if not item.senders:
        return item.source
    return f"the {'copies' if len(item.senders) > 1 else 'copy'} on {fold(item.senders)}"


def nodes_text(names: list[str]) -> str:
    """Return node names in short form, with their number: ``n[1-4] (4 nodes)``."""
    return f"{fold(names)} ({len(names)} nodes)" if len(names) > 1 else names[0]


@dataclass(frozen=True, slots=True)
class SoFar:
    """How far an item is after so many ``seconds``: ``sent`` of ``size`` bytes.

    In the last ``idle`` seconds none was sent. A rate that is not ``steady``, as with small files,
    tells no time left.
    """

    destination: str
    sent: int
    size: int
    seconds: float
    idle: float = 0.0
    steady: bool = True

    @property
    def percent(self) -> int:
        """The share that was sent, in percent."""
        return 100 * self.sent // self.size if self.size else 100

    @property
    def rate(self) -> float:
        """Bytes a second; 0 if that is not known."""
        return self.sent / self.seconds if self.seconds > 0 else 0.0

    @property
    def left(self) -> float | None:
        """The seconds left; None if that is not known."""
        return (self.size - self.sent) / self.rate if self.rate else None


def progress_line(so_far: SoFar) -> str:
    """Return how far a transfer is: bytes, percent, and rate and time left if bytes move."""
    sent = f"{bytes_text(so_far.sent)} of {bytes_text(so_far.size)}"
    line = f"{so_far.destination}: {sent}, {so_far.percent} %"
    if so_far.idle:
        return f"{line}, no data for {seconds_text(so_far.idle)}"
    left = "?" if so_far.left is None else seconds_text(so_far.left)
    return f"{line}, {bytes_text(so_far.rate)}/s" + (f", {left} left" if so_far.steady else "")
