"""A slow node is told once, as soon as it has cost enough."""

from __future__ import annotations

from stager.launch.paces import Paces

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


def test_a_node_that_holds_nobody_up_is_not_told() -> None:
    paces = Paces()
    paces.hear(pulse("n1", 4000 * MB, 5, 0))
    assert paces.hear(pulse("n2", 4000 * MB, 100, 1)) == []
    assert paces.hear(pulse("n1", 4000 * MB, 5, 50)) == []


def test_one_node_alone_is_not_told() -> None:
    assert Paces().hear(pulse("n1", 40 * MB, 100, 100)) == []
