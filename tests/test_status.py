"""What a user is told of the files that are recorded on a node, and how they fare by now."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stager.manifest import VERSION, CopyFacts, Record, SourceFacts
from stager.status import HEADERS, Entry, gather, rows
from stager.store import open_cache
from stager.survey import facts_of
from tests.test_store import as_ordinary_user, ordinary_home

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RECORD = Record(
    version=VERSION,
    source="/shared/img.sqsh",
    destination="/nvme/img.sqsh",
    source_facts=SourceFacts(size=3 << 20, mtime_ns=20, ctime_ns=30, inode=40),
    copy_facts=CopyFacts(size=3 << 20, mtime_ns=20, inode=50, owner=60),
    digest="00112233445566778899aabbccddeeff",
    staged_at=1_000_000,
    used_at=1_000_100,
    used_by_job=17,
)


class Node:
    """A node whose whole disk is a folder, with one staged file beneath the root /nvme."""

    def __init__(self, folder: Path) -> None:
        self.disk = folder / "node1"
        self.root = self.disk / "nvme"
        self.root.mkdir(parents=True)
        self.source = folder / "img.sqsh"
        self.source.write_bytes(b"image")
        self.copy = self.root / "img.sqsh"
        self.copy.write_bytes(b"image")
        self.record = self.recorded(self.copy)

    def recorded(self, copy: Path) -> Record:
        """Record ``copy`` as staged, beneath the root that it lies in."""
        facts = copy.stat()
        record = replace(
            RECORD, source=str(self.source),
            destination=str(copy).removeprefix(str(self.disk)),
            source_facts=facts_of(self.source.stat()),
            copy_facts=CopyFacts(facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_uid),
        )  # fmt: skip
        open_cache(str(copy.parent), os.getuid()).save(record)
        return record

    def gather(self, *roots: str) -> list[Entry]:
        return gather("node1", str(self.disk), roots or ("/nvme",), os.getuid())


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


# States


def _nothing(_: Node) -> None:
    pass


def _source_touched(node: Node) -> None:
    os.utime(node.source, ns=(1, 1))


def _source_replaced(node: Node) -> None:
    node.source.rename(node.source.with_name("old"))
    node.source.write_bytes(b"image")


def _source_removed(node: Node) -> None:
    node.source.unlink()


def _copy_touched(node: Node) -> None:
    os.utime(node.copy, ns=(1, 1))


def _copy_appended(node: Node) -> None:
    facts = node.copy.stat()
    node.copy.write_bytes(b"images")
    os.utime(node.copy, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def _copy_replaced(node: Node) -> None:
    facts = node.copy.stat()
    node.copy.rename(node.copy.with_name("old"))
    node.copy.write_bytes(b"image")
    os.utime(node.copy, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def _copy_as_symlink(node: Node) -> None:
    node.copy.rename(node.copy.with_name("moved"))
    node.copy.symlink_to("moved")


def _copy_removed(node: Node) -> None:
    node.copy.unlink()


def _both_removed(node: Node) -> None:
    node.copy.unlink()
    node.source.unlink()


def _disk_emptied(node: Node) -> None:
    node.copy.unlink()
    node.root.rename(node.root.with_name("elsewhere"))
    node.root.mkdir()
    (node.root.with_name("elsewhere") / ".slurm-stage").rename(node.root / ".slurm-stage")


STATES: dict[Callable[[Node], None], str] = {
    _nothing: "current",
    _source_touched: "stale",
    _source_replaced: "stale",
    _source_removed: "source gone",
    _copy_touched: "changed",
    _copy_appended: "changed",
    _copy_replaced: "changed",
    _copy_as_symlink: "changed",
    _copy_removed: "gone",
    _both_removed: "gone",
    _disk_emptied: "gone",
}


@pytest.mark.parametrize(
    ("change", "state"), STATES.items(), ids=[change.__name__.strip("_") for change in STATES]
)
def test_an_entry_says_whether_the_copy_still_fits(
    node: Node, change: Callable[[Node], None], state: str
) -> None:
    change(node)
    assert node.gather() == [Entry("node1", node.record, state)]


@pytest.mark.root
def test_a_copy_that_changed_its_owner_is_changed(node: Node) -> None:
    os.chown(node.copy, os.getuid() + 1, -1)
    assert node.gather() == [Entry("node1", node.record, "changed")]


# Gathering


def test_entries_are_sorted_by_destination_over_all_roots(node: Node) -> None:
    copies = [node.disk / name for name in ("b/2", "a/9", "b/1")]
    for copy in copies:
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(b"image")
    records = {copy.name: node.recorded(copy) for copy in copies}
    assert node.gather("/b", "/nvme", "/a") == [
        Entry("node1", record, "current")
        for record in (records["9"], records["1"], records["2"], node.record)
    ]


def test_a_record_that_cannot_be_trusted_is_no_entry(node: Node) -> None:
    cache = open_cache(str(node.root), os.getuid())
    os.chmod(cache.record_path(node.record.destination), 0o666)
    assert node.gather() == []


def test_a_user_of_whom_the_node_has_no_folder_has_no_entries(node: Node) -> None:
    assert gather("node1", str(node.disk), ["/nvme"], os.getuid() + 1) == []


def test_a_root_that_the_node_lacks_has_no_entries(node: Node) -> None:
    assert node.gather("/nowhere", "/nvme") == [Entry("node1", node.record, "current")]


def test_a_root_that_is_a_file_has_no_entries(node: Node) -> None:
    (node.disk / "file").write_bytes(b"")
    assert node.gather("/file", "/nvme") == [Entry("node1", node.record, "current")]


@pytest.mark.parametrize("mode", [0o500, 0o000], ids=["no writing", "no entering"])
def test_a_root_without_permission_has_no_entries(mode: int) -> None:
    def act(home: Path) -> list[Entry]:
        (home / "closed").mkdir()
        (home / "closed").chmod(mode)
        return gather("node1", str(home), ["/closed"], os.getuid())

    with ordinary_home() as home:
        assert as_ordinary_user(lambda: act(home)) == []


def test_a_look_at_a_disk_without_records_leaves_it_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    assert gather("node1", str(tmp_path), ["/nvme"], os.getuid()) == []
    assert list(tmp_path.rglob("*")) == [tmp_path / "nvme"]


# Showing


def shown(record: Record, state: str = "current", now: float = 1_000_000.0) -> dict[str, str]:
    """The one row of a table for ``record``, by its headers."""
    [row] = rows([Entry("node1", record, state)], now)
    return dict(zip(HEADERS, row, strict=True))


def test_a_row_has_what_its_headers_name() -> None:
    assert shown(RECORD, "source gone", now=1_005_000.0) == {
        "NODE": "node1",
        "DST": "/nvme/img.sqsh",
        "SIZE": "3.0 MiB",
        "STAGED": "1 h 23 min ago",
        "STATE": "source gone",
        "SOURCE": "/shared/img.sqsh",
        "LAST JOB": "17",
    }


def test_rows_are_in_the_order_of_entries() -> None:
    entries = [Entry(node, RECORD, "current") for node in ("n2", "n1", "n3")]
    assert [row[0] for row in rows(entries, 1_000_000)] == ["n2", "n1", "n3"]


def test_a_use_outside_of_slurm_has_no_job() -> None:
    assert shown(replace(RECORD, used_by_job=0))["LAST JOB"] == "-"


@pytest.mark.parametrize(
    ("now", "age"),
    [(1_000_000, "0.0 s ago"), (1_000_059.94, "59.9 s ago"), (999_999, "0.0 s ago")],
    ids=["just now", "below a minute", "by a clock that is behind"],
)
def test_the_age_is_never_below_zero(now: float, age: str) -> None:
    assert shown(RECORD, now=now)["STAGED"] == age


def test_an_entry_as_json_is_its_record_with_node_and_state() -> None:
    assert json.loads(json.dumps(Entry("node1", RECORD, "stale").to_json())) == {
        "node": "node1",
        "state": "stale",
        "version": 1,
        "source": "/shared/img.sqsh",
        "destination": "/nvme/img.sqsh",
        "source_facts": {"size": 3145728, "mtime_ns": 20, "ctime_ns": 30, "inode": 40},
        "copy_facts": {"size": 3145728, "mtime_ns": 20, "inode": 50, "owner": 60},
        "digest": "00112233445566778899aabbccddeeff",
        "staged_at": 1000000,
        "used_at": 1000100,
        "used_by_job": 17,
    }
