"""Bytes are held to a rate, whoever reads them. No test waits: the time is told."""

from __future__ import annotations

import pytest

from stager.source.retry import Pace


def test_after_bytes_their_time_is_waited_for() -> None:
    pace = Pace(100)
    assert pace.pause(50, 10.0) == 0.5
    assert pace.pause(25, 10.5) == 0.25


def test_threads_share_the_rate() -> None:
    pace = Pace(100)
    assert [pace.pause(100, 10.0) for _ in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert pace.pause(100, 12.0) == 3.0


def test_idle_time_is_not_made_up_for() -> None:
    pace = Pace(100)
    pace.pause(100, 10.0)
    assert pace.pause(100, 99.0) == 1.0


@pytest.mark.parametrize("length", [0, 1, 10**12])
def test_without_a_limit_nobody_waits(length: int) -> None:
    assert Pace(0).pause(length, 10.0) == 0.0


def test_a_reader_takes_as_long_as_the_rate_demands() -> None:
    pace, now = Pace(5_000_000), 0.0
    for _ in range(100):
        now += 0.001  # of the network
        now += pace.pause(250_000, now)
    assert now == pytest.approx(5.1, abs=0.01)
