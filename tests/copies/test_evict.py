"""What goes to make room: as little as will do, oldest first, and nothing that is in use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.base import paths
from stager.base.errors import DestinationError, SpaceError
from stager.base.outcome import Evicted
from stager.base.text import bytes_text
from stager.copies.evict import (
    Candidate,
    FreeSpace,
    Held,
    Need,
    Replaced,
    RoomPlan,
    choose,
    find_candidates,
    free_space,
    oldest,
    plan_room,
    remove,
    rooms,
)
from stager.copies.own import HoldsOwnError, find_own
from stager.disk.cache import Cache, open_cache
from stager.disk.files import digest_of
from stager.disk.jobs import note_uses, remove_files
from stager.disk.locks import Locks
from stager.disk.record import CopyFacts, Record
from stager.request.items import Space
from tests.support.records import RECORD
from tests.support.trees import stage_folder
from tests.support.users import USER, forked, on_tmpfs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import TypeVar

    from stager.copies.reading import Reading

    T = TypeVar("T")

MIB = 1 << 20


CACHE = Cache("/nvme/.slurm-stage/60")


def kept(
    name: str, size: int, used_at: int, *, held: Held | None = None, job: bool = False
) -> Candidate:
    lifetime = "job" if job else "cache"
    record = replace(RECORD, destination=f"/nvme/{name}", used_at=used_at, lifetime=lifetime)
    return Candidate(CACHE, record, size, held)


# Choosing

KEPT = st.lists(
    st.builds(
        kept, st.text("abc", min_size=1, max_size=3), st.integers(0, 9), st.integers(0, 5),
        held=st.sampled_from([None, Held.PINNED]), job=st.booleans(),
    ),
    max_size=8, unique_by=lambda one: one.record.destination,
)  # fmt: skip


@given(KEPT, st.integers(-5, 40))
def test_the_selection_is_enough_and_minimal(every: list[Candidate], goal: int) -> None:
    chosen = choose(every, goal)
    freed = sum(one.size for one in chosen)
    assert freed >= goal or chosen == oldest(every)
    assert all(one.may_go for one in chosen)
    if freed >= goal:
        assert all(freed - one.size < goal for one in chosen)


@given(KEPT)
def test_copies_for_a_job_go_first_and_then_the_least_recently_used(
    every: list[Candidate],
) -> None:
    keys = [(one.record.lifetime != "job", one.record.used_at) for one in oldest(every)]
    assert keys == sorted(keys)
    assert {one.record.destination for one in oldest(every)} == {
        one.record.destination for one in every if one.may_go and one.size
    }


def test_a_large_copy_that_must_go_spares_the_small_ones_before_it() -> None:
    small, large, late = kept("a", 1, 1), kept("b", 10, 2), kept("c", 10, 3)
    assert choose([late, large, small], 10) == [large]
    assert choose([late, large, small], 11) == [small, large]


# Room


def planned(
    need: int, free: int, limit: int, candidates: list[Candidate], whole: int = 0
) -> list[Candidate]:
    return plan_room("/nvme", need, FreeSpace(free, free), limit, candidates, whole)


def refusal(
    need: int,
    free: int | FreeSpace,
    limit: int,
    candidates: list[Candidate],
    whole: int = 0,
    *,
    is_estimate: bool = False,
) -> str:
    there = free if isinstance(free, FreeSpace) else FreeSpace(free, free)
    with pytest.raises(SpaceError) as caught:
        plan_room("/nvme", need, there, limit, candidates, whole, is_estimate=is_estimate)
    return str(caught.value)


def test_if_there_is_room_nothing_is_evicted() -> None:
    assert planned(10, 10, 0, [kept("a", 5, 1)]) == []
    assert planned(0, 0, 0, []) == []


def test_as_much_is_evicted_as_is_too_little() -> None:
    first, second = kept("a", 5, 1), kept("b", 5, 2)
    assert planned(10, 6, 0, [first, second]) == [first]
    assert planned(10, 4, 0, [first, second]) == [first, second]


def test_the_limit_counts_the_part_of_a_tree_that_is_there_already() -> None:
    other = kept("a", 5, 1)
    assert planned(2, 100, 15, [other], 10) == []
    assert planned(2, 100, 14, [other], 10) == [other]
    assert refusal(2, 100, 9, [other], 10) == (
        "/nvme: not enough room: 10 B needed; your limit on this disk is 9 B, and your "
        "other copies take 5 B; stage less"
    )


REMEDY = "delete other files of yours there, or ask for nodes with larger disks"


def test_too_little_room_is_reported_with_what_can_be_done() -> None:
    assert refusal(110 << 20, 100 << 20, 0, []) == (
        "/nvme: not enough room: 110.0 MiB needed, 100.0 MiB free, 10.0 MiB still missing; "
        f"{REMEDY}"
    )
    every = [kept("a", 3, 1), kept("b", 4, 1, held=Held.PINNED)]
    assert refusal(110, 100, 0, every) == (
        "/nvme: not enough room: 110 B needed, 100 B free, 3 B can be freed by removing your old "
        "copies, 7 B still missing; 4 B of your copies stay: /nvme/b (pinned); unpin copies "
        f"(stagectl unpin DST), {REMEDY}"
    )


def test_of_copies_that_stay_the_largest_are_named_with_what_lets_them_go() -> None:
    every = [
        kept(name, size, 1, held=held)
        for name, size, held in (
            ("a", 1, Held.IN_USE), ("b", 4, Held.IN_USE), ("c", 2, Held.WANTED),
            ("d", 3, Held.WANTED), ("e", 0, Held.PINNED),
        )
    ]  # fmt: skip
    assert refusal(110, 100, 0, every) == (
        "/nvme: not enough room: 110 B needed, 100 B free, 10 B still missing; 10 B of your copies "
        "stay: /nvme/b (in use), /nvme/d (needed by this job), /nvme/c (needed by this job) and 1 "
        f"more; wait until the jobs that use copies have ended, {REMEDY}"
    )
    assert refusal(110, 100, 0, [kept("a", 1, 1, held=Held.PERHAPS_IN_USE)]) == (
        "/nvme: not enough room: 110 B needed, 100 B free, 10 B still missing; 1 B of your copies "
        "stay: /nvme/a (perhaps in use); delete copies that no job of yours uses (stagectl evict "
        f"DST), {REMEDY}"
    )


def test_what_the_site_keeps_free_is_named() -> None:
    assert refusal(10, FreeSpace(-10 << 30, 50 << 30, 60 << 30), 0, []) == (
        "/nvme: not enough room: 10 B needed, 50.0 GiB free, but this site keeps 60.0 GiB free, "
        f"10.0 GiB still missing; {REMEDY}"
    )
    assert refusal(10, FreeSpace(4, 10, 6), 0, []) == (
        "/nvme: not enough room: 10 B needed, 10 B free, of which this site keeps 6 B free, 6 B "
        f"still missing; {REMEDY}"
    )


def test_what_no_user_can_mend_is_for_the_administrator_or_for_larger_disks() -> None:
    stays = [kept("a", 3, 1, held=Held.PINNED)]
    assert refusal(1 << 30, FreeSpace(-10 << 30, 50 << 30, 60 << 30, 60 << 30), 0, stays) == (
        "/nvme: not enough room: 1.0 GiB needed, 50.0 GiB free, but this site keeps 60.0 GiB free, "
        "11.0 GiB still missing; 3 B of your copies stay: /nvme/a (pinned); tell the "
        "administrator: the disk has only 60.0 GiB, so keep_free must be less"
    )
    assert refusal(95, FreeSpace(70, 80, 10, 100), 0, []) == (
        "/nvme: not enough room: 95 B needed, 80 B free, of which this site keeps 10 B free, 25 B "
        "still missing; the whole disk has only 100 B: ask for nodes with larger disks, or stage "
        "less"
    )


def test_it_is_said_if_a_disk_is_full_of_other_files_than_the_users_copies() -> None:
    every = [kept("a", 3, 1), kept("b", 4, 1, held=Held.PINNED)]
    said = (
        "/nvme: not enough room: 20 B needed, 10 B free, 3 B can be freed by removing your old "
        "copies, 7 B still missing; 4 B of your copies stay: /nvme/b (pinned); unpin copies "
        "(stagectl unpin DST), delete other files of yours there, use other nodes, or ask the "
        "administrator to make room: 83 B of the disk's 105 B are taken by other files than your "
        "copies"
    )
    # root's reserve of 5 B is neither free nor taken
    assert refusal(20, FreeSpace(10, 10, 0, 105, 90), 0, every) == said
    enough = [kept("b", 40, 1, held=Held.PINNED)]
    assert refusal(20, FreeSpace(10, 10, 0, 100, 90), 0, enough) == (
        "/nvme: not enough room: 20 B needed, 10 B free, 10 B still missing; 40 B of your copies "
        f"stay: /nvme/b (pinned); unpin copies (stagectl unpin DST), {REMEDY}"
    )


def test_the_old_copies_that_are_to_be_replaced_are_the_users_and_named_if_that_helps() -> None:
    free = FreeSpace(10, 10, 0, 100, 90)

    def remedy(*replaced: Replaced) -> str:
        with pytest.raises(SpaceError) as caught:
            plan_room("/nvme", 20, free, 0, [], replaced=replaced)
        said = "/nvme: not enough room: 20 B needed, 10 B free, 10 B still missing; "
        assert caught.value.message.startswith(said)
        return caught.value.message.removeprefix(said)

    small, large = Replaced("/nvme/a", 5, 5), Replaced("/nvme/my b", 70, 10)
    assert remedy(small, large) == (
        f"delete the old copies that are to be replaced (stagectl evict '/nvme/my b'), {REMEDY}"
    )
    assert remedy(small) == (
        "delete other files of yours there, use other nodes, or ask the administrator to make "
        "room: 85 B of the disk's 100 B are taken by other files than your copies"
    )


def test_a_need_that_is_an_estimate_is_named_so() -> None:
    estimate = "an estimate: the size of the copy is not known yet"
    assert refusal(125837312, 1 << 20, 0, [], is_estimate=True) == (
        f"/nvme: not enough room: about 120.0 MiB needed ({estimate}), 1.0 MiB free, 119.0 MiB "
        f"still missing; {REMEDY}"
    )


def test_a_users_limit_counts_all_copies_of_the_user() -> None:
    first, second = kept("a", 40, 1), kept("b", 40, 2)
    assert planned(20, 1000, 100, [first, second]) == []
    assert planned(21, 1000, 100, [first, second]) == [first]
    pinned = replace(first, held=Held.PINNED)
    assert refusal(61, 1000, 100, [pinned, second]) == (
        "/nvme: not enough room: 61 B needed; your limit on this disk is 100 B, and your other "
        "copies take 80 B; 40 B of your copies stay: /nvme/a (pinned); stage less, or unpin copies "
        "(stagectl unpin DST)"
    )


# On a disk


@pytest.fixture
def _jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A /run of the test's own, where root marks jobs."""
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(tmp_path / "run"))
    monkeypatch.setattr("stager.base.paths.JOBS_FOLDER", str(tmp_path / "run/jobs"))
    (tmp_path / f"run/{os.getuid()}").mkdir(parents=True)
    (tmp_path / "run/jobs").mkdir()


class Node:
    """A disk with a cache, and files in it."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk
        self.cache = open_cache(str(disk), os.getuid())

    def put(self, name: str, size: int, used_at: int = 0, *, pinned: bool = False) -> Record:
        path = self.disk / name
        path.write_bytes(b"x" * size)
        there = path.stat()
        copy = CopyFacts(size, there.st_mtime_ns, there.st_ino, there.st_uid)
        record = replace(
            RECORD, destination=str(path), copy_facts=copy, digest=digest_of(str(path)),
            used_at=used_at, pinned=pinned,
        )  # fmt: skip
        self.cache.save(record)
        return record

    def remove(self, name: str, *, force: bool = False) -> Record | None:
        with closing(Locks(self.cache)) as locks:
            return remove(self.cache, locks, "", str(self.disk / name), force=force)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.disk.iterdir() if path.is_file())


@pytest.fixture
def node(tmp_path: Path, _jobs: None) -> Node:
    (tmp_path / "disk").mkdir()
    return Node(tmp_path / "disk")


def test_a_copy_goes_with_its_record(node: Node) -> None:
    record = node.put("a", 10)
    assert node.remove("a") == record
    assert node.names() == []
    assert list(node.cache.records()) == []
    assert node.remove("a") is None


def _replace(path: Path) -> None:
    path.with_suffix(".new").write_bytes(b"mine")
    path.with_suffix(".new").rename(path)


def _edit(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"mine")
    os.utime(path, ns=(1, 1))


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def seen(path: Path) -> tuple[int, int, int, int]:
    """All of its stat that a reader does not change."""
    there = path.lstat()
    return there.st_mode, there.st_ino, there.st_size, there.st_mtime_ns


def _take_inode(path: Path) -> None:
    """Another file gets the copy's inode number, as a filesystem gives it away again at once."""
    inode = path.stat().st_ino
    path.write_bytes(b"quite mine")
    os.utime(path, ns=(5, 5))
    assert path.stat().st_ino == inode


@pytest.mark.parametrize("change", [_replace, _edit, _link, _take_inode])
def test_a_file_that_a_user_made_of_a_copy_is_kept_unless_forced(
    node: Node, change: Callable[[Path], object]
) -> None:
    record = node.put("a", 10)
    path = node.disk / "a"
    change(path)
    there = seen(path)
    with pytest.raises(HoldsOwnError) as caught:
        node.remove("a")
    assert str(caught.value) == (
        f"{path} is no longer what was staged there; move it elsewhere, or delete it: stagectl "
        f"evict --force {path}"
    )
    assert seen(path) == there
    assert list(node.cache.records()) == [record]
    assert node.remove("a", force=True) == record
    assert not os.path.lexists(path)
    assert list(node.cache.records()) == []


def test_a_copy_with_another_time_goes(node: Node) -> None:
    record = node.put("a", 10)
    os.utime(node.disk / "a", ns=(5, 5))
    assert node.remove("a") == record
    assert node.names() == []


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_in_the_place_of_a_copy_is_kept(node: Node, *, force: bool) -> None:
    node.put("a", 10)
    (node.disk / "a").unlink()
    (node.disk / "a").mkdir()
    assert node.remove("a", force=force) is not None
    assert (node.disk / "a").is_dir()
    assert list(node.cache.records()) == []


def test_a_staged_folder_of_which_every_file_was_changed_is_kept_unless_forced(node: Node) -> None:
    folder = node.disk / "set"
    record = stage_folder(node.cache, str(folder))
    _edit(folder / "a")
    room = room_on(node, 1, bytes_taken(node))
    with pytest.raises(SpaceError, match=r"/set \(holds files of the user's own\); "):
        room.plan()
    with pytest.raises(HoldsOwnError) as caught:
        node.remove("set")
    assert caught.value.files == ["a"]
    assert list(node.cache.records()) == [record]
    assert (folder / "a").read_bytes().startswith(b"mine")
    assert node.remove("set", force=True) == record
    assert not folder.exists()
    assert list(node.cache.records()) == []


def on_late_clock(tmp_path: Path, act: Callable[[Node], T]) -> T:
    """Return what ``act`` does of a node on a filesystem whose times are some ms behind."""
    (tmp_path / "disk").mkdir()
    return on_tmpfs(tmp_path / "disk", "mode=755", lambda: act(Node(tmp_path / "disk")), "ramfs")


def write_meanwhile(monkeypatch: pytest.MonkeyPatch, copy: Path, late: Path) -> None:
    """Have the file ``late`` written just after the ``copy`` was looked through."""

    def find_and_write(cache: Cache, record: Record, path: str, reading: Reading) -> list[str]:
        found = find_own(cache, record, path, reading)
        if path == str(copy):
            late.write_bytes(b"mine")
        return found

    monkeypatch.setattr("stager.copies.evict.find_own", find_and_write)


@pytest.mark.root
@pytest.mark.usefixtures("_jobs")
@pytest.mark.parametrize("mode", [0o755, 0o555])
def test_what_is_written_into_a_folder_while_it_is_looked_through_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    def act(node: Node) -> tuple[list[str], bytes, int, bool, list[str]]:
        copy = node.disk / "a"
        stage_folder(node.cache, str(copy))
        copy.chmod(mode)
        write_meanwhile(monkeypatch, copy, copy / "results")
        with pytest.raises(HoldsOwnError) as caught:
            node.remove("a")
        late, left = (copy / "results").read_bytes(), os.listdir(node.cache.partial)
        is_recorded = node.cache.load(str(copy)) is not None
        return caught.value.files, late, copy.stat().st_mode & 0o777, is_recorded, left

    assert on_late_clock(tmp_path, act) == (["results"], b"mine", mode, True, [])


def look_late(
    monkeypatch: pytest.MonkeyPatch, copy: Path, act: Callable[[], object], looks: int = 1
) -> None:
    """Have a file written into the ``copy`` after so many looks, and ``act`` done afterwards."""
    done: list[str] = []

    def find_and_act(cache: Cache, record: Record, path: str, reading: Reading) -> list[str]:
        found = find_own(cache, record, path, reading)
        done.append(path)
        if len(done) == looks:
            (copy / "results").write_bytes(b"mine")
        elif len(done) > looks:
            act()
        return found

    monkeypatch.setattr("stager.copies.evict.find_own", find_and_act)


def test_if_the_name_of_a_copy_was_taken_meanwhile_the_new_name_is_told(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = node.disk / "a"
    aside = node.disk / "a.before-eviction-1"
    (node.disk / "a.before-eviction").write_bytes(b"another")
    stage_folder(node.cache, str(copy))
    look_late(monkeypatch, copy, lambda: copy.write_bytes(b"yet another"), looks=2)
    room = room_on(node, 1, bytes_taken(node))
    with pytest.raises(DestinationError) as caught:
        make(node, room)
    assert caught.value.message == (
        f"{copy} was to be evicted, but files were written into it meanwhile, and something else "
        f"has its name now; they are in {aside}, with the rest of the copy"
    )
    assert (copy.read_bytes(), (aside / "results").read_bytes()) == (b"yet another", b"mine")
    assert list(node.cache.records()) == []
    assert os.listdir(node.cache.partial) == []


def test_if_an_eviction_is_killed_what_was_written_meanwhile_is_kept(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = node.disk / ("long name " * 25)
    stage_folder(node.cache, str(copy))
    look_late(monkeypatch, copy, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(AssertionError, match="ended with -9"):
        forked(lambda: node.remove(copy.name))
    open_cache(str(node.disk), os.getuid())
    assert (node.disk / f"{copy.name[:50]}.before-eviction/results").read_bytes() == b"mine"


def remove_and_write(node: Node, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> int:
    """Have a file written into the copy that is removed, after all looks; return its folder."""
    discard = Cache.discard
    copy = os.open(node.disk / "a", os.O_RDONLY)

    def write_and_discard(
        cache: Cache, name: str, folder: int, remove: Callable[[str], object]
    ) -> None:
        os.close(os.open("results", os.O_CREAT | os.O_WRONLY, dir_fd=copy))
        act()
        discard(cache, name, folder, remove)

    monkeypatch.setattr(Cache, "discard", write_and_discard)
    node.remove("a")
    return copy


def test_what_a_program_writes_into_a_folder_as_it_is_removed_is_kept(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage_folder(node.cache, str(node.disk / "a"))
    removed = remove_and_write(node, monkeypatch, lambda: None)
    assert os.listdir(node.disk / "a") == ["results"]
    assert os.listdir(removed) == os.listdir(node.cache.partial) == []
    assert list(node.cache.records()) == []


def test_if_that_file_has_no_place_the_rest_of_the_copy_is_told(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = node.disk / "a"
    stage_folder(node.cache, str(copy))
    with pytest.raises(DestinationError) as caught:
        remove_and_write(node, monkeypatch, lambda: copy.write_bytes(b"another"))
    assert caught.value.message == (
        f"{copy} was to be evicted, but files were written into it meanwhile, and something else "
        f"has its name now; they are in {copy}.before-eviction, with the rest of the copy"
    )
    assert (node.disk / "a.before-eviction/results").exists()
    assert copy.read_bytes() == b"another"
    assert os.listdir(node.cache.partial) == []


@pytest.mark.root
@pytest.mark.usefixtures("_jobs")
def test_a_file_that_is_written_to_while_it_is_looked_at_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(node: Node) -> bytes:
        copy = node.disk / "a"
        node.put("a", MIB)
        write_meanwhile(monkeypatch, copy, copy)
        with pytest.raises(HoldsOwnError):
            node.remove("a")
        return copy.read_bytes()

    assert on_late_clock(tmp_path, act) == b"mine"


def test_another_folder_in_the_place_of_a_staged_one_is_kept(node: Node) -> None:
    folder = node.disk / "set"
    record = stage_folder(node.cache, str(folder))
    folder.rename(node.disk / "moved")
    folder.mkdir()
    assert node.remove("set", force=True) == record
    assert folder.is_dir()
    assert list(node.cache.records()) == []


def test_a_cache_in_which_nothing_was_staged_yet_is_empty(node: Node) -> None:
    os.rmdir(f"{node.cache.folder}/records")
    assert find_candidates(node.cache, "") == []


def test_a_record_whose_copy_is_gone_is_removed(node: Node) -> None:
    node.put("a", 10)
    (node.disk / "a").unlink()
    assert node.remove("a") is not None
    assert list(node.cache.records()) == []


def test_a_record_whose_copy_lay_in_what_is_now_a_file_is_removed(node: Node) -> None:
    (node.disk / "sub").mkdir()
    record = node.put("sub/a", 10)
    (node.disk / "sub/a").unlink()
    (node.disk / "sub").rmdir()
    (node.disk / "sub").write_bytes(b"mine")
    assert node.remove("sub/a") == record
    assert list(node.cache.records()) == []
    assert (node.disk / "sub").read_bytes() == b"mine"


def test_a_pinned_copy_is_kept(node: Node) -> None:
    node.put("a", 10, pinned=True)
    assert node.remove("a") is None
    assert node.names() == ["a"]


def test_a_copy_that_a_job_uses_is_kept_as_long_as_the_job_runs(node: Node) -> None:
    node.put("a", 10)
    note_uses(os.getuid(), 17, [str(node.disk / "a")])
    assert [one.may_go for one in find_candidates(node.cache, "")] == [False]
    assert node.remove("a") is None
    remove_files(os.getuid(), 17)
    assert [one.may_go for one in find_candidates(node.cache, "")] == [True]
    assert node.remove("a") is not None


def test_on_a_node_that_does_not_mark_jobs_nothing_is_evicted(node: Node) -> None:
    node.put("a", 10)
    os.rmdir(paths.JOBS_FOLDER)
    assert [one.may_go for one in find_candidates(node.cache, "")] == [False]


def test_a_copy_that_another_process_has_locked_is_kept(node: Node) -> None:
    node.put("a", 10)
    script = (
        "import sys; from stager.disk.cache import Cache; from stager.disk.locks import Locks; "
        "print(Locks(Cache(sys.argv[1])).take(sys.argv[2]), flush=True); sys.stdin.read()"
    )
    line = [sys.executable, "-c", script, node.cache.folder, f"{node.disk}/a"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(line, text=True, **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout.readline() == "True\n"
        assert node.remove("a") is None
        other.stdin.close()
    assert node.remove("a") is not None


def test_a_folder_that_became_a_link_is_not_followed(node: Node, tmp_path: Path) -> None:
    (node.disk / "sub").mkdir()
    node.put("sub/a", 10)
    (node.disk / "sub").rename(tmp_path / "elsewhere")
    (node.disk / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DestinationError, match="sub is a symbolic link, not a folder"):
        node.remove("sub/a")
    assert (tmp_path / "elsewhere/a").exists()


@pytest.mark.root
def test_a_copy_on_another_filesystem_or_behind_a_link_frees_nothing(
    node: Node, tmp_path: Path
) -> None:
    """Only a forged record names such a path; the filesystem there may not answer."""
    for name in ("link", "mounted"):
        (node.disk / name).mkdir()
        node.put(f"{name}/a", MIB)
    (node.disk / "link").rename(tmp_path / "elsewhere")
    (node.disk / "link").symlink_to(tmp_path / "elsewhere")

    def act() -> list[int]:
        sizes = [one.size for one in find_candidates(node.cache, "")]
        assert node.remove("mounted/a") is not None
        return sizes

    assert on_tmpfs(node.disk / "mounted", "size=4m", act) == [0, 0]
    assert (node.disk / "mounted/a").exists()


def test_removing_a_copy_with_a_second_name_frees_nothing(node: Node) -> None:
    node.put("a", 100_000)
    (node.disk / "b").hardlink_to(node.disk / "a")
    assert [one.size for one in find_candidates(node.cache, "")] == [0]


def room_on(node: Node, need: int, limit: int = 0, name: str = "new") -> RoomPlan:
    """Room for one more file on the disk, where its user may have no more than ``limit``."""
    new = Need("/nvme", node.cache, str(node.disk / name), need)
    (room,) = rooms([new], [new.destination], Space(user_limit=limit), "")
    return room


def make(node: Node, room: RoomPlan) -> list[Evicted]:
    with closing(Locks(node.cache)) as locks:
        return [*room.make({node.cache: locks}, "n1")]


def bytes_taken(node: Node) -> int:
    return sum(one.size for one in find_candidates(node.cache, ""))


def test_a_copy_that_came_in_use_since_the_plan_is_skipped_for_the_next(node: Node) -> None:
    for number, name in enumerate("abc"):
        node.put(name, MIB, used_at=number)
    room = room_on(node, 1, bytes_taken(node))
    assert [one.destination for one in room.plan()] == [f"{node.disk}/a"]
    note_uses(os.getuid(), 17, [str(node.disk / "a")])
    size = (node.disk / "b").stat().st_blocks * 512
    assert make(node, room) == [Evicted("n1", f"{node.disk}/b", size)]
    assert node.names() == ["a", "c"]


def test_copies_that_came_in_use_since_the_plan_may_leave_too_little_room(node: Node) -> None:
    node.put("a", MIB)
    size = bytes_taken(node)
    room = room_on(node, 1, size)
    room.plan()
    node.put("a", MIB, pinned=True)
    with pytest.raises(SpaceError) as caught:
        make(node, room)
    taken = bytes_text(size)
    assert str(caught.value) == (
        f"/nvme: not enough room: 1 B needed; your limit on this disk is {taken}, and your "
        f"other copies take {taken}; {taken} of your copies stay: {node.disk}/a (in use); stage "
        "less, or wait "
        "until the jobs that use copies have ended"
    )
    assert node.names() == ["a"]


def test_a_copy_with_files_of_the_users_own_makes_no_room_and_is_named(node: Node) -> None:
    for number, name in enumerate(("a", "b", "c")):
        stage_folder(node.cache, f"{node.disk}/{name}", used_at=number)
    (node.disk / "a/results").write_bytes(b"mine")
    size, taken = find_candidates(node.cache, "")[0].size, bytes_taken(node)
    room = room_on(node, 1, taken)
    assert [one.destination for one in room.plan()] == [f"{node.disk}/b"]
    (node.disk / "b/results").write_bytes(b"mine")  # since it was planned
    assert make(node, room) == [Evicted("n1", f"{node.disk}/c", size)]
    assert sorted(path.name for path in node.disk.iterdir() if path.name in "abc") == ["a", "b"]
    with pytest.raises(SpaceError) as caught:
        room_on(node, 1, 2 * size).plan()
    assert str(caught.value) == (
        f"/nvme: not enough room: 1 B needed; your limit on this disk is {bytes_text(2 * size)}, "
        f"and your other copies take {bytes_text(2 * size)}; {bytes_text(2 * size)} of your copies "
        f"stay: {node.disk}/a (holds files of the user's own), {node.disk}/b (holds files of the "
        "user's own); stage less, or move your files out of those copies, or delete these with "
        "your files (stagectl evict --force DST)"
    )


def test_what_holds_files_of_the_users_own_is_not_said_to_be_freed(node: Node) -> None:
    for name in ("a", "b", "c"):
        stage_folder(node.cache, f"{node.disk}/{name}")
        (node.disk / name / "results").write_bytes(b"mine" * (name != "c"))
    (node.disk / "c/results").unlink()
    size = find_candidates(node.cache, "")[0].size
    room = room_on(node, free_space(str(node.disk), Space()).usable + (1 << 40))
    with pytest.raises(SpaceError) as caught:
        room.plan()
    told = str(caught.value)
    assert f" free, {bytes_text(size)} can be freed by removing your old copies, " in told
    assert f"; {bytes_text(2 * size)} of your copies stay: {node.disk}/a (holds " in told


def test_the_copy_that_is_to_be_replaced_does_not_count(node: Node) -> None:
    node.put("a", MIB)
    assert room_on(node, bytes_taken(node), bytes_taken(node), name="a").plan() == []


def test_what_became_of_a_copy_frees_what_is_there_now(node: Node) -> None:
    node.put("a", MIB)
    _replace(node.disk / "a")
    node.put("b", MIB)
    (node.disk / "b").unlink()
    assert bytes_taken(node) == (node.disk / "a").stat().st_blocks * 512
    node.put("c", MIB)
    with (node.disk / "c").open("ab") as file:
        file.write(b"mine")
    room = room_on(node, 1, bytes_taken(node))
    with pytest.raises(SpaceError, match=r"/c \(holds files of the user's own\)"):
        room.plan()


@pytest.mark.root
def test_the_sites_share_stays_free_by_bytes_and_by_percent(tmp_path: Path) -> None:
    def act() -> list[int]:
        spaces = [
            Space(),
            Space(keep_free=3 * MIB),
            Space(keep_free_percent=25),
            Space(keep_free=3 * MIB, keep_free_percent=25),
            Space(keep_free=MIB, keep_free_percent=25),
            Space(keep_free=9 * MIB),
        ]
        return [free_space(str(tmp_path), space).usable for space in spaces]

    assert [free // MIB for free in on_tmpfs(tmp_path, "size=8m", act)] == [8, 5, 6, 5, 6, -1]


@pytest.mark.root
@pytest.mark.usefixtures("_jobs")
def test_room_is_made_on_a_full_disk_and_no_more_than_it_takes(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()

    def act() -> tuple[list[str], list[str], str]:
        node = Node(disk)
        for number in range(7):
            node.put(f"f{number}", MIB, used_at=10 - number, pinned=number == 6)

        def needs_of(need: int) -> list[Need]:
            return [Need("/nvme", node.cache, str(disk / "new"), need)]

        (room,) = rooms(needs_of(3 * MIB), [str(disk / "new"), str(disk / "f5")], Space(), "")
        with closing(Locks(node.cache)) as locks:
            gone = [*room.make({node.cache: locks}, "n1")]
        with pytest.raises(SpaceError) as caught:
            rooms(needs_of(8 * MIB - (1 << 16)), [], Space(), "")[0].plan()
        return [one.destination for one in gone], node.names(), str(caught.value)

    gone, left, message = on_tmpfs(disk, "size=8m", act)
    # The oldest is pinned, the next one wanted.
    assert gone == [f"{disk}/f4", f"{disk}/f3", f"{disk}/f2"]
    assert left == ["f0", "f1", "f5", "f6"]
    assert message.endswith(
        f" still missing; 1.0 MiB of your copies stay: {disk}/f6 (pinned); unpin copies (stagectl "
        "unpin DST), delete other files of yours there, or ask for nodes with larger disks"
    )


@pytest.mark.root
@pytest.mark.usefixtures("_jobs")
def test_where_an_old_copy_is_in_the_way_of_the_new_one_that_is_said(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()

    def act() -> list[str]:
        node = Node(disk)
        messages = []
        for pinned, kept in ((False, 0), (False, 2 * MIB), (True, 0)):
            node.put("a", 5 * MIB, pinned=pinned)
            new = Need("/nvme", node.cache, f"{disk}/a", 5 * MIB, 5 * MIB + kept)
            with pytest.raises(SpaceError) as caught:
                rooms([new], [new.destination], Space(), "")[0].plan()
            messages.append(caught.value.message.rpartition(" missing; ")[2])
        return messages

    delete, evict = "delete the old copies that are to be replaced", f"stagectl evict {disk}/a"
    assert on_tmpfs(disk, "size=8m", act) == [
        f"{delete} ({evict}), {REMEDY}",
        f"{delete} ({evict}), {REMEDY}",
        f"{delete} (stagectl unpin {disk}/a, then {evict}), {REMEDY}",
    ]


@pytest.mark.root
@pytest.mark.usefixtures("_jobs")
def test_needs_on_one_disk_are_added_up_whatever_their_roots(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()

    def act() -> list[int]:
        needs = []
        for name in ("a", "b"):
            (disk / name).mkdir()
            node = Node(disk / name)
            needs.append(Need(name, node.cache, str(disk / name / "new"), 3 * MIB))
        with pytest.raises(SpaceError):
            [room.plan() for room in rooms(needs, [], Space(), "")]
        full = [Node(disk / name) for name in ("a", "b")]
        full[1].put("old", MIB)
        caches = [one.cache for one in full]
        limit = Space(user_limit=3 * MIB)
        (room,) = rooms(needs[:1], [], limit, "", caches)
        with closing(Locks(caches[0])) as locks:
            gone = [*room.make({caches[0]: locks}, "n1")]
        assert [one.destination for one in gone] == [f"{disk}/b/old"]
        kept_free = rooms(needs[:1], [], Space(keep_free_percent=20), "")[0].plan()
        with pytest.raises(SpaceError):
            rooms(needs[:1], [], Space(keep_free=2 * MIB), "")[0].plan()
        return [len(rooms(needs, [], Space(), "")), len(kept_free)]

    assert on_tmpfs(disk, "size=4m", act) == [1, 0]


@pytest.mark.root
def test_a_copy_that_cannot_be_removed_is_skipped_for_the_next(node: Node) -> None:
    (node.disk / "sub").mkdir()
    node.put("sub/a", MIB, used_at=1)
    node.put("b", MIB, used_at=2)
    os.chown(node.disk / "sub", USER, USER)
    gone = make(node, room_on(node, MIB, limit=2 * MIB))
    assert [one.destination for one in gone] == [f"{node.disk}/b"]
    assert (node.disk / "sub/a").exists()
