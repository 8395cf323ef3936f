"""Routes: every rank gets every chunk once, by a way of the length that the algorithm promises."""

from __future__ import annotations

from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.wire.layout import Algorithm
from stager.wire.route import Hop, choose, route

POINT_TO_POINT = [Algorithm.CHAIN, Algorithm.TREE]
SIZES = st.integers(1, 200)


def hops(algorithm: Algorithm, size: int, index: int, reader: int) -> list[Hop]:
    return [route(algorithm, rank, size)(index, reader) for rank in range(size)]


def distance(world: list[Hop], rank: int) -> int:
    parent = world[rank].parent
    return 0 if parent is None else 1 + distance(world, parent)


@pytest.mark.parametrize("algorithm", POINT_TO_POINT)
@given(size=SIZES, index=st.integers(0, 9), data=st.data())
def test_every_rank_gets_each_chunk_from_the_rank_that_sends_it(
    algorithm: Algorithm, size: int, index: int, data: st.DataObject
) -> None:
    reader = data.draw(st.integers(0, size - 1))
    world = hops(algorithm, size, index, reader)
    sent = sorted((child, rank) for rank, hop in enumerate(world) for child in hop.children)
    assert sent == [(rank, hop.parent) for rank, hop in enumerate(world) if rank != reader]
    assert world[reader].parent is None
    assert max(distance(world, rank) for rank in range(size)) < size


@given(size=st.integers(2, 5000))
def test_a_tree_is_as_deep_as_the_logarithm_of_the_world(size: int) -> None:
    for index in (0, 1):
        world = hops(Algorithm.TREE, size, index, 0)
        assert max(distance(world, rank) for rank in range(size)) <= log2(size) + 2


@given(size=SIZES)
def test_no_rank_sends_more_than_two_of_two_chunks(size: int) -> None:
    even, odd = (hops(Algorithm.TREE, size, index, 0) for index in (0, 1))
    sends = [len(a.children) + len(b.children) for a, b in zip(even, odd, strict=True)]
    assert max(sends) <= 2


def test_the_routes_of_seven() -> None:
    assert [hop.children for hop in hops(Algorithm.CHAIN, 7, 0, 5)] == [
        (1,), (2,), (3,), (4,), (), (6,), (0,)
    ]  # fmt: skip
    assert [hop.children for hop in hops(Algorithm.TREE, 7, 0, 0)] == [
        (4,), (), (1, 3), (), (2, 6), (), (5,)
    ]  # fmt: skip
    assert [hop.children for hop in hops(Algorithm.TREE, 7, 1, 0)] == [
        (3,), (2,), (), (5, 1), (), (6, 4), ()
    ]  # fmt: skip


def test_auto_takes_what_is_fastest() -> None:
    assert choose(Algorithm.AUTO, 100, 1) is Algorithm.IBCAST
    assert choose(Algorithm.AUTO, 4, 2) is Algorithm.CHAIN
    assert choose(Algorithm.AUTO, 100, 2) is Algorithm.TREE
    assert choose(Algorithm.BCAST, 4, 1) is Algorithm.BCAST
