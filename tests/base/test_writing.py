"""Time in which several threads write at once counts once, also while it lasts."""

from __future__ import annotations

import threading
import time

import pytest

from stager.base.telemetry import Figures, Writing


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_what_is_written_one_after_the_other_adds_up(clock: list[float]) -> None:
    writing = Writing()
    assert writing.figures() == Figures(0, 0.0, 0.0)
    for _ in range(3):
        with writing:
            clock[0] += 2
        writing.count(10)
        clock[0] += 5
    writing.hold_up(1.5)
    assert writing.figures() == Figures(30, 6.0, 1.5)


def test_what_is_being_written_counts(clock: list[float]) -> None:
    writing = Writing()
    with writing:
        clock[0] += 4
        assert writing.figures().busy == 4
        clock[0] += 1
    assert writing.figures().busy == 5


def test_threads_that_write_at_once_are_busy_once(clock: list[float]) -> None:
    writing = Writing()
    begun, go_on = threading.Event(), threading.Event()

    def write() -> None:
        with writing:
            begun.set()
            go_on.wait(10)

    thread = threading.Thread(target=write)
    with writing:
        clock[0] += 1
        thread.start()
        begun.wait(10)
        clock[0] += 2
    clock[0] += 3
    go_on.set()
    thread.join()
    assert writing.figures().busy == 6


def test_a_write_that_fails_ends_too(clock: list[float]) -> None:
    writing = Writing()

    def write() -> None:
        with writing:
            clock[0] += 1
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write()
    clock[0] += 7
    assert writing.figures() == Figures(0, 1.0, 0.0)
