"""Which ranks authenticate the connections between them."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

from stager.launch.job import JobContext
from stager.launch.peers import library_for, peer_key, peers_library
from stager.request.policy import Launch, Policy

if TYPE_CHECKING:
    from pathlib import Path

POLICY = Policy(roots=("/nvme",))
FOUR, ONE = JobContext(17, "n[1-4]", 4), JobContext(17, "n1", 1)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The library, installed."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/stage_peers.so").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return f"{tmp_path}/lib/stage_peers.so"


def test_ranks_on_several_nodes_use_the_library(library: str) -> None:
    assert peers_library() == library
    assert library_for(FOUR, POLICY) == library
    assert library_for(ONE, POLICY) is None


def test_the_site_may_do_without_it(library: str) -> None:
    policy = Policy(roots=("/nvme",), launch=Launch(authenticate=False))
    assert peers_library() == library
    assert library_for(FOUR, policy) is None


def test_an_installation_by_pip_alone_has_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert peers_library() is None
    assert library_for(FOUR, POLICY) is None


def test_each_stage_has_a_key_of_its_own() -> None:
    first, second = peer_key(), peer_key()
    assert first.keys() == second.keys() == {"STAGE_PEER_KEY"}
    assert first != second
    assert re.fullmatch("[0-9a-f]{32}", first["STAGE_PEER_KEY"])
