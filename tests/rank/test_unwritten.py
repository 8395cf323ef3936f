"""What the user writes at DST while it is staged is not overwritten or deleted."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from stager.base.errors import DestinationError
from stager.base.options import Options
from stager.fs.files import TICK, CopyFacts
from stager.rank.agree import Node
from stager.rank.file_transfer import check_unwritten
from stager.rank.plan import Task
from stager.rank.tree_transfer import TreeSink
from stager.request.items import Space, StageItem
from stager.source.description import Source, SourceFacts
from stager.source.endpoints import RemoteSettings
from stager.store.cache import open_cache
from stager.wire.layout import Settings
from tests.rank.test_task import PLAN
from tests.support.users import USER


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
        cache=open_cache(str(tmp_path / "nvme"), os.getuid(), disk=str(tmp_path)),
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
    file, tree = partial(check_unwritten, task, None), partial(TreeSink(task).announce, "")
    for act in (file, tree):
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
