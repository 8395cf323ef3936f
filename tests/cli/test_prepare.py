"""``stagectl prepare`` on this node; `tests/cluster/test_hosts.py` has it on several."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.stagectl import Ran

if TYPE_CHECKING:
    from tests.support.desk import Desk


@pytest.mark.root
def test_root_is_told_how_it_prepares_a_node(desk: Desk) -> None:
    assert desk.stagectl("prepare") == Ran(
        3, "",
        f"stage: root prepares a node for one user, there: {sys.executable} -I -m "
        f"stager.node.prolog --config {desk.config} UID\n",
    )  # fmt: skip


def test_simulated_nodes_need_none(desk: Desk) -> None:
    text = "stage: simulated nodes need nothing to be made ready; leave out --local-root\n"
    assert desk.stagectl("prepare", "--local-root", "x") == Ran(2, "", text)
