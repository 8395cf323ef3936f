"""What verify, evict, pin and unpin do on one node, and what they refuse."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import xxhash

from stager.base.codec import codec_of
from stager.base.errors import DestinationError, UsageError
from stager.base.options import Options
from stager.fs.files import CopyFacts, digest_of
from stager.node.agent import (
    Done,
    Enough,
    Evict,
    NodeResult,
    OfCopies,
    Pin,
    Refused,
    Stays,
    Unpin,
    Verify,
    carry_out,
    command_of,
    text_of,
)
from stager.request.items import StageItem
from stager.source.posix import facts_of, look_at_source
from stager.store import verify
from stager.store.cache import open_cache
from stager.store.leases import note_uses
from stager.store.locks import Locks
from stager.store.record import VERSION, Record
from stager.store.states import node_status
from stager.store.validity import survey
from tests.support import records
from tests.support.trees import stage_folder
from tests.support.users import OWNER, USER, as_ordinary_user, as_user, forked, ordinary_home

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 1 << 20
NOW = int(time.time())


class Node:
    """A node whose disk is a folder, and the user's copies beneath its root /nvme."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk
        (disk / "nvme").mkdir(parents=True)
        self.cache = open_cache(f"{disk}/nvme", os.getuid(), disk=str(disk))

    def stage(self, name: str, age: int = 0, data: bytes = b"data", **changes: object) -> Path:
        """A copy that was used ``age`` seconds ago, and its record."""
        copy = self.disk / "nvme" / name
        copy.write_bytes(data)
        facts = copy.stat()
        record = Record(
            version=VERSION, source="/shared/a", destination=f"/nvme/{name}",
            source_facts=facts_of(facts),
            copy_facts=CopyFacts(
                facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_uid
            ),
            digest=xxhash.xxh3_128_hexdigest(data), staged_at=NOW - age, used_at=NOW - age,
            used_by_job=17, lifetime="cache", pinned=False,
        )  # fmt: skip
        self.cache.save(replace(record, **changes))  # type: ignore[arg-type]
        return copy

    def do(self, make: type[OfCopies], *names: str, **options: object) -> NodeResult:
        destinations = tuple(f"/nvme/{name}" for name in names)
        command = make(("/nvme",), destinations=destinations, **options)  # type: ignore[arg-type]
        return carry_out(command, str(self.disk))

    def left(self) -> list[str]:
        """The copies that are there, each with its record."""
        recorded = sorted(record.destination for record in self.cache.records())
        assert recorded == sorted(f"/nvme/{p.name}" for p in self.disk.glob("nvme/[a-z]*"))
        return [path.removeprefix("/nvme/") for path in recorded]

    def pinned(self, name: str) -> bool:
        record = self.cache.load(f"/nvme/{name}")
        assert record
        return record.pinned


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "node1")


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], None]:
    """Notes that a running job of this user uses a copy."""
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(tmp_path / "run"))
    monkeypatch.setattr("stager.base.paths.JOBS_FOLDER", str(tmp_path / "run/jobs"))
    (tmp_path / "run/jobs").mkdir(parents=True)
    (tmp_path / f"run/{os.getuid()}").mkdir()

    def use(job: int, name: str) -> None:
        (tmp_path / f"run/jobs/{job}.{os.getuid()}").touch()
        note_uses(os.getuid(), job, [f"/nvme/{name}"])

    return use


ABSENT = "is no copy of yours here; stagectl status lists what is staged"


def refused(result: NodeResult) -> list[tuple[int, str]]:
    assert result.done == []
    return [(one.code, one.message) for one in result.refused]


def held_by_another(node: Node, name: str, act: Callable[[], NodeResult]) -> NodeResult:
    """What ``act`` does while another process, of job 23, stages the copy."""

    def child() -> NodeResult:
        return act()

    with closing(Locks(node.cache)) as locks:
        assert locks.take(f"/nvme/{name}")
        return forked(child)  # a lock is its process's: the child is another one


# Commands


def test_a_command_travels_as_one_plain_argument() -> None:
    command = Evict(
        ("/nvme", ""),
        ("/site",),
        destinations=("/nvme/a b'\n", "/nvme/\udce9"),
        older=7,
        to_free=8,
        dry_run=True,
    )
    text = text_of(command)
    assert text.replace("-", "").replace("_", "").rstrip("=").isalnum()
    assert command_of(text) == command


@pytest.mark.parametrize("text", ["", "x", "AAAA", "bnVsbA==", "e30=", "eyJkZWVkIjogMX0="])
def test_a_text_that_is_not_a_command_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        command_of(text)
    assert str(caught.value) == "only stagectl on another node calls this command"


def test_a_result_travels() -> None:
    result = NodeResult(
        [Done("/nvme/a", 1)],
        [Refused(2, "no", "/nvme/b")],
        [Stays("/nvme/c", "in use")],
        [Enough("/nvme", 5)],
    )
    assert codec_of(NodeResult).from_data(codec_of(NodeResult).to_data(result)) == result


@pytest.mark.parametrize("action", [Verify, Evict, Pin, Unpin])
def test_a_destination_that_is_not_staged_is_refused_and_the_others_are_done(
    node: Node, action: type[OfCopies]
) -> None:
    node.stage("a")
    result = node.do(action, "x", "a")
    assert [one.destination for one in result.done] == ["/nvme/a"]
    assert result.refused == [Refused(2, f"/nvme/x {ABSENT}", "/nvme/x")]


def test_a_node_without_a_cache_has_nothing_staged(tmp_path: Path) -> None:
    command = Pin(("/nvme",), destinations=("/nvme/a",))
    assert refused(carry_out(command, str(tmp_path))) == [(2, f"/nvme/a {ABSENT}")]
    assert carry_out(Verify(("/nvme",)), str(tmp_path)) == NodeResult()


# pin and unpin


def test_a_pin_is_kept_in_the_record(node: Node) -> None:
    node.stage("a")
    assert node.do(Pin, "a") == NodeResult([Done("/nvme/a", 4)])
    assert node.pinned("a")
    assert node.do(Unpin, "a") == NodeResult([Done("/nvme/a", 4)])
    assert not node.pinned("a")


def test_a_copy_that_is_being_staged_is_not_pinned(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.stage("a")
    result = held_by_another(node, "a", lambda: node.do(Pin, "a"))
    holder = _holder()
    message = f"/nvme/a is being staged or evicted by {holder}; try again later"
    assert refused(result) == [(9, message)]
    assert not node.pinned("a")


def _holder() -> str:
    job = os.environ.get("SLURM_JOB_ID")
    return f"job {job}" if job else f"process {os.getpid()}"


# evict


def test_evicted_copies_are_gone_with_their_records(node: Node) -> None:
    for name in "abc":
        node.stage(name)
    assert node.do(Evict, "a", "c") == NodeResult([Done("/nvme/a", 4096), Done("/nvme/c", 4096)])
    assert node.left() == ["b"]


def test_a_dry_run_evicts_nothing(node: Node) -> None:
    node.stage("a", 3600)
    done = NodeResult([Done("/nvme/a", 4096)])
    assert node.do(Evict, "a", dry_run=True) == done
    assert node.do(Evict, older=60, dry_run=True) == done
    assert node.left() == ["a"]


def test_a_pinned_copy_is_not_evicted(node: Node) -> None:
    node.stage("a", 3600, pinned=True)
    message = "/nvme/a is pinned; unpin it first: stagectl unpin /nvme/a"
    assert refused(node.do(Evict, "a")) == [(3, message)]
    stays = NodeResult(stay=[Stays("/nvme/a", "pinned")])
    assert node.do(Evict, older=60) == stays
    assert node.left() == ["a"]


def test_a_copy_in_use_is_not_evicted(node: Node, jobs: Callable[[int, str], None]) -> None:
    node.stage("a", 3600)
    jobs(17, "a")
    message = "/nvme/a is used by job 17; evict it when it has ended"
    assert refused(node.do(Evict, "a")) == [(9, message)]
    jobs(9, "a")
    assert refused(node.do(Evict, "a", dry_run=True)) == [
        (9, "/nvme/a is used by jobs 17,9; evict it when they have ended")
    ]
    assert node.do(Evict, older=60) == NodeResult(stay=[Stays("/nvme/a", "in use")])
    assert node.left() == ["a"]


def test_a_job_may_evict_what_it_alone_uses(node: Node, jobs: Callable[[int, str], None]) -> None:
    for name in "ab":
        node.stage(name)
        jobs(17, name)
    jobs(9, "b")
    used = "/nvme/a is used by job 17; evict it when it has ended"
    assert refused(node.do(Evict, "a", job=9)) == [(9, used)]
    assert node.do(Evict, "a", "b", job=17) == NodeResult(
        [Done("/nvme/a", 4096)],
        [Refused(9, "/nvme/b is used by job 9; evict it when it has ended")],
    )
    assert node.left() == ["b"]


def test_a_copy_that_is_being_staged_is_not_evicted(node: Node) -> None:
    node.stage("a", 3600)
    result = held_by_another(node, "a", lambda: node.do(Evict, "a"))
    message = f"/nvme/a is being staged or evicted by {_holder()}; try again later"
    assert refused(result) == [(9, message)]
    result = held_by_another(node, "a", lambda: node.do(Evict, older=60))
    assert result == NodeResult(stay=[Stays("/nvme/a", "in use")])
    assert node.left() == ["a"]


def test_copies_that_were_not_used_for_long_are_evicted(node: Node) -> None:
    for name, age in {"a": 90_000, "b": 100, "c": 100_000}.items():
        node.stage(name, age)
    assert node.do(Evict, older=86_400) == NodeResult(
        [Done("/nvme/a", 4096), Done("/nvme/c", 4096)]
    )
    assert node.left() == ["b"]


def test_a_copy_that_cannot_be_evicted_does_not_stop_the_others(node: Node) -> None:
    """A user replaced the folder above it by a link."""
    (node.disk / "nvme/b").mkdir()
    node.stage("b/copy", 3600)
    (node.disk / "nvme/b").rename(node.disk / "elsewhere")
    (node.disk / "nvme/b").symlink_to(node.disk / "elsewhere")
    node.stage("a", 3600)
    node.stage("c", 3600)
    result = node.do(Evict, older=60)
    assert [one.destination for one in result.done] == ["/nvme/a", "/nvme/c"]
    [one] = result.refused
    assert (one.code, result.stay) == (6, [])
    assert one.message == (
        f"{node.disk}/nvme/b is a symbolic link, not a folder; links are not followed: remove it, "
        "or write the path that it leads to in the destination"
    )
    assert (node.disk / "elsewhere/copy").exists()


def free(node: Node) -> int:
    room = os.statvfs(node.disk)
    return room.f_bavail * room.f_frsize


def test_the_least_recently_used_are_evicted_until_enough_is_free(node: Node) -> None:
    for name, age in {"a": 30, "b": 20, "c": 10}.items():
        node.stage(name, age, bytes(64 * MIB))
    # The disk is not this test's alone: half a copy's size to either side.
    result = node.do(Evict, to_free=free(node) + 96 * MIB)
    assert result == NodeResult(result.done)
    assert [one.destination for one in result.done] == ["/nvme/a", "/nvme/b"]
    # A filesystem may take a further block for where the parts of a file are.
    assert all(0 <= one.size - 64 * MIB < MIB for one in result.done)
    assert node.left() == ["c"]
    room = free(node)
    result = node.do(Evict, to_free=room - 32 * MIB)
    [enough] = result.enough
    assert result == NodeResult(enough=[Enough("/nvme", enough.free)])
    assert abs(enough.free - room) < 32 * MIB
    assert node.left() == ["c"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1 << 60, "1024.0 PiB"),
        (10**18, "1000000000 GB (888.2 PiB)"),
        (10**18 + 1, "888.2 PiB"),
    ],
)
def test_nothing_is_evicted_if_all_copies_would_not_be_enough(
    node: Node, size: int, text: str
) -> None:
    node.stage("a")
    node.stage("b", pinned=True)
    [(code, message)] = refused(node.do(Evict, to_free=size))
    assert code == 5
    assert message.startswith(f"/nvme: cannot free {text}: ")
    end = (
        " are free, and evicting your copies would free only 4.0 KiB more "
        "(/nvme/b (pinned) stays); nothing was evicted there"
    )
    assert message.endswith(end)
    assert node.left() == ["a", "b"]


def test_a_file_in_the_place_of_a_copy_is_kept(node: Node) -> None:
    copy = node.stage("a", 3600)
    copy.rename(copy.with_name("other"))
    copy.write_bytes(b"mine")
    for dry_run in (True, False):
        assert node.do(Evict, older=60, dry_run=dry_run) == NodeResult(
            stay=[Stays("/nvme/a", "not the copy, which is gone")]
        )
    assert copy.read_bytes() == b"mine"


def test_of_a_folder_that_was_evicted_it_is_told_that_files_in_it_stay(node: Node) -> None:
    cache = open_cache(f"{node.disk}/nvme", os.getuid(), disk=str(node.disk))
    path = node.disk / "nvme/set"
    record = stage_folder(cache, str(path))
    cache.forget(record.destination)
    cache.save(replace(record, destination="/nvme/set"))
    (path / "mine").write_text("mine")
    assert record.tree
    size = record.tree.allocated
    assert node.do(Evict, "set", dry_run=True) == NodeResult([Done("/nvme/set", size)])
    gone = Done("/nvme/set", size, kept=True)
    assert node.do(Evict, "set") == NodeResult([gone])
    assert (path / "mine").read_text() == "mine"


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_folder_in_the_place_of_a_copy_stays_and_is_not_called_evicted(
    node: Node, *, dry_run: bool
) -> None:
    copy = node.stage("a", 3600)
    copy.rename(copy.with_name("other"))
    copy.mkdir()
    stays = [Stays("/nvme/a", "not the copy, which is gone")]
    assert node.do(Evict, older=60, dry_run=dry_run) == NodeResult(stay=stays)
    assert copy.is_dir()


def test_a_folder_in_the_place_of_a_copy_is_kept(node: Node) -> None:
    copy = node.stage("a")
    copy.unlink()
    copy.mkdir()
    changed = "/nvme/a was changed or replaced, so it {} not be deleted"
    assert node.do(Evict, "a", dry_run=True) == NodeResult(
        refused=[Refused(7, changed.format("would"))]
    )
    message = (
        "/nvme/a was changed or replaced, so it was not deleted, and slurm-stage no longer "
        "manages it; if you do not need it, delete it there: srun -N1 -n1 -w NODE rm -r /nvme/a"
    )
    assert node.do(Evict, "a") == NodeResult(refused=[Refused(7, message)])
    node.stage("b").unlink()
    (copy.parent / "b").mkdir()
    by_root = node.do(Evict, "b", user=os.getuid())
    message = message.replace("/a", "/b").partition(";")[0]  # no command that deletes for root
    assert by_root == NodeResult(refused=[Refused(7, message)])
    assert (copy.is_dir(), (copy.parent / "b").is_dir()) == (True, True)


@pytest.mark.parametrize("path", ["/etc/passwd", "/nvme/../etc/passwd", "/nvme2/a", "/nvme"])
def test_a_record_of_what_is_not_beneath_its_root_is_none(node: Node, path: str) -> None:
    cache = open_cache(f"{node.disk}/nvme", os.getuid(), disk=str(node.disk))
    cache.save(replace(records.RECORD, destination=path))
    assert [*cache.records()] == []
    (unread,) = node_status(str(node.disk), ("/nvme",), ()).unread
    assert unread.why == f"it is the record of {path}, which is not in /nvme"
    command = Evict(("/nvme",), destinations=(path,))
    assert carry_out(command, str(node.disk)).refused == [
        Refused(
            2, f"{path} is no copy of yours here; stagectl status lists what is staged",
            path,
        )
    ]  # fmt: skip


def test_a_disk_that_fails_is_reported(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.stage("a")
    node.stage("b")
    shutil.rmtree(f"{node.cache.folder}/partial")
    assert (
        refused(node.do(Pin, "a", "b"))
        == [(6, f"{node.cache.folder}/partial: No such file or directory")] * 2
    )


# verify


def _touched(copy: Path) -> None:
    copy.write_bytes(b"DATA")
    os.utime(copy, ns=(1, 1))


def _damaged(copy: Path) -> None:
    facts = copy.stat()
    with copy.open("r+b") as file:
        file.write(b"x")
    os.utime(copy, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def _replaced(copy: Path) -> None:
    facts = copy.stat()
    other = copy.with_name("other")
    other.write_bytes(b"DATA")
    os.utime(other, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    other.rename(copy)


def _gone(copy: Path) -> None:
    copy.unlink()


def _linked(copy: Path) -> None:
    copy.rename(copy.with_name("other"))
    copy.symlink_to("other")


def _a_folder(copy: Path) -> None:
    copy.unlink()
    copy.mkdir()


DELETE = (
    "move it elsewhere, or delete it there if you do not need it (srun -N1 -n1 -w NODE rm -r "
    "/nvme/b), and stage it again"
)
DAMAGED = "the copy is damaged: its bytes differ from its checksum"
REPLACE = "keep what you changed (b) elsewhere, then stage it again with the option replace"
FAULTS: dict[Callable[[Path], None], str] = {
    _touched: f"the copy was changed after staging; {REPLACE}",
    _damaged: f"{DAMAGED}; stage it again",
    _replaced: f"the copy was replaced by something else; {REPLACE}",
    _gone: "the copy is gone; stage it again",
    _linked: f"the copy was replaced by something else; {REPLACE}",
    _a_folder: f"the copy was replaced by something else; {DELETE}",
}


@pytest.mark.parametrize(
    ("damage", "fault"), FAULTS.items(), ids=[act.__name__.strip("_") for act in FAULTS]
)
def test_a_damaged_copy_is_reported_and_the_others_are_verified(
    node: Node, damage: Callable[[Path], None], fault: str
) -> None:
    copies = {name: node.stage(name) for name in "abc"}
    damage(copies["b"])
    expected = NodeResult(
        [Done("/nvme/a", 4), Done("/nvme/c", 4)], [Refused(7, f"/nvme/b: {fault}")]
    )
    assert node.do(Verify) == expected
    assert node.do(Verify, "a", "b", "c") == expected
    records = {record.destination: record for record in node.cache.records()}
    damaged = [destination for destination, record in records.items() if record.is_damaged]
    assert damaged == (["/nvme/b"] if damage is _damaged else [])
    source = node.disk / "source"
    source.write_bytes(b"data")

    def stage_again(*, replaces: bool) -> None:
        item = StageItem(str(source), "/nvme/b", "/nvme", Options(replace=replaces))
        answer = survey(item, str(copies["b"]), look_at_source(str(source)), node.cache, "n1")
        assert not answer.current

    # What the remedy says of the next stage is so.
    refuses = DELETE in fault or REPLACE in fault
    with pytest.raises(DestinationError) if refuses else nullcontext():
        stage_again(replaces=False)
    with pytest.raises(DestinationError) if DELETE in fault else nullcontext():
        stage_again(replaces=True)


def test_a_copy_that_cannot_be_read_is_reported_and_the_others_are_verified() -> None:
    def act(home: Path) -> NodeResult:
        node = Node(home / "node1")
        node.stage("a").chmod(0)
        node.stage("b")
        return node.do(Verify)

    with ordinary_home() as home:
        result = as_ordinary_user(lambda: act(home))
    fault = (
        "/nvme/a: the copy cannot be read: Permission denied; stage it again, or use another node"
    )
    assert result == NodeResult([Done("/nvme/b", 4)], [Refused(7, fault)])


def test_a_copy_that_is_being_replaced_is_not_reported_as_damaged(node: Node) -> None:
    copy = node.stage("a")
    copy.write_bytes(b"newer")  # its record comes next, from the job that has the lock
    result = held_by_another(node, "a", lambda: node.do(Verify))
    message = f"/nvme/a is being staged or evicted by {_holder()}; try again later"
    assert refused(result) == [(9, message)]


def test_a_copy_whose_record_changed_meanwhile_is_judged_by_the_new_one(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.stage("a")
    really = digest_of

    def replaced_meanwhile(path: str) -> str:
        monkeypatch.setattr(verify, "digest_of", really)
        node.stage("a", data=b"newer")
        return really(path)

    monkeypatch.setattr(verify, "digest_of", replaced_meanwhile)
    assert node.do(Verify) == NodeResult([Done("/nvme/a", 5)])


# What is for all users


@pytest.mark.root
def test_only_its_account_may_change_shared_copies_and_all_may_verify_them() -> None:
    with ordinary_home() as home:
        (home / "site").mkdir()
        os.chown(home, 0, 0)
        home.chmod(0o755)
        node = Node(home / "node1")
        (home / "site/a").write_bytes(b"data")
        staged = node.cache
        node.stage("x")
        record = staged.load("/nvme/x")
        assert record
        facts = (home / "site/a").stat()
        copy = CopyFacts(4, facts.st_mtime_ns, facts.st_ino, OWNER)
        shared = replace(record, destination="/site/a", copy_facts=copy)
        for path in (home / "site", home / "site/a"):
            os.chown(path, OWNER, OWNER)
        as_user(
            OWNER,
            lambda: open_cache(f"{home}/site", OWNER, shared=True, disk=str(home)).save(shared),
        )

        def do(action: type[OfCopies]) -> NodeResult:
            command = action((), ("/site",), OWNER, destinations=("/site/a",))
            return carry_out(command, str(home))

        for action in (Evict, Pin, Unpin):
            message = (
                "/site/a was staged for all users: only the account that staged it "
                f"(uid {OWNER}) may {action.verb} it"
            )
            if action is Evict:
                message += f", or root by --user {OWNER}"
            for uid in (0, USER):
                assert refused(as_user(uid, partial(do, action))) == [(3, message)]
        for uid in (0, USER, OWNER):
            assert as_user(uid, lambda: do(Verify)) == NodeResult([Done("/site/a", 4)])
        assert as_user(OWNER, lambda: do(Pin)) == NodeResult([Done("/site/a", 4)])
