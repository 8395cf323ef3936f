"""What the real pyslurm answers; tests/launch/test_job.py has a stand-in that answers the same.

``make test-majors SLURM_SOURCE=… PYSLURM=…`` runs this; ``make test`` does not, as pyslurm is built
for minutes, and only with the Slurm of its own release.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.cluster import Cluster

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from tests.cluster.cluster import Job


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster without slurm-stage."""
    with Cluster() as cluster:
        yield cluster


def probe(cluster: Cluster, *question: str) -> subprocess.CompletedProcess[str]:
    """Ask pyslurm as alice on the login node, in the process that `ask_pyslurm` starts."""
    line = [sys.executable, "-I", "-m", "stager.launch.by_pyslurm", *question]
    return cluster.run(line, check=False)


def answer(cluster: Cluster, *question: str) -> Any:
    """Return what pyslurm knows."""
    asked = probe(cluster, *question)
    assert (asked.returncode, asked.stderr) == (0, "")
    return json.loads(asked.stdout)


def python(cluster: Cluster, text: str) -> subprocess.CompletedProcess[str]:
    """Run a line of Python with the functions of `launch.job`, as alice on the login node."""
    line = [sys.executable, "-c", f"from stager.launch.job import *; {text}"]
    return cluster.run(line, check=False)


@pytest.fixture(scope="module")
def running(cluster: Cluster) -> Job:
    """A job on n1, n2 and n3; n4 is drained."""
    job = cluster.sbatch("sleep 600", "-N3", "--nodelist=n[1-3]")
    job.wait_for(lambda record: record["JobState"] == "RUNNING")
    cluster.run("scontrol update NodeName=n4 State=DRAIN Reason=test", user="root")
    return job


def test_the_nodes_of_jobs(cluster: Cluster, running: Job) -> None:
    pending = cluster.sbatch("true", "-N4", "--hold")
    assert answer(cluster, "job", running.id) == ["n[1-3]", 3]
    assert answer(cluster, "job", pending.id) == [None, 4]
    assert answer(cluster, "job", "999") is None
    why = cluster.run([sys.executable, "-c", "import pyslurm; pyslurm.Job.load(999)"], check=False)
    assert why.stderr.splitlines()[-1].endswith(".RPCError: Invalid job id specified")


def test_the_states_of_nodes(cluster: Cluster, running: Job) -> None:
    assert answer(cluster, "nodes") == {
        "n1": "MIXED", "n2": "MIXED", "n3": "MIXED", "n4": "IDLE+DRAIN",
    }  # fmt: skip


def test_a_configuration_that_cannot_be_read_ends_the_process(
    cluster: Cluster, running: Job
) -> None:
    configuration = cluster.base / "etc/slurm/slurm.conf"
    configuration.chmod(0)
    for question in (["nodes"], ["job", running.id]):
        asked = probe(cluster, *question)
        assert (asked.returncode, asked.stdout) == (1, "")
        assert "fatal: Unable to process configuration file" in asked.stderr
    configuration.chmod(0o644)


def test_a_controller_that_is_stopped_costs_no_more_time_than_is_given(
    cluster: Cluster, running: Job
) -> None:
    """By itself pyslurm waits for 30 s and longer."""
    cluster.run(["scontrol", "shutdown", "slurmctld"], user="root")
    begun = time.monotonic()
    states = python(cluster, "print(node_states('n1', 'srun'))")
    assert (states.stdout, states.stderr) == ("{}\n", "")
    assert time.monotonic() - begun < 5
    looked_up = python(cluster, f"look_up({running.id}, {{}}, 'srun')")
    assert looked_up.stderr.splitlines()[-1] == (
        "stager.base.errors.LaunchError: Slurm has not answered within 30 s which nodes job "
        f"{running.id} has; try again later"
    )
    assert time.monotonic() - begun < 40
