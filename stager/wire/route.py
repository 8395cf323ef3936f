"""An algorithm, a world and a chunk in; from whom a rank has the chunk and to whom it passes out.

Pure. All routes pass each chunk to each rank once and have a rank send each chunk about once, so
that the rate of a node does not fall with their number; they differ in how long the first chunk
takes to the last rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Algorithm(StrEnum):
    """How chunks get from their reader to all other ranks."""

    AUTO = "auto"
    #: The MPI library's own broadcasts: one at a time, or several at once.
    BCAST = "bcast"
    IBCAST = "ibcast"
    #: Point to point, each rank to the next: full rate, and a way as long as the world.
    CHAIN = "chain"
    #: Point to point through two binary trees, each of which has the other's inner ranks as its
    #: leaves: full rate, and a way as long as the world's logarithm.
    TREE = "tree"


@dataclass(frozen=True, slots=True)
class Hop:
    """Ranks next to this one: where a chunk comes from, None at its reader; where it goes."""

    parent: int | None
    children: tuple[int, ...]


#: Chunks for which even a small world has buffers.
_LEAST_DEPTH = 8
#: Ranks from which on a tree is faster than a chain.
TREE_FROM = 8


def choose(algorithm: Algorithm, size: int, count: int) -> Algorithm:
    """What ``auto`` stands for in a world of ``size`` ranks and a file of ``count`` chunks."""
    if algorithm is not Algorithm.AUTO:
        return algorithm
    if count <= 1:
        return Algorithm.IBCAST
    return Algorithm.TREE if size >= TREE_FROM else Algorithm.CHAIN


def best_depth(size: int) -> int:
    """Chunks for which a rank in a world of ``size`` should have buffers.

    As many as are under way down a tree while the first is acknowledged, and no fewer than keep a
    reader and a writer busy. More cost time: what is used again soon is still in the processor's
    cache.
    """
    return max(_LEAST_DEPTH, 2 * size.bit_length() + 2)


def route(algorithm: Algorithm, rank: int, size: int) -> Callable[[int, int], Hop]:
    """This rank's way to find the Hop of a chunk by its reader's turn and its reader's rank.

    A reader's chunks take the two trees in turns. ``algorithm`` is ``chain`` or ``tree``.
    """
    step = _chain if algorithm is Algorithm.CHAIN else _tree

    @lru_cache(maxsize=4096)
    def hop(parity: int, reader: int) -> Hop:
        near = step((rank - reader) % size, size, parity)
        parent = None if near.parent is None else (near.parent + reader) % size
        return Hop(parent, tuple((child + reader) % size for child in near.children))

    return lambda turn, reader: hop(turn % 2, reader)


def _chain(place: int, size: int, _: int) -> Hop:
    return Hop(place - 1 if place else None, (place + 1,) if place + 1 < size else ())


def _tree(place: int, size: int, parity: int) -> Hop:
    """Even chunks take one tree over the places 1 to ``size`` - 1, odd ones the other."""
    others = size - 1
    if not others:
        return Hop(None, ())
    if not place:
        return Hop(None, (_place(_top(others), others, parity),))
    label = _label(place, others, parity)
    return Hop(
        0 if label == _top(others) else _place(_parent(label, others), others, parity),
        tuple(_place(child, others, parity) for child in _children(label, others)),
    )


def _label(place: int, count: int, parity: int) -> int:
    """The label of a place in the first tree or the second.

    Odd labels are leaves. An odd label in one tree is an even one in the other, but for one place
    where their count is odd.
    """
    if not parity:
        return place
    return place % count + 1 if count % 2 else count + 1 - place


def _place(label: int, count: int, parity: int) -> int:
    """The place that has a label; the inverse of `_label`."""
    if not parity:
        return label
    return (label - 2) % count + 1 if count % 2 else count + 1 - label


# The in-order binary tree over the labels 1 to count: a label's lowest set bit is its height.


def _top(count: int) -> int:
    return 1 << (count.bit_length() - 1)


def _parent(label: int, count: int) -> int:
    height = label & -label
    above = (label ^ height) | (height << 1)
    # The tree is cut off at ``count``; what would hang above there hangs below.
    return above if above <= count else label ^ height


def _children(label: int, count: int) -> list[int]:
    height = label & -label
    children = [label - height // 2] if height > 1 else []
    right = min(height - 1, count - label)
    return children + ([label + _top(right)] if right else [])
