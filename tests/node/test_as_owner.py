"""What root asks about one user's copies is done as that user, and reaches nobody else's files."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import TYPE_CHECKING

import pytest

from stager.base.codec import codec_of
from stager.base.errors import PolicyRefusal
from stager.fs.files import CopyFacts
from stager.node.agent import Done, Evict, NodeResult, Pin, Refused, Unpin, carry_out, carry_out_for
from stager.source.posix import facts_of
from stager.store.cache import Cache, open_cache
from stager.store.record import VERSION, Record
from stager.store.states import node_status
from tests.support.users import OWNER, USER, as_user, ordinary_home

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.root


@pytest.fixture
def disk() -> Iterator[Path]:
    """A disk with the root /nvme, where two users have a copy each, named by their uids."""
    with ordinary_home() as home:
        os.chown(home, 0, 0)
        home.chmod(0o755)
        nvme = home / "nvme"
        (nvme / ".slurm-stage").mkdir(parents=True)
        nvme.chmod(0o1777)
        for uid in (USER, OWNER):
            (nvme / f".slurm-stage/{uid}").mkdir(mode=0o700)
            os.chown(nvme / f".slurm-stage/{uid}", uid, uid)
            as_user(uid, partial(stage, nvme, str(uid)))
        yield home


def stage(nvme: Path, name: str) -> None:
    (nvme / name).write_bytes(b"data")
    record(nvme, name, (nvme / name).stat())


def record(nvme: Path, name: str, facts: os.stat_result) -> None:
    """Write a record of this user's that names a file, whoever it belongs to."""
    open_cache(str(nvme), os.getuid(), disk=str(nvme.parent)).save(
        Record(
            version=VERSION,
            source="/shared/a",
            destination=f"/nvme/{name}",
            source_facts=facts_of(facts),
            copy_facts=CopyFacts(4, facts.st_mtime_ns, facts.st_ino, facts.st_uid),
            digest="0" * 31 + "1",
            staged_at=1,
            used_at=1,
            used_by_job=17,
            lifetime="cache",
            pinned=False,
        )
    )


def evict(user: int, disk: Path, *names: object, **options: object) -> NodeResult:
    destinations = tuple(f"/nvme/{name}" for name in names)
    command = Evict(("/nvme",), user=user, destinations=destinations, **options)  # type: ignore[arg-type]
    return carry_out_for(user, command, str(disk))


def listed(user: int, disk: Path) -> list[tuple[str, str, int]]:
    status = node_status(str(disk), ["/nvme"], [], user=user)
    assert (len(status.rooms), status.silent) == (1, [])
    return [(one.destination, one.state, one.user) for one in status.entries]


def test_root_lists_and_removes_the_copies_of_the_one_user(disk: Path) -> None:
    assert listed(USER, disk) == [(f"/nvme/{USER}", "ready", USER)]
    gone = NodeResult([Done(f"/nvme/{USER}", 4096)])
    assert evict(USER, disk, older=60, dry_run=True) == gone
    assert evict(USER, disk, older=60) == gone
    assert listed(USER, disk) == []
    assert listed(OWNER, disk) == [(f"/nvme/{OWNER}", "ready", OWNER)]
    lists = f"stagectl status --user {USER} lists what is staged"
    absent = f"/nvme/{OWNER} is no copy of {USER} here; {lists}"
    refused = NodeResult(refused=[Refused(2, absent, f"/nvme/{OWNER}")])
    assert evict(USER, disk, OWNER) == refused


def test_root_unpins_the_copies_of_the_one_user(disk: Path) -> None:
    path = f"/nvme/{USER}"
    own = Pin(("/nvme",), destinations=(path,))
    assert as_user(USER, lambda: carry_out(own, str(disk))) == NodeResult([Done(path, 4)])
    pinned = f"{path} is pinned; unpin it first: stagectl unpin --user {USER} {path}"
    assert evict(USER, disk, USER) == NodeResult(refused=[Refused(3, pinned)])
    unpin = Unpin(("/nvme",), user=USER, destinations=(path,))
    assert carry_out_for(USER, unpin, str(disk)) == NodeResult([Done(path, 4)])
    assert evict(USER, disk, USER) == NodeResult([Done(path, 4096)])


def test_others_than_root_may_not_ask(disk: Path) -> None:
    with pytest.raises(PolicyRefusal) as caught:
        as_user(USER, lambda: evict(OWNER, disk, older=60))
    assert str(caught.value) == (
        f"only root may use the copies of another user (uid {OWNER}); run this as root, or leave "
        "out --user"
    )
    assert (disk / f"nvme/{OWNER}").exists()


def test_a_forged_record_leads_root_to_no_file_of_another_user(disk: Path) -> None:
    victim = disk / f"nvme/{OWNER}"
    as_user(USER, lambda: record(disk / "nvme", str(OWNER), victim.stat()))
    [refused] = evict(USER, disk, OWNER).refused
    assert (refused.code, refused.message) == (6, f"/nvme/{OWNER}: Operation not permitted")
    assert victim.read_bytes() == b"data"
    # Who is root is not stopped by that: the process must be the user's.
    assert evict(OWNER, disk, OWNER).done == [Done(f"/nvme/{OWNER}", 4096)]


def test_a_link_in_the_place_of_the_records_leads_root_to_those_of_nobody(disk: Path) -> None:
    records = disk / f"nvme/.slurm-stage/{USER}/records"

    def attack() -> None:
        records.rename(records.with_name("old"))
        records.symlink_to(f"../{OWNER}/records")

    as_user(USER, attack)
    assert listed(USER, disk) == []
    assert evict(USER, disk, older=60).done == []
    assert (disk / f"nvme/{OWNER}").exists()


def test_a_process_that_does_not_answer_in_time_is_reported(disk: Path) -> None:
    command = Evict(("/nvme",), older=60, user=USER)
    assert carry_out_for(USER, command, str(disk), 0.0).refused == [
        Refused(
            8,
            f"a process that looks at the copies of uid {USER} as this user did not answer within "
            "0 s; look for a filesystem of that user that does not answer, or for a process of "
            "that user that stops it; then try again",
        )
    ]


def test_the_copies_of_many_records_fit_into_the_answer(disk: Path) -> None:
    def many() -> None:
        cache = Cache(f"{disk}/nvme/.slurm-stage/{USER}", disk=str(disk))
        one = cache.load(f"/nvme/{USER}")
        assert one
        text = one.to_json()
        for number in range(9000):
            destination = f"/nvme/{'x' * 100}{number}"
            forged = json.loads(text) | {"destination": destination}
            with open(cache.record_path(destination), "w") as file:
                file.write(json.dumps(forged))

    as_user(USER, many)
    result = evict(USER, disk, older=60)
    assert len(json.dumps(codec_of(NodeResult).to_data(result))) > 1 << 20
    assert len(result.done) == 9001


def test_the_own_user_needs_no_other_process(disk: Path) -> None:
    command = Evict(("/nvme",), destinations=(f"/nvme/{USER}",))
    assert as_user(USER, lambda: carry_out(command, str(disk))).done == [
        Done(f"/nvme/{USER}", 4096)
    ]
