"""A slow node is told once, as soon as it has cost enough."""

from __future__ import annotations

import pytest

from stager.launch.health import Paces, too_slow_text

MB = 1_000_000


def pulse(node: str, size: int, busy: float, held: float) -> dict[str, object]:
    return {"event": "pulse", "node": node, "pace": [size, busy, held]}


def test_a_slow_node_is_told_once_when_it_has_cost_enough() -> None:
    paces = Paces()
    told: list[tuple[int, str]] = []
    for second in range(1, 20):
        for node in ("n1", "n2"):
            assert paces.hear(pulse(node, second * 40 * MB, second * 0.05, 0.0)) == []
        found = paces.hear(pulse("n17", second * 40 * MB, second, second))
        told += [(second, one.text) for one in found]
    assert told == [(6, "n17 is slow: it writes 40 MB/s, the others 800 MB/s")]


def hear_until_60_s(paces: Paces, *slow: str) -> None:
    """Have n1 to n5 write, and the ``slow`` ones hold up the others for 30 s, and for 60 s."""
    for held in (30, 60):
        for name in ("n1", "n2", "n3", "n4", "n5"):
            of_node = (held + 1, held) if name in slow else (1, 0)
            paces.hear(pulse(name, 900 * MB, *of_node))


def test_a_slow_node_is_given_up_when_it_has_cost_the_others_the_patience() -> None:
    for patience, given_up in ((60.1, []), (60, ["n3"])):
        paces = Paces(patience, most=1, own="n1")
        hear_until_60_s(paces, "n3")
        assert [one.node for one in paces.too_slow] == given_up
    assert too_slow_text(paces.too_slow) == (
        "too slow: it writes 15 MB/s, the others 900 MB/s, and cost them 1 min 0 s"
    )


def test_slow_nodes_are_given_up_together() -> None:
    paces = Paces(60, most=2, own="n1")
    hear_until_60_s(paces, "n3", "n4")
    assert [one.node for one in paces.too_slow] == ["n3", "n4"]
    assert too_slow_text(paces.too_slow) == (
        "too slow: it writes at most 15 MB/s, the others 900 MB/s, and cost them 1 min 0 s"
    )


@pytest.mark.parametrize(("patience", "most", "own"), [(60, 0, "n1"), (60, 1, "n1"), (0, 2, "n1")])
def test_no_slow_node_is_given_up_where_they_are_more_than_may_fail(
    patience: float, most: int, own: str
) -> None:
    paces = Paces(patience, most, own)
    hear_until_60_s(paces, "n3", "n4")
    assert paces.too_slow == []


def test_the_node_of_the_script_is_never_given_up() -> None:
    paces = Paces(60, most=1, own="n3")
    hear_until_60_s(paces, "n3")
    assert paces.too_slow == []


def test_a_node_that_holds_nobody_up_is_not_told() -> None:
    paces = Paces()
    paces.hear(pulse("n1", 4000 * MB, 5, 0))
    assert paces.hear(pulse("n2", 4000 * MB, 100, 1)) == []
    assert paces.hear(pulse("n1", 4000 * MB, 5, 50)) == []


def test_one_node_alone_is_not_told() -> None:
    assert Paces().hear(pulse("n1", 40 * MB, 100, 100)) == []
