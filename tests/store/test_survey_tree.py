"""Whether a node's copy of a folder may be current, by its record alone."""

from __future__ import annotations

import os
import stat
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from stager.base.errors import DestinationError
from stager.base.options import Mode, Options, Share, Validate
from stager.request.items import StageItem
from stager.source.description import Source
from stager.store.cache import open_cache
from stager.store.record import Record, TreeFacts
from stager.store.tree_validity import judge_tree, survey_tree
from stager.store.validity import Reason
from stager.store.verify import Fault, fault_of
from tests.support.records import RECORD
from tests.support.trees import stage_folder
from tests.support.users import as_ordinary_user, ordinary_home

if TYPE_CHECKING:
    from pathlib import Path

FACTS = RECORD.source_facts
TREE = TreeFacts(files=5, allocated=4096, source_digest="0" * 32, table_digest="2" * 32)
#: A whole copy of a folder, and a part of one.
WHOLE = replace(RECORD, tree=TREE)
PART = replace(RECORD, tree=replace(TREE, files=2, split="4:0", by="{n}"))
FOLDER = Source(FACTS, 0o755, 0, 0, files=5, listing="0" * 32)
#: A stat of the copy, as `WHOLE` has it.
FOUND = os.stat_result((stat.S_IFDIR | 0o755, 50, 1, 1, 60, 0, 10, 0, 0, 0))
COPIED = StageItem("/shared/img.sqsh", "/nvme/img.sqsh", "/nvme", Options(validate=Validate.STAT))


def having(item: StageItem, **options: Any) -> StageItem:
    return replace(item, options=replace(item.options, **options))


SPREAD = having(COPIED, mode=Mode.SHARD, by="{n}")


def judged(item: StageItem, record: Record | None, source: Source = FOLDER) -> Reason | None:
    return judge_tree(item, source, record, FOUND)


@pytest.mark.parametrize(
    ("item", "record", "reason"),
    [
        (COPIED, WHOLE, None),
        (SPREAD, PART, None),
        (COPIED, PART, Reason.PART_ONLY),
        (SPREAD, WHOLE, Reason.NOT_SPLIT),
        (having(SPREAD, by="part-{n}"), PART, Reason.SPLIT_DIFFERENTLY),
        (having(SPREAD, by=""), PART, Reason.SPLIT_DIFFERENTLY),
        (COPIED, replace(WHOLE, tree=replace(TREE, relocation="no")), Reason.RELOCATED_DIFFERENTLY),
        (having(COPIED, share=Share.GROUP), WHOLE, Reason.SHARED_DIFFERENTLY),
        (COPIED, replace(WHOLE, share="all"), Reason.SHARED_DIFFERENTLY),
        (having(SPREAD, validate=Validate.ALWAYS), WHOLE, Reason.ALWAYS),
        (SPREAD, RECORD, Reason.NOT_RECORDED),
        (SPREAD, None, Reason.NOT_RECORDED),
    ],
)
def test_the_copy_of_a_folder_may_be_current_or_there_is_a_reason(
    item: StageItem, record: Record | None, reason: Reason | None
) -> None:
    assert judged(item, record) == reason


def test_a_folder_that_is_missing_is_absent_whatever_is_asked_for() -> None:
    assert judge_tree(SPREAD, FOLDER, WHOLE, None) == Reason.ABSENT


def test_a_part_is_current_for_the_listing_that_it_is_of() -> None:
    changed = replace(FOLDER, listing="3" * 32)
    assert judged(SPREAD, PART, changed) == Reason.LISTING_CHANGED


@pytest.mark.parametrize(
    ("record", "is_folder", "problem"),
    [
        (None, True, "a folder that was not staged"),
        (RECORD, True, "a folder that was not staged"),
        (RECORD, False, "a plain file that was changed after it was staged"),
        (WHOLE, False, "a plain file that was not staged"),
        (WHOLE, True, "a folder that was put in the place of the copy"),
    ],
)
def test_a_folder_does_not_replace_what_nobody_staged(
    tmp_path: Path, record: Record | None, is_folder: bool, problem: str
) -> None:
    copy = tmp_path / "nvme/img.sqsh"
    (copy if is_folder else copy.parent).mkdir(parents=True)
    (copy / "mine" if is_folder else copy).write_bytes(b"mine")
    cache = open_cache(f"{tmp_path}/nvme", os.getuid(), disk=str(tmp_path))
    if record:
        cache.save(record)
    with pytest.raises(DestinationError) as caught:
        survey_tree(COPIED, str(copy), FOLDER, cache, "n1", {})
    remedy = "move it, delete it, or choose another destination"
    if is_folder and record is None:
        remedy += "; to put the copy into it, write /nvme/img.sqsh/"
    if not is_folder:
        remedy = "move it, delete it, choose another destination, or add the option replace"
    assert str(caught.value) == f"{copy} is {problem}; it is kept: {remedy}"
    replacing = having(COPIED, replace=True)
    with pytest.raises(DestinationError) if is_folder else nullcontext():
        assert survey_tree(replacing, str(copy), FOLDER, cache, "n1", {}).changed


def test_a_staged_folder_of_which_every_file_was_changed_is_replaced_if_asked(
    tmp_path: Path,
) -> None:
    cache = open_cache(str(tmp_path), os.getuid())
    copy = tmp_path / "set"
    record = stage_folder(cache, str(copy))
    (copy / "a").write_bytes(b"mine")
    item = replace(COPIED, source=record.source, destination=str(copy), root=str(tmp_path))
    with pytest.raises(DestinationError) as caught:
        survey_tree(item, str(copy), FOLDER, cache, "n1", {})
    assert str(caught.value) == (
        f"{copy} holds 1 file that was added or changed after staging: a; it is kept: "
        "move it elsewhere, choose another destination, or add the option replace"
    )
    assert survey_tree(having(item, replace=True), str(copy), FOLDER, cache, "n1", {}).changed


def test_the_copy_of_a_folder_whose_table_is_lost_is_not_current(tmp_path: Path) -> None:
    cache = open_cache(str(tmp_path), os.getuid())
    record = stage_folder(cache, f"{tmp_path}/set")
    item = replace(COPIED, source=record.source, destination=f"{tmp_path}/set", root=str(tmp_path))
    assert survey_tree(item, item.destination, FOLDER, cache, "n1", {}).current
    os.unlink(cache.record_path(item.destination).removesuffix(".json"))
    found = survey_tree(item, item.destination, FOLDER, cache, "n1", {})
    assert found.reason is Reason.COPY_CHANGED


def test_a_folder_of_the_users_that_is_closed_is_no_fault_of_the_copy_that_it_lies_in() -> None:
    def act(home: Path) -> list[Fault]:
        cache = open_cache(str(home), os.getuid())
        record = stage_folder(cache, f"{home}/set")
        (home / "set/own/in").mkdir(parents=True)
        (home / "set/own").chmod(0)
        with_own = fault_of(cache, record)
        (home / "set").chmod(0)
        return [with_own, fault_of(cache, record)]

    with ordinary_home() as home:
        fault, closed = as_ordinary_user(lambda: act(home))
        assert fault == Fault("", is_damage=False)
        assert "permissions in it were changed: ." in closed.text
