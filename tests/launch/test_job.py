"""How a process learns which nodes its job has, from the environment or from Slurm."""

from __future__ import annotations

import socket
import sys
import time
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import LaunchError, UsageError
from stager.launch import job
from stager.launch.job import (
    JobContext,
    end_step,
    enter,
    find,
    find_step,
    fold,
    is_away,
    is_drained,
    is_later_task,
    is_suspended,
    look_up,
    node_states,
    own_name,
    unfold,
)

if TYPE_CHECKING:
    from pathlib import Path

JOB = JobContext(job=17, nodes="n[1-4]", node_count=4)
ENVIRONMENT = {
    "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_NUM_NODES": "4",
}  # fmt: skip
OUTSIDE = (
    "not inside a Slurm job: use sbatch, salloc or srun first, --job ID for a job of yours that is "
    "running, --hosts or --hostfile to name nodes, or --local N to simulate N nodes on this machine"
)
UNKNOWN = "Slurm does not know the nodes of job 17; check that it is running (scontrol show job 17)"


# From the environment


def test_a_job_whose_nodes_are_in_the_environment_asks_nobody(programs: Path) -> None:
    assert find(ENVIRONMENT, f"{programs}/srun") == JOB
    step = {**ENVIRONMENT, "SLURM_STEP_NODELIST": "n[1-4]"}
    assert find(step, f"{programs}/srun") == JOB


def test_the_nodes_of_an_srun_are_those_of_its_step() -> None:
    step = {**ENVIRONMENT, "SLURM_STEP_NODELIST": "n[2-3]", "SLURM_STEP_NUM_NODES": "2"}
    assert find_step(step, "srun") == JobContext(17, "n[2-3]", 2, is_step=True)
    assert find_step(ENVIRONMENT, "srun") == JOB


@pytest.mark.parametrize("job", [None, "", "x", "17.0", "-1", " 17"])
def test_a_process_outside_of_a_job_is_refused(job: str | None, programs: Path) -> None:
    environment = {} if job is None else {**ENVIRONMENT, "SLURM_JOB_ID": job}
    with pytest.raises(UsageError) as caught:
        find(environment, f"{programs}/srun")
    assert str(caught.value) == OUTSIDE


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_JOB_NODELIST": ""},
        {"SLURM_JOB_NUM_NODES": ""},
        {"SLURM_JOB_NUM_NODES": "four"},
        {"SLURM_JOB_NUM_NODES": "2-4"},
        # A step of a few nodes, or of another job than the one whose list this is.
        {"SLURM_STEP_NODELIST": "n1"},
    ],
    ids=str,
)
def test_nodes_that_the_environment_does_not_tell_are_asked_for(
    change: dict[str, str], programs: Path
) -> None:
    program(programs, "scontrol", f"echo '{ANSWER}'")
    assert find({**ENVIRONMENT, **change}, f"{programs}/srun") == JOB


# From scontrol

#: What `scontrol --oneliner show job 17` prints, the middle of it left out.
ANSWER = (
    "JobId=17 JobName=train it UserId=u(1000) GroupId=u(1000) JobState=RUNNING Reason=None "
    "RunTime=00:00:07 NodeList=n[1-4] BatchHost=n1 ReqNodeList=(null) ExcNodeList=n9 "
    "NumNodes=4 NumCPUs=8 NumTasks=4 WorkDir=/home/u/a b StdErr=/home/u/slurm-17.out"
)


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "$@" >>{folder}/{name}.asked\n{script}\n')
    path.chmod(0o755)


def asked_of(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.asked").read_text().splitlines()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of Slurm's commands, the only one; pyslurm cannot be imported."""
    monkeypatch.setattr(job, "FOLDERS", ())
    monkeypatch.setitem(sys.modules, "pyslurm", None)
    return tmp_path


def test_scontrol_is_asked_for_nodes_that_are_not_in_the_environment(programs: Path) -> None:
    program(programs, "scontrol", f"echo '{ANSWER}'")
    assert find({"SLURM_JOB_ID": "17"}, f"{programs}/srun") == JOB
    assert asked_of(programs, "scontrol") == ["--oneliner show job 17"]


def test_a_process_enters_a_job_without_what_it_has_of_another(programs: Path) -> None:
    fields = "echo '16 PENDING 7 0 16 9'; echo '17 RUNNING 1000 2 17 N/A'"
    program(programs, "squeue", f'case "$*" in *%j) echo "a train";; *) {fields};; esac')
    variables = {"SLURM_CONF": "/c", "SLURMD_NODENAME": "n3", "HOME": "/h"}
    for other in ({}, {"SLURM_JOB_ID": "16", "SLURM_JOB_NODELIST": "n3", "SLURM_NTASKS": "2"}):
        environment = variables | other
        enter(17, environment, f"{programs}/srun")
        assert environment == variables | {
            "SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2", "SLURM_JOB_NAME": "a train",
            "SLURM_JOB_UID": "1000",
        }  # fmt: skip
    own = dict(ENVIRONMENT)
    enter(17, own, f"{programs}/srun")
    assert own == ENVIRONMENT


def test_the_answer_of_scontrol_need_not_be_utf8(programs: Path) -> None:
    answer = ANSWER.replace("train", "caf\\0351")
    program(programs, "scontrol", f"printf '%b\\n' '{answer}'")
    assert find({"SLURM_JOB_ID": "17"}, f"{programs}/srun") == JOB


@pytest.mark.parametrize(
    "script",
    [
        "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
        f"echo '{ANSWER}'; exit 1",
        "exit 0",
        "echo 'JobId=17 NodeList= NumNodes=4'",
        "echo 'JobId=17 NodeList=(null) NumNodes=4'",
        "echo 'JobId=17 NodeList=n[1-4] NumNodes=2-4'",
        "echo 'JobId=17 NodeList=n[1-4]'",
    ],
    ids=[
        "no such job", "a failure", "nothing", "no nodes", "null nodes", "a range of counts",
        "no count",
    ],
)  # fmt: skip
def test_a_job_that_scontrol_does_not_know_is_a_launch_error(programs: Path, script: str) -> None:
    program(programs, "scontrol", script)
    with pytest.raises(LaunchError) as caught:
        find({"SLURM_JOB_ID": "17"}, f"{programs}/srun")
    assert str(caught.value) == UNKNOWN


def test_a_machine_without_scontrol_knows_no_job(programs: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        find({"SLURM_JOB_ID": "17"}, f"{programs}/srun")
    assert str(caught.value) == UNKNOWN


# From pyslurm

#: A job and nodes as pyslurm 25.11 shows them (tests/cluster/pyslurm_answers.py asks it). Job 18 is
#: pending; it does not know others.
PYSLURM = """
from types import SimpleNamespace

class RPCError(Exception):
    pass

class Job:
    @staticmethod
    def load(job):
        known = {17: ("n[1-4]", 4), 18: (None, 4)}
        if job not in known:
            raise RPCError("Invalid job id specified")
        nodes, count = known[job]
        return SimpleNamespace(allocated_nodes=nodes, num_nodes=count)

class Nodes:
    @staticmethod
    def load():
        states = {"n1": "IDLE", "n2": "IDLE+DRAIN", "n3": "DOWN"}
        return {name: SimpleNamespace(state=state) for name, state in states.items()}
"""
#: What libslurm does as pyslurm is imported, with a slurm.conf that cannot be read.
FATAL = """
import os, sys
print("python: fatal: Unable to process configuration file", file=sys.stderr)
os._exit(1)
"""


class Installed:
    """A folder in which a stand-in for pyslurm can be installed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._module = folder / "pyslurm.py"
        monkeypatch.delitem(sys.modules, "pyslurm")
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PYTHONPATH", str(folder))

    def write(self, text: str) -> None:
        self._module.write_text(text)


@pytest.fixture
def installed(programs: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    folder = programs / "packages"
    folder.mkdir()
    installed = Installed(folder, monkeypatch)
    installed.write(PYSLURM)
    return installed


@pytest.mark.usefixtures("installed")
def test_pyslurm_is_asked_before_scontrol(programs: Path) -> None:
    program(programs, "scontrol", "exit 1")
    assert find({"SLURM_JOB_ID": "17"}, f"{programs}/srun") == JOB
    assert not (programs / "scontrol.asked").exists()
    assert "pyslurm" not in sys.modules


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("job", [18, 19])
def test_a_job_without_nodes_and_one_that_is_unknown_are_the_same(programs: Path, job: int) -> None:
    program(programs, "scontrol", f"echo 'JobId={job} NodeList=(null) NumNodes=4'")
    with pytest.raises(LaunchError) as caught:
        look_up(job, {}, f"{programs}/srun")
    assert str(caught.value) == UNKNOWN.replace("17", str(job))


@pytest.mark.parametrize("module", [FATAL, "import no_such_library", "raise RuntimeError"])
def test_scontrol_is_asked_where_pyslurm_fails(
    programs: Path, installed: Installed, module: str
) -> None:
    installed.write(module)
    program(programs, "scontrol", f"echo '{ANSWER}'")
    program(programs, "sinfo", "echo 'n1|idle'")
    assert find({"SLURM_JOB_ID": "17"}, f"{programs}/srun") == JOB
    assert node_states("n1", f"{programs}/srun") == {"n1": "idle"}


def test_a_controller_that_does_not_answer_pyslurm_is_not_asked_again(
    programs: Path, installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.write("import time; time.sleep(60)")
    for name in ("scontrol", "sinfo"):
        program(programs, name, "exec sleep 32")
    monkeypatch.setattr("stager.launch.job._ANSWER_TIMEOUT", 1)
    begun = time.monotonic()
    assert node_states("n1", f"{programs}/srun") == {}
    with pytest.raises(LaunchError) as caught:
        look_up(17, {}, f"{programs}/srun")
    assert time.monotonic() - begun < 5
    assert str(caught.value) == (
        "Slurm has not answered within 1 s which nodes job 17 has; try again later"
    )
    assert not list(programs.glob("*.asked"))


# Another job


def test_another_job_is_not_that_of_the_environment(programs: Path) -> None:
    program(programs, "scontrol", "echo 'JobId=18 NodeList=n7 NumNodes=1'")
    assert look_up(18, ENVIRONMENT, f"{programs}/srun") == JobContext(18, "n7", 1)
    assert look_up(17, ENVIRONMENT, f"{programs}/srun") == JOB
    assert asked_of(programs, "scontrol") == ["--oneliner show job 18"]


def test_another_job_that_nobody_knows_is_a_launch_error(programs: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        look_up(18, ENVIRONMENT, f"{programs}/srun")
    assert str(caught.value) == UNKNOWN.replace("17", "18")


# States of nodes

STATES = {"n1": "idle", "n2": "down*"}


@pytest.mark.parametrize(
    ("script", "suspended"),
    [("echo SUSPENDED", True), ("echo RUNNING", False), ("exit 1", False), ("true", False)],
)
def test_squeue_says_whether_a_job_is_suspended(
    programs: Path, script: str, suspended: bool
) -> None:
    program(programs, "squeue", script)
    assert is_suspended(17, f"{programs}/srun") is suspended
    assert asked_of(programs, "squeue") == ["--noheader --jobs=17 --format=%T"]


def test_without_squeue_no_job_is_suspended(programs: Path) -> None:
    assert not is_suspended(17, f"{programs}/srun")


def test_sinfo_prints_a_state_once_for_each_partition(programs: Path) -> None:
    program(programs, "sinfo", "echo 'n1|idle'; echo 'n2|down*'; echo 'n1|idle'; echo oops")
    assert node_states("n[1-2]", f"{programs}/srun") == STATES
    assert asked_of(programs, "sinfo") == ["--noheader --Node --format=%N|%T --nodes=n[1-2]"]


@pytest.mark.parametrize("script", ["exit 1", "exec sleep 10", "exit 0"])
def test_without_an_answer_in_time_no_state_is_known(programs: Path, script: str) -> None:
    program(programs, "sinfo", script)
    assert node_states("n1", f"{programs}/srun") == {}


@pytest.mark.usefixtures("installed")
def test_pyslurm_is_asked_for_states_before_sinfo(programs: Path) -> None:
    states = {"n1": "idle", "n2": "idle+drain"}
    assert node_states("n[1-2],n9", f"{programs}/srun") == states
    assert not (programs / "sinfo.asked").exists()


def test_sinfo_is_asked_for_states_where_pyslurm_lacks_the_call(
    programs: Path, installed: Installed
) -> None:
    installed.write(PYSLURM.replace("class Nodes", "class nodes"))
    program(programs, "sinfo", "echo 'n1|idle'")
    assert node_states("n1", f"{programs}/srun") == {"n1": "idle"}


@pytest.mark.parametrize(
    ("state", "away", "drained"),
    [
        ("idle", False, False), ("mixed", False, False), ("idle*", False, False),
        ("", False, False),
        ("down", True, False), ("down*", True, False), ("idle~", True, False),
        ("powering_up", True, False), ("drained", False, True), ("draining", False, True),
        ("idle+drain", False, True), ("down+drain", True, True),
        ("IDLE+CLOUD+POWERED_DOWN", True, False),
    ],
)  # fmt: skip
def test_which_nodes_can_answer(state: str, away: bool, drained: bool) -> None:
    assert (is_away(state), is_drained(state)) == (away, drained)


# Steps and names


def test_a_step_is_ended_by_scancel(programs: Path) -> None:
    program(programs, "scancel", "echo 'never printed'; exit 1")
    end_step(ENVIRONMENT, "3", f"{programs}/srun")
    assert asked_of(programs, "scancel") == ["--signal=TERM 17.3"]


def test_a_step_that_cannot_be_ended_raises_nothing(
    programs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    end_step(ENVIRONMENT, "3", f"{programs}/srun")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["n1"], "n1"),
        (["n1", "n2", "n3", "n4"], "n[1-4]"),
        (["n3", "n1", "n1"], "n[1,3]"),
        (["n08", "n09", "n10"], "n[08-10]"),
        (["gpu2", "cpu1", "gpu1"], "cpu1,gpu[1-2]"),
        (["r1n1", "r1n2", "r2n1", "r2n2"], "r[1-2]n[1-2]"),
        (["login.site.org"], "login.site.org"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_node_names_are_folded_as_slurm_writes_them(names: list[str], text: str) -> None:
    assert fold(names) == text


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-10],login", ["login", "n08", "n09", "n10"]),
        ("n2,n1,n2", ["n1", "n2"]),
        ("n[1-4]!n3", ["n1", "n2", "n4"]),
    ],
)
def test_lists_of_nodes_are_unfolded(text: str, names: list[str]) -> None:
    assert unfold(text) == names


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("n[1-", 'n[1- is not a list of nodes: missing bracket: "n[1-"'),
        ("n[1-x]", None),
        ("@nowhere\n", None),
        ("n1!n1", None),
        ("", "the list of nodes is empty"),
    ],
)
def test_a_bad_list_of_nodes_is_reported_on_one_line(text: str, why: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        unfold(text)
    assert why in (None, str(caught.value))
    assert str(caught.value).isprintable()


def test_a_node_has_the_name_that_slurm_gives_it() -> None:
    assert own_name({"SLURMD_NODENAME": "n7"}) == "n7"
    assert own_name({}) == socket.gethostname()


def test_a_program_that_no_slurmstepd_started_is_no_task() -> None:
    assert not is_later_task({"SLURM_PROCID": "3"})
