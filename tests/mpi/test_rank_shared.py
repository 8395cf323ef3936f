"""Whole stages to a disk that all ranks see: each byte is written once."""

from __future__ import annotations

import gzip
import os
import tarfile
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from stager.archive.target import Target
from stager.base.digest import PIECE
from stager.base.errors import SpaceError
from stager.base.options import ITSELF, Mode, Validate, Verify
from stager.base.outcome import Counts
from stager.fs.files import digest_of
from stager.fs.partial_file import Partial
from stager.source.posix import PosixFile
from stager.tree.partial_tree import PartialTree
from stager.wire.layout import Settings
from tests.support.tree_world import ALL, FILES, TOTAL, TreeWorld, archive_of, files_beneath
from tests.support.world import World, messages

if TYPE_CHECKING:
    from mpi4py import MPI

    from stager.base.outcome import ItemReport


#: Bytes of a message where a file has several pieces.
CHUNK = 1 << 20


class Passed(NamedTuple):
    """What one rank read and wrote, each time the offset and the bytes."""

    read: list[tuple[int, int]]
    written: list[tuple[int, int]]


class FileWorld(World):
    """Nodes to which one file is staged."""

    SIZE = 100_001

    def __init__(self, comm: MPI.Intracomm, folder: Path) -> None:
        super().__init__(comm, folder, "file", is_shared=True)
        self.on_first(lambda: self.source.write_bytes(bytes(i % 251 for i in range(self.SIZE))))

    def stage(self, **options: object) -> ItemReport:
        """Stage the file, and check the copy."""
        outcome = self.run(items=self.items(**options))
        assert messages(outcome) == []
        (item,) = outcome.items
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


@pytest.fixture
def passed(file: FileWorld, monkeypatch: pytest.MonkeyPatch) -> Passed:
    """Note what this rank reads of the source and writes to the copy; chunks are large."""
    file.request = replace(file.request, transfer=Settings(chunk=CHUNK))
    passed = Passed([], [])
    read, write = PosixFile.read_into, Partial.write

    def note_read(reader: PosixFile, buffer: memoryview, offset: int) -> None:
        passed.read.append((offset, len(buffer)))
        read(reader, buffer, offset)

    def note_write(partial: Partial, data: memoryview, offset: int) -> None:
        passed.written.append((offset, len(data)))
        write(partial, data, offset)

    monkeypatch.setattr(PosixFile, "read_into", note_read)
    monkeypatch.setattr(Partial, "write", note_write)
    return passed


@pytest.mark.parametrize("size", [0, 1, PIECE])
def test_a_file_of_one_piece_is_read_by_one(file: FileWorld, passed: Passed, size: int) -> None:
    file.on_first(lambda: file.source.write_bytes((b"some data" * size)[:size]))
    item = file.stage()
    assert (item.received, item.current, item.source_bytes_read) == (file.nodes, [], size)
    assert sum(length for _, length in passed.read) == size * (file.comm.rank == 0)
    item = file.stage()
    assert (item.received, item.current) == ([], file.nodes)


@pytest.mark.parametrize("verify", Verify)
def test_each_piece_is_read_and_written_by_one(
    file: FileWorld, passed: Passed, verify: Verify
) -> None:
    size = file.comm.size * PIECE + 5000
    file.on_first(lambda: file.source.write_bytes(os.urandom(size)))
    item = file.stage(verify=verify)
    assert (item.received, item.source_bytes_read) == (file.nodes, size)
    assert item.digest == digest_of(str(file.copy))
    assert sorted(passed.read) == sorted(passed.written)
    of_ranks = file.comm.allgather(passed.read)
    assert all(of_ranks)
    at = 0
    for offset, length in sorted(chain.from_iterable(of_ranks)):
        assert offset == at
        at += length
    assert at == size
    item = file.stage(validate=Validate.CHECKSUM)
    assert (item.received, item.current) == ([], file.nodes)


@pytest.mark.parametrize("begins", [[], [5 * PIECE], [PIECE + CHUNK, 4 * PIECE - CHUNK]])
def test_holes_are_neither_read_nor_written(
    file: FileWorld, passed: Passed, begins: list[int]
) -> None:
    def make() -> None:
        with file.source.open("wb") as source:
            source.truncate(7 * PIECE + 1)
            for begin in begins:
                source.seek(begin)
                source.write(os.urandom(2 * CHUNK))

    file.on_first(make)
    item = file.stage(verify=Verify.READBACK)
    assert item.source_bytes_read == 2 * CHUNK * len(begins)
    assert file.copy.stat().st_blocks == file.source.stat().st_blocks
    assert item.digest == digest_of(str(file.copy))


def test_a_large_file_that_changes_is_read_again(
    file: FileWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.request = replace(file.request, transfer=Settings(chunk=CHUNK))
    file.on_first(lambda: file.source.write_bytes(bytes(file.comm.size * PIECE)))
    read, changes = PosixFile.read_into, [b"changed"] * (file.comm.rank == file.comm.size - 1)

    def change(reader: PosixFile, buffer: memoryview, offset: int) -> None:
        read(reader, buffer, offset)
        while changes:
            with file.source.open("r+b") as source:
                source.write(changes.pop())

    monkeypatch.setattr(PosixFile, "read_into", change)
    item = file.stage()
    assert item.received == file.nodes
    assert file.copy.read_bytes().startswith(b"changed")


def test_a_rank_that_cannot_write_its_pieces_leaves_nothing(
    file: FileWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.request = replace(file.request, transfer=Settings(chunk=CHUNK))
    file.on_first(lambda: file.source.write_bytes(bytes(file.comm.size * PIECE)))

    def fail(*_: object) -> None:
        raise SpaceError("full")

    if file.comm.rank == file.comm.size - 1:
        monkeypatch.setattr(Partial, "write", fail)
    assert messages(file.run()) == [f"5 {file.nodes[-1]}: full"]
    assert not file.copy.exists()
    assert os.listdir(file.copy.parent / f".slurm-stage/{os.getuid()}/partial") == []
    file.comm.Barrier()
    monkeypatch.undo()
    file.stage()


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


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".zip"])
@pytest.mark.parametrize("verify", Verify)
def test_an_archive_is_read_once_and_unpacked_by_all(
    tree: TreeWorld, monkeypatch: pytest.MonkeyPatch, suffix: str, verify: Verify
) -> None:
    path = archive_of(tree, suffix)
    items = tree.items(source=path, extract=True, verify=verify)
    made: list[bytes] = []
    create = Target._create

    def note(target: Target, member: bytes) -> int:
        made.append(member)
        return create(target, member)

    monkeypatch.setattr(Target, "_create", note)
    (item,) = tree.run(items=items).items
    assert files_beneath(tree.copy) == files_beneath(tree.source)
    assert item.source_bytes_read == os.stat(path).st_size
    of_ranks = tree.comm.allgather(made)
    links = 2 * (suffix == ".zip")  # these are files there
    assert sum(map(len, of_ranks)) == len(FILES) + links == len(set().union(*of_ranks))
    assert all(of_ranks) == (suffix != ".zip" or tree.comm.size == 1)
    (again,) = tree.run(items=items).items
    assert (again.received, again.source_bytes_read) == ([], 0)


def test_a_hostile_archive_leaves_nothing(tree: TreeWorld) -> None:
    path = archive_of(tree, ".tar")

    def spoil() -> None:
        with tarfile.open(path, "a") as archive:
            archive.addfile(tarfile.TarInfo("../bad"))

    tree.on_first(spoil)
    outcome = tree.run(items=tree.items(source=path, extract=True))
    assert {failure.code for failure in outcome.failures} == {2}
    assert not tree.copy.exists()
    assert os.listdir(tree.copy.parent / f".slurm-stage/{os.getuid()}/partial") == []


def test_a_compressed_file_is_written_once(file: FileWorld) -> None:
    path = f"{file.source}.gz"
    file.on_first(lambda: Path(path).write_bytes(gzip.compress(file.source.read_bytes())))
    item = file.stage(source=path, decompress=ITSELF)
    assert (item.received, item.source_bytes_read) == (file.nodes, os.stat(path).st_size)
    item = file.stage(source=path, decompress=ITSELF)
    assert (item.received, item.current) == ([], file.nodes)


def test_a_folder_that_all_nodes_see_has_no_parts(tree: TreeWorld) -> None:
    outcome = tree.run(items=tree.items(mode=Mode.SHARD))
    if tree.comm.size > 1:
        why = "all nodes see all files there, none has a part; leave out mode=shard"
        assert messages(outcome) == [f"2 node0: /nvme/tree: {why}"]
        assert not tree.copy.exists()


def test_a_rank_that_fails_at_the_end_leaves_nothing(
    tree: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = tree.items(source=archive_of(tree, ".tar"), extract=True)

    def fail(_: PartialTree) -> None:
        raise SpaceError("full")

    if tree.comm.rank == tree.comm.size - 1:
        monkeypatch.setattr(PartialTree, "sync", fail)
    assert messages(tree.run(items=items)) == [f"5 {tree.nodes[-1]}: full"]
    assert not tree.copy.exists()
    assert os.listdir(tree.copy.parent / f".slurm-stage/{os.getuid()}/partial") == []
    tree.comm.Barrier()
    monkeypatch.undo()
    assert messages(tree.run(items=items)) == []
    assert files_beneath(tree.copy) == files_beneath(tree.source)
