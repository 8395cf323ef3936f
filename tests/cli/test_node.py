"""``stagectl node``: what other nodes may ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.stagectl import STAGECTL, Ran, run

if TYPE_CHECKING:
    from tests.support.desk import Desk


@pytest.mark.parametrize("order", ["", "x", "e30=", "\udce9"])
def test_a_node_refuses_what_is_no_order(desk: Desk, order: str) -> None:
    ran = run([*STAGECTL, "node", order])
    assert ran == Ran(2, "", "stage: this is for stagectl on another node to call\n")
