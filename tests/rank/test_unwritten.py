"""What the user writes at DST while it is staged is not overwritten or deleted."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from stager.base.errors import DestinationError
from stager.base.options import Options
from stager.base.outcome import Counts, OwnFiles
from stager.disk.cache import open_cache
from stager.disk.files import TICK
from stager.disk.record import CopyFacts, SourceFacts, TreeFacts
from stager.rank.agree import Node
from stager.rank.file_cargo import check_unwritten
from stager.rank.publication import announce_tree, publish_tree
from stager.rank.reuse import lost_files
from stager.rank.task import Task
from stager.request.items import Space, StageItem
from stager.source.facts import Source
from stager.source.settings import RemoteSettings
from stager.tree.late import Before
from stager.wire.settings import Settings
from tests.rank.test_task import PLAN
from tests.support.records import RECORD
from tests.support.users import USER

if TYPE_CHECKING:
    from collections.abc import Callable

    from stager.tree.listing import Listing
    from stager.tree.partial import PartialTree


@pytest.fixture
def late(tmp_path: Path) -> Task:
    """A task whose survey was a moment ago."""
    (tmp_path / "nvme").mkdir()
    return Task(
        item=StageItem("/shared/x", "/nvme/x", "/nvme", Options()),
        source=Source(SourceFacts(size=9, mtime_ns=2, ctime_ns=3, inode=4), 0o644, 0, 9),
        plan=PLAN,
        settings=Settings(),
        remote=RemoteSettings(),
        space=Space(),
        job=0,
        cache=open_cache(str(tmp_path / "nvme"), os.getuid()),
        node=Node("n0", str(tmp_path), os.getuid()),
        rank=0,
        since=time.time_ns(),
    )


def write(task: Task) -> os.stat_result:
    Path(task.path).write_text("mine")
    return os.lstat(task.path)


def test_a_file_that_was_written_meanwhile_is_kept(late: Task) -> None:
    check_unwritten(late, None)  # nothing is there
    write(late)
    with pytest.raises(DestinationError) as caught:
        check_unwritten(late, None)
    assert caught.value.message == (
        f"{late.path} was written while it was staged; it is kept: move it, delete "
        "it, choose another destination, or add the option replace"
    )


@pytest.mark.root
@pytest.mark.parametrize("replaces", [False, True])
def test_of_what_another_user_staged_meanwhile_it_is_told_whose_it_is(
    late: Task, *, replaces: bool
) -> None:
    task = replace(late, item=replace(late.item, options=Options(replace=replaces)))
    write(task)
    os.chown(task.path, USER, USER)
    above, name = os.path.split(task.path)
    free = f"{above}/root/{name}"
    message = f"{task.path} belongs to uid {USER}; choose another destination, such as {free}"
    tree = cast("PartialTree", None)
    for act in (
        lambda: check_unwritten(task, None),
        lambda: announce_tree(task, tree, cast("Listing", None), b"", originals={}),
    ):
        with pytest.raises(DestinationError) as caught:
            act()
        assert caught.value.message == message


def test_of_a_folder_that_was_made_meanwhile_replace_is_not_said_to_help(late: Task) -> None:
    os.mkdir(late.path)
    with pytest.raises(DestinationError) as caught:
        check_unwritten(late, None)
    assert caught.value.message == (
        f"{late.path} was written while it was staged; it is kept: move it, delete "
        "it, or choose another destination"
    )


@pytest.mark.parametrize("was_there", [True, False])
def test_replace_overwrites_nothing_that_is_written_meanwhile(late: Task, was_there: bool) -> None:
    time.sleep(TICK / 1e9)
    if was_there:
        write(late)
    time.sleep(2 * TICK / 1e9)
    since = time.time_ns()
    time.sleep(2 * TICK / 1e9)
    with open(late.path, "a") as file:
        file.write("mine")
    item = replace(late.item, options=Options(replace=True))
    with pytest.raises(DestinationError) as caught:
        check_unwritten(replace(late, item=item, since=since), None)
    assert caught.value.message == (
        f"{late.path} was written while it was staged; it is kept: move it, delete "
        "it, or submit again when nothing is written there"
    )


def test_what_was_there_before_or_was_staged_since_is_replaced(late: Task) -> None:
    there = write(late)
    check_unwritten(replace(late, since=there.st_ctime_ns + TICK + 1), None)
    facts = CopyFacts(there.st_size, there.st_mtime_ns, there.st_ino, there.st_uid)
    check_unwritten(late, late.record(facts, "5" * 32))


def test_only_files_that_were_there_before_are_told_as_deleted(late: Task) -> None:
    for name in ("before", "meanwhile"):
        Path(late.path).mkdir(exist_ok=True)
        (Path(late.path) / name).touch()
        late = replace(late, since=time.time_ns()) if name == "before" else late
        time.sleep(2 * TICK / 1e9)
    assert lost_files(late, ["before", "meanwhile"]) == OwnFiles("n0", 1, ("before",))
    assert lost_files(late, ["meanwhile", "renamed meanwhile"]) == OwnFiles("n0", 0, ())
    assert lost_files(late, [r"a name with \xff"]) == OwnFiles("n0", 1, (r"a name with \xff",))
    assert lost_files(late, []) is None
    os.mkdir(f"{late.path}/renamed")
    os.rename(f"{late.path}/before", f"{late.path}/renamed/before")
    later = replace(late, since=time.time_ns() + TICK)
    by_folders = replace(later, folders={os.lstat(late.path).st_ino: b""})
    assert lost_files(later, ["renamed/before"]) == OwnFiles("n0", 1, ("renamed/before",))
    assert lost_files(by_folders, ["renamed/before", "renamed/"]) == OwnFiles("n0", 0, ())
    os.rename(late.path, f"{late.path}.away")
    write(late)
    assert lost_files(late, [os.path.basename(late.path)]) == OwnFiles("n0", 0, ()), (
        "it was put there"
    )


@pytest.mark.parametrize("options", [Options(), Options(replace=True)])
def test_what_is_written_meanwhile_into_a_folder_is_kept(late: Task, options: Options) -> None:
    task = replace(late, item=replace(late.item, options=options), folders={7: b""})
    kept: list[object] = []

    class Tree:
        def publish(self, path: str, before: Before, note: Callable[[], object]) -> list[str]:
            kept.append((path, before))
            note()
            return ["d", "b", "a\udcff", "c"]

    folder = replace(RECORD, tree=TreeFacts(1, 1, "1" * 32, "2" * 32, "3" * 32))
    lost = OwnFiles("n0", 1, ("e",))
    published = publish_tree(task, cast("PartialTree", Tree()), folder, Counts(1), lost)
    assert published.lost == lost
    assert published.kept == OwnFiles("n0", 4, (r"a\xff", "b", "c"))
    assert kept == [(task.path, Before(task.since, folders={7: b""}))]


def test_files_that_are_lost_are_named_although_the_stage_fails_at_its_end(late: Task) -> None:
    class Tree:
        def publish(self, *_: object) -> list[str]:
            raise DestinationError("the rest is in /x.before-staging")

    folder = replace(RECORD, tree=TreeFacts(1, 1, "1" * 32, "2" * 32, "3" * 32))

    def message(lost: OwnFiles | None) -> str:
        with pytest.raises(DestinationError) as caught:
            publish_tree(late, cast("PartialTree", Tree()), folder, Counts(1), lost)
        return caught.value.message

    assert message(None) == message(OwnFiles("n0", 0, ())) == "the rest is in /x.before-staging"
    assert message(OwnFiles("n0", 2, ("a", "b"))) == (
        "the rest is in /x.before-staging; 2 files that were added or changed after staging are "
        "there, or deleted: a, b"
    )
