"""Make the tables and lines of `stagectl status` from the nodes' statuses. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from stager.base.text import bytes_range, bytes_text, columns, elided, files_text, folded, printable
from stager.launch.job import fold
from stager.store.states import NodeStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from stager.cli.terminal import Blocks
    from stager.store.states import DiskRoom, Entry

Row = tuple[str, ...]
_Value = TypeVar("_Value")

HEADERS = ("NODE", "DST", "SIZE", "STAGED", "STATE", "KEPT", "SOURCE", "LAST JOB")
FILE_HEADERS = ("DST", "SIZE", "NODES", "STATE", "KEPT", "SOURCE")
#: On a terminal, a bar beside the number of nodes. Nothing of it may be left out, as of names.
BAR = "ON NODES"
FILE_HEADERS_WITH_BAR = tuple(BAR if name == "NODES" else name for name in FILE_HEADERS)
USER_HEADERS = ("USER", "FILES", "FOLDERS", "COPIES", "SIZE", "NODES")
#: Columns that are aligned to the right.
_ALIGNED_RIGHT = (
    "SIZE", "FILES", "FOLDERS", "COPIES", "BLOCK", "THREADS", "RATE", "IOPS", "P50", "P99",
    "RETRIES",
)  # fmt: skip
#: Columns whose cells may lose their middle, and what stays of them while there is another way and
#: if there is none. The column that gets a line of its own if there are too few others.
_ELASTIC, _MUCH, _LEAST, _BELOW = ("NODE", "NODES", "DST", "SOURCE", "KEPT"), 24, 12, "SOURCE"
#: The node that what all nodes see is of.
_SHARED = ""
#: Seconds within which one transfer ends on all nodes.
_SAME_TRANSFER = 10


def with_shared(nodes: Mapping[str, NodeStatus]) -> Mapping[str, NodeStatus]:
    """Return the statuses with the copies that all nodes see apart, as those of a node ``""``."""
    if len(nodes) < 2:
        return nodes
    first, *others = ({_key(entry): entry for entry in one.entries} for one in nodes.values())
    shared = {key: entry for key, entry in first.items() if all(key in one for one in others)}
    if not shared:
        return nodes
    own = {
        node: replace(one, entries=[entry for entry in one.entries if _key(entry) not in shared])
        for node, one in nodes.items()
    }
    return {_SHARED: NodeStatus([*shared.values()]), **own}


def _key(entry: Entry) -> tuple[str, str]:
    """Return what entries of several nodes have in common if they are of one copy."""
    return entry.cache or str(id(entry)), entry.destination


def _where(nodes: Sequence[str]) -> str:
    """Return the nodes of rows; of what all see, that it is shared."""
    own = [node for node in nodes if node != _SHARED]
    shared = ["shared"] if len(own) < len(nodes) else []
    return ", ".join([*shared, *([fold(own)] if own else [])])


def missing(nodes: Mapping[str, NodeStatus]) -> dict[str, list[str]]:
    """Return the nodes that lack a file which another node has recorded, by destination."""
    held = {
        node: {entry.destination for entry in one.entries if not (entry.shared or entry.store)}
        for node, one in nodes.items()
        if node != _SHARED
    }
    everything = sorted(set().union(*held.values())) if held else []
    lacking = {path: [node for node in held if path not in held[node]] for path in everything}
    return {path: where for path, where in lacking.items() if where}


def rows(
    nodes: Mapping[str, NodeStatus], now: float, *, whole_job: bool,
) -> list[Row]:  # fmt: skip
    """Return the rows for HEADERS; rows that differ only by their node are one row.

    ``now`` is in seconds since 1970. For a ``whole_job`` there are also rows of the nodes that lack
    a file.
    """
    where: dict[Row, list[str]] = {}
    entries: dict[Row, list[Entry]] = {}
    for node, one in nodes.items():
        for entry in one.entries:
            job = str(entry.used_by_job) if entry.used_by_job else "-"
            key: Row = (
                entry.destination, "" if entry.part else _size(entry), entry.state,
                _kept(entry), entry.source, job,
            )  # fmt: skip
            where.setdefault(key, []).append(node)
            entries.setdefault(key, []).append(entry)
    order = {node: place for place, node in enumerate(nodes)}
    found: list[tuple[str, int, Row]] = []
    for key, names in where.items():
        path, size, *rest = key
        ages = _ages([entry.staged_at for entry in entries[key]], now)
        row = (_where(names), _name(entries[key][0]), size or _parts(entries[key]), ages, *rest)
        found.append((path, order[names[0]], row))
    if whole_job:
        size_and_source = {key[0]: (key[1], key[4]) for key in where}
        for path, names in missing(nodes).items():
            size, source = size_and_source[path]
            lacking = (fold(names), path, size or "-", "-", "missing", "-", source, "-")
            found.append((path, order[names[0]], lacking))
    return [_printed(row) for _, _, row in sorted(found)]


def file_rows(
    nodes: Mapping[str, NodeStatus], *, whole_job: bool,
    blocks: Blocks | None = None,
) -> list[Row]:  # fmt: skip
    """Return one row a file for FILE_HEADERS: on how many nodes it is in which state.

    With ``blocks``, the nodes where it still is are drawn and counted, for FILE_HEADERS_WITH_BAR.
    """
    entries: dict[str, list[Entry]] = {}
    for one in nodes.values():
        for entry in one.entries:
            entries.setdefault(entry.destination, []).append(entry)
    lacking = missing(nodes) if whole_job else {}
    found: list[Row] = []
    shared = {one.destination for one in nodes.get(_SHARED, NodeStatus()).entries}
    number = len(nodes) - (_SHARED in nodes)
    for path, every in sorted(entries.items()):
        where = "shared" if path in shared else _nodes(every, number, blocks)
        states = Counter(entry.state for entry in every)
        states.update({"missing": len(lacking.get(path, []))})
        counts = ", ".join(f"{count} {state}" for state, count in states.most_common() if count)
        found.append(
            (
                _name(every[0]), _sizes(every), where, counts,
                _alternatives(_kept(entry) for entry in every),
                _alternatives(entry.source for entry in every),
            )
        )  # fmt: skip
    return [_printed(row) for row in found]


def _nodes(entries: Sequence[Entry], nodes: int, blocks: Blocks | None) -> str:
    """Return on how many nodes a file is recorded; with ``blocks``, where it is, as a bar."""
    if not blocks:
        return str(len(entries))
    there = sum(map(_is_there, entries))
    return f"{blocks.share(there, nodes)} {there} of {nodes}"


def _is_there(entry: Entry) -> bool:
    return entry.state != "missing"


def user_rows(nodes: Mapping[str, NodeStatus], name_of: Callable[[int], str]) -> list[Row]:
    """Return one row a user for USER_HEADERS. What is gone does not count."""
    found: list[Row] = []
    there = {node: [*filter(_is_there, one.entries)] for node, one in nodes.items()}
    for user in sorted({entry.user for entries in there.values() for entry in entries}):
        theirs = {
            node: [entry for entry in entries if entry.user == user]
            for node, entries in there.items()
        }
        every = [entry for some in theirs.values() for entry in some]
        files, folders = _counts(every)
        found.append(
            (
                name_of(user),
                str(files),
                str(folders),
                str(len(every)),
                bytes_text(sum(entry.size for entry in every)),
                _where([node for node, some in theirs.items() if some]),
            )
        )
    return [_printed(row) for row in found]


def _counts(entries: Iterable[Entry]) -> tuple[int, int]:
    """Return how many files and folders the ``entries`` are copies of."""
    is_folder: dict[tuple[int, str], bool] = {}
    for entry in entries:
        key = entry.user, entry.destination
        is_folder[key] = entry.folder or is_folder.get(key, False)
    folders = sum(is_folder.values())
    return len(is_folder) - folders, folders


def total_line(nodes: Mapping[str, NodeStatus]) -> str:
    """Return the numbers of files, folders and copies that are there, and their bytes in all."""
    every = [entry for one in nodes.values() for entry in filter(_is_there, one.entries)]
    files, folders = _counts(every)
    counts = [files_text(files)] if files or not folders else []
    counts += [f"{folders} folder{'' if folders == 1 else 's'}"] if folders else []
    size = bytes_text(sum(entry.size for entry in every))
    copies = f", {len(every)} cop{'y' if len(every) == 1 else 'ies'}" if len(nodes) > 1 else ""
    return f"{' and '.join(counts)}{copies}, {size} in all"


def room_lines(nodes: Mapping[str, NodeStatus]) -> list[str]:
    """Return the free space of each root: the least and the most of the nodes."""
    rooms: dict[str, dict[str, DiskRoom]] = {}
    for node, one in nodes.items():
        for room in one.rooms:
            rooms.setdefault(room.root, {})[node] = room
    return [
        f"{printable(root)}: {bytes_range([room.free for room in by_node.values()])} free of "
        f"{bytes_range([room.size for room in by_node.values()])} on {fold(list(by_node))}"
        for root, by_node in rooms.items()
    ]


def shared_lines(nodes: Mapping[str, NodeStatus]) -> list[str]:
    """Return how the filesystem of a job's disks stands, and its driver's lines, by nodes."""
    remarks: dict[str, list[str]] = {}
    for node, one in nodes.items():
        if room := one.shared:
            text = room.problem or (
                f"{bytes_text(room.free)} free of {bytes_text(room.size)}, made of the disks of "
                f"{room.nodes} node{'' if room.nodes == 1 else 's'}"
            )
            for line in (f"{room.mount}: {text}", *room.lines):
                remarks.setdefault(line, []).append(node)
    return [printable(f"{line} ({fold(names)})") for line, names in remarks.items()]


def unread_lines(nodes: Mapping[str, NodeStatus]) -> list[str]:
    """Return how many records of each node cannot be read, and why the first one cannot."""
    lines: list[str] = []
    for node, one in nodes.items():
        records = [each for each in one.unread if not each.folder]
        lines += [
            printable(
                f"{node}: copies are not listed, because the folder of their records cannot be "
                f"read: {each.path}: {each.why}"
            )
            for each in one.unread
            if each.folder
        ]
        if records:
            count, first = len(records), min(records)
            text = (
                "1 record cannot be read, so its copy, if there is one, is not listed; its user "
                "can stage it again (if it is a folder, first delete that folder). The record:"
                if count == 1
                else f"{count} records cannot be read, so their copies, if there are any, are not "
                "listed; their users can stage them again (first delete those that are folders). "
                "One of the records:"
            )
            lines.append(printable(f"{node}: {text} {first.path}: {first.why}"))
    return lines


def silent_lines(nodes: Mapping[str, NodeStatus], name: Callable[[int], str]) -> list[str]:
    """Return the users whose copies are not known on each node, and what to do."""
    return [
        printable(
            f"{node}: the copies of {', '.join(map(name, one.silent))} are not listed: a process "
            "that looks at them as this user did not answer in time; look for a filesystem of that "
            "user that does not answer, or for a process of that user that stops it"
        )
        for node, one in nodes.items()
        if one.silent
    ]


def table(
    headers: Row,
    found: Sequence[Row],
    width: int = 0,
    *,
    right: Iterable[str] = _ALIGNED_RIGHT,
    paint: Callable[[str, str], str] = lambda _, cell: cell,
) -> Iterator[str]:
    """Yield the lines of a table in plain columns, within ``width`` columns unless that is 0.

    If need be, names and paths lose their middle, or sources come below the rows. If that is not
    enough, each row becomes a block with a line or more for each cell. ``right`` are the headers of
    what is aligned to the right. ``paint`` adds colour to a header's cell.
    """
    # Not by rich, whose tables take seconds for thousands of rows.
    natural = [max(map(columns, column)) for column in zip(headers, *found, strict=True)]
    if not width or _length(natural) <= width:
        yield from _rows(headers, found, natural, right, paint)
    elif widths := _narrowed(headers, natural, width, _MUCH):
        yield from _rows(headers, found, widths, right, paint)
    elif widths := _narrowed(_above(headers, headers), _above(headers, natural), width, _LEAST):
        above = [_above(headers, row) for row in found]
        lines = _rows(_above(headers, headers), above, widths, right, paint)
        for line, row in zip(lines, (headers, *found), strict=True):
            yield line
            source = [cell for header, cell in zip(headers, row, strict=True) if header == _BELOW]
            yield from (f"    {part}" for cell in source for part in folded(cell, width - 4))
    else:
        yield from _blocks(headers, found, width, paint)


def _above(headers: Row, values: Sequence[_Value]) -> tuple[_Value, ...]:
    """Return a row's values without that of the column that comes below."""
    return tuple(v for header, v in zip(headers, values, strict=True) if header != _BELOW)


def _length(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _narrowed(headers: Row, widths: Sequence[int], width: int, least: int) -> list[int]:
    """Return the columns' widths for a table within ``width``; none if names get too short."""
    found = list(widths)
    elastic = [number for number, header in enumerate(headers) if header in _ELASTIC]
    while _length(found) > width:
        widest = max(elastic, key=found.__getitem__, default=0)
        if not elastic or found[widest] <= least:
            return []
        found[widest] -= 1
    return found


def _rows(
    headers: Row, found: Sequence[Row], widths: Sequence[int], right: Iterable[str],
    paint: Callable[[str, str], str],
) -> Iterator[str]:  # fmt: skip
    """Yield a line for the headers and for each row."""
    for row in (headers, *found):
        cells = []
        for header, cell, room in zip(headers, row, widths, strict=True):
            text = elided(cell, room)
            blanks = " " * (room - columns(text))
            text = paint(header, text)
            cells.append(blanks + text if header in right else text + blanks)
        yield "  ".join(cells).rstrip()


def _blocks(
    headers: Row, found: Sequence[Row], width: int, paint: Callable[[str, str], str]
) -> Iterator[str]:
    """Yield a block of lines for each row."""
    left = max(map(len, headers))
    room = max(1, width - left - 2)
    for number, row in enumerate(found):
        if number:
            yield ""
        for header, cell in zip(headers, row, strict=True):
            first, *rest = folded(cell, room)
            yield f"{header:<{left}}  {paint(header, first)}"
            yield from (f"{'':<{left}}  {paint(header, line)}" for line in rest)


def age_text(seconds: float) -> str:
    """Return an age in one unit: ``5000`` → ``1 h``. So copies of one stage have the same age."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(max(0.0, seconds))} s"


def _ages(staged: Sequence[int], now: float) -> str:
    newest, oldest = age_text(now - max(staged)), age_text(now - min(staged))
    together = newest == oldest or max(staged) - min(staged) <= _SAME_TRANSFER
    return f"{oldest} ago" if together else f"{newest} to {oldest} ago"


def _name(entry: Entry) -> str:
    """Return the destination; an entry of the store has none but what jobs made of its source."""
    return "(store)" if entry.store else entry.destination


def _kept(entry: Entry) -> str:
    """Return why a copy is kept."""
    reasons = ["pinned"] if entry.pinned else []
    if entry.jobs:
        plural = "s" if len(entry.jobs) > 1 else ""
        reasons.append(f"job{plural} {','.join(map(str, entry.jobs))}")
    return ", ".join(reasons) or "-"


def _size(entry: Entry) -> str:
    size = bytes_text(entry.size)
    return f"{files_text(entry.files)}, {size}" if entry.folder else size


def _sizes(entries: Sequence[Entry]) -> str:
    """Return the sizes of copies of one file, which may differ."""
    if entries[0].part:
        return _parts(entries)
    sizes = dict.fromkeys(map(_size, entries))
    each = [entry.size for entry in entries]
    return bytes_range(each) if len(sizes) > 1 else next(iter(sizes))


def _parts(entries: Sequence[Entry]) -> str:
    """Return the sizes of the parts of a folder that is spread over nodes."""
    sizes = [entry.size for entry in entries]
    files = files_text(sum(entry.files for entry in entries))
    return f"{files}, {bytes_range(sizes)} on each"


def _alternatives(texts: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(texts))


def _printed(row: Row) -> Row:
    return tuple(map(printable, row))
