"""Nodes of the job are asked by a step, here with a script in the place of srun."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from stager.launch.job import JobContext
from stager.launch.nodes import NODE_ARGV, Answer, frames, hello
from stager.launch.srun import step_argv
from stager.node.agent import Status, Verify, text_of

if TYPE_CHECKING:
    from tests.support.nodes import Site

JOB = JobContext(job=17, nodes="n[1-4]", node_count=4)
STATUS = Status(("/nvme",))
VERIFY = Verify(("/nvme",))
LARGE = {"entries": [f"/nvme/{number} é" for number in range(5000)]}
NO_ANSWER = (
    "no answer within 0.6 s; ask again, and if it stays silent see whether the node and its disks "
    "work, or tell the administrator"
)


def test_a_step_brings_all_answers_in_the_order_of_the_nodes(site: Site) -> None:
    files = f"{site.answer('n2', LARGE)} {site.answer('n1', {'a': 1})}"
    site.program("srun", f"cat {files}; env >{site.folder}/env")
    assert site.ask("n1 n2") == [Answer("n1", {"a": 1}), Answer("n2", LARGE)]
    variables = (site.folder / "env").read_text().splitlines()
    assert "STAGE_HELPER=17" in variables
    # Whatever the environment of a step of a few nodes says.
    assert {"SLURM_JOB_NODELIST=n[1-4]", "SLURM_JOB_NUM_NODES=4"} <= set(variables)
    assert "_SLURM_SPANK_OPTION_slurm_stage_stage_helper=1" in variables
    assert not any("SECRET" in line for line in variables)


def test_a_silent_node_is_given_up_after_some_seconds(site: Site) -> None:
    site.program("srun", f"cat {site.answer('n1', {})}; exec sleep 60")
    begun = time.monotonic()
    assert site.ask("n1 n2") == [Answer("n1", {}), Answer("n2", None, NO_ANSWER)]
    assert 0.6 <= time.monotonic() - begun < 2


def test_a_node_that_fails_beside_a_silent_one_is_told_with_its_last_line(site: Site) -> None:
    lines = "0: Traceback\\n0: ImportError: x\\nsrun: error: n1: task 0: Exited with exit code 1"
    hosts = "srun: launching StepId=17.0 on host n%d, 1 tasks: %d\\n"
    site.program("srun", f"printf '{hosts}' 1 0 2 1; printf '{lines}\\n'; exec sleep 60")
    assert site.ask("n1 n2") == [
        Answer("n1", None, "ImportError: x"), Answer("n2", None, NO_ANSWER),
    ]  # fmt: skip


def test_an_srun_that_ignores_signals_is_killed(site: Site) -> None:
    site.program("srun", "trap '' TERM; while true; do sleep 0.1; done")
    begun = time.monotonic()
    assert site.ask("n1") == [Answer("n1", None, NO_ANSWER)]
    assert time.monotonic() - begun < 2


def test_a_node_that_has_begun_may_take_its_time(site: Site) -> None:
    lines = site.answer("n1", {"done": 1})
    slowly = f"head -1 {lines}; sleep 1.2; tail -n +2 {lines}"
    site.program("srun", slowly)
    assert site.ask("n1 n2", VERIFY) == [Answer("n1", {"done": 1}), Answer("n2", None, NO_ANSWER)]
    # A status must come at once.
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


def test_a_step_that_fails_is_reported_with_its_last_line(site: Site) -> None:
    site.program("srun", "echo first >&2; echo 'srun: error: Invalid job id' >&2; exit 1")
    assert site.ask("n1") == [Answer("n1", None, "srun: error: Invalid job id")]
    site.program("srun", "exit 1")
    why = "the step ended without an answer of this node; check that slurm-stage is installed there"
    assert site.ask("n1") == [Answer("n1", None, why)]
    (site.folder / "srun").unlink()
    why = (
        f"{site.folder}/srun, which stage.toml names, is not there or cannot be run; tell the "
        "administrator to correct srun in [launch]"
    )
    assert site.ask("n1") == [Answer("n1", None, why)]


def test_the_step_runs_the_command_on_the_nodes_that_are_asked(site: Site) -> None:
    site.program("srun", f'printf "%s\\n" "$@" >{site.folder}/argv')
    site.ask("n1 n3")
    argv = (site.folder / "argv").read_text().splitlines()
    assert argv == step_argv("srun", JOB, ["n1", "n3"], [*NODE_ARGV, text_of(STATUS)])[1:]
    assert (sys.executable, "-I", "-m", "stager", "node") == NODE_ARGV


def test_a_node_of_the_step_that_answers_for_another_is_not_believed(site: Site) -> None:
    forged = [f"2: {line}" for line in (hello("n1"), *frames("n1", {"forged": 1}))]
    # A task's lines have its label, whatever they look like.
    claim = "2: srun: launching StepId=17.0 on host n1, 1 tasks: 2"
    (site.folder / "lies").write_text("\n".join([claim, *forged, ""]))
    files = f"{site.folder}/lies {site.answer('n3', {})} {site.answer('n1', {'a': 1})}"
    site.program("srun", f"cat {files}")
    lie = "it answered in the name of n1; check this node"
    assert site.ask("n1 n3") == [Answer("n1", {"a": 1}), Answer("n3", None, lie)]
