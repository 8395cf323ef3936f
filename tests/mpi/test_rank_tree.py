"""Whole stages of folders by `run`, where each rank has a folder as its node's disk."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import xxhash

from stager.base.errors import DestinationError, SpaceError
from stager.base.options import Validate, Verify
from stager.base.outcome import Counts, NoteKind
from stager.request.items import Space, Work
from stager.store.cache import Cache, open_cache
from stager.tree.partial_tree import PartialTree
from stager.tree.stream import StreamReader
from stager.tree.update import Step, Update
from stager.tree.walk import walk
from tests.support.tree_world import (
    ALL,
    FILES,
    TOTAL,
    TreeWorld,
    assert_unchanged_by_a_failure,
    damage,
)
from tests.support.trees import as_copy
from tests.support.world import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI

    from stager.base.outcome import ItemReport


@pytest.fixture
def world(comm: MPI.Intracomm, folder: Path) -> TreeWorld:
    return TreeWorld(comm, folder)


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
    assert item.reasons == ["the source changed, or other files of it are wanted"]
    assert (world.copy / "sub3/file3").stat().st_ino == before.st_ino


def test_a_new_file_is_added_and_a_deleted_file_removed(world: TreeWorld) -> None:
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


def test_a_file_that_was_staged_into_a_folder_is_forgotten_if_it_is_gone(world: TreeWorld) -> None:
    (asked,) = world.items()
    inner = f"{asked.destination}/zero"
    world.run(items=(replace(asked, source=f"{world.source}/zero", destination=inner),))
    cache = open_cache(world.node.path("/nvme"), os.getuid(), disk=world.node.disk)
    assert cache.load(inner)
    shutil.rmtree(world.copy)
    assert world.stage().received == world.nodes
    assert [record.destination for record in cache.records()] == [asked.destination]


def test_a_file_may_become_a_folder_and_a_folder_a_file(world: TreeWorld) -> None:
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


def test_files_that_were_added_to_a_copy_stay_whether_the_source_changes_or_not(
    world: TreeWorld,
) -> None:
    world.stage()
    own = ["sub5/__pycache__/x.pyc", "results/1/out", "sub1/log", "-"]

    def add() -> None:
        for name in own:
            (world.copy / name).parent.mkdir(parents=True, exist_ok=True)
            (world.copy / name).write_text(name)
        os.mkfifo(world.copy / "sub5/pipe")
        (world.copy / "results/1").chmod(0)  # nobody looks into it

    world.on_last(add)
    (item,) = world.run().items
    assert (item.received, item.reasons) == ([], [])

    def change() -> None:
        (world.source / "sub5/file5").write_bytes(b"new")
        shutil.rmtree(world.source / "sub1")

    world.on_first(change)
    (item,) = world.run().items
    assert (item.received, changed_on(item)) == (world.nodes, [])

    def check() -> None:
        (world.copy / "results/1").chmod(0o700)
        assert {name: (world.copy / name).read_text() for name in own} == {one: one for one in own}
        assert (world.copy / "sub5/pipe").is_fifo()
        assert (world.copy / "sub5/file5").read_bytes() == b"new"
        assert os.listdir(world.copy / "sub1") == ["log"]

    world.on_last(check)
    assert world.run().items[0].received == []


@pytest.mark.parametrize(
    ("damage", "moved", "own"),
    [
        (lambda tree: (tree / "sub5/file5").write_bytes(b"written by a job"), 5, "sub5/file5"),
        (lambda tree: (tree / "sub5/file5").unlink(), 5, ""),
        (lambda tree: (tree / "empty").rmdir(), 0, ""),
        (lambda tree: shutil.rmtree(tree / "sub5"), 707, ""),
        (lambda tree: (tree / "sub5/file5").chmod(0o640), 5, ""),
        (lambda tree: os.utime(tree / "sub5/file5", ns=(5, 5)), 5, "sub5/file5"),
        (lambda tree: relink(tree / "link", "elsewhere"), 0, "link"),
        (lambda tree: relink(tree / "link", "sub1/file1"), None, ""),
        (lambda tree: (tree / "twin").unlink(), 0, ""),
        (lambda tree: relink(tree / "twin", "large"), 0, "twin"),
    ],
    ids=[
        "written", "removed", "folder", "files", "mode", "touched", "link", "same link",
        "hard link", "no hard link",
    ],
)  # fmt: skip
def test_what_a_job_changed_in_its_copy_is_restored_but_only_with_replace_if_it_is_lost_then(
    world: TreeWorld, damage: Callable[[Path], object], moved: int | None, own: str
) -> None:
    world.stage()
    world.on_last(lambda: damage(world.copy))
    last = world.nodes[-1]
    if own:
        before = os.lstat(world.source.parent / last / "nvme/tree" / own)
        assert messages(world.run()) == [f"6 {last}: {refusal(own)}"]
        after = os.lstat(world.source.parent / last / "nvme/tree" / own)
        # To look at a link changes the time of its last use.
        assert [*before[:7], *before[8:]] == [*after[:7], *after[8:]]
        world.comm.Barrier()
    if moved is None:
        assert world.run().items[0].received == []
        return
    item = world.stage(replace=bool(own))
    assert (item.received, item.reasons) == ([last], ["the copy changed"])
    assert item.tree
    assert item.tree.moved_size == moved
    assert changed_on(item) == ([last] if own else [])


def changed_on(item: ItemReport) -> list[str]:
    return [node for note in item.notes if note.kind is NoteKind.CHANGED for node in note.nodes]


def relink(path: Path, target: str) -> None:
    """Put a symbolic link in the place of a file or link."""
    path.unlink()
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("mine", "new"),
    [
        ("results", "results"),
        ("results/out", "results"),
        ("results", "results/out"),
        ("sub5/out", "sub5"),
    ],
    ids=["file", "folder", "file for a folder", "in a staged folder"],
)
def test_an_added_file_where_a_new_version_has_something_is_named_before_anything_moves(
    world: TreeWorld, mine: str, new: str
) -> None:
    world.stage()

    def add() -> None:
        (world.copy / mine).parent.mkdir(exist_ok=True)
        (world.copy / mine).write_bytes(b"mine")

    def change() -> None:
        if (world.source / new).is_dir():
            shutil.rmtree(world.source / new)
        (world.source / new).parent.mkdir(exist_ok=True)
        (world.source / new).write_bytes(b"new")
        (world.source / "sub1/file1").unlink()

    world.on_last(add)
    world.on_first(change)
    last = world.nodes[-1]
    copy = world.source.parent / last / "nvme/tree"
    named = mine if new.startswith(mine) or new == "sub5" else new
    assert messages(world.run()) == [f"6 {last}: {refusal(named)}"]
    assert (copy / mine).read_bytes() == b"mine"
    assert (world.copy / "sub1/file1").exists()
    world.comm.Barrier()
    assert world.stage(replace=True).received == world.nodes


def refusal(own: str) -> str:
    """Why a folder with this file of the user's own is not replaced."""
    return (
        f"/nvme/tree holds 1 file that was added or changed after staging: {own}; it is kept: "
        "move it elsewhere, choose another destination, or add the option replace"
    )


def test_a_copy_that_was_found_damaged_is_mended(world: TreeWorld) -> None:
    world.stage()
    cache = open_cache(world.node.path("/nvme"), os.getuid(), disk=world.node.disk)

    def mark() -> None:
        damage(world.copy / "sub5/file5")
        record = cache.load("/nvme/tree")
        assert record
        cache.save(record.as_damaged())

    world.on_last(mark)
    item = world.stage()
    assert (item.received, changed_on(item)) == ([world.nodes[-1]], [])
    assert item.tree == Counts(len(FILES), 1, 5)
    assert world.stage().received == []


def test_validate_checksum_finds_damage_and_moves_that_file_alone(world: TreeWorld) -> None:
    world.stage()
    world.on_last(lambda: damage(world.copy / "sub5/file5"))
    item = world.stage(validate=Validate.CHECKSUM)
    assert (item.received, item.tree) == ([world.nodes[-1]], Counts(len(FILES), 1, 5))
    assert item.reasons == ["it is damaged"]


def test_another_node_or_the_source_replaces_a_sender_with_a_damaged_copy(world: TreeWorld) -> None:
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


def test_a_dry_run_reports_and_does_nothing(world: TreeWorld) -> None:
    (item,) = world.run(work=Work.PLAN).items
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
    what = f"{path} is {make} that was not staged"
    remedy = "it is kept: move it, delete it, or choose another destination"
    if make == "a plain file":
        remedy = remedy.replace("or choose another destination", "choose another destination, ")
        remedy += "or add the option replace"
    else:
        remedy += "; to put the copy into it, write /nvme/tree/"
    assert messages(world.run()) == [f"6 {world.nodes[-1]}: {what}; {remedy}"]
    world.comm.Barrier()
    assert path.read_bytes() == b"results" if path.is_file() else (path / "results").is_dir()
    world.comm.Barrier()
    if make == "a plain file":
        assert changed_on(world.stage(replace=True)) == [world.nodes[-1]]


def test_an_empty_folder_is_replaced(world: TreeWorld) -> None:
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


def test_a_source_that_changes_in_every_attempt_fails_the_stage(
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


def test_a_disk_that_is_too_small_fails_the_stage_before_a_byte_moves(world: TreeWorld) -> None:
    outcome = world.run(space=Space(keep_free=1 << 60))
    for failure in outcome.failures:
        assert failure.code == 5
        assert ": not enough room: " in failure.message
        assert " free, but this site keeps 1024.0 PiB free, " in failure.message
    assert len(outcome.failures) == world.comm.size
    assert not world.copy.exists()


def test_if_one_node_fails_in_the_end_no_node_gets_a_new_folder(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stage()
    assert_unchanged_by_a_failure(world, monkeypatch)
    assert world.stage().tree == Counts(len(FILES), 1, 7)


@pytest.mark.parametrize("published", [False, True], ids=["before", "after"])
def test_a_failure_around_the_publication_is_repaired_by_the_next_stage(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch, *, published: bool
) -> None:
    publish = PartialTree.publish

    def end(self: PartialTree, *where: Any) -> None:
        if published:
            publish(self, *where)
        raise DestinationError("the end")

    monkeypatch.setattr(PartialTree, "publish", end)
    assert {failure.message for failure in world.run().failures} == {"the end"}
    monkeypatch.undo()
    assert world.copy.exists() == published
    world.stage()
    assert world.stage().received == []


@pytest.mark.parametrize("taken", [0, 1, 3, 6, 99])
def test_an_update_that_ended_early_on_a_node_is_finished_by_the_next_stage(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """Also by one that finds the new version current: its record is not yet that."""
    world.stage()

    def change() -> None:
        (world.source / "sub1/file1").write_bytes(b"changed")
        (world.source / "sub2/new/inner").mkdir(parents=True)
        (world.source / "sub2/new/inner/file").write_bytes(b"new")
        shutil.rmtree(world.source / "sub3")

    world.on_first(change)
    take, left = Update.take, [taken]

    def end(self: Update, step: Step) -> None:
        if not left[0]:
            raise DestinationError("the end")
        left[0] -= 1
        take(self, step)

    def not_finish(*_: object) -> None:
        raise DestinationError("the end")

    if world.comm.rank == world.comm.size - 1:
        monkeypatch.setattr(Update, "take", end)
        monkeypatch.setattr(Cache, "finish_update", not_finish)
    assert messages(world.run()) == [f"6 {world.nodes[-1]}: the end"]
    monkeypatch.undo()
    (item,) = world.run(work=Work.PLAN).items
    assert (item.received, item.reasons) == ([world.nodes[-1]], ["the copy changed"])
    assert world.stage().received == []


def test_a_full_disk_for_the_table_leaves_the_old_tree(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stage()
    before = as_copy(walk(str(world.copy)))
    world.on_first(lambda: (world.source / "sub1/file1").write_bytes(b"changed"))

    def full(*_: object, **__: object) -> str:
        raise SpaceError("full")

    if world.comm.rank == world.comm.size - 1:
        monkeypatch.setattr(Cache, "announce_table", full)
    assert messages(world.run()) == [f"5 {world.nodes[-1]}: full"]
    assert as_copy(walk(str(world.copy))) == before
    monkeypatch.undo()
    world.stage()


def test_what_the_user_put_in_the_place_of_the_tree_is_kept(world: TreeWorld) -> None:
    world.stage()

    def put() -> None:
        world.copy.rename(world.copy.with_name("old"))
        world.copy.mkdir()
        (world.copy / "mine").write_bytes(b"mine")

    world.on_last(put)
    outcome = world.run()
    assert [failure.code for failure in outcome.failures] == [6]
    assert "is a folder that was put in the place of the copy; " in outcome.failures[0].message
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
        f"6 {node}: {why}; choose another destination, or delete that copy (stagectl evict "
        "/nvme/tree)"
        for node in world.nodes
    ]
    into = world.items(source=f"{world.source}/large", destination="/nvme/tree/large")
    assert "lies in /nvme/tree, which is staged" in world.run(items=into).failures[0].message


def test_a_folder_does_not_replace_a_copy_that_was_staged_beneath_it(world: TreeWorld) -> None:
    inner = world.items(source=f"{world.source}/large", destination="/nvme/tree/in")
    world.run(items=inner)
    outcome = world.run()
    assert {failure.code for failure in outcome.failures} == {6}
    assert (world.copy / "in").exists()


def test_without_its_table_nothing_is_known_of_a_copy(world: TreeWorld) -> None:
    world.stage()
    cache = open_cache(str(world.copy.parent), os.getuid(), disk=world.node.disk)
    record = cache.load("/nvme/tree")
    assert record is not None
    assert record.tree is not None
    Path(cache.record_path("/nvme/tree").removesuffix(".json")).write_bytes(
        table := b"of another version"
    )
    digest = xxhash.xxh3_128_hexdigest(table)
    cache.save(replace(record, tree=replace(record.tree, table_digest=digest)))
    world.comm.Barrier()
    for message in messages(world.run()):
        assert " 103 files that were added or changed after staging: large, sub0/file0, " in message
    world.comm.Barrier()
    item = world.stage(replace=True)
    assert (item.received, item.tree) == (world.nodes, ALL)


def test_patterns_select_what_is_staged(world: TreeWorld) -> None:
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


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"include": ("*.bin",)}, "include=*.bin matches nothing in it"),
        ({"include": ("*.a", "*.b")}, "include=*.a, include=*.b match nothing in it"),
        (
            {"include": ("/sub1/",), "exclude": ("sub*/",)},
            "include=/sub1/ matches nothing in it that exclude= leaves",
        ),
        ({"exclude": ("*",)}, "exclude=* leaves nothing of it"),
        (
            {"exclude": ("sub*/**", "[!s]*")},
            "exclude=sub*/**, exclude=[!s]* leave nothing of it",
        ),
    ],
)
def test_patterns_that_select_nothing_are_refused(
    world: TreeWorld, options: dict[str, tuple[str, ...]], why: str
) -> None:
    how = "correct the pattern (as in a .gitignore), or stage the whole folder without it"
    assert messages(world.run(items=world.items(**options))) == [
        f"2 node0: {world.source}: {why}; {how}"
    ]
    assert not world.copy.exists()


def test_an_empty_folder_is_staged_whatever_is_excluded(world: TreeWorld) -> None:
    bare = world.source.with_name("bare")
    world.on_first(bare.mkdir)
    items = world.items(source=str(bare), exclude=("*",))
    assert messages(world.run(items=items)) == []
    assert os.listdir(world.copy) == []


def test_a_pattern_that_matches_nothing_is_noted(world: TreeWorld) -> None:
    options = {"include": ("/large", "*.bin"), "decompress": ("*.gz", "*.xz")}
    for _ in ("staged", "current"):
        (item,) = world.run(items=world.items(**options)).items
        [note] = item.notes
        assert note.text == (
            "note: include=*.bin, decompress=*.gz, decompress=*.xz match nothing in "
            f"{world.source}; correct or remove them"
        )
    (item,) = world.run(items=world.items(include=("/large", "*.bin"))).items
    [note] = item.notes
    assert note.text == (
        f"note: include=*.bin matches nothing in {world.source}; correct or remove it"
    )
    (item,) = world.run(items=world.items(include=("/large", "/sub1/file*"))).items
    assert item.notes == []


def test_patterns_are_for_folders(world: TreeWorld) -> None:
    items = world.items(source=f"{world.source}/large", exclude=("*",))
    why = "is not a folder; remove include and exclude, which are for folders"
    assert messages(world.run(items=items)) == [f"2 node0: {world.source}/large {why}"]


def test_one_folder_may_be_staged_to_two_destinations_in_parts(world: TreeWorld) -> None:
    parts = (
        *world.items(destination="/nvme/one", include=("/large",)),
        *world.items(destination="/nvme/two", exclude=("/large", "/twin")),
    )
    first, second = world.run(items=parts).items
    rest = len(FILES) - 1
    assert first.tree == Counts(1, 1, FILES["large"])
    assert second.tree == Counts(rest, rest, TOTAL - FILES["large"])
