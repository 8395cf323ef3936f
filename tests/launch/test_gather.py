"""How nodes are asked, by a step and by ClusterShell, and what is made of what they say."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from stager.base.errors import LaunchError
from stager.copies.upkeep import Action, Command
from stager.launch import gather
from stager.launch.gather import Answer, Mailbox, ask, frames, hello, step_argv
from stager.launch.job import JobContext
from stager.request.policy import Launch, Policy

if TYPE_CHECKING:
    from pathlib import Path

JOB = JobContext(job=17, nodes="n[1-4]", node_count=4)
STATUS = Command(Action.STATUS, ("/nvme",))
VERIFY = Command(Action.VERIFY, ("/nvme",))
LARGE = {"entries": [f"/nvme/{number} é" for number in range(5000)]}


# Lines


def test_an_answer_is_cut_into_lines_that_slurm_keeps_whole() -> None:
    noise = {"x": random.Random(1).randbytes(5000).hex()}
    lines = list(frames("n1", noise))
    assert len(lines) > 5
    assert max(map(len, lines)) < 1000
    assert all(line.isascii() for line in lines)


def test_answers_whose_lines_come_mixed_are_put_together() -> None:
    mailbox = Mailbox(["n1", "n2", "n3"])
    lines = [*frames("n1", LARGE), *frames("n2", {"a": 1}), "a banner", "", hello("n3")]
    random.Random(2).shuffle(lines)
    assert sum(not mailbox.hear(line) for line in lines) == 2
    assert mailbox.answers == {"n1": Answer("n1", LARGE), "n2": Answer("n2", {"a": 1})}
    assert list(mailbox.waiting) == ["n3"]
    assert mailbox.begun == {"n1", "n2", "n3"}


@pytest.mark.parametrize(
    "line",
    [
        "", " ", "@stage1", "@stage1 n1", "@stage0 n1 hello", "@stage1 n9 hello",
        "x@stage1 n1 hello",
    ],
)  # fmt: skip
def test_what_is_no_part_of_an_answer_is_passed_over(line: str) -> None:
    mailbox = Mailbox(["n1"])
    assert not mailbox.hear(line)
    assert list(mailbox.waiting) == ["n1"]


@pytest.mark.parametrize("data", ["", "x", "AAAA", "eJwDAAAAAAE="])
def test_an_answer_that_cannot_be_read_is_a_problem(data: str) -> None:
    mailbox = Mailbox(["n1"])
    assert mailbox.hear(f"@stage1 n1 0 1 {data}")
    assert mailbox.answers == {"n1": Answer("n1", None, "its answer cannot be read")}


def test_the_first_word_on_a_node_is_the_last() -> None:
    mailbox = Mailbox(["n1"])
    mailbox.give_up("n1", "\x1b no")
    mailbox.give_up("n1", "again")
    mailbox.give_up("n2", "unknown")
    assert not mailbox.hear(hello("n1"))
    assert mailbox.answers == {"n1": Answer("n1", None, "? no")}


# By a step


def test_the_step_runs_once_on_each_node_beside_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(roots=("/nvme",), launch=Launch(srun="/opt/bin/srun", mpi="pmix_v4"))
    assert step_argv(JOB, policy, ["n1", "n2", "n4"], STATUS) == [
        "/opt/bin/srun", "--jobid", "17", "--job-name=stagectl", "--quiet", "--overlap",
        "--mpi=none", "--export=ALL", "--nodelist=n[1-2,4]", "-N", "3", "-n", "3",
        "--ntasks-per-node=1", "--mem=0", "--gres=none", "--cpu-bind=none", "--chdir=/",
        "--kill-on-bad-exit=0", "--wait=0", "--input=none",
        sys.executable, "-I", "-m", "stager", "node", STATUS.to_text(),
    ]  # fmt: skip


class Site:
    """Programs of a site without Slurm: each test writes those that it needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.policy = Policy(roots=("/nvme",), launch=Launch(srun=f"{folder}/srun"))

    def program(self, name: str, script: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def answer(self, node: str, said: dict[str, Any]) -> str:
        """A file with all that the node says."""
        path = self.folder / f"{node}.answer"
        path.write_text("".join(f"{line}\n" for line in (hello(node), *frames(node, said))))
        return str(path)

    def ask(
        self, nodes: str, order: Command = STATUS, job: JobContext | None = JOB
    ) -> list[Answer]:
        names = nodes.split()
        return ask(names, order, job, self.policy, {"SLURM_JOB_ID": "17", "SECRET": "1"})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    monkeypatch.setitem(sys.modules, "pyslurm", None)
    monkeypatch.setattr(gather, "PATIENCE", 0.6)
    site = Site(tmp_path)
    site.program("sinfo", "exit 1")
    return site


NO_ANSWER = "no answer within 0.6 s"


def test_a_step_brings_all_answers_in_the_order_of_the_nodes(site: Site) -> None:
    files = f"{site.answer('n2', LARGE)} {site.answer('n1', {'a': 1})}"
    site.program("srun", f"cat {files}; env >{site.folder}/env")
    assert site.ask("n1 n2") == [Answer("n1", {"a": 1}), Answer("n2", LARGE)]
    variables = (site.folder / "env").read_text().splitlines()
    assert "STAGE_HELPER=17" in variables
    assert "_SLURM_SPANK_OPTION_slurm_stage_stage_helper=1" in variables
    assert not any("SECRET" in line for line in variables)


def test_a_node_that_is_down_is_not_asked(site: Site) -> None:
    site.program("sinfo", "echo 'n1|idle'; echo 'n2|down*'; echo 'n3|drained'")
    site.program("srun", f"cat {site.answer('n1', {})} {site.answer('n3', {})}")
    assert site.ask("n1 n2 n3") == [
        Answer("n1", {}, state="idle"),
        Answer("n2", None, "down", "down*"),
        Answer("n3", {}, state="drained"),
    ]


def test_where_all_nodes_are_down_nobody_is_asked(site: Site) -> None:
    site.program("sinfo", "echo 'n1|down'")
    assert site.ask("n1") == [Answer("n1", None, "down", "down")]


def test_a_node_that_is_silent_is_waited_for_no_longer_than_that(site: Site) -> None:
    site.program("srun", f"cat {site.answer('n1', {})}; exec sleep 60")
    begun = time.monotonic()
    assert site.ask("n1 n2") == [Answer("n1", {}), Answer("n2", None, NO_ANSWER)]
    assert 0.6 <= time.monotonic() - begun < 2


def test_a_launcher_that_does_not_heed_signals_is_killed(site: Site) -> None:
    site.program("srun", "trap '' TERM; while true; do sleep 0.1; done")
    begun = time.monotonic()
    assert site.ask("n1") == [Answer("n1", None, NO_ANSWER)]
    assert time.monotonic() - begun < 2


def test_a_node_that_has_begun_has_the_time_that_its_work_takes(site: Site) -> None:
    lines = site.answer("n1", {"done": 1})
    slowly = f"head -1 {lines}; sleep 1.2; tail -n +2 {lines}"
    site.program("srun", slowly)
    assert site.ask("n1 n2", VERIFY) == [Answer("n1", {"done": 1}), Answer("n2", None, NO_ANSWER)]
    # But for reading records there is no such time.
    assert site.ask("n1 n2") == [Answer(node, None, NO_ANSWER) for node in ("n1", "n2")]


def test_a_node_on_which_slurm_starts_nothing_is_named(site: Site) -> None:
    why = "Communication connection failure"
    error = f"srun: error: Task launch for StepId=17.0 failed on node n2: {why}"
    site.program("srun", f"echo '{error}' >&2; cat {site.answer('n1', {})}")
    assert site.ask("n1 n2") == [
        Answer("n1", {}), Answer("n2", None, f"Slurm could not start a task: {why}"),
    ]  # fmt: skip


def test_nodes_that_srun_cut_off_are_asked_again_to_verify(site: Site) -> None:
    error = "srun: error: Task launch for StepId=17.0 failed on node n2: x"
    lines = site.answer("n1", {"done": 1})
    first = f"echo '{error}' >&2; head -1 {lines}; touch {site.folder}/second"
    site.program("srun", f"if [ -e {site.folder}/second ]; then cat {lines}; else {first}; fi")
    assert site.ask("n1 n2", VERIFY) == [
        Answer("n1", {"done": 1}), Answer("n2", None, "Slurm could not start a task: x"),
    ]  # fmt: skip


def test_a_step_that_fails_is_told_by_its_last_word(site: Site) -> None:
    site.program("srun", "echo first >&2; echo 'srun: error: Invalid job id' >&2; exit 1")
    assert site.ask("n1") == [Answer("n1", None, "srun: error: Invalid job id")]
    site.program("srun", "exit 1")
    assert site.ask("n1") == [Answer("n1", None, "the step ended without its answer")]
    (site.folder / "srun").unlink()
    why = f"{site.folder}/srun cannot be started: No such file or directory"
    assert site.ask("n1") == [Answer("n1", None, why)]


# By ClusterShell, with a stand-in for ssh


@pytest.fixture
def shell(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site whose clush.conf names its own ssh: it says what lies in the node's file."""
    monkeypatch.setenv("CLUSTERSHELL_CFGDIR", str(site.folder))
    (site.folder / "clush.conf").write_text(
        f"[Main]\nfanout: 2\nssh_path: {site.folder}/our-ssh\nssh_options: -oPort=2222\n"
    )
    site.program(
        "our-ssh",
        f'echo "$@" >>{site.folder}/asked\n'
        "while [[ $1 == -* ]]; do shift; done\n"
        f'case $1 in *7) exec sleep 60;; *8) echo "ssh: no route to $1" >&2; exit 255;; esac\n'
        f"cat {site.folder}/$1.answer",
    )
    return site


def test_nodes_outside_of_the_job_are_asked_as_clush_would(shell: Site) -> None:
    shell.answer("n1", LARGE)
    assert shell.ask("n1", job=None) == [Answer("n1", LARGE)]
    [asked] = (shell.folder / "asked").read_text().splitlines()
    assert asked.startswith("-oPort=2222 ")
    command = f"n1 {sys.executable} -I -m stager node {STATUS.to_text()}"
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


def test_a_node_that_ends_without_an_answer_is_told_by_its_code(shell: Site) -> None:
    (shell.folder / "n1.answer").write_text("")
    why = "it ended with code 0 and without an answer"
    assert shell.ask("n1", job=None) == [Answer("n1", None, why)]


def test_nodes_within_and_without_the_job_are_asked_at_once(shell: Site) -> None:
    shell.program("srun", f"cat {shell.answer('n1', {'by': 'srun'})}")
    shell.answer("x1", {"by": "ssh"})
    answers = shell.ask("x1 n1")
    assert answers == [Answer("x1", {"by": "ssh"}), Answer("n1", {"by": "srun"})]


def test_a_broken_clush_conf_is_named(shell: Site) -> None:
    (shell.folder / "clush.conf").write_text("[Main]\nfanout: many\n")
    with pytest.raises(LaunchError) as caught:
        shell.ask("n1", job=None)
    assert str(caught.value) == (
        "clush.conf: (Config Main.fanout): invalid literal for int() with base 10: 'many'"
    )


# The real part, on this machine: ClusterShell, with a stand-in for ssh that runs the command here


def test_a_real_node_command_answers(shell: Site) -> None:
    shell.program("our-ssh", 'while [[ $1 == -* ]]; do shift; done\nSLURMD_NODENAME=$1 sh -c "$2"')
    (shell.folder / "nvme").mkdir()
    gather.PATIENCE = 10.0
    order = Command(Action.STATUS, (f"{shell.folder}/nvme",))
    [answer] = shell.ask("n1", order, None)
    assert answer.said is not None, answer.problem
    assert json.loads(json.dumps(answer.said))["entries"] == []
    assert answer.said["rooms"][0][0] == f"{shell.folder}/nvme"
