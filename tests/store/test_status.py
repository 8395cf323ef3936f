"""The status of a node: the state of each copy, free space, records that cannot be read."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stager.base.codec import codec_of
from stager.fs.files import CopyFacts
from stager.source.description import SourceFacts
from stager.source.posix import facts_of
from stager.store.cache import Cache, open_cache
from stager.store.leases import jobs_using
from stager.store.states import DiskRoom, Entry, NodeStatus, Unread, node_status
from tests.support import records
from tests.support.entries import ENTRY
from tests.support.trees import stage_folder
from tests.support.users import (
    OWNER,
    USER,
    as_ordinary_user,
    as_user,
    give_records_folder,
    ordinary_home,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

RECORD = replace(
    records.RECORD,
    source_facts=SourceFacts(size=3 << 20, mtime_ns=20, ctime_ns=30, inode=40),
    copy_facts=CopyFacts(size=3 << 20, mtime_ns=20, inode=50, owner=60),
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
        self.entry = self.recorded(self.copy)

    def recorded(self, copy: Path, **changes: object) -> Entry:
        """Record ``copy`` as staged, beneath the root that it lies in."""
        facts = copy.stat()
        fields = {
            "source": str(self.source),
            "destination": str(copy).removeprefix(str(self.disk)),
            "source_facts": facts_of(self.source.stat()),
            "copy_facts": CopyFacts(facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_uid),
        }
        record = replace(RECORD, **{**fields, **changes})  # type: ignore[arg-type]
        open_cache(str(copy.parent), os.getuid(), disk=str(self.disk)).save(record)
        return ENTRY._replace(
            destination=record.destination, source=record.source, size=5, user=os.getuid(),
            pinned=record.pinned,
        )  # fmt: skip

    def status(self, *roots: str) -> NodeStatus:
        return node_status(str(self.disk), roots or ("/nvme",), ())

    def record_path(self) -> str:
        cache = open_cache(str(self.root), os.getuid())
        return cache.record_path(self.entry.destination)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def open_node() -> Iterator[Node]:
    """A node of root's, whose disk other users reach."""
    with ordinary_home() as home:
        yield Node(home)


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


def _copy_hard_linked(node: Node) -> None:
    os.link(node.copy, node.copy.with_name("other"))


def _update_cut_off(node: Node) -> None:
    cache = open_cache(str(node.root), os.getuid())
    os.makedirs(cache.update_path(node.entry.destination))


STATES: dict[Callable[[Node], None], str] = {
    _nothing: "ready",
    _source_touched: "outdated",
    _source_replaced: "outdated",
    _source_removed: "ready",
    _update_cut_off: "outdated",
    _copy_touched: "changed",
    _copy_appended: "changed",
    _copy_replaced: "changed",
    _copy_as_symlink: "changed",
    _copy_hard_linked: "changed",
    _copy_removed: "missing",
    _both_removed: "missing",
    _disk_emptied: "missing",
}


@pytest.mark.parametrize(
    ("change", "state"), STATES.items(), ids=[change.__name__.strip("_") for change in STATES]
)
def test_the_state_of_an_entry(node: Node, change: Callable[[Node], None], state: str) -> None:
    change(node)
    assert node.status().entries == [node.entry._replace(state=state)]


def staged_folder(node: Node, **changes: object) -> Path:
    """Stage a folder beneath the root; its record has these changes."""
    cache, copy = open_cache(str(node.root), os.getuid()), node.root / "set"
    record = stage_folder(cache, str(copy))
    cache.save(replace(record, **changes))  # type: ignore[arg-type]
    return copy


def state_of(copy: Path) -> str:
    entries = node_status("", [str(copy.parent)], ()).entries
    return next(one.state for one in entries if one.destination == str(copy))


def test_the_time_of_a_folder_on_fuse_tells_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = node.source.with_name("set")
    source.mkdir()
    copy = staged_folder(node, source=str(source), source_facts=SourceFacts(5, 1, 0, 0))
    assert state_of(copy) == "outdated"
    monkeypatch.setattr("stager.source.posix.is_on_fuse", lambda _: True)
    assert state_of(copy) == "ready"


def test_what_its_user_changes_in_a_folder_makes_it_changed_but_not_what_is_added(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = staged_folder(node)
    (copy / "added").touch()
    assert state_of(copy) == "ready"
    (copy / "a").write_bytes(b"other")
    assert state_of(copy) == "changed"
    monkeypatch.setattr("stager.store.states._MOST_FILES", 0)
    assert state_of(copy) == "ready"
    monkeypatch.undo()
    (copy / "a").unlink()
    assert state_of(copy) == "changed"


@pytest.mark.root
def test_a_copy_with_another_owner_is_changed(node: Node) -> None:
    os.chown(node.copy, os.getuid() + 1, -1)
    assert node.status().entries == [node.entry._replace(state="changed")]


# Looking


def test_entries_are_sorted_by_destination_over_all_roots(node: Node) -> None:
    copies = [node.disk / name for name in ("b/2", "a/9", "b/1")]
    for copy in copies:
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(b"image")
    entries = {copy.name: node.recorded(copy) for copy in copies}
    assert node.status("/b", "/nvme", "/a").entries == [
        entries["9"], entries["1"], entries["2"], node.entry,
    ]  # fmt: skip


def test_a_status_has_the_free_space_of_each_root(node: Node) -> None:
    room = os.statvfs(node.root)
    [seen] = node.status("/nvme", "/nowhere").rooms
    assert (seen.root, seen.size) == ("/nvme", room.f_blocks * room.f_frsize)
    assert abs(seen.free - room.f_bavail * room.f_frsize) < 1 << 30


def test_a_user_without_a_folder_on_the_node_has_no_entries(node: Node) -> None:
    def act() -> list[Entry]:
        return node_status(str(home), ("/nvme",), ()).entries

    with ordinary_home() as home:
        (home / "nvme").mkdir()
        assert as_ordinary_user(act) == []


def test_a_root_that_the_node_lacks_has_no_entries(node: Node) -> None:
    assert node.status("/nowhere", "/nvme").entries == [node.entry]


def test_a_root_that_is_a_file_has_no_entries(node: Node) -> None:
    (node.disk / "file").write_bytes(b"")
    assert node.status("/file", "/nvme").entries == [node.entry]


@pytest.mark.parametrize("mode", [0o500, 0o000], ids=["no writing", "no entering"])
def test_a_root_without_permission_has_no_entries(mode: int) -> None:
    def act(home: Path) -> list[Entry]:
        (home / "closed").mkdir()
        (home / "closed").chmod(mode)
        return node_status(str(home), ("/closed",), ()).entries

    with ordinary_home() as home:
        assert as_ordinary_user(lambda: act(home)) == []


def test_the_status_of_a_disk_without_records_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    assert node_status(str(tmp_path), ["/nvme"], []).entries == []
    assert list(tmp_path.rglob("*")) == [tmp_path / "nvme"]


# Records that count as absent


def _writable_by_all(path: str) -> str:
    os.chmod(path, 0o666)
    return "it is not a plain file that this user alone can write"


def _link(path: str) -> str:
    os.rename(path, f"{path}.other")
    os.symlink(f"{path}.other", path)
    return "Too many levels of symbolic links"


def _linked_twice(path: str) -> str:
    os.link(path, f"{os.path.dirname(path)}/../twice")
    return "it is not a plain file that this user alone can write"


def _pipe(path: str) -> str:
    os.unlink(path)
    os.mkfifo(path, 0o600)
    return "it is not a plain file that this user alone can write"


def _too_long(path: str) -> str:
    with open(path, "a") as file:
        file.write(" " * 65536)
    return "it is longer than a record can be"


def _newer(path: str) -> str:
    _rewrite(path, {"version": 9})
    return "version 9, expected 8"


def _cut(path: str) -> str:
    os.truncate(path, 10)
    return "Unterminated string starting at: line 2 column 2 (char 3)"


def _of_another(path: str) -> str:
    _rewrite(path, {"destination": "/nvme/other"})
    return "it is the record of /nvme/other under another name"


def _rewrite(path: str, change: dict[str, object]) -> None:
    with open(path) as file:
        fields = json.load(file)
    with open(path, "w") as file:
        json.dump({**fields, **change}, file)


@pytest.mark.parametrize(
    "damage",
    [_writable_by_all, _link, _linked_twice, _pipe, _too_long, _newer, _cut, _of_another],
    ids=lambda act: act.__name__.strip("_"),
)
def test_a_record_that_cannot_be_trusted_is_reported_and_no_entry(
    node: Node, damage: Callable[[str], str]
) -> None:
    path = node.record_path()
    why = damage(path)
    seen = node.status()
    assert seen.entries == []
    assert Unread(path, why) in seen.unread


# Shared roots, and the copies of all users


@pytest.mark.root
@pytest.mark.parametrize("reader", [0, USER], ids=["root", "a user"])
def test_all_users_see_what_the_sites_account_staged(open_node: Node, reader: int) -> None:
    site = open_node.disk / "site"
    site.mkdir()
    (site / "a").write_bytes(b"image")
    facts = (site / "a").stat()
    record = replace(
        RECORD, source=str(open_node.source), destination="/site/a",
        source_facts=facts_of(open_node.source.stat()),
        copy_facts=CopyFacts(5, facts.st_mtime_ns, facts.st_ino, OWNER),
    )  # fmt: skip
    for path in (site, site / "a"):
        os.chown(path, OWNER, OWNER)
    open_node.disk.parent.chmod(0o755)

    def status() -> NodeStatus:
        return node_status(str(open_node.disk), ("/nvme",), ("/site",), OWNER)

    own = site / f".slurm-stage/{OWNER}"
    own.mkdir(parents=True, mode=0o700)  # as root makes it, before anything is staged
    os.chown(own, OWNER, OWNER)
    assert as_user(reader, status).unread == []
    as_user(OWNER, lambda: open_cache(str(site), OWNER, shared=True).save(record))
    seen = as_user(reader, status)
    # Root follows no path that another account named.
    assert [entry for entry in seen.entries if entry.shared] == [
        ENTRY._replace(
            destination="/site/a", source=str(open_node.source), size=5, user=OWNER, shared=True,
            state="ready",
        )
    ]  # fmt: skip


@pytest.mark.root
def test_root_may_ask_for_everyone_and_does_not_look_at_their_sources(open_node: Node) -> None:
    node = open_node
    parent = node.root / ".slurm-stage"
    (parent / str(USER)).mkdir(mode=0o700)
    os.chown(parent / str(USER), USER, USER)
    copy = node.root / "theirs"
    copy.write_bytes(b"theirs")
    os.chown(copy, USER, USER)
    facts = copy.stat()

    def save() -> None:
        # Not by open_cache: it makes the inner folders as this user.
        for name in ("records", "partial"):
            (parent / str(USER) / name).mkdir()
        Cache(f"{parent}/{USER}").save(
            replace(
                RECORD,
                destination="/nvme/theirs",
                source="/trap",
                copy_facts=CopyFacts(6, facts.st_mtime_ns, facts.st_ino, USER),
            )
        )

    as_user(USER, save)
    assert [(e.user, e.state) for e in node.status().entries] == [(0, "ready")]
    seen = node_status(str(node.disk), ["/nvme"], [], everyone=True)
    assert [(e.user, e.destination, e.state) for e in seen.entries] == [
        (0, "/nvme/img.sqsh", "ready"), (USER, "/nvme/theirs", "ready"),
    ]  # fmt: skip
    assert (seen.unread, seen.silent) == ([], [])
    (parent / str(USER)).chmod(0o000)
    closed = node_status(str(node.disk), ["/nvme"], [], everyone=True)
    assert [entry.user for entry in closed.entries] == [0]
    why = f"Permission denied; its user can open it: chmod -R u+rwX {parent}/{USER}"
    assert closed.unread == [Unread(f"{parent}/{USER}", why, folder=True)]


@pytest.mark.root
@pytest.mark.parametrize(
    "answer",
    [b"", b"{", b"[" * 100_000, b'{"entries": [["a"]], "rooms": [], "unread": [], "silent": []}',
     b"\xff", TimeoutError()],
)  # fmt: skip
def test_users_whose_process_does_not_answer_as_it_should_are_named(
    node: Node, monkeypatch: pytest.MonkeyPatch, answer: bytes | TimeoutError
) -> None:
    give_records_folder(node.root, USER)

    def answer_as(*_: object) -> bytes:
        if isinstance(answer, TimeoutError):
            raise answer
        return answer

    monkeypatch.setattr("stager.store.states.answer_as", answer_as)
    seen = node_status(str(node.disk), ["/nvme"], [], everyone=True)
    assert [entry.user for entry in seen.entries] == [0]
    assert seen.silent == [USER]


@pytest.mark.root
def test_no_user_answers_for_another(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    give_records_folder(node.root, USER)
    lie = codec_of(NodeStatus).to_data(NodeStatus([ENTRY._replace(user=1, shared=True)]))
    monkeypatch.setattr("stager.store.states.answer_as", lambda *_: json.dumps(lie).encode())
    seen = node_status(str(node.disk), ["/nvme"], [], everyone=True)
    assert {(entry.user, entry.shared) for entry in seen.entries} == {(0, False), (USER, False)}


# Jobs


def test_running_jobs_are_found_by_what_they_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(tmp_path))
    monkeypatch.setattr("stager.base.paths.JOBS_FOLDER", str(tmp_path / "jobs"))
    for folder in ("jobs", "1000", "1001"):
        (tmp_path / folder).mkdir()
    for mark in ("17.1000", "18.1000", "20.1001"):
        (tmp_path / "jobs" / mark).touch()
    (tmp_path / "1000/17.uses").write_bytes(b"/nvme/a\0/nvme/b\0")
    (tmp_path / "1000/18.uses").write_bytes(b"/nvme/b\0")
    (tmp_path / "1000/17.1").write_bytes(b"0\n")
    (tmp_path / "1001/20.uses").write_bytes(b"/nvme/b\0")
    (tmp_path / "1001/19.uses").write_bytes(b"/nvme/a\0")  # a job that has no mark
    for uid in (1000, 1001):
        os.chown(tmp_path / str(uid), uid, uid)
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    assert jobs_using(1000) == {"/nvme/a": [17], "/nvme/b": [17, 18]}
    assert jobs_using(1001) == {"/nvme/b": [20]}
    assert jobs_using(1002) == {}
    assert {path: sorted(jobs) for path, jobs in jobs_using(None).items()} == {
        "/nvme/a": [17], "/nvme/b": [17, 18, 20],
    }  # fmt: skip


def test_a_status_travels_and_has_a_json_for_programs() -> None:
    seen = NodeStatus([ENTRY], [DiskRoom("/nvme", 1, 2)], [Unread("/p", "why")], [1001])
    assert codec_of(NodeStatus).decode(codec_of(NodeStatus).encode(seen)) == seen
    assert seen.to_json() == {
        "entries": [
            {
                "destination": "/nvme/img.sqsh",
                "source": "/shared/img.sqsh",
                "size": 3145728,
                "digest": "00112233445566778899aabbccddeeff",
                "staged_at": 1000000,
                "used_at": 1000100,
                "used_by_job": 17,
                "lifetime": "cache",
                "pinned": False,
                "jobs": [],
                "state": "ready",
                "user": 1000,
                "shared": False,
                "files": 0,
                "part": False,
                "folder": False,
                "store": False,
                "cache": "",
            }
        ],
        "roots": [{"root": "/nvme", "free": 1, "size": 2}],
        "unreadable": [{"path": "/p", "why": "why", "folder": False}],
        "silent": [1001],
        "shared": None,
    }


def test_ten_thousand_records_are_read(node: Node) -> None:
    cache = open_cache(str(node.root), os.getuid(), disk=str(node.disk))
    template = cache.load("/nvme/img.sqsh")
    assert template
    for number in range(10_000):
        record = replace(template, destination=f"/nvme/{number}")
        with open(cache.record_path(record.destination), "w") as file:
            file.write(record.to_json())
    status = node.status()
    assert (len(status.entries), status.unread) == (10_001, [])
