"""What the ranks report: progress at intervals, and of each item who received it and why."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from stager.base.options import Options
from stager.base.outcome import Counts, ItemReport, Note, NoteKind
from stager.rank.plan import TransferPlan
from stager.rank.report import Delivered, Progress, item_report
from stager.request.items import StageItem
from stager.source.description import Source, SourceFacts
from stager.store.validity import Reason, Survey

if TYPE_CHECKING:
    from stager.rank.plan import Task

FILE = Source(SourceFacts(size=9, mtime_ns=2, ctime_ns=3, inode=4), 0o644, 0, 9)
FOLDER = Source(FILE.facts, 0o755, 0, 9, files=3, listing="digest")
SURVEYS = [
    Survey("n0", None, "digest"),
    Survey("n1", Reason.ABSENT, ""),
    Survey("n2", Reason.ABSENT, ""),
]


def task(
    plan: TransferPlan, source: Source = FILE, options: Options | None = None, owner: int = 1000
) -> Task:
    item = StageItem("/shared/x", "/nvme/x", "/nvme", options or Options())
    cache, node = SimpleNamespace(uid=owner), SimpleNamespace(uid=1000)
    return cast(
        "Task", SimpleNamespace(item=item, plan=plan, source=source, cache=cache, node=node)
    )


def test_progress_is_reported_at_intervals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    progress = Progress("/nvme/x")
    for clock in (100.5, 101.0, 101.5, 103.0):
        progress.tell(int(clock), 1000, 0)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    same = {"event": "progress", "destination": "/nvme/x", "size": 1000, "steady": True}
    assert events == [{**same, "sent": 101, "seconds": 1.0}, {**same, "sent": 103, "seconds": 3.0}]


@pytest.mark.parametrize(("files", "steady"), [(0, True), (4, True), (5, False)])
def test_small_files_let_nobody_guess_the_time_that_is_left(
    files: int,
    steady: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    progress = Progress("/nvme/x")
    clock = 101.0
    progress.tell(1, 4 << 20, files)
    assert json.loads(capsys.readouterr().out)["steady"] is steady


def test_a_report_names_the_nodes_that_received_sent_and_were_current() -> None:
    plan = TransferPlan(9, (1, 2), (0,), (0,), False, "digest")
    report = item_report(task(plan), SURVEYS, Delivered("digest", (0,)), 1.5)
    assert (report.received, report.current, report.senders) == (["n1", "n2"], ["n0"], ["n0"])
    assert (report.reasons, report.seconds, report.tree) == (["absent"], 1.5, None)


def test_who_reads_the_source_is_no_sender() -> None:
    plan = TransferPlan(9, (0, 1, 2), (), (0, 1), True, "")
    assert item_report(task(plan), SURVEYS, Delivered("digest", (0, 1), 9), 1.0).senders == []


def test_current_parts_of_different_splits_are_a_reason_to_receive() -> None:
    plan = TransferPlan(9, (0,), (), (0,), True, "", is_sharded=True)
    report = item_report(task(plan), SURVEYS[:1], Delivered("digest"), 1.0)
    assert report.reasons == ["spread over other nodes"]


@pytest.mark.parametrize(("dry_run", "how"), [(False, "was"), (True, "would be")])
def test_what_is_replaced_is_reported(how: str, *, dry_run: bool) -> None:
    plan = TransferPlan(9, (0, 1), (2,), (0,), True, "")
    surveys = [
        Survey("n0", Reason.ABSENT, ""),
        Survey("n1", Reason.ALWAYS, "", replaces="/shared/old"),
        Survey("n2", None, ""),
    ]
    text = f"a copy of /shared/old {how} replaced"
    report = item_report(task(plan), surveys, Delivered("digest"), 1.0, dry_run=dry_run)
    assert report.notes == [Note(NoteKind.REPLACED, text, ["n1"])]


OWN_REPLACED = (
    "what was not staged, or was changed since, was replaced; write what you want to keep elsewhere"
)


@pytest.mark.parametrize(
    ("dry_run", "texts"),
    [
        (
            False,
            [
                OWN_REPLACED,
                "it is pinned (stagectl unpin lets it go)",
            ],
        ),
        (True, ["what is yours there would be deleted, because of the option replace"]),
    ],
)
def test_what_is_the_users_own_and_what_is_pinned_is_noted(
    texts: list[str], *, dry_run: bool
) -> None:
    plan = TransferPlan(9, (0, 1), (2,), (0,), True, "")
    surveys = [
        Survey("n0", Reason.COPY_CHANGED, "", changed=True),
        Survey("n1", Reason.ABSENT, "", pinned=True),
        Survey("n2", None, "", changed=True),
    ]
    report = item_report(task(plan), surveys, Delivered("digest"), 1.0, dry_run=dry_run)
    kinds, nodes = (NoteKind.CHANGED, NoteKind.PINNED), (["n0"], ["n1"])
    assert report.notes == [*map(Note, kinds, texts, nodes)]


def remark(report: ItemReport) -> str:
    assert all(note.kind is NoteKind.REMARK for note in report.notes)
    return "; ".join(note.text for note in report.notes)


TEAM = "all members of the group team could replace the copy, as they may write in /nvme/team"
STICKY = (
    "choose another destination, or have its owner set the sticky bit (chmod +t), unless that is "
    "wanted"
)


@pytest.mark.parametrize(
    ("texts", "note"),
    [
        (["", "", ""], ""),
        ([TEAM] * 3, f"note: {TEAM}; {STICKY}"),
        ([TEAM, "", TEAM], f"note: on n0, n2, {TEAM}; {STICKY}"),
    ],
)
def test_who_else_could_replace_a_copy_is_noted(texts: list[str], note: str) -> None:
    plan = TransferPlan(9, (), (0, 1, 2), (0,), False, "digest")
    surveys = [Survey(f"n{at}", None, "", open_to=text) for at, text in enumerate(texts)]
    assert remark(item_report(task(plan), surveys, Delivered("digest"), 1.0)) == note


def test_a_damaged_copy_is_noted_with_its_node() -> None:
    plan = TransferPlan(9, (1, 2), (0,), (0,), False, "digest")
    surveys = [
        Survey("n0", None, "digest"),
        Survey("n1", Reason.DAMAGED, ""),
        Survey("n2", Reason.SOURCE_CHANGED, ""),
    ]
    note = "note: on n1, the copy was damaged: its bytes were not those that were staged"
    assert remark(item_report(task(plan), surveys, Delivered("digest"), 1.0)) == note


def test_a_current_tree_is_counted_by_its_source_and_an_archive_by_the_surveys() -> None:
    plan = TransferPlan(9, (), (0,), (0,), False, "digest")
    surveys = [Survey("n0", None, "digest", files=7)]
    tree = item_report(task(plan, FOLDER), surveys, Delivered("digest"), 1.0).tree
    assert tree == Counts(3)
    archive = task(plan, FILE, Options(extract=True))
    assert item_report(archive, surveys, Delivered("digest"), 1.0).tree == Counts(7)


def test_an_environment_that_cannot_work_is_noted_also_when_it_is_current() -> None:
    source = replace(FOLDER, environment_note="note: it cannot")
    current = TransferPlan(9, (), (0,), (0,), False, "digest")
    for plan in (current, replace(current, receivers=(1, 2))):
        one = task(plan, source)
        assert remark(item_report(one, SURVEYS, Delivered("digest"), 1.0)) == "note: it cannot"


@pytest.mark.parametrize(
    ("number", "note"),
    [
        (0, ""),
        (1, "note: 1 link in /shared/x leads out of it; what is there is not in the copy{}"),
        (1200, "note: 1,200 links in /shared/x lead out of it; what is there is not in the copy{}"),
    ],
)
def test_links_that_leave_the_folder_are_noted_when_it_moves(number: int, note: str) -> None:
    source = replace(FOLDER, leaving=number)
    current = TransferPlan(9, (), (0,), (0,), False, "digest")
    assert remark(item_report(task(current, source), SURVEYS, Delivered("digest"), 1.0)) == ""
    moved = task(replace(current, receivers=(1, 2)), source)
    expected = note.format(" without links=follow")
    assert remark(item_report(moved, SURVEYS, Delivered("digest"), 1.0)) == expected
