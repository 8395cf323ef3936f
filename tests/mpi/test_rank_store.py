"""What is staged to a job's own folder is kept in the nodes' stores, and made of that for the next
job.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stager.base.options import Lifetime, Validate, Via
from stager.base.outcome import Counts
from stager.fs.files import remove_tree
from stager.request.items import Work
from stager.tree.walk import walk
from tests.support.store_world import StoreWorld
from tests.support.tree_world import ALL, archive_of, damage, files_beneath, seen

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi


@pytest.fixture
def world(comm: MPI.Intracomm, folder: Path) -> StoreWorld:
    """Nodes with a store."""
    return StoreWorld(comm, folder)


@pytest.mark.parametrize("via", [Via.AUTO, Via.COPY, Via.LINK])
def test_the_next_job_moves_nothing(world: StoreWorld, via: Via) -> None:
    first = world.into("/job1", via=via)
    assert (first.received, first.current, first.tree) == (world.nodes, [], ALL)
    second = world.into("/job2", via=via)
    assert (second.received, second.current) == ([], world.nodes)
    assert (second.source_bytes_read, second.tree) == (0, Counts(ALL.files))
    assert first.ways == second.ways
    for job in ("/job1", "/job2"):
        assert files_beneath(world.seen(job)) == files_beneath(world.source)
    assert world.seen("/job1").is_symlink() == (via is Via.LINK)
    assert world.into("/job2", via=via).ways == []


def test_a_copy_has_the_permissions_of_the_source_and_an_entry_none_to_write(
    world: StoreWorld,
) -> None:
    world.into("/job1", via=Via.COPY)
    assert seen(walk(str(world.seen("/job1")))) == seen(walk(str(world.source)))
    modes = {path.lstat().st_mode for path in world.entry().rglob("*") if not path.is_symlink()}
    assert [mode for mode in modes if mode & 0o222] == []


def test_one_file_is_kept_as_well(world: StoreWorld) -> None:
    source = world.source / "large"
    assert world.into("/job1", source).received == world.nodes
    found = world.into("/job2", source)
    assert (found.received, found.current, found.tree) == ([], world.nodes, None)
    assert world.seen("/job2", "large").read_bytes() == source.read_bytes()
    assert world.into("/job2", source).ways == []


def test_two_destinations_of_one_source_have_one_entry(world: StoreWorld) -> None:
    (one,) = world.items(source=str(world.source), destination="/job1/one", root="/job1")
    other = replace(one, destination="/job2/other", root="/job2")
    outcome = world.run(items=(one, other))
    assert outcome.failures == []
    assert [item.destination for item in outcome.items] == ["/job1/one", "/job2/other"]
    assert len(list(world.entries.iterdir())) == 1
    for copy in (world.seen("/job1", "one"), world.seen("/job2", "other")):
        assert files_beneath(copy) == files_beneath(world.source)


def test_a_new_version_moves_what_changed_and_leaves_what_an_earlier_job_has(
    world: StoreWorld,
) -> None:
    world.into("/job1")
    before = files_beneath(world.seen("/job1"))
    world.on_first(lambda: (world.source / "large").write_bytes(b"new"))
    found = world.into("/job2")
    assert found.tree == Counts(ALL.files, 1, 3)
    assert files_beneath(world.seen("/job1")) == before
    assert files_beneath(world.seen("/job2")) == files_beneath(world.source)
    # The first job's own folder is brought to it as any copy is.
    world.into("/job1")
    assert files_beneath(world.seen("/job1")) == files_beneath(world.source)


def test_what_a_job_writes_into_its_folder_stays_its_own(world: StoreWorld) -> None:
    world.into("/job1", via=Via.COPY)
    copy = world.seen("/job1")
    (copy / "own").write_text("own")
    world.into("/job1", via=Via.COPY)
    assert (copy / "own").read_text() == "own"
    (copy / "large").write_text("changed")
    (item,) = world.items(
        source=str(world.source), destination="/job1/source", root="/job1", via=Via.COPY
    )
    (failure, *_) = world.run(items=(item,)).failures
    assert failure.code == 6
    assert failure.message == (
        "/job1/source holds 2 files that were added or changed after staging: large, twin; they "
        "are kept: move them elsewhere, choose another destination, or add the option replace"
    )
    assert files_beneath(world.entry())["large"] == files_beneath(world.source)["large"]


def _change(folder: Path) -> None:
    """Do to several files in a staged folder what programs do."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o700)
    (folder / "sub1/file1").write_bytes(b"changed!")
    os.truncate(folder / "sub2/file2", 1)
    with (folder / "sub3/file3").open("ab") as file:
        file.write(b"more")
    (folder / "sub4/file4").rename(folder / "sub5/renamed")
    (folder / "sub6/file6").chmod(0)
    (folder / "sub0/added").write_text("own")
    (folder / "link").unlink()


@pytest.mark.parametrize("via", [Via.AUTO, Via.COPY, Via.LINK])
def test_the_next_job_has_the_source_whatever_a_job_does_to_what_it_sees(
    world: StoreWorld, via: Via
) -> None:
    world.into("/job1", via=via)
    _change(world.seen("/job1"))
    world.into("/job2", via=via)
    assert files_beneath(world.seen("/job2")) == files_beneath(world.source)
    world.into("/job3", via=Via.COPY)
    assert seen(walk(str(world.seen("/job3")))) == seen(walk(str(world.source)))


@pytest.mark.parametrize("suffix", [".tar", ".zip"])
def test_an_archive_is_unpacked_once(world: StoreWorld, suffix: str) -> None:
    path = archive_of(world, suffix)
    first = world.into("/job1", Path(path), extract=True)
    second = world.into("/job2", Path(path), extract=True)
    assert (first.received, second.received) == (world.nodes, [])
    for job in ("/job1", "/job2"):
        assert files_beneath(world.seen(job, f"source{suffix}")) == files_beneath(world.source)


def test_what_the_store_has_no_room_for_goes_to_the_job_alone(world: StoreWorld) -> None:
    space = replace(world.request.space, user_limit=1)
    world.request = replace(world.request, space=space)
    found = world.into("/job1")
    assert found.received == world.nodes
    assert [path for path in world.entries.rglob("*") if path.is_file()] == []
    (note,) = found.notes
    begin = r"note: not kept for the next job: node\d: /nvme: not enough room"
    assert re.match(begin, note.text), note.text
    # A link that was asked for is a copy then, and stays one.
    linked = world.into("/job2", via=Via.LINK)
    assert linked.received == world.nodes
    world.request = replace(world.request, space=replace(space, user_limit=0))
    assert world.into("/job2", via=Via.LINK).received == world.nodes  # the entry
    assert not world.seen("/job2").is_symlink()
    assert files_beneath(world.seen("/job2")) == files_beneath(world.source)


def test_what_one_item_lacks_in_the_store_is_no_others_lack(world: StoreWorld) -> None:
    small = world.source / "sub1/file1"
    world.into("/job1", small)
    space = replace(world.request.space, user_limit=64 << 10)
    world.request = replace(world.request, space=space)
    items = (
        *world.items(source=str(small), destination="/job2/file1", root="/job2"),
        *world.items(source=str(world.source), destination="/job2/source", root="/job2"),
    )
    outcome = world.run(items=items)
    assert not outcome.failures
    assert [one.received for one in outcome.items] == [[], world.nodes]
    assert [len(one.notes) for one in outcome.items] == [0, 1]


@pytest.mark.parametrize("spoil", ["source", "entry", "always"])
def test_a_link_is_current_if_what_it_leads_to_is(world: StoreWorld, spoil: str) -> None:
    world.into("/job1", via=Via.LINK)
    validate = Validate.STAT
    if spoil == "source":
        world.on_first(lambda: (world.source / "large").write_bytes(b"new"))
    elif spoil == "entry":
        remove_tree(str(world.entry()))
    else:
        validate = Validate.ALWAYS
    assert world.into("/job1", via=Via.LINK, validate=validate).received == world.nodes
    assert files_beneath(world.seen("/job1")) == files_beneath(world.source)
    # Without the option, a folder of its own takes the link's place.
    world.into("/job1")
    assert not world.seen("/job1").is_symlink()
    assert files_beneath(world.seen("/job1")) == files_beneath(world.source)


def test_an_entry_is_checked_as_the_strictest_of_its_views_asks(world: StoreWorld) -> None:
    world.into("/job1", via=Via.COPY)
    path = world.entry() / "sub1/file1"
    path.chmod(0o600)
    damage(path)
    path.chmod(0o400)
    (one,) = world.items(source=str(world.source), destination="/job2/a", root="/job2")
    options = replace(one.options, validate=Validate.CHECKSUM)
    other = replace(one, destination="/job2/b", options=options)
    assert not world.run(items=(one, other)).failures
    for name in "ab":
        assert files_beneath(world.seen("/job2", name)) == files_beneath(world.source)


def test_a_single_file_that_can_be_written_is_made_anew(world: StoreWorld) -> None:
    source = world.source / "large"
    world.into("/job1", source)
    world.entry("large").chmod(0o644)
    assert world.into("/job2", source).received == world.nodes
    assert world.entry("large").stat().st_mode & 0o777 == 0o400


def test_what_a_job_changed_in_an_entry_alone_moves_again(world: StoreWorld) -> None:
    world.into("/job1", via=Via.COPY)
    (world.entry() / "sub1/file1").chmod(0o600)
    assert world.into("/job2", via=Via.COPY).tree == Counts(ALL.files, 1, 1)


def test_a_copy_for_the_job_alone_is_not_kept(world: StoreWorld) -> None:
    world.into("/job1", lifetime=Lifetime.JOB)
    assert not world.entries.exists()


def test_a_dry_run_tells_how_it_would_be_made(world: StoreWorld) -> None:
    item = world.items(
        source=str(world.source), destination="/job1/source", root="/job1", via=Via.LINK
    )
    (planned,) = world.run(items=item, work=Work.PLAN).items
    assert (planned.destination, planned.ways) == ("/job1/source", ["symbolic link"])
    assert not world.entries.exists()
