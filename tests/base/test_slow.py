"""A node is slow if it writes far less than the others, and only if that cost them much."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.base.outcome import LOST, SHARE, Pace, slow_nodes

MB, GB = 1_000_000, 1_000_000_000


def pace(node: str, rate: float, size: float = 10 * GB, held: float = 1e9) -> Pace:
    return Pace(node, int(size), size / rate, held)


OTHERS = [pace(f"n{number}", 900 * MB) for number in range(1, 17)]


def test_a_slow_node_is_named_with_its_rate_that_of_the_others_and_what_it_cost() -> None:
    (found,) = slow_nodes([*OTHERS, pace("n17", 40 * MB)])
    assert (found.node, found.rate, found.others) == ("n17", 40 * MB, 900 * MB)
    assert found.seconds == pytest.approx(10_000 / 40 - 10_000 / 900)
    assert found.text == "n17 is slow: it writes 40 MB/s, the others 900 MB/s"


@pytest.mark.parametrize(
    "paces",
    [
        [],
        [pace("n1", MB)],
        OTHERS,
        [*OTHERS, pace("n17", 310 * MB)],
        [*OTHERS, pace("n17", 40 * MB, size=200 * MB)],
        [*OTHERS, pace("n17", 40 * MB, held=4.9)],
        [*OTHERS, Pace("n17")],
        [*OTHERS, Pace("n17", size=7)],
        [*OTHERS, Pace("n17", held=100)],
        [pace("n1", 40 * MB), Pace("n2")],
    ],
    ids=[
        "nothing", "one node", "all alike", "more than a third", "little was lost",
        "nobody waited for it", "it received nothing", "it wrote in no time",
        "it only waited", "no other wrote",
    ],
)  # fmt: skip
def test_no_node_is_named_without_a_reason(paces: list[Pace]) -> None:
    assert slow_nodes(paces) == []


def test_all_slow_nodes_are_named_also_where_there_are_two_nodes() -> None:
    found = slow_nodes([*OTHERS, pace("n17", 40 * MB), pace("n18", 20 * MB)])
    assert [one.node for one in found] == ["n17", "n18"]
    (found_one,) = slow_nodes([pace("n1", 40 * MB), pace("n2", 900 * MB)])
    assert found_one.node == "n1"


def test_others_that_were_held_up_less_than_it_took_longer_lost_only_that() -> None:
    (found,) = slow_nodes([*OTHERS, pace("n17", 40 * MB, held=30)])
    assert found.seconds == 30


def test_paces_are_added_up_over_items() -> None:
    small = pace("n17", 40 * MB, size=100 * MB, held=2.4)
    whole = small + small + small
    assert (whole.node, whole.size) == ("n17", 300 * MB)
    assert whole.busy == pytest.approx(7.5)
    assert whole.held == pytest.approx(7.2)
    assert slow_nodes([*OTHERS, small]) == []
    assert [one.node for one in slow_nodes([*OTHERS, whole])] == ["n17"]


PACES = st.lists(
    st.builds(
        Pace,
        node=st.uuids().map(str),
        size=st.integers(0, 1 << 50),
        busy=st.floats(0, 1e6),
        held=st.floats(0, 1e6),
    ),
    max_size=30,
)


def others_of(paces: list[Pace], node: str) -> list[float]:
    return sorted(one.rate for one in paces if one.node != node and one.size and one.busy)


@given(PACES)
def test_who_is_named_is_slow_by_every_measure_and_never_the_faster_half(
    paces: list[Pace],
) -> None:
    by_node = {one.node: one for one in paces}
    found = slow_nodes(paces)
    for one in found:
        own, others = by_node[one.node], others_of(paces, one.node)
        assert one.rate == own.rate < SHARE * one.others
        assert others[0] <= one.others <= others[-1]
        assert LOST <= one.seconds <= min(own.held, own.busy)
        assert sum(rate > one.rate for rate in others) >= len(others) / 2
    assert slow_nodes(paces[::-1]) == found[::-1]
    assert [one for one in found if by_node[one.node].held < LOST] == []
