"""The arguments of every nested srun."""

from __future__ import annotations

import sys

from stager.launch.job import JobContext
from stager.launch.srun import hello_argv, srun_argv, step_argv
from stager.request.policy import Launch, Policy

JOB = JobContext(job=17, nodes="n[1-4]", node_count=4)
POLICY = Policy(roots=("/nvme",), launch=Launch(mpi="pmix"))
#: What every launcher starts.
RANK = [sys.executable, "-I", "-m", "stager.rank"]


def test_srun_starts_one_rank_on_each_node_of_the_job() -> None:
    assert srun_argv("/usr/bin/srun", JOB, POLICY) == [
        "/usr/bin/srun", "--jobid", "17", "--overlap", "--export=ALL", "-N", "4", "-n", "4",
        "--ntasks-per-node=1", "--mem=0", "--gres=none", "--cpu-bind=none", "--chdir=/",
        "--input=none", "--quiet", "--job-name=stage", "--mpi=pmix", "--kill-on-bad-exit=1",
        "--wait=15", *RANK,
    ]  # fmt: skip


def test_ranks_preload_the_library_and_srun_does_not() -> None:
    plain = srun_argv("/usr/bin/srun", JOB, POLICY)
    assert srun_argv("/usr/bin/srun", JOB, POLICY, "/opt/slurm-stage/lib/stage_peers.so") == [
        *plain[: -len(RANK)],
        "/usr/bin/env", "LD_PRELOAD=/opt/slurm-stage/lib/stage_peers.so", *RANK,
    ]  # fmt: skip


def test_srun_starts_ranks_on_some_of_the_nodes_by_name() -> None:
    of_three = srun_argv("/usr/bin/srun", JobContext(17, "n[1-2,4]", 3), POLICY)
    place = of_three.index("--quiet")
    argv = [*of_three[:place], "--nodelist=n[1-2,4]", *of_three[place:]]
    assert srun_argv("/usr/bin/srun", JOB, POLICY, nodes=["n1", "n2", "n4"]) == argv
    of_step = JobContext(17, "n[1-2,4]", 3, is_step=True)
    assert srun_argv("/usr/bin/srun", of_step, POLICY) == argv


def test_the_site_chooses_its_srun_and_its_mpi() -> None:
    policy = Policy(roots=("/nvme",), launch=Launch(mpi="pmi2"))
    assert srun_argv("/opt/slurm/bin/srun", JobContext(4711, "login", 1), policy) == [
        "/opt/slurm/bin/srun", "--jobid", "4711", "--overlap", "--export=ALL",
        "-N", "1", "-n", "1", "--ntasks-per-node=1", "--mem=0", "--gres=none", "--cpu-bind=none",
        "--chdir=/", "--input=none", "--quiet", "--job-name=stage", "--mpi=pmi2",
        "--kill-on-bad-exit=1", "--wait=15", *RANK,
    ]  # fmt: skip


def test_a_step_runs_a_command_once_on_each_node_without_mpi() -> None:
    assert step_argv("/opt/bin/srun", JOB, ["n1", "n2", "n4"], ["/bin/echo", "a b"]) == [
        "/opt/bin/srun", "--jobid", "17", "--overlap", "--export=ALL", "-N", "3",
        "-n", "3", "--ntasks-per-node=1", "--mem=0", "--gres=none", "--cpu-bind=none", "--chdir=/",
        "--input=none", "--verbose", "--label", "--job-name=stagectl", "--mpi=none",
        "--nodelist=n[1-2,4]", "--kill-on-bad-exit=0", "--wait=0", "/bin/echo", "a b",
    ]  # fmt: skip


def test_two_ranks_say_hello_as_the_ranks_of_a_stage_start_on_two_nodes() -> None:
    of_two = srun_argv("/usr/bin/srun", JobContext(17, "n[2,4]", 2), POLICY, "/opt/lib/peers.so")
    place = of_two.index("--quiet")
    argv = [*of_two[:place], "--nodelist=n[2,4]", *of_two[place:]]
    assert hello_argv("/usr/bin/srun", JOB, POLICY, ["n2", "n4"], "/opt/lib/peers.so") == argv


def test_two_ranks_say_hello_on_one_node_even_if_the_job_has_one_cpu_there() -> None:
    assert hello_argv("/usr/bin/srun", JOB, POLICY, ["n2"]) == [
        "/usr/bin/srun", "--jobid", "17", "--overlap", "--export=ALL", "-N", "1", "-n", "2",
        "--ntasks-per-node=2", "--mem=0", "--gres=none", "--cpu-bind=none", "--chdir=/",
        "--input=none", "--nodelist=n2", "--overcommit", "--quiet", "--job-name=stage",
        "--mpi=pmix", "--kill-on-bad-exit=1", "--wait=15", *RANK,
    ]  # fmt: skip
