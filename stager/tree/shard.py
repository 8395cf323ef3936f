"""TODO."""

from __future__ import annotations

import heapq
import os
from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING

import xxhash

from stager.base.errors import UsageError
from stager.base.paths import SHARD_LIST_NAME
from stager.tree.listing import Kind, Listing, Row, text_of
from stager.tree.patterns import numbered_regex

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

"""A folder's files and who holds them in, which node is to hold each out: `mode=shard`. Pure.

Nodes are ranks by number. A file that a node holds already stays there unless another node would
have too little for that.
"""


#: The share of a node's mean load by which its own may differ before files move for it.
_SLACK = 0.02
#: A file costs something by itself: this part of what a mean one has.
_BY_ITSELF = 100
#: No node.
_NOBODY = -1


def by_number(listing: Listing, folder: str, pattern: str, nodes: int) -> array[int]:
    """The node of each row, by the number that stands in its path where ``pattern`` has ``{n}``.

    The node of a number is what remains of it, divided by the ``nodes``. Raises UsageError for a
    file of the listed ``folder`` that does not match.
    """
    regex = numbered_regex(pattern)
    owners = array("q", [_NOBODY]) * len(listing)
    for row in listing.rows(Kind.FILE):
        found = regex.match(os.fsdecode(listing.paths[row]))
        if found is None:
            where = text_of(os.fsencode(folder) + b"/" + listing.paths[row])
            raise UsageError(f"{where} does not match by={pattern}; leave it out by exclude=")
        owners[row] = int(found["number"]) % nodes
    return owners


def balanced(listing: Listing, held: Sequence[bytes]) -> array[int]:
    """The node of each row so that all have about as many bytes; ``held[node]`` marks the rows
    whose files are there already, a byte each.
    """
    return _Balance(listing, held).owners


class _Balance:
    """Deals the files out: first to who holds them, then the largest first to who has least."""

    def __init__(self, listing: Listing, held: Sequence[bytes]) -> None:
        files = list(listing.rows(Kind.FILE))
        by_itself = 1 + listing.size // max(1, _BY_ITSELF * len(files))
        self._costs = {row: listing.sizes[row] + by_itself for row in files}
        self._loads = [0] * len(held)
        self.owners = array("q", [_NOBODY]) * len(listing)
        largest_first = sorted(files, key=lambda row: -self._costs[row])
        self._leave(largest_first, held)
        self._deal(row for row in largest_first if self.owners[row] == _NOBODY)
        self._even_out(largest_first)

    def _give(self, row: int, node: int) -> None:
        self.owners[row] = node
        self._loads[node] += self._costs[row]

    def _leave(self, rows: Iterable[int], held: Sequence[bytes]) -> None:
        """Leave the files where they are; of several nodes with the one that has least."""
        holders: dict[int, list[int]] = {}
        for node, marks in enumerate(held):
            at = -1
            while (at := marks.find(1, at + 1)) >= 0:
                holders.setdefault(at, []).append(node)
        several = [row for row in rows if len(holders.get(row, ())) > 1]
        for row, nodes in holders.items():
            if len(nodes) == 1 and row in self._costs:
                self._give(row, nodes[0])
        for row in several:
            self._give(row, min(holders[row], key=self._loads.__getitem__))

    def _deal(self, rows: Iterable[int]) -> None:
        heap = [(load, node) for node, load in enumerate(self._loads)]
        heapq.heapify(heap)
        for row in rows:
            _, node = heap[0]
            self._give(row, node)
            heapq.heapreplace(heap, (self._loads[node], node))

    def _even_out(self, rows: Sequence[int]) -> None:
        """Move files from who has most to who has least, until that is little."""
        mean = sum(self._loads) / len(self._loads)
        slack = mean * _SLACK
        givers = [(mean - load, node) for node, load in enumerate(self._loads) if load > mean]
        takers = [(load - mean, node) for node, load in enumerate(self._loads) if load < mean]
        if all(-excess <= slack for excess, _ in (*givers, *takers)):
            return
        heapq.heapify(givers)
        heapq.heapify(takers)
        files = self._smallest_first(rows)
        while givers and takers and min(givers[0][0], takers[0][0]) < -slack:
            (excess, giver), (lack, taker) = givers[0], takers[0]
            row = _best(files[giver], self._costs, -max(excess, lack), -excess - lack)
            if row is None:
                heapq.heappop(givers)  # its files are too large
                continue
            self._loads[giver] -= self._costs[row]
            self._give(row, taker)
            _update(givers, mean - self._loads[giver])
            _update(takers, self._loads[taker] - mean)

    def _smallest_first(self, rows: Sequence[int]) -> dict[int, list[int]]:
        """The files of each node."""
        files: dict[int, list[int]] = {node: [] for node in range(len(self._loads))}
        for row in reversed(rows):
            files[self.owners[row]].append(row)
        return files


def _best(rows: list[int], costs: Mapping[int, int], wanted: float, most: float) -> int | None:
    """Take the largest of the sorted ``rows`` that costs what is ``wanted`` or less, else the
    smallest, if that costs less than the ``most``; None where it does not.
    """
    number = max(0, bisect_right(rows, wanted, key=costs.__getitem__) - 1)
    if not rows or costs[rows[number]] >= most:
        return None
    return rows.pop(number)


def _update(heap: list[tuple[float, int]], gap: float) -> None:
    """Give the first of the ``heap`` its new gap, or take it out where it has none any more."""
    if gap < 0:
        heapq.heapreplace(heap, (gap, heap[0][1]))
    else:
        heapq.heappop(heap)


def part_of(listing: Listing, owners: Sequence[int], node: int) -> list[int]:
    """The rows that are to be on the ``node``: its files with all their names, and what is no file.

    Folders and links are on every node.
    """
    return [
        row
        for row, kind in enumerate(listing.kinds)
        if kind in (Kind.FOLDER, Kind.LINK) or owners[row] == node
    ]


def with_hard_links(listing: Listing, owners: array[int]) -> array[int]:
    """The ``owners`` of files and of their further names, which go where the file goes."""
    for row, file in _hard_links(listing).items():
        owners[row] = owners[file]
    return owners


def _hard_links(listing: Listing) -> dict[int, int]:
    """The rows of further names, and of the files that they name."""
    twins = list(listing.rows(Kind.HARD_LINK))
    numbers = {listing.paths[row]: row for row in listing.rows(Kind.FILE)} if twins else {}
    return {row: numbers[listing.targets[row]] for row in twins}


def list_text(listing: Listing, owners: Sequence[int], names: Sequence[str]) -> bytes:
    """The list of who holds what, by the nodes' ``names``: node, bytes and path of each file.

    Of the characters of a path those that would end it, and the backslash, are written as in C.
    """
    twins = _hard_links(listing)
    lines = (
        b"%s\t%d\t%s\n"
        % (os.fsencode(names[owner]), listing.sizes[twins.get(row, row)], _escaped(path))
        for row, (path, owner) in enumerate(zip(listing.paths, owners, strict=True))
        if owner != _NOBODY
    )
    return b"".join(lines)


_ESCAPES = {b"\\": b"\\\\", b"\t": b"\\t", b"\n": b"\\n", b"\r": b"\\r"}


def _escaped(path: bytes) -> bytes:
    for char, text in _ESCAPES.items():
        path = path.replace(char, text)
    return path


def split_name(text: bytes, nodes: int) -> str:
    """What the ``nodes`` have in common that hold the parts of one split, whose list is ``text``.

    Their number, and the list's xxh3-128 in hexadecimal: ``4:0123…``.
    """
    return f"{nodes}:{xxhash.xxh3_128_hexdigest(text)}"


def list_row(text: bytes, mtime_ns: int) -> Row:
    """The row of the list's own file in a node's part."""
    return Row(os.fsencode(SHARD_LIST_NAME), Kind.FILE, 0o444, len(text), mtime_ns)
