"""Room for new copies: what is planned, removed and refused."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stager.base import linux
from stager.base.errors import SpaceError
from stager.base.outcome import Evicted
from stager.base.text import bytes_text
from stager.request.items import Space
from stager.store.leases import note_uses
from stager.store.locks import Locks
from stager.store.space import (
    Candidate,
    Demand,
    FreeSpace,
    Held,
    Need,
    Replaced,
    RoomPlan,
    free_space,
    rooms,
)
from tests.support.copies import MIB, Node, bytes_taken, kept, make, put_own, room_on
from tests.support.trees import stage_folder
from tests.support.users import USER, on_tmpfs

if TYPE_CHECKING:
    from pathlib import Path


def planned(
    need: int, free: int, limit: int, candidates: list[Candidate], whole: int = 0
) -> list[Candidate]:
    there = FreeSpace(free, free)
    return Demand("/nvme", need, there, limit, candidates, whole or need).choose()


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
    demand = Demand("/nvme", need, there, limit, candidates, whole or need, is_estimate=is_estimate)
    with pytest.raises(SpaceError) as caught:
        demand.choose()
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
            Demand("/nvme", 20, free, 0, [], replaced=replaced).choose()
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


def test_a_stage_needs_some_room_beside_its_copies_unless_the_site_keeps_as_much_free() -> None:
    free, copies = FreeSpace(0, 0), [kept("a", 4096, 1)]
    with pytest.raises(SpaceError, match=r"68\.0 KiB needed, 0 B free, 4\.0 KiB can be freed"):
        Demand("/nvme", 4096, free, 0, copies, beside=64 << 10).choose()
    assert Demand("/nvme", 4096, free, 0, copies).choose() == copies
    assert Demand("/nvme", 0, free, 0, copies, beside=64 << 10).choose() == []


def test_the_copy_that_is_to_be_replaced_does_not_count(node: Node) -> None:
    node.put("a", MIB)
    assert room_on(node, bytes_taken(node), bytes_taken(node), name="a").plan() == []


def test_what_became_of_a_copy_frees_what_is_there_now(node: Node) -> None:
    node.put("a", MIB)
    put_own(node.disk / "a")
    node.put("b", MIB)
    (node.disk / "b").unlink()
    node.put("c", MIB)
    with (node.disk / "c").open("ab") as file:
        file.write(b"mine")
    assert bytes_taken(node) == 0


def test_a_folder_with_files_of_the_users_own_makes_room_but_keeps_them(node: Node) -> None:
    record = stage_folder(node.cache, f"{node.disk}/a")
    (node.disk / "a/results").write_bytes(b"mine")
    assert record.tree
    room = room_on(node, 1, bytes_taken(node))
    assert make(node, room) == [Evicted("n1", f"{node.disk}/a", record.tree.allocated)]
    assert os.listdir(node.disk / "a") == ["results"]
    assert bytes_taken(node) == 0


@pytest.mark.root
def test_the_sites_share_stays_free_by_bytes_and_by_percent(tmp_path: Path) -> None:
    def act() -> list[int]:
        spaces = [
            Space(),
            Space(keep_free=3 * MIB),
            Space(keep_free="25%"),
            Space(keep_free=9 * MIB),
        ]
        return [free_space(str(tmp_path), space).usable for space in spaces]

    assert [free // MIB for free in on_tmpfs(tmp_path, "size=8m", act)] == [8, 5, 6, -1]


@pytest.mark.root
@pytest.mark.usefixtures("jobs_folder")
def test_room_is_made_on_a_full_disk_and_no_more_than_it_takes(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()

    def act() -> tuple[list[str], list[str], str]:
        node = Node(disk)
        for number in range(7):
            node.put(f"f{number}", MIB, used_at=10 - number, pinned=number == 6)

        def needs_of(need: int) -> list[Need]:
            return [Need("/nvme", node.cache, str(disk / "new"), need)]

        (room,) = rooms(needs_of(3 * MIB), [str(disk / "new"), str(disk / "f5")], Space())
        with closing(Locks(node.cache)) as locks:
            gone = [*room.make({node.cache: locks}, "n1")]
        with pytest.raises(SpaceError) as caught:
            rooms(needs_of(8 * MIB - (1 << 17)), [], Space())[0].plan()
        return [one.destination for one in gone], node.names(), str(caught.value)

    gone, left, message = on_tmpfs(disk, "size=8m", act)
    # The oldest is pinned, the next one wanted.
    assert gone == [f"{disk}/f4", f"{disk}/f3", f"{disk}/f2"]
    assert left == ["f0", "f1", "f5", "f6"]
    assert message.endswith(
        f" still missing; 1.0 MiB of your copies stay: {disk}/f6 (pinned); unpin copies (stagectl "
        "unpin DST), delete other files of yours there, or ask for nodes with larger disks"
    )


@pytest.mark.usefixtures("jobs_folder")
def test_room_is_made_where_the_users_quota_ends_and_the_disk_does_not(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        node.put(f"f{number}", MIB, used_at=number)
    used = bytes_taken(node)
    asked: list[tuple[int, str]] = []

    def quota_of(uid: int, path: str) -> linux.Quota:
        asked.append((uid, path))
        return linux.Quota(used + MIB, used)

    # Whether the kernel keeps quotas is a choice of its configuration.
    monkeypatch.setattr(linux, "quota_of", quota_of)

    def room_for(need: int) -> RoomPlan:
        return rooms([Need("/nvme", node.cache, str(node.disk / "new"), need)], [], Space())[0]

    assert room_for(MIB - (64 << 10)).plan() == []
    assert [one.destination for one in make(node, room_for(2 * MIB))] == [
        f"{node.disk}/f0", f"{node.disk}/f1",
    ]  # fmt: skip
    assert node.names() == ["f2"]
    with pytest.raises(SpaceError) as caught:
        room_for(5 * MIB).plan()
    assert str(caught.value) == (
        "/nvme: not enough room: 5.1 MiB needed, 1.0 MiB left of your quota of 4.0 MiB, 1.0 MiB "
        "can be freed by removing your old copies, 3.1 MiB still missing; delete other files of "
        "yours there, or ask the administrator for more"
    )
    assert set(asked) == {(os.getuid(), node.cache.folder)}


@pytest.mark.root
@pytest.mark.usefixtures("jobs_folder")
def test_where_an_old_copy_is_in_the_way_of_the_new_one_that_is_said(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()

    def act() -> list[str]:
        node = Node(disk)
        messages = []
        for pinned, more in ((False, 0), (False, 2 * MIB), (True, 0)):
            node.put("a", 5 * MIB, pinned=pinned)
            new = Need("/nvme", node.cache, f"{disk}/a", 5 * MIB, 5 * MIB + more)
            with pytest.raises(SpaceError) as caught:
                rooms([new], [new.destination], Space())[0].plan()
            messages.append(caught.value.message.rpartition(" missing; ")[2])
        return messages

    delete, evict = "delete the old copies that are to be replaced", f"stagectl evict {disk}/a"
    assert on_tmpfs(disk, "size=8m", act) == [
        f"{delete} ({evict}), {REMEDY}",
        f"{delete} ({evict}), {REMEDY}",
        f"{delete} (stagectl unpin {disk}/a, then {evict}), {REMEDY}",
    ]


@pytest.mark.root
@pytest.mark.usefixtures("jobs_folder")
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
            [room.plan() for room in rooms(needs, [], Space())]
        full = [Node(disk / name) for name in ("a", "b")]
        full[1].put("old", MIB)
        caches = [one.cache for one in full]
        limit = Space(user_limit=3 * MIB)
        (room,) = rooms(needs[:1], [], limit, caches)
        with closing(Locks(caches[0])) as locks:
            gone = [*room.make({caches[0]: locks}, "n1")]
        assert [one.destination for one in gone] == [f"{disk}/b/old"]
        kept_free = rooms(needs[:1], [], Space(keep_free="20%"))[0].plan()
        with pytest.raises(SpaceError):
            rooms(needs[:1], [], Space(keep_free=2 * MIB))[0].plan()
        return [len(rooms(needs, [], Space())), len(kept_free)]

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


# The store


def room_for_entry(node: Node, need: int, size: int, limit: int = 0) -> RoomPlan:
    """Room for one more entry, in a store of ``size``, and for its copy in a job's folder."""
    root = str(node.disk)
    space = Space(
        user_limit=limit, store=root, store_size=size, private=("/job",), of_job=("/job",)
    )
    needs = [
        Need("/job", node.cache, "/job/data", need),
        Need(root, node.cache, node.entry(9), need),
    ]
    return rooms(needs, [], space)[0]


@pytest.mark.usefixtures("jobs_folder")
def test_a_users_entries_stay_below_the_size_of_the_store(node: Node) -> None:
    node.put("copy", 5 * MIB)
    node.put_entry(1, MIB, used_at=2)
    node.put_entry(2, MIB, used_at=1)
    node.put_entry(3, MIB, used_at=3)
    for size, expected in ((4 * MIB, []), (3 * MIB, [2]), (2 * MIB, [2, 1]), (0, [])):
        chosen = room_for_entry(node, MIB, size).plan()
        assert [one.destination for one in chosen] == [*map(node.entry, expected)]
    make(node, room_for_entry(node, MIB, 3 * MIB))
    assert sorted(one.destination for one in node.cache.records()) == sorted(
        [str(node.disk / "copy"), node.entry(1), node.entry(3)]
    )


@pytest.mark.usefixtures("jobs_folder")
def test_a_store_that_is_too_small_is_told_and_not_the_limit(node: Node) -> None:
    node.put_entry(1, MIB, pinned=True)
    with pytest.raises(SpaceError) as caught:
        room_for_entry(node, MIB, 2 * MIB - 1).plan()
    assert str(caught.value) == (
        f"{node.disk}: not enough room: 1.0 MiB needed; the size of the node's store is 2.0 MiB, "
        "and your other copies take 1.0 MiB; 1.0 MiB of your copies stay: "
        "/shared/img.sqsh (pinned); stage less, or unpin copies (stagectl unpin DST)"
    )


@pytest.mark.usefixtures("jobs_folder")
def test_the_limit_counts_entries_and_not_what_a_job_has_of_its_own(node: Node) -> None:
    node.put_entry(1, MIB)
    assert room_for_entry(node, MIB, 0, limit=2 * MIB).plan() == []
    chosen = room_for_entry(node, MIB, 0, limit=2 * MIB - 1).plan()
    assert [one.destination for one in chosen] == [node.entry(1)]


@pytest.mark.usefixtures("jobs_folder")
def test_an_entry_counts_also_while_a_job_has_another_name_of_it(node: Node) -> None:
    os.link(node.put_entry(1, MIB).destination, node.disk / "of-job")
    assert bytes_taken(node) == MIB
