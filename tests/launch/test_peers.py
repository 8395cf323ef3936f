"""Which ranks authenticate the connections between them."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import LaunchError
from stager.launch.mpi import library_for, peer_key
from stager.request.policy import Launch, Policy
from tests.support.users import as_ordinary_user, ordinary_home

if TYPE_CHECKING:
    from pathlib import Path

POLICY = Policy(roots=("/nvme",))
CANNOT = (
    "{} cannot be loaded, without which ranks accept connections from anyone; tell the "
    "administrator to install slurm-stage there again"
)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The library, installed."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/stage_peers.so").write_bytes(b"\x7fELF...")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return f"{tmp_path}/lib/stage_peers.so"


def test_ranks_on_several_nodes_use_the_library(library: str) -> None:
    assert library_for(4, POLICY) == library
    assert library_for(1, POLICY) is None


@pytest.mark.usefixtures("library")
def test_the_site_may_do_without_it() -> None:
    policy = Policy(roots=("/nvme",), launch=Launch(authenticate=False))
    assert library_for(4, policy) is None


def test_an_installation_by_pip_alone_has_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert library_for(4, POLICY) is None


def test_a_site_that_has_lost_the_library_cannot_stage_without(
    library: str, tmp_path: Path
) -> None:
    (tmp_path / "libexec").mkdir()
    (tmp_path / "libexec/job_epilog").touch()
    assert library_for(4, POLICY) == library
    (tmp_path / "lib/stage_peers.so").unlink()
    assert library_for(1, POLICY) is None
    with pytest.raises(LaunchError) as caught:
        library_for(4, POLICY)
    assert caught.value.message == CANNOT.format(library)


def test_a_site_that_has_closed_its_scripts_cannot_stage_without_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ordinary_home() as home:

        def said() -> str:
            monkeypatch.setattr(sys, "prefix", str(home))
            (home / "libexec").mkdir(mode=0o000)
            with pytest.raises(LaunchError) as caught:
                library_for(4, POLICY)
            return caught.value.message

        assert as_ordinary_user(said) == CANNOT.format(home / "lib/stage_peers.so")


def test_a_library_that_was_cut_off_as_it_was_installed_is_refused(library: str) -> None:
    with open(library, "w"):
        pass
    with pytest.raises(LaunchError) as caught:
        library_for(4, POLICY)
    assert caught.value.message == CANNOT.format(library)


def test_each_stage_has_a_key_of_its_own() -> None:
    first, second = peer_key(), peer_key()
    assert first.keys() == second.keys() == {"STAGE_PEER_KEY"}
    assert first != second
    assert re.fullmatch("[0-9a-f]{32}", first["STAGE_PEER_KEY"])
