"""A file that is decompressed: how much room is asked for before it comes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from stager.rank.file_transfer import DecompressSink
from tests.support.records import RECORD

if TYPE_CHECKING:
    from stager.rank.plan import Task
    from stager.store.record import Record


@pytest.mark.parametrize(
    ("record", "need"),
    [
        (None, 3000),
        (RECORD, 3000),
        (replace(RECORD, made="decompressed"), 3000),
        (
            replace(RECORD, made="decompressed", copy_facts=replace(RECORD.copy_facts, size=8000)),
            8000,
        ),
    ],
    ids=["absent", "compressed", "smaller", "larger"],
)
def test_the_copy_before_is_the_estimate_unless_it_is_smaller_than_the_source(
    record: Record | None, need: int
) -> None:
    task = SimpleNamespace(
        cache=SimpleNamespace(load=lambda _: record),
        item=SimpleNamespace(destination="/nvme/x"),
        source=SimpleNamespace(allocated=3000),
    )
    assert DecompressSink(cast("Task", task)).need() == (need, need)
