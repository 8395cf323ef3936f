"""A file that the user writes at DST while it is staged is not overwritten."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stager.base.errors import DestinationError
from stager.base.options import Options
from stager.disk.cache import open_cache
from stager.disk.files import TICK
from stager.disk.record import CopyFacts, SourceFacts
from stager.rank.agree import Node
from stager.rank.file_cargo import check_unwritten
from stager.rank.task import Task
from stager.request.items import Space, StageItem
from stager.source.facts import Source
from stager.source.settings import RemoteSettings
from stager.wire.settings import Settings
from tests.rank.test_task import PLAN


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
        f"{late.path} was written while it was staged; staging would overwrite it: move it, delete "
        "it, choose another destination, or add the option replace"
    )


def test_replace_overwrites_it(late: Task) -> None:
    write(late)
    item = replace(late.item, options=Options(replace=True))
    check_unwritten(replace(late, item=item), None)


def test_what_was_there_before_or_was_staged_since_is_replaced(late: Task) -> None:
    there = write(late)
    check_unwritten(replace(late, since=there.st_ctime_ns + TICK + 1), None)
    facts = CopyFacts(there.st_size, there.st_mtime_ns, there.st_ino, there.st_uid)
    check_unwritten(late, late.record(facts, "5" * 32))
