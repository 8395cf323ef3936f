"""Tests of the lines by which ranks tell of events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.base import events
from stager.base.events import LONGEST, Parts, event, read_event

if TYPE_CHECKING:
    from random import Random

TEXTS = st.text(max_size=3 * LONGEST)


def read_all(lines: list[str]) -> list[dict[str, Any]]:
    """Return the events on these lines."""
    parts = Parts()
    return [one for line in lines if (one := read_event(parts.join(line))) is not None]


def test_a_short_event_is_one_line_of_json() -> None:
    line = event("started", nodes=4)
    assert line == '{"event": "started", "nodes": 4}'
    assert read_all([line]) == [{"event": "started", "nodes": 4}]


def test_an_event_is_one_line() -> None:
    assert event("waiting", node="n1\n") == '{"event": "waiting", "node": "n1\\n"}'


@given(TEXTS)
def test_no_line_is_too_long_or_holds_a_line_break(text: str) -> None:
    whole = event("crashed", node="n1", error=text)
    assert max(map(len, whole.encode("ascii").split(b"\n"))) <= LONGEST
    assert read_all(whole.split("\n")) == [{"event": "crashed", "node": "n1", "error": text}]


@given(st.lists(TEXTS, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_parts_of_several_events_may_come_in_any_mixture(texts: list[str], mix: Random) -> None:
    """Each event's own parts stay in their order."""
    waiting = [event("crashed", error=text).split("\n") for text in texts]
    lines = []
    while waiting:
        one = mix.choice(waiting)
        lines.append(one.pop(0))
        waiting = [rest for rest in waiting if rest]
    assert sorted(one["error"] for one in read_all(lines)) == sorted(texts)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "noise",
        "@event",
        "@event 0123456789abcdef -1 x",
        "@event 0123456789abcdef 1",
        "@event 0123456789ABCDEF 1 x",
        "@event 0123456789abcdef 1234567890 x",
    ],
)
def test_any_other_line_stays_as_it_is(line: str) -> None:
    assert Parts().join(line) == line
    assert read_event(line) is None


def test_an_event_that_lacks_a_part_is_none() -> None:
    lines = event("crashed", error="x" * 5 * LONGEST).split("\n")
    for number in range(len(lines)):
        assert read_all([*lines[:number], *lines[number + 1 :]]) == []
    parts = Parts()
    assert [parts.join(line) for line in lines[1:]] == [""] * (len(lines) - 1)
    assert parts.beginnings() == []
    assert {parts.join(line) for line in lines[:-1]} == {""}
    [beginning] = parts.beginnings()
    assert beginning.startswith('{"event": "crashed", "error": "xxx')
    assert read_event(parts.join(lines[-1])) == {"event": "crashed", "error": "x" * 5 * LONGEST}


def test_parts_that_never_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MOST", 10 * LONGEST - 1)
    parts = Parts()
    endless = [f"@event {'0' * 16} {number} {'x' * LONGEST}" for number in range(20, 10, -1)]
    whole = event("crashed", error="y" * LONGEST).split("\n")
    for line in endless[:-1]:
        assert parts.join(line) == ""
        assert read_event([parts.join(one) for one in whole][-1])
    with pytest.raises(ValueError, match="more than 9999 bytes of events are not whole"):
        parts.join(endless[-1])


def test_many_parts_without_text_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes memory, too."""
    monkeypatch.setattr(events, "_MOST", 10 * LONGEST)
    parts = Parts()
    for number in range(10):
        assert parts.join(f"@event {number:016x} 1 ") == ""
    with pytest.raises(ValueError, match="are not whole"):
        parts.join(f"@event {10:016x} 1 ")
