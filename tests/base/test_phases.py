"""Every moment belongs to one phase."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from stager.base.telemetry import Phase, Stopwatch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, as a list of its next readings."""
    readings: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: readings.pop(0))
    return readings


def test_phases_add_up(clock: list[float]) -> None:
    clock += [12.0, 15.0, 16.0]
    watch = Stopwatch(10.0, Phase.SURVEY)
    watch.enter(Phase.OPEN)
    watch.enter(Phase.SURVEY)
    watch.enter(Phase.END)
    assert watch.seconds == {"survey": 3.0, "open": 3.0}
    assert watch.total == 6.0


def test_parts_are_taken_from_the_phase_that_ends(clock: list[float]) -> None:
    clock += [10.0]
    watch = Stopwatch(0.0, Phase.BROADCAST)
    watch.enter(Phase.WRITE, {Phase.READ: 3.0, Phase.WRITE: 1.0})
    assert watch.seconds == {"read": 3.0, "write": 1.0, "broadcast": 6.0}


def test_parts_are_never_more_than_the_phase(clock: list[float]) -> None:
    clock += [10.0]
    watch = Stopwatch(0.0, Phase.BROADCAST)
    watch.enter(Phase.WRITE, {Phase.READ: 8.0, Phase.WRITE: 5.0})
    assert watch.seconds == {"read": 8.0, "write": 2.0, "broadcast": 0.0}


def test_a_phase_may_be_a_part_and_one_of_its_own(clock: list[float]) -> None:
    clock += [10.0, 12.0]
    watch = Stopwatch(0.0, Phase.BROADCAST)
    watch.enter(Phase.WRITE, {Phase.READ: 10.0, Phase.WRITE: 5.0})
    watch.enter(Phase.END)
    assert watch.seconds == {"read": 10.0, "write": 2.0, "broadcast": 0.0}
    assert watch.total == 12.0


def test_a_process_knows_when_it_was_started() -> None:
    """To a tick of the kernel, and not when it first asks: Python takes longer than that."""
    code = "from stager.base.telemetry import process_begun; print(process_begun())"
    before = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        started = time.monotonic()
        printed, _ = process.communicate()
    assert before - 0.02 <= float(printed) <= started
