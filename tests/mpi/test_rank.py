"""Whole stages by `run`, where each rank has a folder as its node's disk: all nodes or none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stager.base.codec import NUMBER
from stager.base.errors import DestinationError, SourceError, SpaceError
from stager.base.options import Lifetime, Validate, Verify
from stager.base.text import bytes_text
from stager.fs.files import TICK
from stager.fs.partial_file import Partial
from stager.fs.reader import FileReader
from stager.node.job_state import wait_for_line
from stager.rank.agree import RefusedError, together
from stager.rank.program import line_status
from stager.request.items import Space, Waiting, Work
from stager.store.cache import Cache, open_cache
from stager.store.space import FreeSpace
from stager.wire.layout import Algorithm, Settings
from tests.support.world import World, messages

if TYPE_CHECKING:
    from pathlib import Path

    from mpi4py import MPI

    from stager.base.outcome import Outcome
    from stager.store.record import Record

DATA = bytes(range(256)) * 100
#: A disk on which all that is free is kept so by the site.
FULL = FreeSpace(0, 1 << 20, 1 << 20)


class FileWorld(World):
    """Nodes to which one file is staged."""

    def __init__(self, comm: MPI.Intracomm, folder: Path) -> None:
        super().__init__(comm, folder, "data")
        self.write_source(DATA)

    def write_source(self, data: bytes) -> None:
        """Write ``data`` to the source."""
        self.on_first(lambda: self.source.write_bytes(data))


@pytest.fixture
def world(comm: MPI.Intracomm, folder: Path) -> FileWorld:
    return FileWorld(comm, folder)


def test_the_first_run_brings_the_file_to_all_nodes(world: FileWorld) -> None:
    (item,) = world.run().items
    assert world.copy.read_bytes() == DATA
    assert (item.received, item.current, item.senders) == (world.nodes, [], [])
    assert (item.source_bytes_read, item.reasons) == (len(DATA), ["absent"])


def test_the_second_run_moves_nothing(world: FileWorld) -> None:
    world.run()
    before = world.copy.stat()
    (item,) = world.run().items
    assert (item.received, item.current, item.source_bytes_read) == ([], world.nodes, 0)
    assert world.copy.stat() == before


def test_the_last_node_gets_what_it_lacks_from_the_first(world: FileWorld) -> None:
    world.run()
    last = world.comm.size - 1
    if world.comm.rank == last:
        world.copy.unlink()
    (item,) = world.run().items
    assert world.copy.read_bytes() == DATA
    alone = world.comm.size == 1
    assert item.received == [f"node{last}"]
    assert item.senders == ([] if alone else ["node0"])
    assert item.source_bytes_read == (len(DATA) if alone else 0)


@pytest.mark.parametrize("mine", [DATA.swapcase(), DATA], ids=["other bytes", "the same bytes"])
def test_an_own_file_with_the_time_of_the_source_is_overwritten_only_if_it_is_a_copy_of_it(
    world: FileWorld, mine: bytes
) -> None:
    facts = world.source.stat()

    def make() -> None:
        world.copy.write_bytes(mine)
        os.utime(world.copy, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        time.sleep(2 * TICK / 1e9)  # it is there before the stage begins

    world.on_last(make)
    outcome = world.run()
    if mine == DATA:
        assert outcome.items[0].received == world.nodes
        return
    (failure,) = outcome.failures
    assert (failure.code, failure.node) == (6, world.nodes[-1])
    assert failure.message.endswith(
        "/nvme/data is a plain file that was not staged; it is kept: move it, "
        "delete it, choose another destination, or add the option replace"
    )
    is_last = world.comm.rank == world.comm.size - 1
    assert world.copy.exists() == is_last
    assert not is_last or world.copy.read_bytes() == mine
    (item,) = world.run(items=world.items(replace=True)).items
    assert item.received == world.nodes


def test_a_dry_run_reports_and_does_nothing(world: FileWorld) -> None:
    outcome = world.run(work=Work.PLAN)
    assert outcome.items[0].received == world.nodes
    assert not world.copy.exists()


def test_validate_always_reads_the_source_again(world: FileWorld) -> None:
    world.run()
    (item,) = world.run(items=world.items(validate=Validate.ALWAYS)).items
    assert (item.received, item.source_bytes_read) == (world.nodes, len(DATA))
    assert item.reasons == ["validate=always"]


def test_a_folder_on_one_node_is_no_place_for_a_file(world: FileWorld) -> None:
    world.on_last(world.copy.mkdir)
    last = world.comm.size - 1
    disk = world.comm.bcast(world.node.disk, root=last)
    remedy = "write /nvme/data/ to put the file into it, or choose another destination"
    assert messages(world.run()) == [f"6 node{last}: {disk}/nvme/data is a folder; {remedy}"]
    assert world.copy.exists() == (world.comm.rank == last)


def test_missing_parents_are_made(world: FileWorld) -> None:
    world.run(items=world.items(destination="/nvme/a/b/c"))
    assert (world.copy.parent / "a/b/c").read_bytes() == DATA


def test_if_one_node_cannot_write_none_publishes(world: FileWorld) -> None:
    last = world.comm.size - 1
    items = world.items(destination="/nvme/sub/data")
    blocker = world.copy.parent / "sub"
    if world.comm.rank == last:
        blocker.write_text("in the way")
    outcome = world.run(items=items)
    disk = world.comm.bcast(world.node.disk, root=last)
    remedy = "a folder is needed there: remove it, or choose another destination"
    assert messages(outcome) == [
        f"6 node{last}: {disk}/nvme/sub is a plain file, not a folder; {remedy}"
    ]
    assert blocker.exists() == (world.comm.rank == last)


def test_a_file_whose_record_could_not_be_completed_is_replaced(
    world: FileWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no trace of the user, and the source is another one by now."""
    save, last = Cache.save, world.comm.size - 1

    def fail_once_published(cache: Cache, record: Record) -> None:
        if world.comm.rank == last and not record.is_damaged:
            raise SpaceError("no space")
        save(cache, record)

    with monkeypatch.context() as patched:
        patched.setattr(Cache, "save", fail_once_published)
        assert messages(world.run()) == [f"5 node{last}: no space"]
    assert world.copy.read_bytes() == DATA
    world.write_source(b"new")
    (item,) = world.run().items
    assert item.received == world.nodes
    assert world.copy.read_bytes() == b"new"


def test_a_missing_source_is_reported_by_one_node(world: FileWorld) -> None:
    if world.comm.rank == 0:
        world.source.unlink()
    world.comm.Barrier()
    remedy = "check the path, and that the compute nodes mount this filesystem"
    message = f"No such file or directory; {remedy}"
    assert messages(world.run()) == [f"4 node0: {world.source}: {message}"]


@pytest.mark.parametrize("algorithm", [item for item in Algorithm if item is not Algorithm.AUTO])
@pytest.mark.parametrize("size", [(1 << 31) - 1, (1 << 31) + 1, (1 << 32) - 1, (1 << 32) + 1])
def test_a_sparse_file_stays_sparse(world: FileWorld, algorithm: Algorithm, size: int) -> None:
    middle, end = b"in the middle", b"the end"
    if world.comm.rank == 0:
        with world.source.open("wb") as file:
            file.write(DATA)
            file.seek(size // 2)
            file.write(middle)
            file.seek(size - len(end))
            file.write(end)
    world.comm.Barrier()
    (item,) = world.run(transfer=Settings(algorithm=algorithm)).items
    facts = world.copy.stat()
    assert (item.size, facts.st_size) == (size, size)
    assert item.source_bytes_read == facts.st_blocks * 512 - (-size % 4096) < 64 * 1024
    with world.copy.open("rb") as file:
        assert file.read(len(DATA)) == DATA
        assert file.read(1) == b"\0"
        file.seek(size // 2)
        assert file.read(len(middle)) == middle
        file.seek(size - len(end))
        assert file.read() == end
    world.copy.unlink()


def test_read_back_compares_what_is_on_the_disk(world: FileWorld) -> None:
    (item,) = world.run(items=world.items(verify=Verify.READBACK)).items
    assert world.copy.read_bytes() == DATA
    assert item.received == world.nodes


def test_a_disk_that_returns_other_bytes_fails_the_stage(
    world: FileWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = world.comm.size - 1
    if world.comm.rank == last:

        def seal_and_damage(partial: Partial, *facts: int) -> None:
            seal(partial, *facts)
            partial.write(memoryview(b"damage"), 5)

        seal = Partial.seal
        monkeypatch.setattr(Partial, "seal", seal_and_damage)
    outcome = world.run(items=world.items(verify=Verify.READBACK))
    path = world.comm.bcast(str(world.copy), root=last)
    problem = "the bytes read back from the disk differ from those written; use another node"
    assert messages(outcome) == [f"7 node{last}: {path}: {problem}"]
    assert not world.copy.exists()


def test_one_holder_sends_however_many_may_read(world: FileWorld) -> None:
    size, last = world.comm.size, world.comm.size - 1
    world.run()
    if world.comm.rank == last:
        world.copy.unlink()
    world.comm.Barrier()
    (item,) = world.run(transfer=Settings(chunk=4096, depth=2, readers=(3,))).items
    assert world.copy.read_bytes() == DATA
    assert item.senders == (["node0"] if size > 1 else [])
    assert item.received == [f"node{last}"]


def test_if_a_holder_is_damaged_another_one_sends(world: FileWorld) -> None:
    size, last = world.comm.size, world.comm.size - 1
    world.run()
    facts = world.copy.stat()
    if world.comm.rank == last:
        world.copy.unlink()
    if world.comm.rank == 0 and size > 2:
        with world.copy.open("r+b") as file:
            file.write(b"damage")
        os.utime(world.copy, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    world.comm.Barrier()
    (item,) = world.run().items
    assert world.copy.read_bytes() == DATA
    if size > 2:
        assert item.senders == ["node1"]
        assert item.received == ["node0", f"node{last}"]


def test_what_was_staged_before_the_stage_started_over_is_told(world: FileWorld) -> None:
    world.run()
    facts = world.copy.stat()
    if world.comm.rank == world.comm.size - 1:
        world.copy.unlink()
    if world.comm.rank == 0 and world.comm.size > 1:
        with world.copy.open("r+b") as file:
            file.write(b"damage")
        os.utime(world.copy, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    world.comm.Barrier()
    items = (*world.items(destination="/nvme/other"), *world.items())
    other, item = world.run(items=items).items
    assert (other.received, other.current) == (world.channel.nodes, [])
    assert item.received


def test_any_number_of_damaged_holders_is_replaced_by_a_good_one(world: FileWorld) -> None:
    size, last = world.comm.size, world.comm.size - 1
    world.run()
    facts = world.copy.stat()
    if world.comm.rank == last:
        world.copy.unlink()
    elif world.comm.rank < last - 1:
        with world.copy.open("r+b") as file:
            file.write(b"damage")
        os.utime(world.copy, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    world.comm.Barrier()
    (item,) = world.run().items
    assert world.copy.read_bytes() == DATA
    assert item.senders == ([f"node{last - 1}"] if size > 1 else [])


def test_a_holder_that_cannot_be_opened_is_replaced_by_the_source(
    world: FileWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run()
    if world.comm.rank == world.comm.size - 1:
        world.copy.unlink()

    class OnFailingDisk(FileReader):
        def __init__(self, path: str) -> None:
            if path == str(world.copy):
                raise SourceError(f"{path}: Input/output error")
            super().__init__(path)

    monkeypatch.setattr("stager.rank.file_transfer.FileReader", OnFailingDisk)
    world.comm.Barrier()
    (item,) = world.run().items
    assert world.copy.read_bytes() == DATA
    assert (item.senders, len(item.received)) == ([], world.comm.size)


def test_a_failure_ends_the_phases_of_a_stage(world: FileWorld) -> None:
    if world.comm.rank == 0:
        world.source.unlink()
    world.comm.Barrier()
    assert list(world.run().phases) == ["survey", "end"]


def test_every_second_of_a_stage_belongs_to_a_phase(world: FileWorld) -> None:
    begun = time.monotonic()
    outcome = world.run()
    assert sum(outcome.phases.values()) == pytest.approx(outcome.seconds)
    assert outcome.seconds <= time.monotonic() - begun
    assert list(outcome.phases) == [
        "survey", "wait", "open", "read", "write", "broadcast", "fsync", "publish", "end"
    ]  # fmt: skip
    assert min(outcome.phases.values()) >= 0


def test_a_world_of_the_wrong_size_is_refused(world: FileWorld) -> None:
    outcome = world.run(nodes=world.comm.size + 1)
    assert outcome.code == 8
    started = "1 process" if world.comm.size == 1 else f"{world.comm.size} processes"
    job = f"but the job has {world.comm.size + 1} nodes"
    assert f"MPI started {started}, {job}" in outcome.failures[0].message


def test_two_ranks_on_one_node_are_refused(world: FileWorld) -> None:
    world.rename("same")
    outcome = world.run()
    assert outcome.code == (0 if world.comm.size == 1 else 8)


def test_several_items_are_all_done(world: FileWorld) -> None:
    items = world.items() + world.items(destination="/nvme/other")
    first = world.run(items=items)
    assert [item.received for item in first.items] == [world.nodes, world.nodes]
    assert (world.copy.parent / "other").read_bytes() == DATA


def test_many_small_files_are_staged_together(world: FileWorld) -> None:
    sources = [world.source.with_name(f"many-{number}") for number in range(70)]
    for number, source in enumerate(sources):
        if not world.comm.rank:
            source.write_bytes(b"%d" % number)
    world.comm.Barrier()
    items = tuple(
        replace(world.items()[0], source=str(source), destination=f"/nvme/many/{number}")
        for number, source in enumerate(sources)
    )
    large = world.items()
    first = world.run(items=(*items[:3], *large, *items[3:]))
    assert [one.received for one in first.items] == [world.nodes] * 71
    assert [one.source_bytes_read for one in first.items[:3]] == [1, 1, 1]
    folder = world.copy.parent / "many"
    assert [(folder / str(n)).read_bytes() for n in range(70)] == [b"%d" % n for n in range(70)]
    assert [one.current for one in world.run(items=items).items] == [world.nodes] * 70


def test_an_error_on_one_rank_is_raised_on_all(world: FileWorld) -> None:
    def step() -> int:
        if world.comm.rank == world.comm.size - 1:
            raise DestinationError("broken")
        return world.comm.rank

    with pytest.raises(RefusedError) as refused:
        together(world.context, step, NUMBER)
    assert [str(f.node) for f in refused.value.failures] == [world.nodes[-1]]
    assert together(world.context, lambda: 1, NUMBER) == [1] * world.comm.size


def test_a_lock_held_by_another_process_is_waited_for_and_then_given_up(world: FileWorld) -> None:
    last = world.comm.size - 1
    holder = None
    if world.comm.rank == last:
        holder = hold_lock(
            open_cache(world.node.path("/nvme"), os.getuid(), disk=world.node.disk).folder
        )
    world.comm.Barrier()
    outcome = world.run()
    assert (outcome.code, [failure.node for failure in outcome.failures]) == (9, [f"node{last}"])
    if holder:
        holder.kill()
        holder.communicate()
    world.comm.Barrier()
    assert world.run().code == 0


def hold_lock(folder: str) -> subprocess.Popen[bytes]:
    """Start a process that holds the lock of /nvme/data until it is killed."""
    code = (
        "import sys, time\nfrom stager.store.cache import Cache\n"
        "from stager.store.locks import Locks\n"
        "assert Locks(Cache(sys.argv[1])).take('/nvme/data')\nprint(flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    return process


def record_of(world: FileWorld) -> Record:
    record = open_cache(world.node.path("/nvme"), os.getuid(), disk=world.node.disk).load(
        "/nvme/data"
    )
    assert record
    return record


@pytest.mark.parametrize(("first", "last"), [("cache", "job"), ("job", "cache")])
def test_the_last_stage_says_how_long_a_copy_stays(world: FileWorld, first: str, last: str) -> None:
    world.run(items=world.items(lifetime=Lifetime(first)))
    world.run(items=world.items(lifetime=Lifetime(last)))
    assert record_of(world).lifetime == last
    world.write_source(DATA * 2)
    world.run(items=world.items(lifetime=Lifetime(first)))
    assert record_of(world).lifetime == first


def test_the_next_version_of_a_pinned_copy_is_pinned(world: FileWorld) -> None:
    world.run()
    cache = open_cache(world.node.path("/nvme"), os.getuid(), disk=world.node.disk)
    cache.save(replace(record_of(world), pinned=True))
    world.comm.Barrier()
    world.write_source(DATA * 2)
    world.run()
    assert world.copy.read_bytes() == DATA * 2
    assert record_of(world).pinned


def stage_other(world: FileWorld, name: str, **changes: object) -> Outcome:
    (item,) = world.items(destination=f"/nvme/{name}")
    return world.run(items=(item,), **changes)


def limited(world: FileWorld) -> Space:
    """Return a limit at which a user may have two files of this size."""
    taken = world.copy.stat().st_blocks * 512 if world.copy.exists() else len(DATA)
    return Space(user_limit=2 * max(world.comm.allgather(taken)) + 8192)


def told_of_evictions(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str, int]]:
    """Return what this rank has told of copies that it evicted."""
    lines = (line for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    told = [event for event in map(json.loads, lines) if event["event"] == "evicted"]
    return [(one["node"], one["destination"], one["size"]) for one in told]


def test_the_least_recently_used_copies_are_evicted_to_keep_the_limit(
    world: FileWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    world.run()
    time.sleep(1.1)  # records hold times in whole seconds
    stage_other(world, "second")
    space = limited(world)
    planned = stage_other(world, "third", space=space, work=Work.PLAN)
    assert [one.destination for one in planned.evicted] == ["/nvme/data"] * world.comm.size
    assert world.copy.exists()
    assert told_of_evictions(capsys) == []
    outcome = stage_other(world, "third", space=space)
    assert outcome.evicted == []  # each rank tells of its own at once
    here = [one for one in planned.evicted if one.node == world.node.name]
    assert told_of_evictions(capsys) == [(one.node, one.destination, one.size) for one in here]
    assert sorted(path.name for path in world.copy.parent.glob("[a-z]*")) == ["second", "third"]


def test_if_one_node_has_too_little_room_none_evicts(world: FileWorld) -> None:
    world.run()
    stage_other(world, "second")
    if world.comm.rank == world.comm.size - 1:
        cache = open_cache(world.node.path("/nvme"), os.getuid(), disk=world.node.disk)
        for record in list(cache.records()):
            cache.save(replace(record, pinned=True))
    world.comm.Barrier()
    outcome = stage_other(world, "third", space=limited(world))
    (failure,) = outcome.failures
    assert (failure.code, failure.node) == (5, world.nodes[-1])
    stay = "of your copies stay: /nvme/data (pinned), /nvme/second (pinned)"
    assert failure.message.endswith(f"{stay}; stage less, or unpin copies (stagectl unpin DST)")
    assert sorted(path.name for path in world.copy.parent.glob("[a-z]*")) == ["data", "second"]


def test_a_copy_that_is_gone_is_told_though_the_room_goes_meanwhile(
    world: FileWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world.run()
    size = world.copy.stat().st_blocks * 512
    last = world.comm.size - 1
    if world.comm.rank == last:
        monkeypatch.setattr("stager.store.space.free_space", lambda *_: FULL)
        # As another process writes as much as each eviction frees.
        monkeypatch.setattr(FreeSpace, "plus", lambda free, _: free)
    outcome = stage_other(world, "second")
    assert [(one.code, one.node) for one in outcome.failures] == [(5, f"node{last}")]
    gone = [(f"node{last}", "/nvme/data", size)] if world.comm.rank == last else []
    assert told_of_evictions(capsys) == gone
    assert world.copy.exists() == (world.comm.rank != last)


def test_room_is_made_on_the_one_disk_that_is_full(
    world: FileWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage_other(world, "first")
    time.sleep(1.1)  # records hold times in whole seconds
    stage_other(world, "second")
    last = world.comm.size - 1
    if world.comm.rank == last:
        monkeypatch.setattr("stager.store.space.free_space", lambda *_: FULL)
    outcome = world.run()
    size = (world.copy.parent / "second").stat().st_blocks * 512
    gone = [(f"node{last}", "/nvme/first", size)] if world.comm.rank == last else []
    assert (outcome.code, told_of_evictions(capsys)) == (0, gone)
    left = sorted(path.name for path in world.copy.parent.glob("[a-z]*"))
    assert left == ["data", "second"] if world.comm.rank == last else ["data", "first", "second"]
    assert world.copy.read_bytes() == DATA


def test_a_disk_that_is_full_fails_the_stage_and_keeps_the_old_copy(
    world: FileWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run()
    world.write_source(DATA * 2)
    last = world.comm.size - 1
    if world.comm.rank == last:
        monkeypatch.setattr("stager.store.space.free_space", lambda *_: FreeSpace(100, 100))
    outcome = world.run()
    need = world.comm.bcast(min(len(DATA) * 2, world.source.stat().st_blocks * 512))
    need += 64 << 10  # for what a stage writes beside its copies
    assert messages(outcome) == [
        (
            f"5 node{last}: /nvme: not enough room: {bytes_text(need)} needed, 100 B free, "
            f"{bytes_text(need - 100)} still missing; delete other files of yours there, or ask "
            "for nodes with larger disks"
        )
    ]
    assert world.copy.read_bytes() == DATA


def make_status_folder(world: FileWorld, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder for this node's step statuses, as the plugin does, and return it."""
    run_folder = world.copy.parent / "run"
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(run_folder))
    monkeypatch.setenv("STAGE_PARENT", "1")
    mine = run_folder / str(os.getuid())
    mine.mkdir(parents=True)
    return mine


def test_a_node_without_the_plugin_fails_all_although_an_earlier_job_left_a_folder(
    world: FileWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tasks there would not wait for their files."""
    make_status_folder(world, monkeypatch)
    world.on_last(lambda: monkeypatch.delenv("STAGE_PARENT"))
    waiting = Waiting("17.0", "4")
    assert messages(world.run(waiting=replace(waiting, needs_plugin=True))) == [
        (
            f"8 node{world.comm.size - 1}: slurm-stage did not run on this node; tell the "
            "administrator (stagectl doctor there says why)"
        )
    ]


def test_those_who_run_the_same_line_are_told_how_it_ended(world: FileWorld) -> None:
    world.on_last(lambda: world.copy.write_text("the user's own"))
    world.request = replace(world.request, line="a")
    with line_status(world.context) as tell_line:
        outcome = world.run()
        tell_line(outcome)
    assert outcome.code == 6
    code = wait_for_line("a", world.node.path("/nvme"), os.getuid(), "1", 0.1)
    assert code == 6
