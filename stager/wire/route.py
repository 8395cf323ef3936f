"""Decide from which rank a chunk comes, and to which ranks it goes on. Pure.

On every route each chunk reaches each rank once, and a rank sends each chunk about once, so that
the rate does not fall with the number of nodes. Routes differ in how long the first chunk takes to
the last rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from stager.wire.layout import Algorithm

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Hop:
    """Where a rank gets a chunk from, None at the chunk's reader, and where it sends it."""

    parent: int | None
    children: tuple[int, ...]


#: Least number of chunks for which a rank has buffers.
_LEAST_DEPTH = 8
#: From this number of ranks on a tree is faster than a chain.
TREE_FROM = 8


def choose(algorithm: Algorithm, size: int, count: int) -> Algorithm:
    """Replace ``auto`` by the best algorithm for ``size`` ranks and a file of ``count`` chunks."""
    if algorithm is not Algorithm.AUTO:
        return algorithm
    if count <= 1:
        return Algorithm.IBCAST
    return Algorithm.TREE if size >= TREE_FROM else Algorithm.CHAIN


def best_depth(size: int) -> int:
    """Return the chunks for which a rank in a world of ``size`` ranks should have buffers.

    They are as many as are under way down a tree until the first is acknowledged, and enough to
    keep a reader and a writer busy. More would be slower: a buffer that is soon used again is still
    in the processor's cache.
    """
    return max(_LEAST_DEPTH, 2 * size.bit_length() + 2)


def route(algorithm: Algorithm, rank: int, size: int) -> Callable[[int, int], Hop]:
    """Return a function of a chunk's turn and reader that gives this rank's Hop for the chunk.

    The turn is the chunk's number among its reader's chunks, which take the two trees alternately.
    ``algorithm`` is ``chain`` or ``tree``.
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
    """Return the Hop in the tree of the parity; both span the places 1 to ``size`` - 1."""
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
    """Return the label of a place in the tree of the parity.

    Odd labels are leaves. A place with an odd label in one tree has an even one in the other, but
    for one place if their count is odd.
    """
    if not parity:
        return place
    return place % count + 1 if count % 2 else count + 1 - place


def _place(label: int, count: int, parity: int) -> int:
    """Return the place with the label; the inverse of `_label`."""
    if not parity:
        return label
    return (label - 2) % count + 1 if count % 2 else count + 1 - label


def _top(count: int) -> int:
    """Return the top of the in-order binary tree over the labels 1 to ``count``.

    In that tree the height of a label is its lowest set bit.
    """
    return 1 << (count.bit_length() - 1)


def _parent(label: int, count: int) -> int:
    height = label & -label
    above = (label ^ height) | (height << 1)
    # The tree is cut off at ``count``: a label gets the nearest ancestor that exists.
    return above if above <= count else label ^ height


def _children(label: int, count: int) -> list[int]:
    height = label & -label
    children = [label - height // 2] if height > 1 else []
    right = min(height - 1, count - label)
    return children + ([label + _top(right)] if right else [])
