"""Whole stages to a disk that all ranks see: each byte is written once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from stager.base.outcome import Counts
from tests.support.tree_world import ALL, FILES, TOTAL, TreeWorld
from tests.support.world import World

if TYPE_CHECKING:
    from pathlib import Path

    from mpi4py import MPI

    from stager.base.outcome import ItemReport


class FileWorld(World):
    """Nodes to which one file is staged."""

    SIZE = 100_001

    def __init__(self, comm: MPI.Intracomm, folder: Path) -> None:
        super().__init__(comm, folder, "file", is_shared=True)
        self.on_first(lambda: self.source.write_bytes(bytes(i % 251 for i in range(self.SIZE))))

    def stage(self, **options: object) -> ItemReport:
        """Stage the file, and check the copy."""
        (item,) = self.run(items=self.items(**options)).items
        assert self.copy.read_bytes() == self.source.read_bytes()
        assert os.listdir(self.copy.parent / f".slurm-stage/{os.getuid()}/partial") == []
        self.comm.Barrier()
        return item


@pytest.fixture
def tree(comm: MPI.Intracomm, folder: Path) -> TreeWorld:
    return TreeWorld(comm, folder, is_shared=True)


@pytest.fixture
def file(comm: MPI.Intracomm, folder: Path) -> FileWorld:
    return FileWorld(comm, folder)


def test_a_file_is_written_once(file: FileWorld) -> None:
    item = file.stage()
    assert (item.received, item.current) == (file.nodes, [])
    item = file.stage()
    assert (item.received, item.current) == ([], file.nodes)


def test_a_folder_is_read_and_written_once(tree: TreeWorld) -> None:
    item = tree.stage()
    assert (item.received, item.current) == (tree.nodes, [])
    assert (item.source_bytes_read, item.size, item.tree) == (TOTAL, TOTAL, ALL)
    item = tree.stage()
    assert (item.received, item.current, item.source_bytes_read) == ([], tree.nodes, 0)
    assert item.tree == Counts(len(FILES))


def test_one_changed_file_moves_alone(tree: TreeWorld) -> None:
    tree.stage()
    tree.on_first(lambda: (tree.source / "sub1/file1").write_bytes(b"changed"))
    item = tree.stage()
    assert (item.source_bytes_read, item.tree) == (7, Counts(len(FILES), 1, 7))
