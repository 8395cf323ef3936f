"""A node's answer as lines, and its way back."""

from __future__ import annotations

import random

import pytest

from stager.base.events import LONGEST, event
from stager.launch.nodes import Answer, Mailbox, frames, hello

LARGE = {"entries": [f"/nvme/{number} é" for number in range(5000)]}


def test_an_answer_is_cut_into_lines_that_slurm_keeps_whole() -> None:
    noise = {"x": random.Random(1).randbytes(5000).hex()}
    lines = list(frames("n1", noise))
    assert len(lines) > 5
    assert max(map(len, lines)) <= LONGEST
    assert all(line.isascii() for line in lines)


def test_answers_whose_lines_come_mixed_are_put_together() -> None:
    mailbox = Mailbox(["n1", "n2", "n3"])
    told = {
        "n1": [*frames("n1", LARGE), "a banner", ""],
        "n2": [hello("n2"), *frames("n2", LARGE)],
        "n3": [hello("n3")],
    }
    sources = [node for node, lines in told.items() for _ in lines]
    random.Random(2).shuffle(sources)
    assert sum(not mailbox.take(told[node].pop(0), node) for node in sources) == 2
    assert mailbox.answers == {"n1": Answer("n1", LARGE), "n2": Answer("n2", LARGE)}
    assert list(mailbox.waiting) == ["n3"]
    assert mailbox.begun == {"n1", "n2", "n3"}


@pytest.mark.parametrize(
    "line",
    [
        "", " ", "@event", "@event n1", "n1 hello", f" {hello('n1')}", event("started", node="n1"),
    ],
)  # fmt: skip
def test_other_lines_are_not_part_of_an_answer(line: str) -> None:
    mailbox = Mailbox(["n1"])
    assert not mailbox.take(line, "n1")
    assert list(mailbox.waiting) == ["n1"]


def test_a_node_that_answers_for_another_is_not_believed() -> None:
    mailbox = Mailbox(["n1", "n2", "n3"])
    for line in (hello("n1"), *frames("n1", {"forged": 1})):
        mailbox.take(line, "n3")
    for line in (hello("n1"), *frames("n1", {"a": 1})):
        assert mailbox.take(line, "n1")
    # Also when it is one that nobody asked, and from a node that nobody asked.
    assert mailbox.take(hello("n9"), "n2")
    assert not mailbox.take(hello("n9"), "n9")
    assert mailbox.answers == {
        "n1": Answer("n1", {"a": 1}),
        "n2": Answer("n2", None, "it answered in the name of n9; check this node"),
        "n3": Answer("n3", None, "it answered in the name of n1; check this node"),
    }


@pytest.mark.parametrize("data", ["", "x", "AAAA", "eJwDAAAAAAE="])
def test_an_answer_that_cannot_be_read_is_a_problem(data: str) -> None:
    mailbox = Mailbox(["n1"])
    assert mailbox.take(event("answer", node="n1", content=data), "n1")
    assert mailbox.answers == {"n1": Answer("n1", None, "its answer cannot be read")}


def test_an_event_with_more_in_it_than_an_answer_has_is_not_read() -> None:
    """Millions of empty lists would take gigabytes."""
    mailbox = Mailbox(["n1"])
    for line in event("hello", node="n1", more=[[]] * LONGEST).split("\n"):
        mailbox.take(line, "n1")
    assert mailbox.answers == {"n1": Answer("n1", None, "its answer cannot be read")}


def test_a_node_that_was_given_up_stays_so() -> None:
    mailbox = Mailbox(["n1"])
    mailbox.give_up("n1", "\x1b no")
    mailbox.give_up("n1", "again")
    mailbox.give_up("n2", "unknown")
    assert not mailbox.take(hello("n1"), "n1")
    assert mailbox.answers == {"n1": Answer("n1", None, "? no")}
