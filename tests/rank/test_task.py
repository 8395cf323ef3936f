"""Records of copies: their lifetimes and pins, their uses, and damaged copies."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stager.base.options import Lifetime, Options
from stager.fs.files import CopyFacts
from stager.rank.agree import Node
from stager.rank.plan import Task, TransferPlan
from stager.request.items import Space, StageItem
from stager.source.description import Source, SourceFacts
from stager.source.endpoints import DEFAULT_REMOTE
from stager.store.cache import Cache, open_cache
from stager.store.record import TreeFacts
from stager.wire.layout import Settings

if TYPE_CHECKING:
    from pathlib import Path

COPY = CopyFacts(size=9, mtime_ns=2, inode=3, owner=4)
TREE = TreeFacts(files=1, allocated=9, source_digest="1" * 32, table_digest="3" * 32)  # fmt: skip
PLAN = TransferPlan(9, (1,), (0,), (0,), False, "digest")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    (tmp_path / "nvme").mkdir()
    return open_cache(str(tmp_path / "nvme"), os.getuid(), disk=str(tmp_path))


def task(cache: Cache, rank: int = 0, lifetime: Lifetime = Lifetime.CACHE) -> Task:
    return Task(
        item=StageItem("/shared/x", "/nvme/x", "/nvme", Options(lifetime=lifetime)),
        source=Source(SourceFacts(size=9, mtime_ns=2, ctime_ns=3, inode=4), 0o644, 0, 9),
        plan=PLAN,
        settings=Settings(),
        remote=DEFAULT_REMOTE,
        space=Space(),
        job=17,
        cache=cache,
        node=Node("n0", "/disks/n0", os.getuid()),
        rank=rank,
        since=0,
    )


def test_a_rank_knows_whether_it_sends_or_receives_and_where(cache: Cache) -> None:
    assert (task(cache, 0).sends, task(cache, 0).receives) == (True, False)
    assert (task(cache, 1).sends, task(cache, 1).receives) == (False, True)
    assert task(replace(cache, disk="/disks/n0")).path == "/disks/n0/nvme/x"


def test_a_new_record_names_the_job_and_keeps_a_pin(cache: Cache) -> None:
    record = task(cache).record(COPY, "5" * 32)
    assert (record.used_by_job, record.pinned, record.tree) == (17, False, None)
    cache.save(replace(record, pinned=True))
    assert task(cache).record(COPY, "6" * 32).pinned


@pytest.mark.parametrize(("before", "now"), [("cache", "job"), ("job", "cache"), ("job", "job")])
def test_the_last_job_that_asks_for_a_copy_says_how_long_it_stays(
    cache: Cache, before: str, now: str
) -> None:
    first = task(cache, lifetime=Lifetime(before))
    cache.save(first.record(COPY, "5" * 32))
    task(cache, lifetime=Lifetime(now)).note_use()
    record = cache.load("/nvme/x")
    assert record is not None
    assert record.lifetime == now


def test_the_use_of_a_copy_without_a_record_is_not_noted(cache: Cache) -> None:
    task(cache).note_use()
    assert cache.load("/nvme/x") is None


@pytest.mark.parametrize("tree", [None, TREE], ids=["file", "folder"])
def test_a_damaged_copy_keeps_its_record_which_says_so(
    cache: Cache, tree: TreeFacts | None
) -> None:
    cache.save(task(cache).record(COPY, "5" * 32, tree))
    failure = task(cache).mark_damaged()
    assert (failure.code, failure.node) == (7, "n0")
    assert (
        failure.message == "/nvme/x: this copy is damaged; submit again: the next stage replaces it"
    )
    record = cache.load("/nvme/x")
    assert record is not None
    assert (record.digest, record.is_damaged, record.tree) == ("0" * 32, True, tree)
