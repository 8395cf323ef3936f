"""Turns: each chunk has one reader, and all ranks agree which."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.wire.turns import Turns


@given(readers=st.integers(1, 6), first=st.integers(0, 30) | st.just(Turns.NEVER))
def test_each_chunk_has_one_reader_on_whom_all_ranks_agree(readers: int, first: int) -> None:
    world = [Turns(rank, readers, first) for rank in range(readers + 2)]
    for index in range(40):
        (reader,) = {turns.reader(index) for turns in world}
        assert reader < readers
        assert [rank for rank, turns in enumerate(world) if turns.is_own(index)] == [reader]
        assert index >= first or reader == 0
    chunks = [index for turns in world for index in turns.own(0, 40)]
    assert sorted(chunks) == list(range(40))


def test_a_turn_counts_the_chunks_of_one_reader() -> None:
    turns = Turns(0, 3, first=0)
    assert [turns.turn(index) for index in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    alone = Turns(0, 3, first=Turns.NEVER)
    assert [alone.turn(index) for index in range(3)] == [0, 1, 2]


def test_who_reads_may_change_while_chunks_are_counted() -> None:
    turns = Turns(0, 2, first=Turns.NEVER)
    own = turns.own(0, 8)
    assert [next(own) for _ in range(3)] == [0, 1, 2]
    turns.first = 4
    assert list(own) == [3, 4, 6]


@pytest.mark.parametrize(
    ("rank", "first", "has_turn", "can_spread"),
    [
        (0, Turns.NEVER, True, True), (1, Turns.NEVER, False, True), (1, 5, True, False),
        (2, 5, False, False),
    ],
)  # fmt: skip
def test_a_rank_knows_whether_it_reads(
    rank: int, first: int, has_turn: bool, can_spread: bool
) -> None:
    turns = Turns(rank, 2, first)
    assert (turns.has_turn, turns.can_spread) == (has_turn, can_spread)
    assert not Turns(rank, 1, first).can_spread
