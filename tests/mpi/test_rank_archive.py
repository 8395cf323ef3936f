"""Whole stages of archives, which every node unpacks."""

from __future__ import annotations

import os
import tarfile
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import SourceError
from stager.base.options import Verify
from stager.base.outcome import Counts
from stager.request.items import Space
from stager.tree.walk import walk
from tests.support.tree_world import TreeWorld, archive_of, files_beneath
from tests.support.trees import as_copy
from tests.support.world import messages

if TYPE_CHECKING:
    from pathlib import Path

    from mpi4py import MPI


@pytest.fixture
def world(comm: MPI.Intracomm, folder: Path) -> TreeWorld:
    return TreeWorld(comm, folder)


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tar.xz", ".zip"])
@pytest.mark.parametrize("verify", Verify)
def test_an_archive_is_unpacked_on_all_nodes(world: TreeWorld, suffix: str, verify: Verify) -> None:
    path = archive_of(world, suffix)
    items = world.items(source=path, extract=True, verify=verify)
    (item,) = world.run(items=items).items
    size = os.stat(path).st_size
    found = files_beneath(world.copy)
    assert found == files_beneath(world.source)
    assert item.tree is not None
    assert (item.received, item.size, item.source_bytes_read) == (world.nodes, size, size)
    assert item.tree.moved == item.tree.files
    (again,) = world.run(items=items).items
    assert (again.received, again.tree) == ([], Counts(item.tree.files))


def test_a_node_that_lacks_what_was_unpacked_reads_the_archive(world: TreeWorld) -> None:
    items = world.items(source=archive_of(world, ".tar.gz"), extract=True)
    world.run(items=items)
    world.on_last((world.copy / "zero").unlink)
    (item,) = world.run(items=items).items
    assert (item.received, item.senders) == ([world.nodes[-1]], [])
    assert item.reasons == ["the copy changed"]
    assert (world.copy / "zero").exists()


def test_a_hostile_archive_does_not_change_the_old_copy(world: TreeWorld) -> None:
    path = archive_of(world, ".tar")
    items = world.items(source=path, extract=True)
    world.run(items=items)
    before = as_copy(walk(str(world.copy)))

    def spoil() -> None:
        with tarfile.open(path, "a") as archive:
            archive.addfile(tarfile.TarInfo("../bad"))

    world.on_first(spoil)
    why = (
        f"{path}: its member '../bad' has '..' in its path: nothing was unpacked; "
        "create the archive again without it"
    )
    assert messages(world.run(items=items)) == [f"2 {node}: {why}" for node in world.nodes]
    assert as_copy(walk(str(world.copy))) == before
    assert os.listdir(world.copy.parent / f".slurm-stage/{os.getuid()}/partial") == []


@pytest.mark.parametrize("suffix", [".tar.gz", ".zip"])
def test_a_damaged_archive_fails_the_stage(world: TreeWorld, suffix: str) -> None:
    path = archive_of(world, suffix)
    world.on_first(lambda: os.truncate(path, 3000))
    outcome = world.run(items=world.items(source=path, extract=True))
    assert len(outcome.failures) == world.comm.size
    for failure in outcome.failures:
        assert failure.code == SourceError.code
        assert failure.message.startswith(f"{path} cannot be unpacked: ")
    assert not world.copy.exists()


def test_an_archive_that_unpacks_to_too_much_is_refused(world: TreeWorld) -> None:
    items = world.items(source=archive_of(world, ".tar.gz"), extract=True)
    outcome = world.run(items=items, space=Space(unpacked_size=10_000))
    assert {failure.code for failure in outcome.failures} == {2}
    assert "it has more than the 9.8 KiB that the site allows" in outcome.failures[0].message
    outcome = world.run(items=items, space=Space(unpacked_members=10))
    assert "it has more than the 10 members that the site allows" in outcome.failures[0].message
    assert not world.copy.exists()


def test_a_folder_has_nothing_to_extract(world: TreeWorld) -> None:
    assert messages(world.run(items=world.items(extract=True))) == [
        f"2 node0: {world.source} is a folder; extract is for archives"
    ]
