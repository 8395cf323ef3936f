"""Assign each file of a folder to a node, for ``mode=shard``. Pure.

Nodes are numbered as the ranks are. A file stays on a node that has it, unless a node would have
more than the fullest one must, or less than half of its share.
"""

from __future__ import annotations

import heapq
import os
import stat
from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING

import xxhash

from stager.base.errors import UsageError
from stager.base.paths import SHARD_LIST
from stager.tree.listing import Kind, Listing, Row, text_of
from stager.tree.patterns import numbered_regex

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

#: The share of the nodes' mean load by which a load may differ before files move.
_SLACK = 0.02
#: The part of its share below which a node gets files of others, although the fullest node cannot
#: be relieved.
_TOO_LITTLE = 0.5
#: Each file costs a hundredth of the mean size besides its own size, so that the nodes get about as
#: many files too.
_PARTS_OF_MEAN = 100
#: The node of a row that is no file.
NO_NODE = -1
#: The rights to read.
_MAY_READ = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH


def by_number(listing: Listing, folder: str, pattern: str, nodes: int) -> array[int]:
    """Return the node of each row, from the number in its path where ``pattern`` has ``{n}``.

    The node is the number modulo ``nodes``. Raise UsageError if a file of the listed ``folder``
    does not match.
    """
    regex = numbered_regex(pattern)
    owners = array("q", [NO_NODE]) * len(listing)
    for row in listing.rows(Kind.FILE):
        found = regex.match(os.fsdecode(listing.paths[row]))
        if found is None:
            where = text_of(os.fsencode(folder) + b"/" + listing.paths[row])
            raise UsageError(f"{where} does not match by={pattern}; leave it out by exclude=")
        owners[row] = int(found["number"]) % nodes
    return owners


def balanced(
    listing: Listing, held: Sequence[bytes], rows: Iterable[int] | None = None
) -> array[int]:
    """Return the node of each row such that all nodes have about as many bytes.

    All files are dealt, or those of ``rows``; another row has `NO_NODE`.

    ``held[node]`` has a byte for each row: 1 if the node has the file already.
    """
    files = listing.rows(Kind.FILE)
    return _Balance(listing, held, files if rows is None else rows).owners


class _Balance:
    """Assigns files: first to a node that has the file, then the largest to the least loaded node.

    The load of a node is the cost of all its files.
    """

    def __init__(self, listing: Listing, held: Sequence[bytes], rows: Iterable[int]) -> None:
        files = list(rows)
        cost = 1 + listing.size // max(1, _PARTS_OF_MEAN * len(files))
        self._costs = {row: listing.sizes[row] + cost for row in files}
        self._loads = [0] * len(held)
        self.owners = array("q", [NO_NODE]) * len(listing)
        largest_first = sorted(files, key=lambda row: -self._costs[row])
        self._keep_held(largest_first, held)
        self._assign(row for row in largest_first if self.owners[row] == NO_NODE)
        self._even_out(largest_first)

    def _give(self, row: int, node: int) -> None:
        self.owners[row] = node
        self._loads[node] += self._costs[row]

    def _keep_held(self, rows: Iterable[int], held: Sequence[bytes]) -> None:
        """Assign each file that is on a node to it; of several nodes to the least loaded."""
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

    def _assign(self, rows: Iterable[int]) -> None:
        """Assign each of the ``rows`` to the node that is the least loaded then."""
        heap = [(load, node) for node, load in enumerate(self._loads)]
        heapq.heapify(heap)
        for row in rows:
            _, node = heap[0]
            self._give(row, node)
            heapq.heapreplace(heap, (self._loads[node], node))

    def _even_out(self, rows: Sequence[int]) -> None:
        """Move files between the nodes until none has too much or too little.

        ``rows`` are the files, the largest first.
        """
        mean, share = sum(self._loads) / len(self._loads), self._share(rows)
        moves = True
        while moves:  # it ends: each move makes two loads more alike
            moves = self._move_towards(mean, rows)
            # Beside a node with one huge file, all others are below the mean: none gave files.
            if min(self._loads) < share * _TOO_LITTLE:
                moves |= self._move_towards(share, rows)

    def _share(self, rows: Iterable[int]) -> float:
        """Return the mean load of the nodes without a file that is larger than this mean."""
        rest, nodes = sum(self._loads), len(self._loads)
        for row in rows:
            if self._costs[row] * nodes <= rest:
                break
            rest -= self._costs[row]
            nodes -= 1
        return rest / nodes

    def _move_towards(self, mean: float, rows: Sequence[int]) -> bool:
        """Move files from the most to the least loaded node until the loads are near the mean.

        Return whether a file was moved.
        """
        moved = False
        slack = mean * _SLACK
        # Heaps of the nodes above and below the mean, the farthest first; gaps are negative.
        givers = [(mean - load, node) for node, load in enumerate(self._loads) if load > mean]
        takers = [(load - mean, node) for node, load in enumerate(self._loads) if load < mean]
        if all(-gap <= slack for gap, _ in (*givers, *takers)):
            return False
        heapq.heapify(givers)
        heapq.heapify(takers)
        files = self._smallest_first(rows)
        while givers and takers and min(givers[0][0], takers[0][0]) < -slack:
            (excess, giver), (lack, taker) = givers[0], takers[0]
            row = _take(files[giver], self._costs, -max(excess, lack), -excess - lack)
            if row is None:
                heapq.heappop(givers)  # all its files are too large to move
                continue
            self._loads[giver] -= self._costs[row]
            self._give(row, taker)
            moved = True
            _update(givers, mean - self._loads[giver])
            _update(takers, self._loads[taker] - mean)
        return moved

    def _smallest_first(self, rows: Sequence[int]) -> dict[int, list[int]]:
        """Return the files of each node, from ``rows`` with the largest first."""
        files: dict[int, list[int]] = {node: [] for node in range(len(self._loads))}
        for row in reversed(rows):
            files[self.owners[row]].append(row)
        return files


def _take(rows: list[int], costs: Mapping[int, int], wanted: float, limit: float) -> int | None:
    """Remove from the ``rows``, the cheapest first, the file to move, and return it.

    That is the most expensive one that costs no more than ``wanted``, or else the cheapest. Return
    None if it costs ``limit`` or more: to move it would only exchange the two nodes' loads.
    """
    number = max(0, bisect_right(rows, wanted, key=costs.__getitem__) - 1)
    if not rows or costs[rows[number]] >= limit:
        return None
    return rows.pop(number)


def _update(heap: list[tuple[float, int]], gap: float) -> None:
    """Set the gap of the heap's first node, or remove the node if it has none any more."""
    if gap < 0:
        heapq.heapreplace(heap, (gap, heap[0][1]))
    else:
        heapq.heappop(heap)


def part_of(listing: Listing, owners: Sequence[int], node: int) -> list[int]:
    """Return the rows of the ``node``'s part: its files and hard links, all folders, all links."""
    return [
        row
        for row, kind in enumerate(listing.kinds)
        if kind in (Kind.FOLDER, Kind.LINK) or owners[row] == node
    ]


def with_hard_links(listing: Listing, owners: array[int]) -> array[int]:
    """Assign the hard links to the nodes of their files in ``owners``, and return it."""
    for row, file in _hard_links(listing).items():
        owners[row] = owners[file]
    return owners


def _hard_links(listing: Listing) -> dict[int, int]:
    """Return the rows of hard links, each with the row of its file."""
    links = list(listing.rows(Kind.HARD_LINK))
    numbers = {listing.paths[row]: row for row in listing.rows(Kind.FILE)} if links else {}
    return {row: numbers[listing.targets[row]] for row in links}


def list_text(listing: Listing, owners: Sequence[int], names: Sequence[str]) -> bytes:
    """Return the list of all parts: a line of node name, size in bytes and path for each file.

    ``names`` are those of the nodes. Tab, newline, carriage return and backslash in a path are
    escaped as in C.
    """
    files = _hard_links(listing)
    lines = (
        b"%s\t%d\t%s\n"
        % (os.fsencode(names[owner]), listing.sizes[files.get(row, row)], _escaped(path))
        for row, (path, owner) in enumerate(zip(listing.paths, owners, strict=True))
        if owner != NO_NODE
    )
    return b"".join(lines)


_ESCAPES = {b"\\": b"\\\\", b"\t": b"\\t", b"\n": b"\\n", b"\r": b"\\r"}


def _escaped(path: bytes) -> bytes:
    for char, text in _ESCAPES.items():
        path = path.replace(char, text)
    return path


def split_name(text: bytes, nodes: int) -> str:
    """Return the identity of a split: the number of nodes and the xxh3-128 of its list ``text``.

    It looks like ``4:0123…``, and tells the parts of one split from those of another.
    """
    return f"{nodes}:{xxhash.xxh3_128_hexdigest(text)}"


def list_row(text: bytes, mtime_ns: int, listing: Listing) -> Row:
    """Return the row of the file in a node's part that has the list ``text``.

    Who may list the folder, as in the ``listing`` of copies, may read it.
    """
    mode, group = listing.modes[0] & _MAY_READ, listing.groups[0]
    return Row(os.fsencode(SHARD_LIST), Kind.FILE, mode, len(text), mtime_ns, group=group)
