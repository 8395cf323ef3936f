"""An outcome travels to the launcher as JSON; what a folder's parts add up to."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from stager.base.codec import codec_of
from stager.base.errors import Failure
from stager.base.outcome import Counts, Evicted, ItemReport, Note, NoteKind, Outcome, Rate, total

FILE = ItemReport(
    source="/shared/a", destination="/nvme/a", size=5, received=["n1"], current=["n2"], senders=[],
    digest="00", source_bytes_read=5, peak_memory=1, seconds=0.5, reasons=["absent"],
)  # fmt: skip
SPREAD = ItemReport(
    source="/shared/d", destination="/nvme/d", size=9, received=["n1", "n2"], current=[],
    senders=[], digest="11", source_bytes_read=9, peak_memory=1, seconds=0.5, reasons=["absent"],
    tree=Counts(3, 2, 9, 1, (4, 5)), shard_list="/nvme/d/.stage-shards.tsv",
    notes=[Note(NoteKind.PINNED, "look", ["n1"])],
)  # fmt: skip


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome([FILE, SPREAD], [], 2.5, phases={"read": 2.5}, evicted=[Evicted("n1", "/x", 3)]),
        Outcome([], [Failure(5, "the disk is full", "n1")], 1.0),
        Outcome([FILE], [], 1.0, dry_run=True),
    ],
)
def test_an_outcome_is_read_back_from_its_json(outcome: Outcome) -> None:
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome


def test_each_field_of_a_report_is_checked_when_it_is_read() -> None:
    """So a rank that tells anything else ends the stage, and not the launcher."""
    for one in fields(ItemReport):
        if one.name not in ("tree", "lost", "kept"):  # these are read apart
            wrong = {**codec_of(ItemReport).to_data(FILE), one.name: object()}
            with pytest.raises(ValueError, match=f"^{one.name} is not "):
                codec_of(ItemReport).from_data(wrong)


def test_the_code_is_that_of_the_first_failure() -> None:
    failures = [Failure(5, "the disk is full", "n1"), Failure(4, "the source is gone", "n2")]
    assert Outcome([], failures, 1.0).code == 5
    assert Outcome([FILE], [], 1.0).code == 0


def test_the_counts_of_parts_add_up() -> None:
    parts = [Counts(3, 2, 20, 1, (20,)), Counts(4, 0, 0, 0, (35,))]
    assert total(parts) == Counts(7, 2, 20, 1, (20, 35))


def test_a_rate_is_bytes_per_second() -> None:
    assert Rate("wire", 100, 4.0).speed == 25.0
    assert Rate("wire", 100, 0.0).speed == 0.0
