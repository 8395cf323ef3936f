"""What the store keeps is named by its source: by status, evict, pin, unpin and verify."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from stager.base.errors import UsageError
from stager.node.agent import (
    Done,
    Evict,
    NodeResult,
    OfCopies,
    Pin,
    Stays,
    Unpin,
    Verify,
    carry_out,
)
from stager.store.leases import note_uses
from stager.store.states import Entry, node_status
from tests.support.copies import Node
from tests.support.trees import stage_folder
from tests.support.users import as_ordinary_user

pytestmark = pytest.mark.usefixtures("jobs_folder")
SOURCE, OTHER, URL = "/shared/env", "/shared/other", "s3://bucket/data"


@pytest.fixture
def full(node: Node) -> Node:
    """A node with a copy, and with two entries of one source and one of a URL."""
    node.put("copy", 10)
    for number, source in ((1, SOURCE), (2, SOURCE), (3, URL)):
        node.cache.save(replace(node.put_entry(number, 10, used_at=number), source=source))
    return node


def do(node: Node, make: type[OfCopies], *names: str, **options: object) -> NodeResult:
    command = make((str(node.disk),), destinations=names, **options)  # type: ignore[arg-type]
    return carry_out(command, "")


def entries(node: Node) -> dict[str, Entry]:
    return {one.destination: one for one in node_status("", [str(node.disk)], []).entries}


def left(node: Node) -> list[int]:
    """The numbers of the entries that are there, each with its record."""
    numbers = [one for one in range(9) if os.path.lexists(node.entry(one))]
    recorded = {one.destination for one in node.cache.records()}
    assert {*map(node.entry, numbers)} == recorded - {str(node.disk / "copy")}
    return numbers


def test_all_entries_of_a_source_are_evicted_and_no_other(full: Node) -> None:
    assert do(full, Evict, SOURCE, dry_run=True).done == [Done(SOURCE, 4096)] * 2
    assert left(full) == [1, 2, 3]
    assert do(full, Evict, SOURCE) == NodeResult([Done(SOURCE, 4096)] * 2)
    assert left(full) == [3]
    assert do(full, Evict, URL).done == [Done(URL, 4096)]
    assert left(full) == []
    [absent] = do(full, Evict, SOURCE).refused
    assert (absent.code, absent.absent) == (UsageError.code, SOURCE)


def test_a_destination_comes_before_a_source_of_the_same_name(full: Node) -> None:
    copy = str(full.disk / "copy")
    full.cache.save(replace(full.put_entry(4, 10), source=copy))
    assert do(full, Evict, copy).done == [Done(copy, 4096)]
    assert left(full) == [1, 2, 3, 4]


def test_the_source_of_a_copy_is_no_name_of_it(full: Node) -> None:
    [record] = [one for one in full.cache.records() if one.destination.endswith("/copy")]
    assert do(full, Evict, record.source).done == []


def test_entries_are_pinned_and_verified_by_their_source(full: Node) -> None:
    assert do(full, Pin, SOURCE).done == [Done(SOURCE, 10)] * 2
    [refused, _] = do(full, Evict, SOURCE).refused
    assert refused.message == f"{SOURCE} is pinned; unpin it first: stagectl unpin {SOURCE}"
    assert Stays(SOURCE, "pinned") in do(full, Evict, older=1).stay
    assert do(full, Unpin, SOURCE).done == [Done(SOURCE, 10)] * 2
    assert do(full, Verify, SOURCE).done == [Done(SOURCE, 10)] * 2


def test_a_changed_entry_is_told_by_its_source_and_goes(full: Node) -> None:
    Path(full.entry(1)).write_bytes(b"changed")
    [refused] = do(full, Verify, SOURCE).refused
    assert refused.message == f"{SOURCE}: the copy was changed after staging; stage it again"
    assert entries(full)[full.entry(1)].state == "changed"
    assert do(full, Evict, SOURCE).refused == []
    assert left(full) == [3]


def test_all_that_is_in_an_entry_goes_with_it(home: Path) -> None:
    """Its user may write in none of its folders."""

    def act() -> list[int]:
        node = Node(home)

        def fill(folder: Path) -> None:
            (folder / "a/b").mkdir(parents=True)
            (folder / "a/b/c").write_bytes(b"data")

        path = Path(node.entry(5))
        path.parent.mkdir(parents=True)
        stage_folder(node.cache, str(path), fill=fill)
        (path / "added").touch()
        for folder in (path / "a/b", path / "a", path):
            folder.chmod(0o500)
        assert do(node, Evict, "/shared/img.sqsh").refused == []
        return left(node)

    assert as_ordinary_user(act) == []


def test_status_shows_an_entry_and_the_job_that_uses_it(full: Node) -> None:
    note_uses(os.getuid(), 12, [full.entry(1)])
    Path(full.entry(1)).chmod(0o400)
    os.link(full.entry(1), full.disk / "of-job")
    found = entries(full)
    assert [(one.store, one.source, one.jobs, one.state) for one in found.values()] == [
        (True, SOURCE, [12], "ready"),
        (True, SOURCE, [], "ready"),
        (True, URL, [], "ready"),
        (False, found[str(full.disk / "copy")].source, [], "ready"),
    ]
    [refused] = do(full, Evict, SOURCE).refused
    assert refused.message == f"{SOURCE} is used by job 12; evict it when it has ended"
    assert left(full) == [1, 3]
