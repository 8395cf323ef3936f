"""``stagectl evict``: what goes, what is kept, and what is not understood."""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stager.cli import copies
from stager.cli.shared_options import NodeOptions
from stager.store.cache import open_cache
from stager.store.locks import Locks
from tests.support.records import RECORD
from tests.support.stagectl import Ran
from tests.support.users import USER, forked

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.desk import Desk


ABSENT = "is no copy of yours here; stagectl status lists what is staged"


def test_a_copy_that_is_absent_on_some_nodes_can_be_evicted_but_not_pinned(copies: Desk) -> None:
    path = "/nvme/img.sqsh"
    shutil.rmtree(copies.nodes / "node2/nvme/.slurm-stage")
    assert copies.simulated("pin", path) == Ran(
        2, f"stage: {path}: pinned on node[1,3] (2 nodes)\n",
        f"stage: node2: {path} {ABSENT}\n",
    )  # fmt: skip
    assert copies.simulated("unpin", path).code == 0
    assert copies.simulated("evict", path) == Ran(
        0, f"stage: {path}: evicted on node[1,3] (2 nodes)\n", ""
    )
    assert copies.simulated("evict", path) == Ran(2, "", f"stage: node[1-3]: {path} {ABSENT}\n")


@pytest.mark.parametrize("command", ["evict", "pin", "verify"])
def test_a_relative_path_and_a_pattern_are_explained(copies: Desk, command: str) -> None:
    assert copies.simulated(command, "img.sqsh", "/nvme/*") == Ran(
        2, "",
        f"stage: node[1-3]: {copies.folder}/img.sqsh {ABSENT}; write the whole path, as img.sqsh "
        "was looked for in the current folder\n"
        f"stage: node[1-3]: /nvme/* {ABSENT}; patterns are not expanded, so name each copy\n",
    )  # fmt: skip


def test_evict_reports_what_it_would_delete_and_then_what_it_deleted(copies: Desk) -> None:
    where = "on node[1-3] (3 nodes)"
    would = f"stage: /nvme/img.sqsh: would be evicted {where}\n"
    assert copies.simulated("evict", "--dry-run", "/nvme//./img.sqsh") == Ran(0, would, "")
    nothing = "stage: nothing to evict on node[1-3] (3 nodes)\n"
    assert copies.simulated("evict", "--older", "7d", "--dry-run") == Ran(0, nothing, "")
    if os.getuid() == 0:
        others = f"stage: nothing of {USER} to evict on node[1-3] (3 nodes)\n"
        line = "evict", "--user", str(USER), "--older", "7d"
        assert copies.simulated(*line) == Ran(0, others, "")
    time.sleep(1.1)
    # A second is the unit of what records remember of their use.
    for arguments in ((), ("--dry-run",)):
        ran = copies.simulated("evict", "--to-free", "1KiB", *arguments)
        assert re.fullmatch(
            rf"stage: /nvme: \S+ [KMGT]iB are free {re.escape(where)} already, so nothing had to "
            "be evicted there\n",
            ran.out,
        )
        assert (ran.code, ran.err) == (0, "")
    assert len(list(copies.nodes.rglob("img.sqsh"))) == 3
    went = f"stage: /nvme/img.sqsh: evicted {where}\n"
    assert copies.simulated("evict", "--older", "1s") == Ran(0, went, "")
    assert not list(copies.nodes.rglob("img.sqsh"))
    assert copies.simulated("evict", "--older", "1s") == Ran(0, nothing, "")


@pytest.mark.parametrize("chosen", ["/nvme/img.sqsh", "--older=1s"])
def test_a_copy_that_its_user_has_removed_is_not_told_as_evicted(copies: Desk, chosen: str) -> None:
    copies.copy(2, "/nvme/img.sqsh").unlink()
    time.sleep(1.1)  # see above
    for options, done in ((["--dry-run"], "would be evicted"), ([], "evicted")):
        assert copies.simulated("evict", *options, chosen) == Ran(
            0,
            f"stage: /nvme/img.sqsh: {done} on node[1,3] (2 nodes)\n"
            "stage: /nvme/img.sqsh: was gone already on node2\n", "",
        )  # fmt: skip


def test_files_that_were_added_to_a_folder_stay_and_the_folder_is_staged_again(desk: Desk) -> None:
    folder = desk.folder / "set"
    folder.mkdir()
    (folder / "a").write_text("staged")
    value = f"{folder}:/nvme/set"
    assert desk.local("stage", value).code == 0
    desk.copy(2, "/nvme/set/mine").write_text("mine")
    assert desk.simulated("evict", "/nvme/set") == Ran(
        0,
        "stage: /nvme/set: evicted on node[1,3] (2 nodes)\n"
        "stage: /nvme/set: evicted, but for files of yours, on node2\n", "",
    )  # fmt: skip
    assert [path.name for path in desk.copy(2, "/nvme/set").iterdir()] == ["mine"]
    assert desk.local("stage", value).code == 0
    for node in (1, 2, 3):
        assert desk.copy(node, "/nvme/set/a").read_text() == "staged"
    assert desk.copy(2, "/nvme/set/mine").read_text() == "mine"


def test_a_dry_run_says_what_evict_would_refuse(copies: Desk) -> None:
    copies.copy(1, "/nvme/img.sqsh").write_text("mine")
    changed = "stage: node1: /nvme/img.sqsh was changed or replaced, so it would not be deleted\n"
    assert copies.simulated("evict", "--dry-run", "/nvme/img.sqsh") == Ran(
        7, "stage: /nvme/img.sqsh: would be evicted on node[2-3] (2 nodes)\n", changed
    )


@pytest.mark.parametrize(
    ("nodes", "folded", "others", "name"),
    [([2], "node2", "node[1,3] (2 nodes)", "node2"), ([1, 3], "node[1,3]", "node2", "NODE")],
)
def test_what_took_a_copy_s_place_is_kept_and_the_command_to_delete_it_is_named(
    copies: Desk, nodes: list[int], folded: str, others: str, name: str
) -> None:
    path = "/nvme/img.sqsh"
    for node in nodes:
        copies.copy(node).unlink()
        (copies.copy(node) / "mine").mkdir(parents=True)
    replaced = f"stage: {folded}: {path} was changed or replaced, so it"
    went = f"stage: {path}: {{}} on {others}\n"
    assert copies.simulated("evict", "--dry-run", path) == Ran(
        7, went.format("would be evicted"), f"{replaced} would not be deleted\n"
    )
    assert copies.simulated("evict", path) == Ran(
        7,
        went.format("evicted"),
        f"{replaced} was not deleted, and slurm-stage no longer manages it; if you do not need it, "
        f"delete it there: srun -N1 -n1 -w {name} rm -r {path}\n",
    )
    assert all((copies.copy(node) / "mine").is_dir() for node in nodes)


def test_pinned_copies_are_kept_and_named(copies: Desk) -> None:
    copies.simulated("pin", "/nvme/img.sqsh")
    time.sleep(1.1)
    assert copies.simulated("evict", "--older", "1s") == Ran(
        0, "stage: kept on node[1-3] (3 nodes): /nvme/img.sqsh (pinned)\n", "",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gone", "evicted", "also"),
    [
        ((), "63 copies evicted on node[1-3] (3 nodes): 18.2 MiB in all", ""),
        (
            ((1, 5), (2, 5), (2, 6)), "60 copies evicted on node[1-3] (3 nodes): 17.3 MiB in all",
            "stage: 3 copies were gone already on node[1-2] (2 nodes)\n",
        ),
    ],
    ids=["all", "some"],
)  # fmt: skip
def test_many_copies_are_counted_on_all_nodes_and_those_that_are_kept_are_named(
    desk: Desk, gone: tuple[tuple[int, int], ...], evicted: str, also: str
) -> None:
    assert desk.local("stage", *(f"{desk.source}:/nvme/{name}" for name in range(26))).code == 0
    desk.simulated("pin", *(f"/nvme/{name}" for name in range(5)))
    time.sleep(1.1)
    where = "node[1-3] (3 nodes)"
    planned = desk.simulated("evict", "--older", "1s", "--dry-run").out.splitlines()
    free = {f"stage: /nvme/{i}: would be evicted on {where}" for i in range(5, 26)}
    assert set(planned[:-1]) == free
    for node, name in gone:
        desk.copy(node, f"/nvme/{name}").unlink()
    assert desk.simulated("evict", "--older", "1s") == Ran(
        0, f"stage: {evicted}\n{also}"
        f"stage: kept on {where}: /nvme/0 (pinned), /nvme/1 (pinned), /nvme/2 (pinned) and 2 more"
        "\n", "",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "choose what to evict by exactly one of DST, --older and --to-free"),
        (["/nvme/a", "--older", "7d"],
         "choose what to evict by exactly one of DST, --older and --to-free"),
        *((["--older", text], f"--older {text} is not a time; write it like 90m, 12h or 7d")
          for text in ("7", "d", "-1d", "1.5h", "7 d", "1w", "9999999999d", "\u0667d")),
        (["--older", "0m"],
         "--older 0m is too short: write at least 1s, or name the copies to delete (DST)"),
        *((["--to-free", text], f"--to-free {text} is not a size; write it like 200G or 1.5TiB")
          for text in ("G", "0", "-1G", "1X", "nan", "inf", "1e999G", "9" * 40)),
    ],
)  # fmt: skip
def test_wrong_values_for_evict_end_with_2(desk: Desk, arguments: list[str], message: str) -> None:
    assert desk.stagectl("evict", *arguments) == Ran(2, "", f"stage: {message}\n")


def test_a_later_task_waits_while_the_first_evicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvme").mkdir()
    (tmp_path / "stage.toml").write_text(f'roots = ["{tmp_path}/nvme"]\n')
    cache = open_cache(f"{tmp_path}/nvme", os.getuid())
    names = [f"{tmp_path}/nvme/{name}" for name in ("a", "b")]
    for name in names:
        cache.save(replace(RECORD, destination=name))
    monkeypatch.setattr(copies, "_FIRST_TASK_LIMIT", -1.0)
    monkeypatch.setattr("stager.launch.job.is_later_task", lambda _: True)
    where = NodeOptions("", None, None, tmp_path / "stage.toml")
    assert not copies._does_first_task(names, where)
    left = [*names]
    monkeypatch.setattr("time.sleep", lambda _: cache.forget(left.pop()))
    with closing(Locks(cache)) as locks:
        assert locks.take(names[0])
        assert forked(lambda: copies._does_first_task(names, where))
