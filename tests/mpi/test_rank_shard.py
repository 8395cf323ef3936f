"""Whole stages of folders that are spread over the nodes."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from mpi4py import MPI

from stager.base.options import Mode, Validate, Verify
from stager.base.outcome import Counts
from stager.base.telemetry import Phase, Stopwatch
from stager.fs.files import write_all
from stager.rank.agree import Context
from stager.rank.program import run
from stager.request.items import Waiting, Work
from stager.tree.listing import Kind
from stager.tree.stream import StreamReader
from stager.tree.walk import walk
from stager.wire.channel import Channel
from stager.wire.layout import KEY_SIZE
from tests.support.tree_world import (
    ALL,
    FILES,
    TOTAL,
    TreeWorld,
    assert_unchanged_by_a_failure,
    damage,
    files_beneath,
)
from tests.support.trees import as_copy
from tests.support.world import messages

if TYPE_CHECKING:
    from pathlib import Path

    from stager.base.outcome import ItemReport


@pytest.fixture
def world(comm: MPI.Intracomm, folder: Path) -> TreeWorld:
    return TreeWorld(comm, folder)


LIST = ".stage-shards.tsv"


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of a folder's files, without links, which may lead out of a part."""
    found = files_beneath(folder)
    return {name: text for name, text in found.items() if not (folder / name).is_symlink()}


def spread(world: TreeWorld, **options: object) -> ItemReport:
    """Spread the folder over the nodes; check that each has its part of the source."""
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
    """Spread the folder; check that the parts together are the whole source."""
    item = spread(world, **options)
    assert owners_of(world).keys() == files_of(world.source).keys()
    assert item.tree is not None
    sizes = world.comm.allgather(part_size(world))
    assert (item.tree.parts or tuple(sizes)) == tuple(sizes)
    return item


def owners_of(world: TreeWorld) -> dict[str, int]:
    """Return the node of each file; check that it is on one only."""
    held = world.comm.allgather(sorted(set(files_of(world.copy)) - {LIST}))
    times = Counter(name for names in held for name in names)
    assert set(times.values()) <= {1}
    return {name: node for node, names in enumerate(held) for name in names}


def part_size(world: TreeWorld) -> int:
    """Return the bytes of this node's files, counting hard links once."""
    names = set(files_of(world.copy)) - {LIST, "twin"}
    return sum((world.copy / name).stat().st_size for name in names)


def list_of(world: TreeWorld, owners: dict[str, int]) -> str:
    """Return the expected list: node, bytes and path of each file, in the order of the paths."""
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
    """Return the attributes that a part with these files must share with the source."""
    facts = [path.lstat() for path in sorted(folder.rglob("*")) if keep(path, folder, files)]
    return [(one.st_mode & ~0o077, one.st_mtime_ns, one.st_gid) for one in [folder.lstat(), *facts]]


def keep(path: Path, folder: Path, files: set[str]) -> bool:
    return path.is_symlink() or path.is_dir() or str(path.relative_to(folder)) in files


def counts(item: ItemReport) -> Counts:
    """Return the counts of moved files and bytes, without the sizes of parts."""
    assert item.tree is not None
    return replace(item.tree, parts=())


@pytest.mark.parametrize("verify", Verify)
def test_each_file_is_on_one_node_and_read_once(world: TreeWorld, verify: Verify) -> None:
    item = spread_all(world, verify=verify)
    assert (item.received, item.current, item.senders) == (world.nodes, [], [])
    assert (item.source_bytes_read, item.size, counts(item)) == (TOTAL, TOTAL, ALL)
    assert (item.reasons, item.shard_list) == (["absent"], f"/nvme/tree/{LIST}")
    assert item.tree is not None
    assert (len(item.tree.parts), sum(item.tree.parts)) == (world.comm.size, TOTAL)


def test_every_node_has_about_as_many_bytes(world: TreeWorld) -> None:
    spread(world)
    small = {name: node for name, node in owners_of(world).items() if name in FILES}
    large = small.pop("large")
    loads = Counter[int]()
    for name, node in small.items():
        loads[node] += FILES[name]
    others = [loads[node] for node in range(world.comm.size) if node != large]
    assert not others or loads[large] == 0
    assert not others or max(others) - min(others) <= 0.05 * sum(others) / len(others)


def test_the_hard_links_of_a_file_are_on_its_node(world: TreeWorld) -> None:
    spread(world)
    owners = owners_of(world)
    assert owners["twin"] == owners["large"]
    if owners["large"] == world.comm.rank:
        assert (world.copy / "twin").samefile(world.copy / "large")


def test_every_node_has_all_folders_and_symbolic_links(world: TreeWorld) -> None:
    spread(world)
    folders = {f"sub{number}" for number in range(7)} | {"empty"}
    assert {path.name for path in world.copy.iterdir() if path.is_dir()} == folders
    assert os.readlink(world.copy / "link") == "sub1/file1"


def test_the_list_of_parts_is_the_same_on_all_nodes_and_read_only(
    world: TreeWorld,
) -> None:
    spread(world)
    (text,) = set(world.comm.allgather((world.copy / LIST).read_text()))
    lines = [line.split("\t") for line in text.splitlines()]
    assert [name for _, _, name in lines] == sorted([*FILES, "twin"])
    assert sum(int(size) for _, size, name in lines if name != "twin") == TOTAL
    assert (world.copy / LIST).stat().st_mode & 0o777 == 0o400


def test_a_spread_folder_is_current_while_nothing_changes(world: TreeWorld) -> None:
    spread_all(world)
    before = as_copy(walk(str(world.copy)))
    item = spread_all(world)
    assert (item.received, item.current, item.source_bytes_read) == ([], world.nodes, 0)
    assert (item.tree, item.shard_list) == (Counts(len(FILES)), f"/nvme/tree/{LIST}")
    assert as_copy(walk(str(world.copy))) == before
    assert spread_all(world, validate=Validate.CHECKSUM).received == []


def test_a_changed_file_moves_alone(world: TreeWorld) -> None:
    spread_all(world)
    before = owners_of(world)
    world.on_first(lambda: (world.source / "sub1/file1").write_bytes(b"changed"))
    item = spread_all(world)
    assert (item.received, item.source_bytes_read) == (world.nodes, 7)
    assert (counts(item), item.reasons) == (
        Counts(len(FILES), 1, 7),
        ["the source changed, or other files of it are wanted"],
    )
    assert {**owners_of(world), "sub1/file1": -1} == {**before, "sub1/file1": -1}
    assert spread_all(world).received == []


def test_a_new_file_is_added_and_a_deleted_one_removed(world: TreeWorld) -> None:
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


def test_a_deleted_file_is_removed_and_nothing_moves(world: TreeWorld) -> None:
    spread_all(world)
    before = owners_of(world)
    world.on_first((world.source / "zero").unlink)
    item = spread_all(world)
    assert (counts(item), item.source_bytes_read) == (Counts(len(FILES) - 1, 0, 0, 1), 0)
    assert {**owners_of(world), "zero": before["zero"]} == before


def test_a_copy_of_a_folder_becomes_a_part_and_a_part_a_copy(world: TreeWorld) -> None:
    world.stage()
    item = spread_all(world)
    assert (item.received, item.reasons) == (
        world.nodes,
        ["the copy has all files, one part (mode=shard) is wanted"],
    )
    assert (counts(item), item.source_bytes_read) == (Counts(len(FILES)), 0)
    item = world.stage()
    assert (item.received, item.reasons) == (
        world.nodes,
        ["the copy has one node's part (mode=shard), all files are wanted"],
    )
    # A single node already has all of it.
    moved = Counts(len(FILES)) if world.comm.size == 1 else ALL
    assert (item.tree, item.source_bytes_read) == (moved, moved.moved_size)
    assert not (world.copy / LIST).exists()
    assert item.shard_list == ""


@pytest.mark.parametrize("what", ["written", "removed", "mode", "list"])
def test_what_a_job_changed_in_its_part_is_restored(world: TreeWorld, what: str) -> None:
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
            path.chmod(0o640)
        else:
            (world.copy / LIST).unlink()

    world.on_last(harm)
    moved = Counts(len(FILES))
    if what in ("written", "removed", "mode"):
        moved = Counts(len(FILES), 1, FILES[name])
    item = spread_all(world, replace=what == "written")
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
    assert item.reasons == ["it is damaged"]


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


def test_a_dry_run_reports_and_does_nothing(world: TreeWorld) -> None:
    (item,) = world.run(items=world.items(mode=Mode.SHARD), work=Work.PLAN).items
    assert (item.received, item.tree) == (world.nodes, Counts(len(FILES)))
    assert not world.copy.exists()


def stage_on_fewer(world: TreeWorld) -> ItemReport | None:
    """Spread the folder over all nodes but the last."""
    few = world.comm.Split(0 if world.comm.rank < world.comm.size - 1 else MPI.UNDEFINED)
    if few == MPI.COMM_NULL:
        return None
    assert isinstance(few, MPI.Intracomm)
    request = replace(world.request, items=world.items(mode=Mode.SHARD), nodes=few.size)
    channel = Channel(few, bytes(KEY_SIZE), world.node.name)
    context = Context(few, world.node, request, channel)
    outcome = run(context, Stopwatch(time.monotonic(), Phase.SURVEY))
    few.Free()
    assert outcome.failures == []
    return outcome.items[0]


def test_fewer_nodes_read_only_the_files_of_the_missing_node(world: TreeWorld) -> None:
    if world.comm.size == 1:
        return
    spread_all(world)
    owners, size = owners_of(world), world.comm.allgather(part_size(world))[-1]
    item = stage_on_fewer(world)
    held = set(files_of(world.copy)) - {LIST}
    assert held >= {name for name, node in owners.items() if node == world.comm.rank}
    if item:
        assert (item.received, item.source_bytes_read) == (world.nodes[:-1], size)
    # Together all nodes still have every file, so nothing is read from the source.
    item = spread_all(world)
    assert (item.source_bytes_read, owners_of(world)) == (0, owners)


NUMBERED = {"by": "file{n}", "exclude": ("/large", "/twin", "/zero")}


def test_a_number_in_the_path_decides_the_node_of_a_file(world: TreeWorld) -> None:
    item = spread(world, **NUMBERED)
    names = [name for name in FILES if name.startswith("sub")]
    numbers = {name: int(name.partition("file")[2]) for name in names}
    assert owners_of(world) == {name: numbers[name] % world.comm.size for name in names}
    assert counts(item) == Counts(len(names), len(names), TOTAL - FILES["large"])
    assert spread(world, **NUMBERED).received == []
    item = spread(world, **{**NUMBERED, "by": "*{n}"})
    assert (item.reasons, item.source_bytes_read) == (["split differently"], 0)


def test_a_file_without_a_number_fails_the_stage_before_a_byte_moves(world: TreeWorld) -> None:
    items = world.items(mode=Mode.SHARD, by="file{n}")
    why = f"{world.source}/large does not match by=file{{n}}; leave it out by exclude="
    assert messages(world.run(items=items)) == [f"2 node0: {why}"]
    assert not world.copy.exists()


def test_a_source_with_a_file_of_the_lists_name_at_its_top_is_refused(world: TreeWorld) -> None:
    world.on_first((world.source / LIST).touch)
    why = f"mode=shard writes a list to /nvme/tree/{LIST}, but the source has a file of that name"
    assert messages(world.run(items=world.items(mode=Mode.SHARD))) == [
        f"2 node0: {why}; leave it out with exclude=/{LIST}"
    ]
    assert not world.copy.exists()
    world.comm.Barrier()
    item = spread(world, exclude=(f"/{LIST}",))
    assert counts(item) == ALL


def test_a_file_of_the_lists_name_further_down_is_staged(world: TreeWorld) -> None:
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


def test_a_source_that_changes_while_it_is_read_is_read_again(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = StreamReader.read_into
    changed: list[None] = []
    # This file belongs to the first node for any number of nodes.
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


def test_if_one_node_fails_in_the_end_no_node_gets_a_new_part(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread_all(world)
    assert_unchanged_by_a_failure(world, monkeypatch, items=world.items(mode=Mode.SHARD))
    assert counts(spread_all(world)) == Counts(len(FILES), 1, 7)


def test_a_step_status_that_one_node_cannot_write_fails_all(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = world.copy.parent / "run" / str(os.getuid())
    mine.mkdir(parents=True)
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(mine.parent))

    def write(descriptor: int, data: bytes, offset: int) -> None:
        if offset == 1 and len(data) > 1:  # more than a code of one digit
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write_all(descriptor, data, offset)

    world.on_last(lambda: monkeypatch.setattr("stager.node.job_state.write_all", write))
    items = world.items(mode=Mode.SHARD)
    outcome = world.run(items=items, waiting=Waiting("17.0", "4"))
    last = world.comm.size - 1
    path = world.comm.bcast(f"{mine}/17.0.4", root=last)
    assert messages(outcome) == [
        f"8 node{last}: {path}: Input/output error; tell the administrator to check this folder"
    ]
    assert outcome.items == []
    # The tasks of all nodes end with the same code.
    assert (mine / "17.0.4").read_text() == "8\n"
