"""Ask Slurm: which nodes a job has, in which states they are; and change a job or its steps.

All of it comes from Slurm: from the job's environment, by pyslurm where it is installed, or by
scontrol, squeue and sinfo, which are looked for beside the ``srun`` that stage.toml names, else in
the system's folders. There is no default of "this host". How a stage ended is written into the
job's comment, which is seen from outside of the job.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stager.base.errors import LaunchError, UsageError
from stager.base.paths import RUN_FOLDER
from stager.base.text import printable
from stager.launch.by_pyslurm import ask_pyslurm

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

#: The system's folders.
FOLDERS = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin", "/sbin")


def search_path(srun: str) -> str:
    """Return the folders in which Slurm's commands are looked for, as in PATH.

    ``srun`` is that of stage.toml. The last are the process's own, where the plugin adds those of
    the Slurm that runs it (gate.c); root may have them from a user, and does without.
    """
    named = [os.path.dirname(srun)] if "/" in srun else []
    own = os.environ.get("PATH", "").split(":") if os.geteuid() else []
    absolute = [folder for folder in own if folder.startswith("/")]
    return ":".join(dict.fromkeys([*named, *FOLDERS, *absolute]))


def find_srun(srun: str) -> str:
    """Return the path of the srun that stage.toml calls ``srun``. Raise LaunchError."""
    path = search_path(srun)
    if found := shutil.which(srun, path=path):
        return found
    if "/" in srun:
        problem = f"{srun}, which stage.toml names, is not there or cannot be run"
        remedy = "correct srun in [launch]"
    else:
        problem = f"{srun} is in none of the folders {path.replace(':', ', ')}"
        remedy = 'name it in stage.toml (srun = "/PATH/srun" in [launch])'
    raise LaunchError(
        f"{problem}; tell the administrator to {remedy}", os.environ.get("SLURMD_NODENAME")
    )


def answer(command: Sequence[str | bytes], srun: str, seconds: float) -> str:
    """Return what a command of Slurm prints, nothing if it fails.

    Raise TimeoutError if it takes longer than ``seconds``.
    """
    try:
        ended = _run(command, srun, seconds, os.environ)
    except TimeoutError:
        raise
    except OSError:
        return ""
    return "" if ended.returncode else ended.stdout


def complaint(
    command: Sequence[str], srun: str, seconds: float, environment: Mapping[str, str]
) -> str:
    """Return why a command of Slurm fails in an ``environment``, nothing if it does not."""
    try:
        ended = _run(command, srun, seconds, environment)
    except TimeoutError:
        return f"{command[0]} did not end in {seconds:.0f} s"
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    words = printable(" ".join(ended.stderr.split()))
    return (words or f"{command[0]} ended with {ended.returncode}") if ended.returncode else ""


def _run(
    command: Sequence[str | bytes], srun: str, seconds: float, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Raise TimeoutError, OSError."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False,
            env={**environment, "PATH": search_path(srun)},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TimeoutError from None


#: Seconds in which scontrol and scancel must end.
_ANSWER_TIMEOUT = 30
#: Seconds in which sinfo and squeue must end; without them, the states are unknown.
_STATES_TIMEOUT = 2
#: Seconds for scancel to kill a step: less than a stage waits that goes on without lost nodes.
_KILL_TIMEOUT = 2
#: The states of nodes that cannot be reached (sinfo(1)).
_AWAY = frozenset({"down", "future", "unknown", "powered_down", "powering_down", "powering_up"})
#: Marks behind a state: powered off, powering up or configuring, powering down.
_AWAY_MARKS = frozenset("~#%")
#: The variables with this prefix that say where Slurm is, and who asks, and nothing about a job.
_OF_SLURM = frozenset({"SLURM_CONF", "SLURM_JWT"})
#: What squeue is asked about a job, where no user writes anything; and the name of each in the
#: job's environment, empty for what is not there. That of the task is last, as it may be long.
_FIELDS = {
    "JobID:20": "", "State:20": "", "UserID:20": "SLURM_JOB_UID",
    "RestartCnt:20": "SLURM_RESTART_COUNT", "ArrayJobID:20": "SLURM_ARRAY_JOB_ID",
    "ArrayTaskID:20": "SLURM_ARRAY_TASK_ID",
}  # fmt: skip
#: Step numbers from here on are Slurm's batch, extern and interactive steps (slurm.h).
SPECIAL_STEPS = 0xFFFFFFF0


@dataclass(frozen=True, slots=True)
class JobContext:
    """A job, and its nodes or those of one srun in it."""

    #: Slurm's job id.
    job: int
    #: The nodes as Slurm writes them: ``n[1-4]``.
    nodes: str
    node_count: int
    #: Whether these are the nodes of one srun in the job.
    is_step: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """What tells a nested srun the nodes of the job, and where PMIx makes a step's folder.

        In a step of a few of the nodes, the environment may name those alone. In the folder that
        root's part makes only root can write: in /tmp, PMIx's default, any user can take the name.
        """
        folder = {"SLURM_PMIX_TMPDIR": RUN_FOLDER} if os.path.isdir(RUN_FOLDER) else {}
        nodes = {"SLURM_JOB_NODELIST": self.nodes, "SLURM_JOB_NUM_NODES": str(self.node_count)}
        return folder | nodes


def find(environment: Mapping[str, str], srun: str) -> JobContext:
    """Return the job in whose allocation this process runs.

    Raise UsageError outside of a job, LaunchError if its nodes cannot be found.
    """
    return look_up(number(environment), environment, srun)


def find_step(environment: Mapping[str, str], srun: str) -> JobContext:
    """Return the nodes of the srun that started this process. Raise as `find` does."""
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    count = environment.get("SLURM_STEP_NUM_NODES", "")
    if nodes and count.isdecimal():
        return JobContext(number(environment), nodes, int(count), is_step=True)
    return find(environment, srun)


def number(environment: Mapping[str, str]) -> int:
    """Return the number of the job that this process runs in. Raise UsageError."""
    text = environment.get("SLURM_JOB_ID", "")
    if not text.isdecimal():
        raise UsageError(
            "not inside a Slurm job: use sbatch, salloc or srun first, --job ID for a job of yours "
            "that is running, --hosts or --hostfile to name nodes, or --local N to simulate N "
            "nodes on this machine"
        )
    het_size = environment.get("SLURM_HET_SIZE", "")
    if het_size.isdecimal() and int(het_size) > 1:
        raise UsageError(
            "staging does not work in a heterogeneous job; submit each part as its own job"
        )
    return int(text)


def enter(job: int, environment: MutableMapping[str, str], srun: str) -> None:
    """Change the ``environment`` of a process outside of a job to one within it.

    Raise UsageError if Slurm says that the job is not running.
    """
    if environment.get("SLURM_JOB_ID") == str(job):
        return
    state = describe(job, environment, srun)
    if state not in ("", "RUNNING"):
        raise UsageError(f"job {job} is not running: its state is {state}")


def outside(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an ``environment`` without what it says of a job, which would mislead srun. Pure."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("SLURM_") or name in _OF_SLURM
    }


def describe(job: int, environment: MutableMapping[str, str], srun: str) -> str:
    """Put into the ``environment`` what Slurm says of another job. Return its state, if known.

    What is there of another job would tell srun and the ranks wrong things.
    """
    for name in environment.keys() - outside(environment).keys():
        del environment[name]
    environment["SLURM_JOB_ID"] = str(job)
    with suppress(TimeoutError):  # which `look_up` will tell
        squeue = ["squeue", "--noheader", "--states=all", f"--jobs={job}"]
        told = answer([*squeue, f"--Format={','.join(_FIELDS)}"], srun, _ANSWER_TIMEOUT)
        lines = map(str.split, told.splitlines())  # of an array, one of each task
        values = next((one for one in lines if one[:1] == [str(job)]), [])
        if len(values) != len(_FIELDS):
            return ""
        for name, value in zip(_FIELDS.values(), values, strict=True):
            if name:
                environment[name] = value
        if not environment["SLURM_ARRAY_TASK_ID"].isdecimal():
            del environment["SLURM_ARRAY_JOB_ID"], environment["SLURM_ARRAY_TASK_ID"]
        # Asked for alone, a name cannot pretend to be anything else.
        names = answer([*squeue, "--format=%j"], srun, _ANSWER_TIMEOUT).splitlines()
        if len(set(names)) == 1:
            environment["SLURM_JOB_NAME"] = names[0]
        return values[1]
    return ""


def look_up(job: int, environment: Mapping[str, str], srun: str) -> JobContext:
    """Return the job of that id, in which this process need not run.

    Raise LaunchError if its nodes cannot be found.
    """
    is_ours = environment.get("SLURM_JOB_ID") == str(job)
    found = _from_environment(job, environment) if is_ours else None
    try:
        found = found or _from_pyslurm(job) or _from_scontrol(job, srun)
    except TimeoutError:
        problem = f"Slurm has not answered within {_ANSWER_TIMEOUT} s which nodes job {job} has"
        raise LaunchError(f"{problem}; try again later") from None
    if found is None:
        raise LaunchError(
            f"Slurm does not know the nodes of job {job}; check that it is running (scontrol show "
            f"job {job})"
        )
    return found


def node_states(nodes: str, srun: str) -> dict[str, str]:
    """Return the state of each of ``nodes`` as Slurm writes it: ``idle``, ``drained``, ``down*``.

    Nodes that Slurm does not know are left out; without Slurm there are none.
    """
    with suppress(TimeoutError):  # what one does not learn in time, the next would not either
        return _states_from_pyslurm(nodes) or _states_from_sinfo(nodes, srun)
    return {}


def is_away(state: str) -> bool:
    """Return whether a node of this state cannot answer: it is down, or without power."""
    flags = re.split(r"[^a-z_]+", state.lower())
    return not _AWAY.isdisjoint(flags) or not _AWAY_MARKS.isdisjoint(state)


def is_drained(state: str) -> bool:
    """Return whether a node of this state takes no new jobs."""
    return "drain" in state.lower()


def is_suspended(job: int, srun: str) -> bool:
    """Return whether Slurm says that the job is suspended."""
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%T"]
    with suppress(TimeoutError):
        return answer(command, srun, _STATES_TIMEOUT).strip() == "SUSPENDED"
    return False


def own_name(environment: Mapping[str, str]) -> str:
    """Return this node's name: Slurm's, if this runs in a job."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def is_later_task(environment: Mapping[str, str]) -> bool:
    """Return whether this process itself is a task of a step, and not the step's first."""
    if environment.get("SLURM_PROCID", "0") == "0":
        return False
    with suppress(OSError), open(f"/proc/{os.getppid()}/cmdline", "rb") as file:
        return file.read().startswith(b"slurmstepd: ")
    return False


def unfold(nodes: str) -> list[str]:
    """Return the nodes of a list such as ``n[1-4]`` or ``@group``. Raise UsageError."""
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    try:
        # ClusterShell orders names by their numbers.
        names = [str(name) for name in NodeSet(nodes)]
    except NodeSetException as error:
        raise UsageError(f"{printable(nodes)} is not a list of nodes: {_plain(error)}") from None
    if not names:
        raise UsageError("the list of nodes is empty")
    return names


def _plain(error: Exception) -> str:
    return printable(" ".join(str(error).split()))


def keep(nodes: list[str], environment: Mapping[str, str], srun: str) -> str:
    """Give the job's other nodes back to Slurm. Return why it refuses, nothing if it does not.

    The node of the script cannot leave.
    """
    job = environment["SLURM_JOB_ID"]
    if job == environment.get("SLURM_ARRAY_JOB_ID"):
        job += f"_{environment['SLURM_ARRAY_TASK_ID']}"  # the whole array cannot change
    with suppress(TimeoutError):
        # With --no-kill, Slurm itself has removed nodes that it found down.
        found = _only(answer(_show(job), srun, _ANSWER_TIMEOUT), "NodeList")
        if found and {*unfold(found)} == {*nodes}:
            return ""
    command = ["scontrol", "update", f"JobId={job}", f"NodeList={fold(nodes)}"]
    # In a job, scontrol would leave scripts with the new variables in the current folder.
    return complaint(command, srun, _ANSWER_TIMEOUT, outside(environment))


def end_step(environment: Mapping[str, str], step: str, srun: str) -> None:
    """Terminate the tasks of one of this job's steps, if Slurm can be reached."""
    command = ["scancel", "--signal=TERM", f"{environment['SLURM_JOB_ID']}.{step}"]
    with suppress(TimeoutError):
        answer(command, srun, _ANSWER_TIMEOUT)


def kill_step(job: int, step: str, srun: str) -> None:
    """Kill the tasks of a step of ``job`` on all nodes that can be reached, if Slurm can be.

    slurmctld sends the signal. What scancel itself sends to the nodes makes each slurmstepd drain
    its node unless it ends within 61 s, and some wait longer for one that is lost (`safe_after`).
    """
    with suppress(TimeoutError):
        answer(["scancel", "--ctld", "--signal=KILL", f"{job}.{step}"], srun, _KILL_TIMEOUT)


def fold(nodes: list[str]) -> str:
    """Return node names in Slurm's short form: ``n[1-4]``."""
    from ClusterShell.NodeSet import NodeSet  # takes 20 ms, and many commands do without

    return str(NodeSet.fromlist(nodes))


def _from_environment(job: int, environment: Mapping[str, str]) -> JobContext | None:
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    count = environment.get("SLURM_JOB_NUM_NODES", "")
    if environment.get("SLURM_STEP_NODELIST", nodes) != nodes:
        # By srun --jobid from within another job, the list and the number are those of that job.
        return None
    return JobContext(job, nodes, int(count)) if nodes and count.isdecimal() else None


def _from_pyslurm(job: int) -> JobContext | None:
    nodes, count = ask_pyslurm("job", str(job), seconds=_ANSWER_TIMEOUT) or (None, None)
    return JobContext(job, nodes, count) if nodes and count else None  # no nodes: it is pending


def _from_scontrol(job: int, srun: str) -> JobContext | None:
    record = answer(_show(str(job)), srun, _ANSWER_TIMEOUT)
    nodes, count = (_only(record, key) for key in ("NodeList", "NumNodes"))
    nodes = "" if nodes == "(null)" else nodes  # the job has not started
    return JobContext(job, nodes, int(count)) if nodes and count.isdecimal() else None


def _show(job: str) -> list[str]:
    return ["scontrol", "--oneliner", "show", "job", job]


def _only(record: str, key: str) -> str:
    """Return the value of ``key``, or nothing if it is there twice.

    Users may write anything into names and folders of their jobs, also another ``NodeList=``.
    """
    values = [field.partition("=")[2] for field in record.split() if field.startswith(f"{key}=")]
    return values[0] if len(values) == 1 else ""


def _states_from_pyslurm(nodes: str) -> dict[str, str]:
    known = ask_pyslurm("nodes", seconds=_STATES_TIMEOUT)
    return {name: known[name].lower() for name in unfold(nodes) if name in known} if known else {}


def _states_from_sinfo(nodes: str, srun: str) -> dict[str, str]:
    command = ["sinfo", "--noheader", "--Node", "--format=%N|%T", f"--nodes={nodes}"]
    told = answer(command, srun, _STATES_TIMEOUT)
    lines = (line.partition("|") for line in told.splitlines())
    return {node.strip(): state.strip() for node, _, state in lines if state.strip()}


#: Seconds in which squeue and scontrol must end. The comment is not worth a longer wait.
_TIMEOUT = 5
#: What our part of a comment begins with, and what is between it and the user's.
_OURS, _BETWEEN = "slurm-stage: ", "; "
#: Characters of our part.
_LONGEST = 300


def write_comment(text: str, environment: Mapping[str, str], srun: str) -> None:
    """Add ``text`` to the comment of the job that this process runs in, if Slurm answers."""
    job = _own_id(environment)
    with suppress(TimeoutError):
        told = answer(["squeue", "--noheader", f"--jobs={job}", "--format=%k"], srun, _TIMEOUT)
        if told:  # a job without a comment has (null)
            comment = with_result(told.strip(), text)
            # In UTF-8, which the user's locale may lack.
            text_of_slurm = f"Comment={comment}".encode(errors="replace")
            answer(["scontrol", "update", f"JobId={job}", text_of_slurm], srun, _TIMEOUT)


def with_result(comment: str, text: str) -> str:
    """Return a job's comment with ``text`` at its end, in place of an earlier stage's. Pure.

    Of the text only the first line: others see comments, and the lines below it are for the user.

    >>> with_result("(null)", "ended with code 4")
    'slurm-stage: ended with code 4'
    >>> with_result("my run; slurm-stage: ended with code 4", "ended with code 5")
    'my run; slurm-stage: ended with code 5'
    """
    if comment == "(null)" or comment.startswith(_OURS):
        comment = ""
    own, _, _ = comment.partition(f"{_BETWEEN}{_OURS}")
    text = printable(" ".join(text.partition("\n")[0].split()))
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 3]}..."
    return f"{own}{_BETWEEN if own else ''}{_OURS}{text}"


def _own_id(environment: Mapping[str, str]) -> str:
    """Return this job's id. The plain number of one job of an array would mean all of them."""
    array, task = (environment.get(f"SLURM_ARRAY_{name}_ID", "") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"]
