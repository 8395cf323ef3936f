"""One process at a time holds the lock of a destination, until it ends."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import xxhash

from stager.base.errors import DestinationError
from stager.store.cache import open_cache
from stager.store.locks import Locks
from tests.support.users import forked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stager.store.cache import Cache


HOLDER = """
import sys
from stager.store.cache import Cache
from stager.base.errors import DestinationError
from stager.store.locks import Locks
locks = Locks(Cache(sys.argv[1]))
print(all(locks.take(destination) for destination in sys.argv[2:]), flush=True)
sys.stdin.read()
"""


@contextmanager
def held(cache: Cache, *destinations: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Another job's process that has the locks of ``destinations``."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, cache.folder, *destinations],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        cwd=Path(__file__).parents[2],
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def locks(cache: Cache) -> Iterator[Locks]:
    locks = Locks(cache)
    yield locks
    locks.close()


def test_a_lock_is_held_by_one_process_and_released_when_it_is_killed(
    cache: Cache, locks: Locks
) -> None:
    with held(cache, "/nvme/a", SLURM_JOB_ID="17") as process:
        taken = locks.take("/nvme/a")
        holder = locks.holder("/nvme/a")
        process.kill()
        process.wait()
        after = locks.take("/nvme/a")
    assert (taken, holder, after) == (False, "job 17", True)


def test_a_holder_in_an_array_is_named_as_squeue_shows_it(cache: Cache, locks: Locks) -> None:
    names = {"SLURM_JOB_ID": "59", "SLURM_ARRAY_JOB_ID": "57", "SLURM_ARRAY_TASK_ID": "4"}
    with held(cache, "/nvme/a", **names):
        assert locks.holder("/nvme/a") == "job 59 (57_4)"


def test_a_holder_outside_of_slurm_is_named_by_its_process_id(cache: Cache, locks: Locks) -> None:
    with held(cache, "/nvme/a") as process:
        assert locks.holder("/nvme/a") == f"process {process.pid}"


def test_a_holder_that_has_just_released_the_lock_is_another_job(locks: Locks) -> None:
    assert locks.holder("/nvme/a") == "another job"


def test_the_locks_of_destinations_are_independent(cache: Cache, locks: Locks) -> None:
    with held(cache, "/nvme/a", "/nvme/b", SLURM_JOB_ID="17"):
        assert [locks.take(f"/nvme/{name}") for name in "abc"] == [False, False, True]


def test_a_released_lock_can_be_taken_and_the_others_stay(cache: Cache, locks: Locks) -> None:
    def try_locks() -> list[bool]:
        other = Locks(cache)
        return [other.take(f"/nvme/{name}") for name in "ab"]

    assert locks.take("/nvme/a")
    assert locks.take("/nvme/b")
    locks.release("/nvme/a")
    assert forked(try_locks) == [True, False]


def test_closed_locks_are_all_released(cache: Cache) -> None:
    mine = Locks(cache)
    assert mine.take("/nvme/a")
    mine.close()
    assert forked(lambda: Locks(cache).take("/nvme/a"))


def test_the_lock_file_stays_empty_and_private(cache: Cache, locks: Locks) -> None:
    assert locks.take("/nvme/a")
    facts = os.stat(f"{cache.folder}/lock")
    assert (facts.st_size, stat.S_IMODE(facts.st_mode)) == (0, 0o600)


def test_what_all_users_see_of_a_lock_does_not_tell_its_destination(
    cache: Cache, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    seen = {_seen_of_lock(one) for one in (cache, open_cache(str(tmp_path / "other"), os.getuid()))}
    assert len(seen) == 2
    assert xxhash.xxh3_64_intdigest(b"/nvme/a") >> 1 not in seen
    assert _seen_of_lock(cache) in seen  # all processes agree


def _seen_of_lock(cache: Cache) -> int:
    """Return what /proc/locks has of the lock of a destination: its offset."""
    with closing(Locks(cache)) as locks:
        assert locks.take("/nvme/a")
        inode = os.stat(f"{cache.folder}/lock").st_ino
        mine = rf" {os.getpid()} \S+:{inode} (\d+) "
        (offset,) = re.findall(mine, Path("/proc/locks").read_text())
        return int(offset)


def test_a_lock_file_that_is_a_symlink_is_refused(cache: Cache, tmp_path: Path) -> None:
    os.symlink(tmp_path / "elsewhere", f"{cache.folder}/lock")
    with pytest.raises(DestinationError) as caught:
        Locks(cache)
    assert str(caught.value) == f"{cache.folder}/lock: Too many levels of symbolic links"
    assert not (tmp_path / "elsewhere").exists()


def test_a_kernel_without_room_for_a_lock_is_a_destination_error(
    cache: Cache, locks: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel's refusal is put on: it has no limit of its own, but a server of NFS may.
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.lockf", refuse)
    monkeypatch.setattr("fcntl.fcntl", refuse)
    for method in (locks.take, locks.release, locks.holder):
        with pytest.raises(DestinationError) as caught:
            method("/nvme/a")
        assert str(caught.value) == f"{cache.folder}/lock: No locks available"
