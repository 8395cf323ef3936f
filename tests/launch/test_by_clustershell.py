"""Other nodes are asked by ClusterShell, here with a script in the place of ssh."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import LaunchError
from stager.launch import nodes
from stager.launch.nodes import Answer
from stager.node.agent import Status, text_of

if TYPE_CHECKING:
    from tests.support.nodes import Site

STATUS = Status(("/nvme",))
LARGE = {"entries": [f"/nvme/{number} é" for number in range(5000)]}
NO_ANSWER = (
    "no answer within 0.6 s; ask again, and if it stays silent see whether the node and its disks "
    "work, or tell the administrator"
)


def test_nodes_outside_of_the_job_are_asked_as_clush_would(shell: Site) -> None:
    shell.answer("n1", LARGE)
    assert shell.ask("n1", job=None) == [Answer("n1", LARGE)]
    [asked] = (shell.folder / "asked").read_text().splitlines()
    assert asked.startswith("-oPort=2222 ")
    command = f"n1 {sys.executable} -I -m stager node {text_of(STATUS)} n1"
    assert asked.endswith(command)


def test_more_nodes_than_the_fan_out_and_some_that_do_not_answer(shell: Site) -> None:
    for number in (1, 2, 3, 4):
        shell.answer(f"n{number}", {"n": number})
    answers = shell.ask("n1 n7 n2 n8 n3 n4", job=None)
    assert answers == [
        Answer("n1", {"n": 1}),
        Answer("n7", None, NO_ANSWER),
        Answer("n2", {"n": 2}),
        Answer("n8", None, "ssh: no route to n8"),
        Answer("n3", {"n": 3}),
        Answer("n4", {"n": 4}),
    ]


def test_a_node_that_ends_without_an_answer_is_reported_with_its_code(shell: Site) -> None:
    (shell.folder / "n1.answer").write_text("")
    why = (
        "stagectl on this node ended with code 0 without an answer; check ssh to it, and that "
        "slurm-stage is installed there"
    )
    assert shell.ask("n1", job=None) == [Answer("n1", None, why)]


def test_a_broken_clush_conf_is_named(shell: Site) -> None:
    (shell.folder / "clush.conf").write_text("[Main]\nfanout: many\n")
    with pytest.raises(LaunchError) as caught:
        shell.ask("n1", job=None)
    assert str(caught.value) == (
        "clush.conf: (Config Main.fanout): invalid literal for int() with base 10: 'many'"
    )


def test_a_real_node_command_answers(shell: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.program("our-ssh", 'while [[ $1 == -* ]]; do shift; done\nSLURMD_NODENAME=$1 sh -c "$2"')
    (shell.folder / "nvme").mkdir()
    monkeypatch.setattr(nodes, "PATIENCE", 10.0)
    command = Status((f"{shell.folder}/nvme",))
    [answer] = shell.ask("n1", command, None)
    assert answer.content is not None, answer.problem
    assert json.loads(json.dumps(answer.content))["entries"] == []
    assert answer.content["rooms"][0][0] == f"{shell.folder}/nvme"
