"""How fast requests were, and where each begins."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.rank.load import Load, Measured, Places, best, percentile


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([5.0], 50, 5.0), ([5.0], 99, 5.0), ([2.0, 1.0], 50, 1.0), ([2.0, 1.0], 99, 2.0),
        ([float(n) for n in range(1, 101)], 50, 50.0),
        ([float(n) for n in range(1, 101)], 99, 99.0),
        ([float(n) for n in range(1000, 0, -1)], 99, 990.0),
    ],
)  # fmt: skip
def test_a_percentile_is_a_value_that_so_many_do_not_exceed(
    values: list[float], percent: int, expected: float
) -> None:
    assert percentile(values, percent) == expected


def test_a_measurement_has_rate_requests_and_latencies() -> None:
    load = Load("read", 1000, 2)
    one = Measured.of(load, [0.1, 0.3, 0.2, 0.2], 3500, 0.5, retries=1)
    assert one == Measured("read", 1000, 2, 4, 3500, 0.5, 0.2, 0.3, 1)
    assert (one.rate, one.iops) == (7000.0, 8.0)
    assert Measured.of(load, [0.0], 1, 0.0).rate == 0.0
    assert Measured.of(load, [0.0], 1, 0.0).iops == 0.0


def measured(block: int, threads: int, rate: int) -> Measured:
    return Measured("read", block, threads, 1, rate, 1.0, 0.1, 0.1)


def test_the_fewest_threads_that_nearly_reach_the_best_rate_are_enough() -> None:
    rows = [
        measured(1, 1, 50), measured(1, 4, 90), measured(1, 16, 100),
        measured(8, 1, 80), measured(8, 4, 95), measured(8, 16, 89),
    ]  # fmt: skip
    assert best(rows) == (rows[2], rows[1])
    assert best(rows[:1]) == (rows[0], rows[0])


def test_requests_go_through_the_files_in_order_and_begin_anew() -> None:
    places = Places([10, 4, 5], Load("read", 4, 1))
    assert [places.at(number) for number in range(places.count + 1)] == [
        (0, 0, 4), (0, 4, 4), (0, 8, 2), (1, 0, 4), (2, 0, 4), (2, 4, 1), (0, 0, 4)
    ]  # fmt: skip


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 20), st.booleans())
def test_each_byte_is_met_once_in_any_order(sizes: list[int], block: int, is_random: bool) -> None:
    places = Places(sizes, Load("read", block, 1, is_random))
    found = [places.at(number) for number in range(places.count)]
    expected = {
        (file, offset, min(block, size - offset))
        for file, size in enumerate(sizes)
        for offset in range(0, size, block)
    }
    assert len(found) == len(expected)
    assert set(found) == expected


def test_requests_in_random_order_are_not_in_order() -> None:
    places = Places([1000], Load("read", 1, 1, is_random=True))
    offsets = [places.at(number)[1] for number in range(1000)]
    assert not [one for one, other in pairwise(offsets) if other == one + 1]
