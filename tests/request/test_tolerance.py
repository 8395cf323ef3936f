"""How many nodes may fail: what users and sites write, and what it means for a job's nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.base.errors import UsageError
from stager.request.grammar import Tolerance, asked_tolerance


@pytest.mark.parametrize("value", [0, 1, 4096, "0", "1", "4096", "0%", "1%", "100%"])
def test_a_number_and_a_share_are_read_and_shown_as_written(value: object) -> None:
    assert str(Tolerance.parse(value)) == str(value)


@pytest.mark.parametrize(
    "value",
    ["", "-1", "+1", "1.5", "101%", "10 %", "%", "one", "1000000", "\u0661", -1, 1.0, True, None],
)
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r'^must be a number of nodes, or a share .* "10%"$'):
        Tolerance.parse(value)


@given(percent=st.integers(0, 100), nodes=st.integers(1, 100_000))
def test_a_share_is_rounded_down(percent: int, nodes: int) -> None:
    most = Tolerance(percent, is_percent=True).of(nodes)
    assert most * 100 <= percent * nodes < (most + 1) * 100


@given(number=st.integers(0, 10_000), nodes=st.integers(1, 10_000))
def test_no_more_nodes_may_fail_than_there_are(number: int, nodes: int) -> None:
    assert Tolerance(number).of(nodes) == min(number, nodes)


def test_without_an_option_the_sites_default_counts() -> None:
    assert asked_tolerance("", "--stage-tolerate", Tolerance(2)) == Tolerance(2)


def test_the_option_replaces_the_default() -> None:
    assert asked_tolerance("0", "--stage-tolerate", Tolerance(2)) == Tolerance(0)


def test_what_cannot_be_read_is_a_wrong_request() -> None:
    with pytest.raises(UsageError) as refused:
        asked_tolerance("some", "--stage-tolerate", Tolerance(0))
    assert str(refused.value) == (
        "--stage-tolerate=some: write a number of nodes, or a share of the job's nodes such as 10%"
    )
