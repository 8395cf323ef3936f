"""After a job its user's own process removes what the job left and reports numbers to root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stager.base.paths import JOBS_FOLDER, RUN_FOLDER
from stager.fs.files import CopyFacts
from stager.node import tidy
from stager.node.runtime import begin_job
from stager.store.cache import open_cache
from stager.store.leases import note_shared_uses, note_uses, uses_in
from stager.store.parents import made_parents
from tests.support.records import RECORD
from tests.support.trees import stage_folder
from tests.support.users import on_tmpfs, remount_read_only

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.root


class Node:
    """A disk with copies, and a /run in which root marks jobs."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk
        self.cache = open_cache(str(disk), os.getuid())
        self.config = disk / "stage.toml"
        self.config.write_text(f'roots = ["{disk}", "/nowhere"]\n')
        Path(RUN_FOLDER, str(os.getuid())).mkdir(parents=True)

    def put(self, name: str, *, lifetime: str = "cache", used_at: int = 0) -> None:
        path = self.disk / name
        path.write_bytes(b"x" * 5000)
        there = path.stat()
        copy = CopyFacts(there.st_size, there.st_mtime_ns, there.st_ino, there.st_uid)
        self.cache.save(
            replace(
                RECORD, destination=str(path), copy_facts=copy, lifetime=lifetime, used_at=used_at
            )
        )

    def put_folder(self, name: str, used_at: int) -> None:
        """Publish and record a folder of one file."""
        stage_folder(self.cache, str(self.disk / name), used_at)

    def run_job(self, job: int, *names: str) -> None:
        begin_job(job, os.getuid(), os.getgid())
        note_uses(os.getuid(), job, [str(self.disk / name) for name in names])

    def end_job(self, job: int) -> None:
        os.unlink(f"{JOBS_FOLDER}/{job}.{os.getuid()}")

    def tidy(self, *options: str) -> dict[str, Any]:
        line = [sys.executable, "-I", "-m", "stager.node.tidy"]
        line += [f"--config={self.config}", *options]
        answer: dict[str, Any] = json.loads(
            subprocess.run(line, check=True, capture_output=True).stdout
        )
        return answer

    def names(self) -> list[str]:
        return sorted(path.name for path in self.disk.glob("?"))


def on_node(tmp_path: Path, act: Callable[[Node], object]) -> Any:
    """What ``act`` returns of a node whose /run is its own."""
    (tmp_path / "disk").mkdir()
    return on_tmpfs(Path("/run"), "mode=755", lambda: act(Node(tmp_path / "disk")))


def test_a_read_only_disk_is_reported_and_does_not_end_the_clean_up(tmp_path: Path) -> None:
    def act() -> dict[str, Any]:
        node = Node(tmp_path / "disk")
        node.put("a", lifetime="job")
        node.run_job(17, "a")
        node.end_job(17)
        remount_read_only(node.disk)
        return node.tidy("--job=17", "--usage", f"--root={node.disk}", "--oldest=1")

    disk = tmp_path / "disk"
    disk.mkdir()
    assert on_tmpfs(
        Path("/run"), "mode=755", lambda: on_tmpfs(disk, "size=1m", act)
    ) == {
        "removed": 0, "figures": [], "usage": {str(disk): [8192, 1]}, "evicted": 0, "may_go": [],
    }  # fmt: skip


def test_a_copy_for_a_job_goes_with_the_last_job_that_uses_it(tmp_path: Path) -> None:
    def act(node: Node) -> list[list[str]]:
        node.put("a", lifetime="job")
        node.put("b", lifetime="job")
        node.put("c")
        node.run_job(17, "a", "b", "c")
        node.run_job(18, "b")
        node.end_job(17)
        assert node.tidy("--job=17") == {"removed": 1, "figures": []}
        seen = [node.names()]
        node.end_job(18)
        assert node.tidy("--job=18") == {"removed": 1, "figures": []}
        assert node.tidy("--job=18") == {"removed": 0, "figures": []}
        return [*seen, node.names()]

    assert on_node(tmp_path, act) == [["b", "c"], ["c"]]


def test_folders_that_a_stage_made_go_with_its_job(tmp_path: Path) -> None:
    def act(node: Node) -> list[list[str]]:
        seen = []
        node.run_job(17, "a/copy", "a/killed/copy")
        node.run_job(18, "a/copy", "a/later/copy")
        with made_parents(node.cache, f"{node.disk}/a/copy"):
            node.put("a/copy", lifetime="job")
        with made_parents(node.cache, f"{node.disk}/a/killed/copy"):
            pass  # killed before it has published
        for job in (17, 18):
            node.end_job(job)
            node.tidy(f"--job={job}")
            seen.append(sorted(str(one.relative_to(node.disk)) for one in node.disk.rglob("a*/**")))
        return seen

    assert on_node(tmp_path, act) == [["a"], []]


def test_a_copy_for_a_job_goes_when_all_its_jobs_end_together(tmp_path: Path) -> None:
    def act(node: Node) -> list[list[str]]:
        seen = []
        for _ in range(5):
            node.put("a", lifetime="job")
            for job in range(17, 21):
                node.run_job(job, "a")
            for job in range(17, 21):
                node.end_job(job)
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda job: node.tidy(f"--job={job}"), range(17, 21)))
            seen.append(node.names())
        return seen

    assert on_node(tmp_path, act) == [[]] * 5


def test_a_pinned_copy_for_a_job_stays(tmp_path: Path) -> None:
    def act(node: Node) -> tuple[int, list[str], list[str]]:
        node.put("a", lifetime="job")
        (record,) = node.cache.records()
        node.cache.save(replace(record, pinned=True))
        node.run_job(17, "a")
        node.end_job(17)
        removed = node.tidy("--job=17")["removed"]
        return removed, node.names(), [one.lifetime for one in node.cache.records()]

    assert on_node(tmp_path, act) == (0, ["a"], ["job"])


def test_no_further_copy_is_evicted_when_enough_is_free(tmp_path: Path) -> None:
    def act(node: Node) -> list[str]:
        for number, name in enumerate("abcd"):
            node.put_folder(name, used_at=number)
        (node.disk / "a/results").write_bytes(b"mine")
        node.run_job(17)
        node.tidy(f"--root={node.disk}", "--oldest=3", "--free=1500000")
        assert os.listdir(node.disk / "a") == ["results"]
        return node.names()

    disk = tmp_path / "disk"
    disk.mkdir()
    names = on_tmpfs(
        Path("/run"), "mode=755", lambda: on_tmpfs(disk, "size=64m", lambda: act(Node(disk)))
    )
    assert names == ["a", "c", "d"]


def test_copies_for_a_job_whose_end_went_unnoticed_go_with_the_users_next_job(
    tmp_path: Path,
) -> None:
    def act(node: Node) -> tuple[dict[str, Any], list[str]]:
        node.put("a")
        for name in "bc":
            node.put(name, lifetime="job")
        node.run_job(17, "b", "c")
        node.run_job(18, "c")
        node.end_job(17)
        os.unlink(f"{RUN_FOLDER}/{os.getuid()}/17.uses")  # as if the node had been restarted
        node.run_job(19)
        node.end_job(19)
        return node.tidy("--job=19"), node.names()

    answer, names = on_node(tmp_path, act)
    assert answer == {"removed": 1, "figures": []}
    assert names == ["a", "c"]


def test_usage_is_reported_by_root(tmp_path: Path) -> None:
    def act(node: Node) -> dict[str, Any]:
        node.put("a")
        node.put("b")
        node.put("c", lifetime="job")
        node.run_job(17)
        return node.tidy("--usage")

    usage = {str(tmp_path / "disk"): [2 * 8192, 2]}
    assert on_node(tmp_path, act) == {"removed": 1, "usage": usage}


def test_the_oldest_are_removed_in_the_order_in_which_they_are_reported(tmp_path: Path) -> None:
    def act(node: Node) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        for number, name in enumerate("dcba"):
            node.put(name, used_at=number)
        node.run_job(17, "c")
        listed = node.tidy(f"--root={node.disk}")
        return listed, node.tidy(f"--root={node.disk}", "--oldest=2"), node.names()

    listed, done, names = on_node(tmp_path, act)
    assert listed == {"removed": 0, "evicted": 0, "may_go": [[0, 8192], [2, 8192], [3, 8192]]}
    assert done == {"removed": 0, "evicted": 2, "may_go": [[3, 8192]]}
    assert names == ["a", "c"]


def test_a_user_without_copies_is_reported_in_zeros(tmp_path: Path) -> None:
    def act(node: Node) -> dict[str, Any]:
        os.rmdir(f"{node.cache.folder}/records")
        return node.tidy("--job=17", "--usage", f"--root={node.disk}")

    disk = str(tmp_path / "disk")
    assert on_node(tmp_path, act) == {
        "removed": 0, "figures": [], "usage": {disk: [0, 0]}, "evicted": 0, "may_go": [],
    }  # fmt: skip


def test_other_processes_of_the_user_cannot_look_into_it(tmp_path: Path) -> None:
    def act(node: Node) -> int:
        os.setresuid(65534, 65534, 65534)
        with suppress(FileNotFoundError):
            tidy.main(["--config=/nowhere"])
        return os.stat(f"/proc/{os.getpid()}/mem").st_uid

    assert on_node(tmp_path, act) == 0


def test_a_node_that_leaves_a_job_leaves_its_list_of_what_all_nodes_see(tmp_path: Path) -> None:
    def act(node: Node) -> None:
        node.run_job(17, "a")
        note_shared_uses(node.cache.folder, 17, ["a"])
        os.unlink(f"{RUN_FOLDER}/{os.getuid()}/17.lists")  # as on a node that did not make it
        node.tidy("--job=17")
        assert uses_in(node.cache.folder, 17) == {"a"}
        note_shared_uses(node.cache.folder, 17, ["a"])
        node.tidy("--job=17")
        assert uses_in(node.cache.folder, 17) == set()

    on_node(tmp_path, act)


def test_without_a_config_only_the_files_of_a_job_that_ended_go(tmp_path: Path) -> None:
    def act(node: Node) -> None:
        node.put("a", lifetime="job")
        node.run_job(17, "a")
        node.run_job(18, "a")
        node.end_job(17)
        line = [sys.executable, "-I", "-m", "stager.node.tidy", "--job=17"]
        ran = subprocess.run(line, check=True, capture_output=True)
        assert (ran.stdout, ran.stderr) == (b"{}\n", b"")
        assert sorted(path.name for path in Path(RUN_FOLDER, str(os.getuid())).iterdir()) == [
            "18.uses"
        ]
        assert node.names() == ["a"]
        node.end_job(18)
        node.tidy("--job=18")
        assert node.names() == []

    on_node(tmp_path, act)
