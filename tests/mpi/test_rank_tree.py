"""Whole stages of folders by `run`, each rank with a folder for its node's disk."""

from __future__ import annotations

import os
import shutil
import tarfile
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from mpi4py import MPI

from stager.base.errors import DestinationError, SourceError, SpaceError
from stager.base.options import Mode, Relocate, Validate, Verify
from stager.base.outcome import Counts
from stager.base.phases import Phase, Stopwatch
from stager.disk.cache import Cache, open_cache
from stager.rank.agree import Context
from stager.rank.main import run
from stager.request.items import Space
from stager.tree.listing import Kind
from stager.tree.partial import PartialTree
from stager.tree.stream import StreamReader
from stager.tree.table import as_copy
from stager.tree.walk import walk
from tests.support.world import World, messages

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stager.base.outcome import ItemReport
    from stager.tree.listing import Listing

#: How many files of which sizes: some share a chunk, one takes several.
FILES = {f"sub{number % 7}/file{number}": number for number in range(100)}
FILES |= {"large": 30_000, "zero": 0}


class TreeWorld(World):
    """Nodes to which one folder is staged."""

    def __init__(self, comm: MPI.Intracomm, folder: Path) -> None:
        super().__init__(comm, folder, "tree")
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
    """What a copy has in common with its source."""
    columns = (
        listing.paths, listing.kinds, listing.modes, listing.sizes, listing.mtimes, listing.groups,
    )  # fmt: skip
    rows = zip(*columns, strict=True)
    return [*rows, tuple(listing.targets.items())]


@pytest.fixture
def world(comm: MPI.Intracomm, folder: Path) -> TreeWorld:
    return TreeWorld(comm, folder)


TOTAL = sum(FILES.values())
ALL = Counts(len(FILES), len(FILES), TOTAL)


def test_the_first_run_brings_the_folder_to_all_nodes(world: TreeWorld) -> None:
    item = world.stage()
    assert (item.received, item.current, item.senders) == (world.nodes, [], [])
    assert (item.source_bytes_read, item.size, item.tree) == (TOTAL, TOTAL, ALL)
    assert item.reasons == ["absent"]


def test_the_second_run_moves_nothing(world: TreeWorld) -> None:
    world.stage()
    before = as_copy(walk(str(world.copy)))
    item = world.stage()
    assert (item.received, item.current, item.source_bytes_read) == ([], world.nodes, 0)
    assert item.tree == Counts(len(FILES))
    assert as_copy(walk(str(world.copy))) == before


def test_one_changed_file_moves_alone(world: TreeWorld) -> None:
    world.stage()
    before = (world.copy / "sub3/file3").stat()
    world.on_first(lambda: (world.source / "sub1/file1").write_bytes(b"changed"))
    item = world.stage()
    assert (item.received, item.source_bytes_read) == (world.nodes, 7)
    assert item.tree == Counts(len(FILES), 1, 7)
    assert item.reasons == ["the source changed"]
    assert (world.copy / "sub3/file3").stat().st_ino == before.st_ino


def test_a_new_file_comes_and_a_deleted_one_goes(world: TreeWorld) -> None:
    world.stage()

    def change() -> None:
        (world.source / "empty/new").write_bytes(b"new")
        (world.source / "sub1/file1").unlink()
        shutil.rmtree(world.source / "sub2")

    world.on_first(change)
    gone = 1 + sum(name.startswith("sub2/") for name in FILES)
    item = world.stage()
    assert item.tree == Counts(len(FILES) - gone + 1, 1, 3, gone)
    assert not (world.copy / "sub2").exists()


def test_a_file_may_become_a_folder_and_the_other_way_round(world: TreeWorld) -> None:
    world.stage()

    def change() -> None:
        (world.source / "zero").unlink()
        (world.source / "zero/in").mkdir(parents=True)
        (world.source / "empty").rmdir()
        (world.source / "empty").write_bytes(b"no more")

    world.on_first(change)
    assert world.stage().tree == Counts(len(FILES), 1, 7, 1)


def test_the_last_node_gets_the_folder_from_the_first(world: TreeWorld) -> None:
    world.stage()
    world.on_last(lambda: shutil.rmtree(world.copy))
    item = world.stage()
    alone = world.comm.size == 1
    assert item.received == [world.nodes[-1]]
    assert item.senders == ([] if alone else ["node0"])
    assert item.source_bytes_read == (TOTAL if alone else 0)


@pytest.mark.parametrize(
    ("damage", "moved"),
    [
        (lambda tree: (tree / "sub5/file5").write_bytes(b"written by a job"), 5),
        (lambda tree: (tree / "sub5/file5").unlink(), 5),
        (lambda tree: (tree / "new").touch(), 0),
        (lambda tree: (tree / "empty").rmdir(), 0),
        (lambda tree: (tree / "sub5/file5").chmod(0o600), 5),
    ],
    ids=["written", "removed", "added", "folder", "mode"],
)
def test_what_a_job_changed_in_its_copy_is_mended(
    world: TreeWorld, damage: Callable[[Path], object], moved: int
) -> None:
    world.stage()
    world.on_last(lambda: damage(world.copy))
    item = world.stage()
    assert (item.received, item.reasons) == ([world.nodes[-1]], ["the copy changed"])
    assert item.tree == Counts(len(FILES), int(moved > 0), moved)


def damage(path: Path) -> None:
    """Change a byte, and leave no trace of that."""
    facts = path.stat()
    with path.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def test_validate_checksum_finds_damage_and_moves_that_file_alone(world: TreeWorld) -> None:
    world.stage()
    world.on_last(lambda: damage(world.copy / "sub5/file5"))
    item = world.stage(validate=Validate.CHECKSUM)
    assert (item.received, item.tree) == ([world.nodes[-1]], Counts(len(FILES), 1, 5))
    assert item.reasons == ["its bytes differ from its digest"]


def test_a_sender_whose_copy_is_damaged_is_found_out(world: TreeWorld) -> None:
    if world.comm.size == 1:
        return
    world.stage()
    world.on_first(lambda: damage(world.copy / "sub5/file5"))
    world.on_last(lambda: shutil.rmtree(world.copy))
    item = world.stage()
    if world.comm.size == 2:
        assert (item.received, item.senders) == (world.nodes, [])
    else:
        assert (item.received, item.senders) == ([world.nodes[0], world.nodes[-1]], ["node1"])


@pytest.mark.parametrize("verify", Verify)
def test_validate_always_moves_all(world: TreeWorld, verify: Verify) -> None:
    world.stage()
    item = world.stage(validate=Validate.ALWAYS, verify=verify)
    assert (item.tree, item.reasons) == (ALL, ["validate=always"])


def test_a_dry_run_tells_and_does_nothing(world: TreeWorld) -> None:
    (item,) = world.run(dry_run=True).items
    assert item.received == world.nodes
    assert not world.copy.exists()


@pytest.mark.parametrize("make", ["a folder", "a plain file"])
def test_what_was_not_staged_is_not_replaced(world: TreeWorld, make: str) -> None:
    def put() -> None:
        if make == "a folder":
            (world.copy / "results").mkdir(parents=True)
        else:
            world.copy.write_bytes(b"results")

    world.on_last(put)
    path = world.source.parent / world.nodes[-1] / "nvme/tree"
    what = f"{path} is {make} that was not staged, and would be lost"
    assert messages(world.run()) == [
        f"6 {world.nodes[-1]}: {what}; remove it or choose another destination"
    ]
    world.comm.Barrier()
    assert path.read_bytes() == b"results" if path.is_file() else (path / "results").is_dir()


def test_an_empty_folder_is(world: TreeWorld) -> None:
    world.on_last(world.copy.mkdir)
    assert world.stage().received == world.nodes


def test_a_source_that_changes_while_it_is_read_is_read_again(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = StreamReader.read_into
    changed: list[None] = []

    def change_then_read(self: StreamReader, buffer: memoryview, offset: int) -> None:
        if not changed:
            changed.append(None)
            (world.source / "sub1/file1").write_bytes(b"new")
        read(self, buffer, offset)

    monkeypatch.setattr(StreamReader, "read_into", change_then_read)
    assert world.stage().tree == Counts(len(FILES), len(FILES), TOTAL + 2)


def test_a_source_that_changes_again_and_again_is_told(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = StreamReader.read_into

    def change_and_read(self: StreamReader, buffer: memoryview, offset: int) -> None:
        with (world.source / "sub1/file1").open("ab") as file:
            file.write(b"more")
        read(self, buffer, offset)

    monkeypatch.setattr(StreamReader, "read_into", change_and_read)
    path = f"{world.source}/sub1/file1"
    assert messages(world.run()) == [
        f"7 node0: {path} changed while it was read; submit again when nothing writes to it"
    ]
    assert not world.copy.exists()


def test_a_disk_that_is_too_small_is_told_before_a_byte_moves(world: TreeWorld) -> None:
    outcome = world.run(space=Space(keep_free=1 << 60))
    for failure in outcome.failures:
        assert failure.code == 5
        assert " bytes are needed and 0 free, " in failure.message
    assert len(outcome.failures) == world.comm.size
    assert not world.copy.exists()


def assert_unchanged_by_a_failure(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch, **request: object
) -> None:
    """One node fails when all is written, and all copies of what has changed stay as they were."""
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


def test_a_node_that_fails_in_the_end_leaves_all_without_a_new_tree(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stage()
    assert_unchanged_by_a_failure(world, monkeypatch)
    assert world.stage().tree == Counts(len(FILES), 1, 7)


@pytest.mark.parametrize("exchanged", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("staged", [False, True], ids=["first", "again"])
def test_an_end_around_the_exchange_costs_nothing_but_another_stage(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch, *, exchanged: bool, staged: bool
) -> None:
    if staged:
        world.stage()
        world.on_first(lambda: (world.source / "sub1/file1").write_bytes(b"changed"))
    publish = PartialTree.publish

    def end(self: PartialTree, path: str) -> None:
        if exchanged:
            publish(self, path)
        raise DestinationError("the end")

    monkeypatch.setattr(PartialTree, "publish", end)
    assert {failure.message for failure in world.run().failures} == {"the end"}
    monkeypatch.undo()
    assert world.copy.exists() == (staged or exchanged)
    world.stage()
    assert world.stage().received == []


def test_a_full_disk_for_the_table_leaves_the_old_tree(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stage()
    before = as_copy(walk(str(world.copy)))
    world.on_first(lambda: (world.source / "sub1/file1").write_bytes(b"changed"))

    def full(*_: object) -> str:
        raise SpaceError("full")

    if world.comm.rank == world.comm.size - 1:
        monkeypatch.setattr(Cache, "save_table", full)
    assert messages(world.run()) == [f"5 {world.nodes[-1]}: full"]
    assert as_copy(walk(str(world.copy))) == before
    monkeypatch.undo()
    world.stage()


def test_nodes_that_are_current_by_size_alone_are_no_source(world: TreeWorld) -> None:
    if world.comm.size == 1:
        return
    world.stage()
    world.on_first(lambda: (world.source / "sub5/file5").write_bytes(b"12345"))
    world.on_last(lambda: shutil.rmtree(world.copy))
    (item,) = world.run(items=world.items(validate=Validate.SIZE)).items
    assert (item.received, item.senders) == ([world.nodes[-1]], [])
    if world.comm.rank == world.comm.size - 1:
        assert (world.copy / "sub5/file5").read_bytes() == b"12345"
    assert world.stage().received == world.nodes[:-1]


def test_what_its_user_put_in_the_trees_place_stays(world: TreeWorld) -> None:
    world.stage()

    def put() -> None:
        world.copy.rename(world.copy.with_name("old"))
        world.copy.mkdir()
        (world.copy / "mine").write_bytes(b"mine")

    world.on_last(put)
    outcome = world.run()
    assert [failure.code for failure in outcome.failures] == [6]
    assert "is a folder that was not staged, and would be lost" in outcome.failures[0].message
    world.comm.Barrier()
    world.on_last(lambda: shutil.rmtree(world.copy))
    world.on_last(lambda: world.copy.with_name("old").rename(world.copy))
    assert world.stage().received == []


def test_a_staged_file_may_become_a_folder(world: TreeWorld) -> None:
    file = world.items(source=f"{world.source}/large")
    world.run(items=file)
    assert world.copy.is_file()
    assert world.stage().received == world.nodes


def test_nothing_is_staged_into_a_tree_that_is_staged_as_a_whole(world: TreeWorld) -> None:
    world.stage()
    inner = world.items(source=f"{world.source}/large", destination="/nvme/tree/sub1/in")
    why = "/nvme/tree/sub1/in lies in /nvme/tree, which is staged as a whole"
    assert messages(world.run(items=inner)) == [
        f"6 {node}: {why}; choose another destination" for node in world.nodes
    ]
    named = world.items(source=f"{world.source}/large")
    assert "lies in /nvme/tree, which is staged" in world.run(items=named).failures[0].message


def test_a_tree_does_not_take_what_is_staged_by_itself(world: TreeWorld) -> None:
    inner = world.items(source=f"{world.source}/large", destination="/nvme/tree/in")
    world.run(items=inner)
    outcome = world.run()
    assert {failure.code for failure in outcome.failures} == {6}
    assert (world.copy / "in").exists()


def test_a_table_of_another_version_is_none(world: TreeWorld) -> None:
    world.stage()
    cache = open_cache(str(world.copy.parent), os.getuid())
    record = cache.load("/nvme/tree")
    assert record is not None
    assert record.tree is not None
    digest = cache.save_table("/nvme/tree", b"of another version")
    cache.save(replace(record, tree=replace(record.tree, table_digest=digest)))
    world.comm.Barrier()
    item = world.stage(validate=Validate.CHECKSUM)
    assert (item.received, item.tree) == (world.nodes, ALL)


def test_patterns_say_what_is_staged(world: TreeWorld) -> None:
    (item,) = world.run(items=world.items(exclude=("sub*/",))).items
    assert item.tree == Counts(2, 2, FILES["large"])
    assert sorted(os.listdir(world.copy)) == ["empty", "large", "link", "twin", "zero"]
    (item,) = world.run(items=world.items(include=("/sub1/", "/large"))).items
    few = sum(name.startswith("sub1/") for name in FILES)
    assert item.tree is not None
    assert (item.tree.files, item.tree.moved, item.tree.deleted) == (few + 1, few, 1)
    assert sorted(os.listdir(world.copy)) == ["large", "sub1"]
    item = world.stage()
    assert item.tree is not None
    assert (item.tree.moved, item.tree.deleted) == (len(FILES) - few - 1, 0)


def test_patterns_are_for_folders(world: TreeWorld) -> None:
    items = world.items(source=f"{world.source}/large", exclude=("*",))
    why = "is not a folder; remove include and exclude, which are for folders"
    assert messages(world.run(items=items)) == [f"2 node0: {world.source}/large {why}"]


def test_one_folder_may_be_staged_in_parts(world: TreeWorld) -> None:
    parts = (
        *world.items(destination="/nvme/one", include=("/large",)),
        *world.items(destination="/nvme/two", exclude=("/large", "/twin")),
    )
    first, second = world.run(items=parts).items
    rest = len(FILES) - 1
    assert first.tree == Counts(1, 1, FILES["large"])
    assert second.tree == Counts(rest, rest, TOTAL - FILES["large"])


# Archives


def archive_of(world: TreeWorld, suffix: str) -> str:
    """An archive of the source, made by the first rank."""
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


def test_a_hostile_archive_leaves_what_was_there(world: TreeWorld) -> None:
    path = archive_of(world, ".tar")
    items = world.items(source=path, extract=True)
    world.run(items=items)
    before = as_copy(walk(str(world.copy)))

    def spoil() -> None:
        with tarfile.open(path, "a") as archive:
            archive.addfile(tarfile.TarInfo("../bad"))

    world.on_first(spoil)
    why = "the archive's member '../bad' has '..' in its name: nothing of it is unpacked"
    assert messages(world.run(items=items)) == [f"2 {node}: {why}" for node in world.nodes]
    assert as_copy(walk(str(world.copy))) == before
    assert os.listdir(world.copy.parent / f".slurm-stage/{os.getuid()}/partial") == []


@pytest.mark.parametrize("suffix", [".tar.gz", ".zip"])
def test_a_damaged_archive_is_told(world: TreeWorld, suffix: str) -> None:
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
    assert "goes beyond the 10000 bytes that may be" in outcome.failures[0].message
    outcome = world.run(items=items, space=Space(unpacked_members=10))
    assert "is one more than the 10 that may be" in outcome.failures[0].message
    assert not world.copy.exists()


def test_a_folder_has_nothing_to_extract(world: TreeWorld) -> None:
    assert messages(world.run(items=world.items(extract=True))) == [
        f"2 node0: {world.source} is a folder; extract is for archives"
    ]


# Python environments

SCRIPT = "#!{}/bin/python\nprint('hello')\n"


def make_environment(world: TreeWorld) -> None:
    """Turn the source into what a virtual environment is."""

    def make() -> None:
        shutil.rmtree(world.source)
        (world.source / "bin").mkdir(parents=True)
        (world.source / "lib/python3.11/site-packages").mkdir(parents=True)
        (world.source / "pyvenv.cfg").write_text(
            f"home = /usr/bin\ncommand = venv {world.source}\n"
        )
        (world.source / "bin/activate").write_text('VIRTUAL_ENV="/made/here"\n')
        (world.source / "bin/hello").write_text(SCRIPT.format(world.source))
        (world.source / "bin/made").write_text(SCRIPT.format("/made/here"))
        (world.source / "bin/python").symlink_to("/usr/bin/python3")
        (world.source / "lib/python3.11/site-packages/module.py").write_text(str(world.source))
        for path in (world.source / "bin").iterdir():
            if not path.is_symlink():
                path.chmod(0o555)

    world.on_first(make)


def check_environment(world: TreeWorld) -> None:
    """The copy works where it is."""
    assert (world.copy / "bin/hello").read_text() == SCRIPT.format("/nvme/tree")
    assert (world.copy / "bin/made").read_text() == SCRIPT.format("/nvme/tree")
    assert (world.copy / "bin/activate").read_text() == 'VIRTUAL_ENV="/nvme/tree"\n'
    assert (world.copy / "pyvenv.cfg").read_text() == "home = /usr/bin\ncommand = venv /nvme/tree\n"
    module = world.copy / "lib/python3.11/site-packages/module.py"
    assert module.read_text() == str(world.source)
    assert (world.copy / "bin/hello").stat().st_mode & 0o777 == 0o555
    world.comm.Barrier()


VENV = {"relocate": Relocate.VENV}


@pytest.mark.parametrize("verify", Verify)
def test_an_environment_names_the_place_where_it_comes_to_lie(
    world: TreeWorld, verify: Verify
) -> None:
    make_environment(world)
    (item,) = world.run(items=world.items(**VENV, verify=verify)).items
    check_environment(world)
    assert item.received == world.nodes
    for validate in (Validate.STAT, Validate.CHECKSUM):
        (item,) = world.run(items=world.items(**VENV, validate=validate)).items
        assert (item.received, item.reasons) == ([], [])


def test_a_changed_environment_moves_what_changed_and_names_its_place(world: TreeWorld) -> None:
    make_environment(world)
    world.run(items=world.items(**VENV))
    world.on_first((world.source / "bin/hello").unlink)
    text = SCRIPT.format(world.source)
    world.on_first(lambda: (world.source / "bin/hello").write_text(text))
    world.on_first(lambda: (world.source / "bin/hello").chmod(0o555))
    (item,) = world.run(items=world.items(**VENV)).items
    assert item.tree == Counts(5, 1, len(text))
    check_environment(world)


def test_a_node_that_lacks_the_environment_gets_it_from_one_that_has_it(world: TreeWorld) -> None:
    if world.comm.size == 1:
        return
    make_environment(world)
    world.run(items=world.items(**VENV))
    world.on_last(lambda: shutil.rmtree(world.copy))
    (item,) = world.run(items=world.items(**VENV)).items
    assert (item.received, item.senders) == ([world.nodes[-1]], ["node0"])
    check_environment(world)
    world.on_last((world.copy / "bin/hello").unlink)
    (item,) = world.run(items=world.items(**VENV)).items
    assert (item.received, item.senders) == ([world.nodes[-1]], ["node0"])
    assert item.tree is not None
    assert item.tree.moved == 1
    check_environment(world)


def test_relocation_is_part_of_what_is_current(world: TreeWorld) -> None:
    make_environment(world)
    assert world.stage().received == world.nodes
    (item,) = world.run(items=world.items(**VENV)).items
    assert (item.received, item.reasons) == (world.nodes, ["relocated differently"])
    check_environment(world)
    assert world.stage().reasons == ["relocated differently"]


def test_an_archived_environment_is_relocated_when_it_is_unpacked(world: TreeWorld) -> None:
    make_environment(world)
    items = world.items(source=archive_of(world, ".tar.gz"), extract=True, **VENV)
    world.run(items=items)
    assert (world.copy / "bin/made").read_text() == SCRIPT.format("/nvme/tree")
    assert (world.copy / "bin/activate").read_text() == 'VIRTUAL_ENV="/nvme/tree"\n'
    for validate in (Validate.STAT, Validate.CHECKSUM):
        (item,) = world.run(
            items=(replace(items[0], options=replace(items[0].options, validate=validate)),)
        ).items
        assert (item.received, item.reasons) == ([], [])


def test_what_is_no_environment_is_not_relocated(world: TreeWorld) -> None:
    why = (
        "has no pyvenv.cfg at its top, so it is not a virtual environment; stage it without "
        "relocate"
    )
    assert messages(world.run(items=world.items(**VENV))) == [
        f"2 {node}: {world.source} {why}" for node in world.nodes
    ]
    assert not world.copy.exists()
    file = world.items(source=f"{world.source}/large", **VENV)
    why = f"{world.source}/large is not a folder; relocate is for Python environments"
    assert messages(world.run(items=file)) == [f"2 node0: {why}"]


# A part on each node


LIST = ".stage-shards.tsv"


def files_of(folder: Path) -> dict[str, bytes]:
    """What is in the files of a folder, but for links, which lead out of a part."""
    found = files_beneath(folder)
    return {name: text for name, text in found.items() if not (folder / name).is_symlink()}


def spread(world: TreeWorld, **options: object) -> ItemReport:
    """Spread the folder over the nodes, and see that each has its part of the source."""
    (item,) = world.run(items=world.items(mode=Mode.SHARD, **options)).items
    owners = owners_of(world)
    source = files_of(world.source)
    found = files_of(world.copy)
    assert found.pop(LIST).decode() == list_of(world, owners)
    assert found == {name: source[name] for name in found}
    assert stat_of(world.copy, set(found)) == stat_of(world.source, set(found))
    assert os.listdir(world.copy.parent / f".slurm-stage/{os.getuid()}/partial") == []
    world.comm.Barrier()
    return item


def spread_all(world: TreeWorld, **options: object) -> ItemReport:
    """Spread the folder, and see that the parts together are all of the source."""
    item = spread(world, **options)
    assert owners_of(world).keys() == files_of(world.source).keys()
    assert item.tree is not None
    sizes = world.comm.allgather(part_size(world))
    assert (item.tree.parts or tuple(sizes)) == tuple(sizes)
    return item


def owners_of(world: TreeWorld) -> dict[str, int]:
    """The node of each file; there is only one."""
    held = world.comm.allgather(sorted(set(files_of(world.copy)) - {LIST}))
    times = Counter(name for names in held for name in names)
    assert set(times.values()) <= {1}
    return {name: node for node, names in enumerate(held) for name in names}


def part_size(world: TreeWorld) -> int:
    """The bytes of this node's files, each counted once."""
    names = set(files_of(world.copy)) - {LIST, "twin"}
    return sum((world.copy / name).stat().st_size for name in names)


def list_of(world: TreeWorld, owners: dict[str, int]) -> str:
    """What the list is to say: node, bytes and path of each file, in the order of the paths."""
    listing = walk(str(world.source))
    sizes = {
        os.fsdecode(path): (world.source / os.fsdecode(path)).stat().st_size
        for path, kind in zip(listing.paths, listing.kinds, strict=True)
        if kind in (Kind.FILE, Kind.HARD_LINK)
    }
    return "".join(
        f"{world.nodes[owners[name]]}\t{sizes[name]}\t{name}\n" for name in sizes if name in owners
    )


def stat_of(folder: Path, files: set[str]) -> list[tuple[object, ...]]:
    """What of a folder, its links and some of its files a part has in common with the source."""
    facts = [path.lstat() for path in sorted(folder.rglob("*")) if keep(path, folder, files)]
    return [(one.st_mode, one.st_mtime_ns, one.st_gid) for one in [folder.lstat(), *facts]]


def keep(path: Path, folder: Path, files: set[str]) -> bool:
    return path.is_symlink() or path.is_dir() or str(path.relative_to(folder)) in files


def counts(item: ItemReport) -> Counts:
    """What moved of a folder, whatever its parts."""
    assert item.tree is not None
    return replace(item.tree, parts=())


@pytest.mark.parametrize("verify", Verify)
def test_each_file_of_a_spread_folder_is_on_one_node_and_read_once(
    world: TreeWorld, verify: Verify
) -> None:
    item = spread_all(world, verify=verify)
    assert (item.received, item.current, item.senders) == (world.nodes, [], [])
    assert (item.source_bytes_read, item.size, counts(item)) == (TOTAL, TOTAL, ALL)
    assert (item.reasons, item.shard_list) == (["absent"], f"/nvme/tree/{LIST}")
    assert item.tree is not None
    assert (len(item.tree.parts), sum(item.tree.parts)) == (world.comm.size, TOTAL)


def test_every_node_has_some_of_the_files_of_a_spread_folder(world: TreeWorld) -> None:
    spread(world)
    small = {name: node for name, node in owners_of(world).items() if name in FILES}
    large = small.pop("large")
    loads = Counter[int]()
    for name, node in small.items():
        loads[node] += FILES[name]
    others = [loads[node] for node in range(world.comm.size) if node != large]
    assert not others or loads[large] == 0
    assert not others or max(others) - min(others) <= 0.05 * sum(others) / len(others)


def test_a_file_of_a_spread_folder_has_all_its_names_on_its_node(world: TreeWorld) -> None:
    spread(world)
    owners = owners_of(world)
    assert owners["twin"] == owners["large"]
    if owners["large"] == world.comm.rank:
        assert (world.copy / "twin").samefile(world.copy / "large")


def test_every_node_has_all_folders_and_links_of_a_spread_folder(world: TreeWorld) -> None:
    spread(world)
    folders = {f"sub{number}" for number in range(7)} | {"empty"}
    assert {path.name for path in world.copy.iterdir() if path.is_dir()} == folders
    assert os.readlink(world.copy / "link") == "sub1/file1"


def test_the_list_of_a_spread_folder_is_the_same_on_all_nodes_and_for_reading(
    world: TreeWorld,
) -> None:
    spread(world)
    (text,) = set(world.comm.allgather((world.copy / LIST).read_text()))
    lines = [line.split("\t") for line in text.splitlines()]
    assert [name for _, _, name in lines] == sorted([*FILES, "twin"])
    assert sum(int(size) for _, size, name in lines if name != "twin") == TOTAL
    assert (world.copy / LIST).stat().st_mode & 0o777 == 0o444


def test_a_spread_folder_that_is_there_is_current(world: TreeWorld) -> None:
    spread_all(world)
    before = as_copy(walk(str(world.copy)))
    item = spread_all(world)
    assert (item.received, item.current, item.source_bytes_read) == ([], world.nodes, 0)
    assert (item.tree, item.shard_list) == (Counts(len(FILES)), f"/nvme/tree/{LIST}")
    assert as_copy(walk(str(world.copy))) == before
    assert spread_all(world, validate=Validate.CHECKSUM).received == []
    assert spread_all(world, validate=Validate.SIZE).received == []


def test_a_changed_file_of_a_spread_folder_moves_alone(world: TreeWorld) -> None:
    spread_all(world)
    before = owners_of(world)
    world.on_first(lambda: (world.source / "sub1/file1").write_bytes(b"changed"))
    item = spread_all(world)
    assert (item.received, item.source_bytes_read) == (world.nodes, 7)
    assert (counts(item), item.reasons) == (Counts(len(FILES), 1, 7), ["the source changed"])
    assert {**owners_of(world), "sub1/file1": -1} == {**before, "sub1/file1": -1}
    assert spread_all(world).received == []


def test_a_new_file_of_a_spread_folder_comes_and_a_deleted_one_goes(world: TreeWorld) -> None:
    spread_all(world)
    before = owners_of(world)

    def change() -> None:
        (world.source / "empty/new").write_bytes(b"new")
        (world.source / "sub1/file1").unlink()
        shutil.rmtree(world.source / "sub2")

    world.on_first(change)
    gone = 1 + sum(name.startswith("sub2/") for name in FILES)
    item = spread_all(world)
    assert counts(item) == Counts(len(FILES) - gone + 1, 1, 3, gone)
    assert not (world.copy / "sub2").exists()
    after = owners_of(world)
    assert after.pop("empty/new") in range(world.comm.size)
    assert after == {name: before[name] for name in after}


def test_a_deleted_file_of_a_spread_folder_goes_and_nothing_moves(world: TreeWorld) -> None:
    spread_all(world)
    before = owners_of(world)
    world.on_first((world.source / "zero").unlink)
    item = spread_all(world)
    assert (counts(item), item.source_bytes_read) == (Counts(len(FILES) - 1, 0, 0, 1), 0)
    assert {**owners_of(world), "zero": before["zero"]} == before


def test_a_copy_of_a_folder_becomes_a_part_and_a_part_a_copy(world: TreeWorld) -> None:
    world.stage()
    item = spread_all(world)
    assert (item.received, item.reasons) == (world.nodes, ["staged as a whole"])
    assert (counts(item), item.source_bytes_read) == (Counts(len(FILES)), 0)
    item = world.stage()
    assert (item.received, item.reasons) == (world.nodes, ["only a part is staged"])
    # One node alone has all of it.
    moved = Counts(len(FILES)) if world.comm.size == 1 else ALL
    assert (item.tree, item.source_bytes_read) == (moved, moved.moved_size)
    assert not (world.copy / LIST).exists()
    assert item.shard_list == ""


@pytest.mark.parametrize("what", ["written", "removed", "mode", "list", "added"])
def test_what_a_job_changed_in_its_part_is_mended(world: TreeWorld, what: str) -> None:
    spread_all(world)
    owners = owners_of(world)
    last = world.comm.size - 1
    name = next(name for name in sorted(owners) if owners[name] == last and name != "twin")

    def harm() -> None:
        path = world.copy / name
        if what == "written":
            path.write_bytes(b"written by a job")
        elif what == "removed":
            path.unlink()
        elif what == "mode":
            path.chmod(0o600)
        elif what == "list":
            (world.copy / LIST).unlink()
        else:
            (world.copy / "new").touch()

    world.on_last(harm)
    moved = Counts(len(FILES))
    if what in ("written", "removed", "mode"):
        moved = Counts(len(FILES), 1, FILES[name])
    item = spread_all(world)
    assert (counts(item), item.source_bytes_read) == (moved, moved.moved_size)
    assert item.reasons == ["the copy changed"]
    assert owners_of(world) == owners


def test_validate_checksum_finds_damage_in_a_part_and_moves_that_file_alone(
    world: TreeWorld,
) -> None:
    spread_all(world)
    owners = owners_of(world)
    if owners["sub5/file5"] == world.comm.rank:
        damage(world.copy / "sub5/file5")
    item = spread_all(world, validate=Validate.CHECKSUM)
    assert counts(item) == Counts(len(FILES), 1, 5)
    assert item.reasons == ["its bytes differ from its digest"]


def test_validate_always_moves_all_parts(world: TreeWorld) -> None:
    spread_all(world)
    item = spread_all(world, validate=Validate.ALWAYS)
    assert (counts(item), item.source_bytes_read) == (ALL, TOTAL)
    assert item.reasons == ["validate=always"]


def test_a_node_that_lost_its_part_gets_it_again_from_the_source(world: TreeWorld) -> None:
    spread_all(world)
    owners, size = owners_of(world), world.comm.allgather(part_size(world))[-1]
    world.on_last(lambda: shutil.rmtree(world.copy))
    item = spread_all(world)
    assert (item.senders, item.source_bytes_read) == ([], size)
    assert owners_of(world) == owners


def test_a_dry_run_of_a_spread_folder_tells_and_does_nothing(world: TreeWorld) -> None:
    (item,) = world.run(items=world.items(mode=Mode.SHARD), dry_run=True).items
    assert (item.received, item.tree) == (world.nodes, Counts(len(FILES)))
    assert not world.copy.exists()


def stage_on_fewer(world: TreeWorld) -> ItemReport | None:
    """Spread the folder over all nodes but the last."""
    few = world.comm.Split(0 if world.comm.rank < world.comm.size - 1 else MPI.UNDEFINED)
    if few == MPI.COMM_NULL:
        return None
    assert isinstance(few, MPI.Intracomm)
    request = replace(world.request, items=world.items(mode=Mode.SHARD), nodes=few.size)
    context = Context(few, world.node, request)
    outcome = run(context, Stopwatch(time.monotonic(), Phase.SURVEY))
    few.Free()
    assert outcome.failures == []
    return outcome.items[0]


def test_fewer_nodes_read_what_the_others_had_and_leave_the_rest(world: TreeWorld) -> None:
    if world.comm.size == 1:
        return
    spread_all(world)
    owners, size = owners_of(world), world.comm.allgather(part_size(world))[-1]
    item = stage_on_fewer(world)
    held = set(files_of(world.copy)) - {LIST}
    assert held >= {name for name, node in owners.items() if node == world.comm.rank}
    if item:
        assert (item.received, item.source_bytes_read) == (world.nodes[:-1], size)
    # And all of them have it as it was, which nobody needs to read.
    item = spread_all(world)
    assert (item.source_bytes_read, owners_of(world)) == (0, owners)


NUMBERED = {"by": "file{n}", "exclude": ("/large", "/twin", "/zero")}


def test_a_number_in_the_path_says_where_a_file_goes(world: TreeWorld) -> None:
    item = spread(world, **NUMBERED)
    names = [name for name in FILES if name.startswith("sub")]
    numbers = {name: int(name.partition("file")[2]) for name in names}
    assert owners_of(world) == {name: numbers[name] % world.comm.size for name in names}
    assert counts(item) == Counts(len(names), len(names), TOTAL - FILES["large"])
    assert spread(world, **NUMBERED).received == []
    item = spread(world, **{**NUMBERED, "by": "*{n}"})
    assert (item.reasons, item.source_bytes_read) == (["split differently"], 0)


def test_a_file_without_a_number_is_told_before_a_byte_moves(world: TreeWorld) -> None:
    items = world.items(mode=Mode.SHARD, by="file{n}")
    why = f"{world.source}/large does not match by=file{{n}}; leave it out by exclude="
    assert messages(world.run(items=items)) == [f"2 node0: {why}"]
    assert not world.copy.exists()


def test_a_source_with_a_file_in_the_lists_place_is_refused(world: TreeWorld) -> None:
    world.on_first((world.source / LIST).touch)
    why = f"{world.source}/{LIST} has the name of the list of all parts"
    assert messages(world.run(items=world.items(mode=Mode.SHARD))) == [
        f"2 node0: {why}; leave it out with exclude=/{LIST}"
    ]
    assert not world.copy.exists()
    world.comm.Barrier()
    item = spread(world, exclude=(f"/{LIST}",))
    assert counts(item) == ALL


def test_a_file_of_the_lists_name_further_down_is_a_file_as_others(world: TreeWorld) -> None:
    world.on_first((world.source / "empty" / LIST).touch)
    assert counts(spread_all(world)) == Counts(len(FILES) + 1, len(FILES) + 1, TOTAL)
    assert f"empty/{LIST}" in owners_of(world)


def test_a_plain_file_is_not_spread(world: TreeWorld) -> None:
    items = world.items(source=f"{world.source}/large", mode=Mode.SHARD)
    why = f"{world.source}/large is not a folder; mode=shard is for folders"
    assert messages(world.run(items=items)) == [f"2 node0: {why}"]


def test_a_folder_without_files_is_spread(world: TreeWorld) -> None:
    def empty() -> None:
        for name in files_of(world.source):
            (world.source / name).unlink()

    world.on_first(empty)
    assert counts(spread_all(world)) == Counts(0)
    assert (world.copy / LIST).read_bytes() == b""
    assert (world.copy / "empty").is_dir()
    assert spread_all(world).received == []


def test_a_spread_source_that_changes_while_it_is_read_is_read_again(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = StreamReader.read_into
    changed: list[None] = []
    # It is the first node's, however many there are.
    path = world.source / "sub0/file84"

    def change_then_read(self: StreamReader, buffer: memoryview, offset: int) -> None:
        if not changed:
            changed.append(None)
            path.write_bytes(b"new")
        read(self, buffer, offset)

    if world.comm.rank == 0:
        monkeypatch.setattr(StreamReader, "read_into", change_then_read)
    item = spread(world, **NUMBERED)
    assert counts(item).moved_size == TOTAL - FILES["large"] - 84 + 3


def test_a_node_that_fails_in_the_end_leaves_all_without_new_parts(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread_all(world)
    assert_unchanged_by_a_failure(world, monkeypatch, items=world.items(mode=Mode.SHARD))
    assert counts(spread_all(world)) == Counts(len(FILES), 1, 7)
