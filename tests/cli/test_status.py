"""``stagectl status``: tables and JSON of what the nodes hold."""

from __future__ import annotations

import json
import os
import pwd
import re
import socket

import pytest

from tests.support.desk import NO_CONFIG, Desk, without_free_space
from tests.support.stagectl import Ran


def test_status_folds_the_records_of_all_nodes(staged: tuple[Desk, Ran]) -> None:
    desk, _ = staged
    ran = desk.stagectl("status", "--local-root", desk.nodes)
    assert (ran.code, ran.err) == (0, "")
    source = str(desk.source)
    assert re.sub(" +", " ", without_free_space(ran.out)) == (
        "NODE DST SIZE STAGED STATE KEPT SOURCE LAST JOB\n"
        f"node[1-3] /nvme/img.sqsh 293.0 KiB T ago ready - {source} -\n"
        "1 file, 3 copies, 878.9 KiB in all\n"
    )
    assert re.search(r"^/nvme: [^\n]* free of [^\n]* on node\[1-3\]$", ran.out, re.MULTILINE)


def test_status_by_file_and_by_user(staged: tuple[Desk, Ran]) -> None:
    desk, _ = staged
    by_file = desk.stagectl("status", "--by", "file", "--local-root", desk.nodes)
    assert re.sub(" +", " ", without_free_space(by_file.out)) == (
        "DST SIZE NODES STATE KEPT SOURCE\n"
        f"/nvme/img.sqsh 293.0 KiB 3 3 ready - {desk.source}\n"
        "1 file, 3 copies, 878.9 KiB in all\n"
    )
    by_user = desk.stagectl("status", "--by", "user", "--local-root", desk.nodes)
    user = pwd.getpwuid(os.getuid()).pw_name
    assert re.sub(" +", " ", without_free_space(by_user.out)) == (
        "USER FILES FOLDERS COPIES SIZE NODES\n"
        f"{user} 1 0 3 878.9 KiB node[1-3]\n"
        "1 file, 3 copies, 878.9 KiB in all\n"
    )


def test_status_of_a_user_who_is_not_there_or_has_nothing(staged: tuple[Desk, Ran]) -> None:
    desk, _ = staged
    assert desk.simulated("status", "--user", "nobody-here") == Ran(
        2, "", "stage: --user nobody-here: this machine has no such user; of a user without an "
        "account, write the number (uid)\n",
    )  # fmt: skip
    empty = Ran(2, "", "stage: --user is empty; name a user, or leave the option out\n")
    for command in (("status",), ("evict", "/nvme/a"), ("unpin", "/nvme/a")):
        assert desk.simulated(*command, "--user", "") == empty
    own = desk.simulated("status", "--user", str(os.getuid()))
    number = re.compile(r"\d[\d.]*")  # free space and ages change meanwhile
    assert own.code == 0
    assert number.sub("N", own.out) == number.sub("N", desk.simulated("status").out)
    if os.getuid() == 0:
        nothing, *_ = desk.simulated("status", "--user", "47110").out.splitlines()
        assert nothing == "stage: nothing is staged for 47110 beneath /nvme on node[1-3]"


def test_status_as_json_has_the_entries_of_each_node(staged: tuple[Desk, Ran]) -> None:
    desk, _ = staged
    ran = desk.stagectl("status", "--json", "--local-root", desk.nodes)
    printed = json.loads(ran.out)
    assert (ran.code, ran.err) == (0, "")
    assert list(printed) == ["version", "nodes", "missing"]
    for number, node in enumerate(printed["nodes"], 1):
        keys = ["node", "state", "problem", "entries", "roots", "unreadable", "silent"]
        keys += ["shared"]
        assert list(node) == keys
        assert (node["node"], node["problem"], node["unreadable"]) == (f"node{number}", "", [])
        [entry] = node["entries"]
        assert (entry["state"], entry["size"]) == ("ready", 300_000)
        assert entry["digest"] == "534c4aa790cd6677008b36bda244561b"
    assert len(printed["nodes"]) == 3


def test_status_passes_over_files_beside_the_simulated_nodes(desk: Desk) -> None:
    desk.config.unlink()
    (desk.nodes / "node1").mkdir(parents=True)
    (desk.nodes / "nodes.txt").write_text("node1\n")
    ran = desk.stagectl("status", "--local-root", desk.nodes)
    assert without_free_space(ran.out) == "stage: nothing is staged for you beneath / on node1\n"


def test_status_folds_the_nodes_on_which_nothing_is_staged(desk: Desk) -> None:
    for number in (1, 2, 10):
        (desk.nodes / f"node{number}").mkdir(parents=True)
    text = "stage: nothing is staged for you beneath /nvme on node[1-2,10]\n"
    assert desk.stagectl("status", "--local-root", desk.nodes) == Ran(0, text, "")


@pytest.mark.parametrize(
    ("variables", "node"),
    [
        ({"SLURMD_NODENAME": "n7"}, "n7"),
        ({}, f"{socket.gethostname()}; ask other nodes by -w NODES, or in a job"),
        # A job of this node alone needs no step.
        (
            {"SLURMD_NODENAME": "n7", "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n7",
             "SLURM_JOB_NUM_NODES": "1"}, "n7",
        ),
    ],
    ids=["on a node", "outside", "in a job of one node"],
)  # fmt: skip
def test_status_of_a_node_without_records_says_so(
    desk: Desk, variables: dict[str, str], node: str
) -> None:
    (desk.folder / "nvme").mkdir()
    desk.config.write_text(f'roots = ["{desk.folder}/nvme", "{desk.folder}/none"]')
    ran = desk.stagectl("status", **variables)
    beneath = f"{desk.folder}/nvme or {desk.folder}/none"
    text = f"stage: nothing is staged for you beneath {beneath} on {node}\n"
    assert (ran.code, without_free_space(ran.out), ran.err) == (0, text, "")


def test_root_is_told_that_nothing_is_staged_for_anybody(desk: Desk) -> None:
    ran = desk.stagectl("status", "--by", "user", "-w", "n7", SLURMD_NODENAME="n7")
    whom = "you" if os.getuid() else "anybody"
    text = f"stage: nothing is staged for {whom} beneath /nvme on n7\n"
    assert (ran.code, without_free_space(ran.out), ran.err) == (0, text, "")


def test_status_of_this_node_by_its_name_asks_no_other_node(desk: Desk) -> None:
    ran = desk.stagectl("status", "-w", "n7", SLURMD_NODENAME="n7")
    text = "stage: nothing is staged for you beneath /nvme on n7\n"
    assert (ran.code, without_free_space(ran.out), ran.err) == (0, text, "")


def test_a_status_that_nobody_answers_ends_with_8(cluster: Desk) -> None:
    (cluster.folder / "srun").write_text("#!/bin/sh\necho 'srun: error: no' >&2\nexit 1\n")
    assert cluster.in_job("status") == Ran(8, "n[1-2]: srun: error: no\nn3: down\n", "")


def test_status_needs_the_sites_stage_toml(desk: Desk) -> None:
    desk.config.unlink()
    assert desk.stagectl("status") == Ran(3, "", f"stage: {desk.config} {NO_CONFIG}\n")
