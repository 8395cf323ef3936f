"""Nodes to which a folder is staged, for tests of whole stages."""

from __future__ import annotations

import os
import shutil
import tarfile
from typing import TYPE_CHECKING

from stager.base.options import Share
from stager.base.outcome import Counts
from stager.tree.partial_tree import PartialTree
from stager.tree.walk import walk
from tests.support.trees import as_copy
from tests.support.world import World

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    from mpi4py import MPI

    from stager.base.outcome import ItemReport
    from stager.tree.listing import Listing


#: Files and their sizes: some share a chunk, one takes several.
FILES = {f"sub{number % 7}/file{number}": number for number in range(100)}
FILES |= {"large": 30_000, "zero": 0}
TOTAL = sum(FILES.values())
ALL = Counts(len(FILES), len(FILES), TOTAL)


class TreeWorld(World):
    """Nodes to which one folder is staged."""

    def __init__(self, comm: MPI.Intracomm, folder: Path, *, is_shared: bool = False) -> None:
        super().__init__(comm, folder, "tree", is_shared=is_shared)
        self.on_first(self.make_source)

    def make_source(self) -> None:
        """Make the files of `FILES`, a hard link, a symbolic link and an empty folder."""
        for name, size in FILES.items():
            path = self.source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes((size + i) % 251 for i in range(size)))
        (self.source / "twin").hardlink_to(self.source / "large")
        (self.source / "link").symlink_to("sub1/file1")
        (self.source / "empty").mkdir()

    def stage(self, **options: object) -> ItemReport:
        """Stage the folder, and check that the copy equals the source."""
        (item,) = self.run(items=self.items(**options)).items
        assert seen(walk(str(self.copy))) == seen(walk(str(self.source)))
        for path in (path for path in self.source.rglob("*") if path.is_file()):
            copy = self.copy / path.relative_to(self.source)
            assert copy.read_bytes() == path.read_bytes()
        assert os.listdir(self.copy.parent / f".slurm-stage/{os.getuid()}/partial") == []
        self.comm.Barrier()
        return item


def seen(listing: Listing) -> list[tuple[object, ...]]:
    """Return the facts that a copy must share with its source."""
    listing = listing.as_copied(Share.NONE, os.getegid())
    columns = (
        listing.paths, listing.kinds, listing.modes, listing.sizes, listing.mtimes, listing.groups,
    )  # fmt: skip
    rows = zip(*columns, strict=True)
    return [*rows, tuple(listing.targets.items())]


def damage(path: Path) -> None:
    """Change a byte, but no size or time."""
    facts = path.stat()
    with path.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def assert_unchanged_by_a_failure(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch, **request: object
) -> None:
    """Make one node fail once all is written; check that all copies are as before."""
    before = as_copy(walk(str(world.copy)))
    world.on_first(lambda: (world.source / "sub1/file1").write_bytes(b"changed"))

    def fail(_: PartialTree) -> None:
        raise OSError(28, "No space left on device")

    if world.comm.rank == world.comm.size - 1:
        monkeypatch.setattr(PartialTree, "seal", fail)
    outcome = world.run(**request)
    assert [failure.code for failure in outcome.failures] == [5]
    assert as_copy(walk(str(world.copy))) == before
    monkeypatch.undo()


def archive_of(world: TreeWorld, suffix: str) -> str:
    """Make an archive of the source on the first rank; return its path."""
    path = f"{world.source}{suffix}"
    ways = {".tar": "w", ".tar.gz": "w:gz", ".tar.xz": "w:xz"}

    def make() -> None:
        if suffix == ".zip":
            shutil.make_archive(str(world.source), "zip", world.source)
            return
        with tarfile.open(path, ways[suffix]) as archive:  # type: ignore[call-overload]
            archive.add(world.source, ".")

    world.on_first(make)
    return path


def files_beneath(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
