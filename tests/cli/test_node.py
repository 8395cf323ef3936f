"""``stagectl node``: what other nodes may ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.stagectl import STAGECTL, Ran, run

if TYPE_CHECKING:
    from tests.support.desk import Desk


@pytest.mark.parametrize("command", ["", "x", "e30=", "\udce9"])
def test_a_node_refuses_what_is_not_a_command(desk: Desk, command: str) -> None:
    ran = run([*STAGECTL, "node", command])
    assert ran == Ran(2, "", "stage: only stagectl on another node calls this command\n")
