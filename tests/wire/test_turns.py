"""Turns: each chunk has one reader, and all ranks agree which."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.wire.turns import Growth, Turns

if TYPE_CHECKING:
    from collections.abc import Callable


@given(
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=4, unique=True).map(sorted),
    starts=st.lists(st.integers(1, 39), max_size=3, unique=True).map(sorted),
)
def test_each_chunk_has_one_reader_on_whom_all_ranks_agree(
    counts: list[int], starts: list[int]
) -> None:
    world = [Turns(rank, counts) for rank in range(max(counts) + 2)]
    starts = starts[: len(counts) - 1]
    for turns in world:
        for first in starts:
            assert turns.can_grow
            turns.grow(first)
    for index in range(40):
        (reader,) = {turns.reader(index) for turns in world}
        assert reader < counts[sum(first <= index for first in starts)]
        assert [rank for rank, turns in enumerate(world) if turns.is_own(index)] == [reader]
    chunks = [index for turns in world for index in turns.own(0, 40)]
    assert sorted(chunks) == list(range(40))


def test_a_turn_counts_the_chunks_of_one_reader() -> None:
    turns = Turns(0, [3])
    assert [turns.turn(index) for index in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    alone = Turns(0, [1, 3])
    assert [alone.turn(index) for index in range(3)] == [0, 1, 2]


def test_who_reads_may_change_while_chunks_are_counted() -> None:
    turns = Turns(0, [1, 2, 3])
    own = turns.own(0, 12)
    assert [next(own) for _ in range(3)] == [0, 1, 2]
    turns.grow(4)
    assert [next(own) for _ in range(2)] == [3, 4]
    turns.grow(8)
    assert list(own) == [6, 9]


def test_a_rank_knows_whether_it_reads() -> None:
    world = [Turns(rank, [1, 2]) for rank in range(3)]
    assert [turns.has_turn for turns in world] == [True, False, False]
    assert {(turns.readers, turns.first, turns.can_grow) for turns in world} == {(1, 0, True)}
    for turns in world:
        turns.grow(5)
    assert [turns.has_turn for turns in world] == [True, True, False]
    assert {(turns.readers, turns.first, turns.can_grow) for turns in world} == {(2, 5, False)}


def grown(
    counts: list[int], rate: Callable[[int], float], late: Callable[[int], bool]
) -> list[int]:
    """Return the chunks at which more readers are called for.

    ``rate`` is that of so many readers, in chunks a second; eight chunks are read ahead.
    """
    turns, now, called = Turns(0, counts), 0.0, []
    growth = Growth(turns, 8, now)
    for index in range(1000):
        now += 1 / rate(turns.readers)
        if turns.is_own(index) and growth.is_due(index, now):
            called.append(index)
            turns.grow(index + 1)
        elif late(index):
            growth.count_late()
    return called


@pytest.mark.parametrize(
    ("counts", "fastest", "late", "called"),
    [
        # Each reader reads a chunk a second, and all chunks are late, or only half.
        ([1, 4], 1000, 1, [16]),
        ([4, 8, 16], 1000, 1, [32, 112]),
        ([1, 4, 8, 16], 1000, 1, [16, 60, 136]),
        ([4, 8], 1000, 2, []),
        # The network takes no more than four readers give.
        ([4, 8, 16], 4, 1, [32]),
        ([1, 4, 8, 16], 4, 1, [16, 60]),
        # The network is what is waited for.
        ([1, 4], 1000, 10**6, []),
        ([4, 8, 16], 1000, 10**6, []),
        ([4], 1000, 1, []),
    ],
)
def test_more_ranks_read_while_it_gets_faster(
    counts: list[int], fastest: float, late: int, called: list[int]
) -> None:
    """Each ``late``-th chunk is late; the network takes ``fastest`` chunks a second."""
    found = grown(counts, lambda readers: min(readers, fastest), lambda index: not index % late)
    assert found == called


def test_only_rank_0_calls_for_more_readers() -> None:
    turns = Turns(1, [2, 4])
    growth = Growth(turns, 8, 0.0)
    for index in range(1, 100, 2):
        growth.count_late()
        assert not growth.is_due(index, index)


@pytest.mark.parametrize(("waited", "late"), [(0.5, False), (0.6, True)])
def test_a_chunk_of_a_single_reader_is_late_if_it_was_long_waited_for(
    waited: float, *, late: bool
) -> None:
    growth = Growth(Turns(0, [1]), 8, now=10)
    assert growth.is_late(11, waited, is_held_up=False) == late
    assert not growth.is_late(12, waited, is_held_up=False), "it was not waited for since"
    assert growth.is_late(13, waited + 1, is_held_up=False)


def test_a_chunk_of_one_of_several_readers_is_late_if_nothing_else_is_slow() -> None:
    growth = Growth(Turns(0, [2]), 8, now=10)
    assert not growth.is_late(11, 1, is_held_up=True)
    assert growth.is_late(12, 1, is_held_up=False)


def test_a_source_that_becomes_slow_gets_more_readers_then() -> None:
    turns = Turns(0, [1, 4])
    growth = Growth(turns, 8, now=0.0)
    for index in range(1, 1001):  # from memory
        assert not growth.is_due(index, index / 1000)
    due = []
    for index in range(1001, 1100):
        growth.count_late()
        if growth.is_due(index, index - 999):
            due.append(index)
    assert due == [1024]


def test_nobody_is_called_for_before_the_last_ones_are_obeyed() -> None:
    turns = Turns(0, [1, 2, 4])
    growth = Growth(turns, 8, now=0.0)
    for index in range(100):
        growth.count_late()
        assert growth.is_due(index, index) == (index == 16)
