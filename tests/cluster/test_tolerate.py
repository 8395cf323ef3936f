"""Nodes that fail leave a job that tolerates that, and its script begins on the others."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.cluster.cluster import SLURM_CONF as CONF
from tests.cluster.cluster import CommandFailed
from tests.cluster.mid_transfer import (
    BEHIND,
    RANK,
    SLOW,
    await_transfer,
    cut_off,
    kill_rank,
    kill_slurmstepd,
    receives,
    slow_source,
    submit,
)
from tests.cluster.site import POLICY, STAGECTL, digest, wait_until
from tests.support.nightly import repeated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.cluster import Job
    from tests.cluster.site import Site

SIZE = 4 << 20
#: The seconds after which a node that does not answer has failed, where a test waits for that.
LIMIT = 6
LOST = "the staging process there was killed, or the node failed"
SILENT = (
    f"no answer for {LIMIT} s: the node or its network has failed, or the staging process there is "
    "stopped"
)
TOO_MANY = "2 of 4 nodes have failed, and only 1 may (--stage-tolerate=1)"
NOT_STARTED = "stage: the job's own program was not started (exit code {})\n"
#: What a plain srun of the script finds, as the files of /nvme/data show.
SRUN = "srun /bin/bash -c 'echo $(hostname) $(stat -c %s /nvme/data)' | sort\n"
#: Shows what a job finds, and that Slurm knows it too.
SCRIPT = f"""
echo "$STAGE_FAILED_NODES|$SLURM_JOB_NODELIST|$SLURM_NODELIST|$(squeue -h -j $SLURM_JOB_ID -o %N)"
echo $SLURM_NNODES $SLURM_JOB_NUM_NODES "$SLURM_JOB_CPUS_PER_NODE" "$SLURM_TASKS_PER_NODE"
{SRUN}ls | grep resize
true
"""
#: The first two lines of that without n3.
LEFT = "n3|n[1-2,4]|n[1-2,4]|n[1-2,4]\n3 3 1(x3) 1(x3)\n"


@pytest.fixture(scope="module")
def _slow_source(installed_site: Site) -> Iterator[None]:
    with slow_source(installed_site, SIZE):
        yield


def in_mid_transfer(site: Site, tolerate: str, script: str = SCRIPT) -> Job:
    """Submit a job that stages the slow file; return in mid-transfer."""
    job = submit(site, tolerate, script)
    await_transfer(site)
    return job


def rank(site: Site, node: str) -> str:
    """Return the process id of the rank there, empty if there is none."""
    return site.run(["pgrep", "-f", RANK], on=node, user="root", check=False).stdout


def has_whole_file(site: Site, *nodes: str) -> bool:
    behind = digest(site.path("login", f"{BEHIND}/data"))
    return all(digest(site.copy(node, "/nvme/data")) == behind for node in nodes)


def comment(job: Job) -> str:
    return job.info()["Comment"].strip()


def ends_well_without_n3(site: Site, job: Job, why: str) -> None:
    """Check what such a job finds and tells when n3 has failed in mid-transfer."""
    assert job.wait(90).exit_code == "0:0", job.output()
    said = f"went on without n3 (1 of 4 nodes): {why}"
    first, second, *rest = job.output().splitlines(keepends=True)
    assert first == f"stage: {said}\n"
    assert re.fullmatch(
        rf"stage: /nvme/data: 4\.0 MiB from {SLOW}/data to n\[1-2,4\] \(3 nodes\) in .*\n", second
    )
    assert "".join(rest) == (
        f"stage: /nvme/data: note: {SLOW}/data is on a FUSE filesystem: a change that leaves sizes "
        "and times as they were is not noticed\n"
        f"{LEFT}n1 {SIZE}\nn2 {SIZE}\nn4 {SIZE}\n"
    )  # fmt: skip
    assert comment(job) == f"slurm-stage: {said}"
    assert has_whole_file(site, "n1", "n2", "n4")
    assert not site.copy("n3", "/nvme/data").exists()


@pytest.mark.usefixtures("_slow_source")
def test_a_job_goes_on_without_a_node_whose_rank_is_killed(site: Site) -> None:
    job = in_mid_transfer(site, "--stage-tolerate=1")
    kill_rank(site, "n3")
    ends_well_without_n3(site, job, LOST)


@pytest.mark.usefixtures("_slow_source")
def test_a_job_goes_on_without_a_node_whose_slurmstepd_is_killed(site: Site) -> None:
    job = in_mid_transfer(site, "--stage-tolerate=1")
    kill_slurmstepd(site, "n3", job)
    ends_well_without_n3(site, job, LOST)


@pytest.mark.usefixtures("_slow_source")
def test_a_job_goes_on_without_a_node_that_loses_its_link(site: Site) -> None:
    with site.policy(f"{POLICY}[transfer]\nstall_timeout = {LIMIT}\n"):
        job = in_mid_transfer(site, "--stage-tolerate=25%")
        with cut_off(site, "n3"):
            wait_until(lambda: LEFT in job.output())
    ends_well_without_n3(site, job, SILENT)
    # Its rank ends when it has not heard its neighbours for a while.
    wait_until(lambda: not site.leftovers())


@pytest.mark.usefixtures("_slow_source")
def test_a_job_goes_on_without_a_node_that_slurm_has_removed_from_it(site: Site) -> None:
    job = submit(site, "--stage-tolerate=1", SCRIPT, "--no-kill")
    await_transfer(site)
    site.run(["scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=test"], user="root")
    try:
        assert job.wait(90).exit_code == "0:0", job.output()
    finally:
        site.revive()
        site.take_away()  # Slurm runs no epilog on a node that is down
    assert LEFT in job.output()


@pytest.mark.usefixtures("_slow_source")
def test_a_second_node_that_is_killed_fails_the_job_with_both_names(site: Site) -> None:
    job = in_mid_transfer(site, "--stage-tolerate=1", "echo started")
    before = rank(site, "n4")
    kill_rank(site, "n3")
    wait_until(lambda: rank(site, "n4") not in (before, ""))
    wait_until(lambda: receives(site, "n4"))
    kill_rank(site, "n4")
    state = job.wait()
    assert (state.state, state.exit_code) == ("FAILED", "8:0")
    said = f"stage: n[3-4]: {LOST}\nstage: {TOO_MANY}\n{NOT_STARTED.format(8)}"
    assert job.output() == said
    assert comment(job) == f"slurm-stage: failed with code 8: n[3-4]: {LOST}"


@pytest.mark.usefixtures("_slow_source")
def test_the_node_of_the_script_may_not_fail(site: Site) -> None:
    job = in_mid_transfer(site, "--stage-tolerate=2", "echo started")
    kill_rank(site, "n1")
    state = job.wait()
    assert (state.state, state.exit_code) == ("FAILED", "8:0")
    why = "the job's script is to run on n1, which therefore cannot leave the job"
    said = f"stage: staging ended early: n1: {LOST}; submit again\n"
    assert job.output().startswith(said)
    assert job.output().endswith(f"\n  {why}\n{NOT_STARTED.format(8)}")


def test_nodes_whose_disks_are_full_or_read_only_leave_the_job(site: Site) -> None:
    site.run("mkdir -p /shared/set; cd /shared/set; for i in 1 2 3 4; do echo $i >$i; done")
    site.run("head -c 30M /dev/urandom >/shared/data")
    script = (
        "#!/bin/bash\n#SBATCH --stage-tolerate=50% --export=NONE --ntasks-per-node=2\n"
        "#STAGE /shared/set:/nvme/set,mode=shard\n#STAGE /shared/data:/nvme/data\n"
        "cut -f1,3 $STAGE_SHARDS; echo $STAGE_FAILED_NODES $SLURM_NTASKS\n"
        f"{SRUN}{STAGECTL} stage --json /shared/data:/nvme/other\n"
    )
    with site.nvme("n3", "loop", "20M"), site.nvme("n4", "tmpfs"):
        site.run(["mount", "-o", "remount,ro", "/nvme"], user="root", on="n4")
        job = site.sbatch(script, "-N4")
        assert job.wait().exit_code == "0:0", job.output()
    told, *lines = job.output().splitlines()
    assert re.fullmatch(
        r"stage: went on without n\[3-4\] \(2 of 4 nodes\): n3: /nvme: not enough room: .*; "
        r"n4: /nvme: the disk is read-only; .*", told,
    )  # fmt: skip
    size = 30 << 20
    assert [line for line in lines if re.match(r"n[\d[]", line)] == [
        "n1\t1", "n2\t2", "n1\t3", "n2\t4", "n[3-4] 4", *2 * [f"n1 {size}"], *2 * [f"n2 {size}"]
    ]  # fmt: skip
    answer = json.loads("\n".join(lines[lines.index("{") :]))
    assert answer["items"][0]["received"] == ["n1", "n2"]


def test_a_node_leaves_one_task_of_an_array_alone(site: Site) -> None:
    """The last task has the number of the array, by which scontrol does not change it."""
    site.run("echo data >/shared/data")
    site.run("echo mine >/nvme/data-1", on="n3")
    script = (
        "#!/bin/bash\ntouch /shared/began-%s; until [ -e /shared/began-0 -a -e /shared/began-1 ]"
    )
    script = script.replace("%s", "$SLURM_ARRAY_TASK_ID")
    script += "; do sleep 0.1; done\nsqueue -h -j $SLURM_JOB_ID -o '%A|%F_%K|%N'\n"
    options = ["-N4", "--array=0-1", "--stage=/shared/data:/nvme/data-%a", "--stage-tolerate=1"]
    site.sbatch(script, *options, "--output=/shared/out-%a").wait()
    wait_until(lambda: site.run(["squeue", "-h"]).stdout == "")
    assert "_0|n[1-4]\n" in site.shared("out-0").read_text()
    assert "_1|n[1-2,4]\n" in site.shared("out-1").read_text()


def test_where_no_node_may_leave_the_stage_fails_and_says_so(site: Site) -> None:
    site.run("echo data >/shared/data")
    site.run("echo mine >/nvme/data", on="n3")
    scheduler = next(line for line in CONF.splitlines() if line.startswith("SchedulerParameters="))
    site.reconfigure(f"{scheduler},disable_job_shrink\n")
    try:
        wish = ["--stage=/shared/data:/nvme/data", "--stage-tolerate=1"]
        job = site.sbatch("echo started", "-N4", *wish)
        assert job.wait().exit_code == "6:0"
    finally:
        site.reconfigure()
    first, second, third = job.output().splitlines(keepends=True)
    assert first.startswith("stage: n3: /nvme/data is a plain file that was not staged;")
    assert second == (
        "stage: Slurm does not let n3 leave the job: Requested operation not supported on this "
        f"system for job {job.id}; submit again with --exclude=n3\n"
    )
    assert third == NOT_STARTED.format(6)


@pytest.mark.usefixtures("_task_prolog")
def test_with_task_prolog_the_sites_default_counts(site: Site) -> None:
    site.run("echo data >/shared/data")
    site.run("echo mine >/nvme/data", on="n3")
    with site.policy(f"{POLICY}[launch]\ntolerate = 1\n"):
        job = site.sbatch(f"#!/bin/bash\n#STAGE /shared/data:/nvme/data\n{SCRIPT}", "-N4")
        assert job.wait().exit_code == "0:0", job.output()
    assert job.output().startswith("stage: went on without n3 (1 of 4 nodes): /nvme/data is a ")
    assert job.output().endswith(f"\n{LEFT}n1 5\nn2 5\nn4 5\n")


@pytest.mark.parametrize("program", ["srun", repeated("salloc")])
def test_only_a_script_finds_a_job_of_fewer_nodes(site: Site, program: str) -> None:
    with pytest.raises(CommandFailed) as refused:
        site.run([program, "--stage=/shared/data:/nvme/data", "--stage-tolerate=1", "true"])
    assert refused.value.stderr.startswith(f"{program}: unrecognized option '--stage-tolerate=1'\n")


def test_a_number_that_cannot_be_is_refused_at_once(site: Site) -> None:
    with pytest.raises(CommandFailed) as refused:
        site.run(["sbatch", "--stage-tolerate=some", "--wrap", "true"])
    said = "write a number of nodes, or a share of the job's nodes such as 10%"
    assert refused.value.code == 2
    assert refused.value.stderr == f"stage: --stage-tolerate=some: {said}\n"
    assert site.run(["squeue", "-h"]).stdout == ""
