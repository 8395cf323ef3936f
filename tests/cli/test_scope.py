"""Which nodes a command is about, and what is printed about those that do not answer."""

from __future__ import annotations

import pytest

from stager.launch.nodes import Answer, Scope, by_problem, frames
from tests.support.desk import Desk, without_free_space
from tests.support.stagectl import Ran
from tests.support.users import USER, as_ordinary_user


@pytest.mark.parametrize("option", [[], ["--job", "17"], ["-w", "n[1-3]"]], ids=str)
def test_status_in_a_job_asks_its_nodes_and_says_which_do_not_answer(
    cluster: Desk, option: list[str]
) -> None:
    ran = cluster.in_job("status", *option)
    assert (ran.code, ran.err) == (0, "")
    assert without_free_space(ran.out) == (
        f"stage: nothing is staged for you beneath {cluster.folder}/nvme on n[1-2]\n"
        "n3: down\nn1: drained\n"
    )


def test_a_node_with_another_version_is_reported(cluster: Desk) -> None:
    task = "srun: launching StepId=17.0 on host n1, 1 tasks: 0"
    lines = [task, *(f"0: {line}" for line in frames("n1", {"shape": "other"}))]
    echo = "".join(f"echo '{line}'\n" for line in lines)
    (cluster.folder / "srun").write_text(f"#!/bin/sh\n{echo}")
    ran = cluster.in_job("status", "-w", "n[1,3]")
    why = (
        "its slurm-stage has another version than this one; "
        "the administrator must install the same version on all nodes"
    )
    assert ran == Ran(8, f"n1: {why}\nn3: down\n", "")


@pytest.mark.parametrize("command", ["status", "verify"])
def test_a_folder_without_simulated_nodes_is_refused(desk: Desk, command: str) -> None:
    message = (
        f"{desk.folder}/typo has no simulated nodes (folders node1, node2, …); name the folder "
        "that `stagectl stage --local` used"
    )
    ran = desk.stagectl(command, "--local-root", "typo")
    assert ran == Ran(2, "", f"stage: {message}\n")


def test_actions_in_a_job_are_done_on_its_nodes(cluster: Desk) -> None:
    ran = cluster.in_job("pin", "/nvme/a")
    absent = "/nvme/a is no copy of yours here; stagectl status lists what is staged"
    assert ran == Ran(2, "", f"stage: n[1-2]: {absent}\nstage: n3: down\n")
    assert cluster.in_job("verify") == Ran(8, "", "stage: n3: down\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-w", "n1", "--job", "3"],
         "use only one of --nodes, --job, --hostfile, --launcher and --local-root"),
        (["-w", "n[1-"], 'n[1- is not a list of nodes: missing bracket: "n[1-"'),
        (["-w", ","], ", is not a list of nodes: missing nodeset operand with ',' operator"),
    ],
    ids=["two at once", "a bad list", "a list of nothing"],
)  # fmt: skip
def test_wrong_lists_of_nodes_end_with_2(desk: Desk, arguments: list[str], message: str) -> None:
    assert desk.stagectl("status", *arguments) == Ran(2, "", f"stage: {message}\n")


def test_nodes_are_folded_although_the_texts_of_ssh_name_them() -> None:
    refused = "ssh: connect to host {} port 22: Connection refused"
    problems = {f"n{number}": refused.format(f"n{number}") for number in (1, 2, 10)}
    assert by_problem({**problems, "n3": refused.format("n30"), "n4": "down", "n5": "down"}) == {
        refused.format("n[1-2,10]"): ["n1", "n2", "n10"],
        refused.format("n30"): ["n3"],
        "down": ["n4", "n5"],
    }
    assert by_problem({"n1": refused.format("n1")}) == {refused.format("n1"): ["n1"]}


ANSWERS = [Answer("n1", {}), Answer("n2", None, "ssh: refused"), Answer("n3", None, "down", "DOWN")]
NODES = [one.node for one in ANSWERS]


def test_users_are_told_how_to_ask_within_a_job() -> None:
    words = ["verify", "/nvme/a b"]
    named = Scope(nodes=NODES)
    assert as_ordinary_user(lambda: named.without_ssh(words, ANSWERS)) == (
        "if these nodes cannot be reached by ssh, ask them within a job of yours: stagectl verify "
        "'/nvme/a b' --job ID, or salloc -w n[1-3] stagectl verify '/nvme/a b'"
    )
    others = [ANSWERS[0], ANSWERS[2]]
    assert as_ordinary_user(lambda: named.without_ssh(words, others)) == ""


@pytest.mark.root
def test_root_is_told_to_ask_within_a_job_of_its_own(desk: Desk) -> None:
    instead = (
        "if these nodes cannot be reached by ssh, ask them within a job of root's: salloc -w {} "
        "--overcommit stagectl {}"
    )
    of_job = Scope(nodes=NODES, whole_job=True, other_job=75)
    assert of_job.without_ssh(["status"], ANSWERS) == instead.format("n[1-2]", "status")
    for words in (
        f"evict --user {USER} /nvme/a /nvme/b",
        f"evict --user {USER} --older 5400s --dry-run",
        "evict --to-free 1000B",
        f"unpin --user {USER} /nvme/a",
        f"status --user {USER}",
        "status --by user",
    ):
        ran = desk.stagectl(*words.split(), "-w", "n[1-2].invalid")
        hint = instead.format("n[1-2].invalid", words)
        assert (ran.code, ran.err.splitlines()[-1]) == (8, f"stage: {hint}")
