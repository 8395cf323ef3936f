"""A job that tolerates nodes that fail begins on the others, each of which has the whole file."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

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
REFUSED = (
    "stage: {}: this node does not have the job's staged files: use srun --nodes=$(wc -l "
    "<$STAGE_NODES_FILE) --exclude=$STAGE_FAILED_NODES\n"
)
#: Shows what a job finds, and that srun can keep off the nodes that failed, but not use them.
SCRIPT = """
echo "$STAGE_FAILED_NODES|$STAGE_NODES"
echo $(cat $STAGE_FAILED_NODES_FILE)/$(cat $STAGE_NODES_FILE)
srun --nodes=$(wc -l <$STAGE_NODES_FILE) --exclude=$STAGE_FAILED_NODES \
    bash -c 'echo $(hostname) $(stat -c %s /nvme/data)' | sort
srun -N1 -w n3 echo started 2>&1 | grep stage:
"""


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
        "n3|n1,n2,n4\nn3/n1 n2 n4\n"
        f"n1 {SIZE}\nn2 {SIZE}\nn4 {SIZE}\n{REFUSED.format('n3')}"
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
            wait_until(lambda: "|n1," in job.output())
    ends_well_without_n3(site, job, SILENT)
    # Its rank ends when it has not heard its neighbours for a while.
    wait_until(lambda: not site.leftovers())


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
    why = "the stage was started on n1, so it cannot go on without that node"
    said = f"stage: staging ended early: n1: {LOST}; submit again\n"
    assert job.output().startswith(said)
    assert job.output().endswith(f"\n  {why}\n{NOT_STARTED.format(8)}")


def test_disks_that_are_full_or_read_only_are_left_out_of_all_stages_of_the_job(
    site: Site,
) -> None:
    site.run("mkdir -p /shared/set; cd /shared/set; for i in 1 2 3 4; do echo $i >$i; done")
    site.run("head -c 30M /dev/urandom >/shared/data")
    script = (
        "#!/bin/bash\n#SBATCH --stage-tolerate=50%\n"
        "#STAGE /shared/set:/nvme/set,mode=shard\n#STAGE /shared/data:/nvme/data\n"
        "cut -f1,3 $STAGE_SHARDS; echo $STAGE_FAILED_NODES\n"
        f"{STAGECTL} stage --json /shared/data:/nvme/other\n"
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
    assert [line for line in lines if re.match(r"n\d", line)] == [
        "n1\t1", "n2\t2", "n1\t3", "n2\t4", "n3,n4"
    ]  # fmt: skip
    answer = json.loads("\n".join(lines[lines.index("{") :]))
    assert answer["items"][0]["received"] == ["n1", "n2"]
    assert answer["failed_nodes"] == [
        {"code": 8, "message": "an earlier stage of this job failed there", "node": node}
        for node in ("n3", "n4")
    ]


def test_tasks_that_wait_on_the_other_nodes_start_when_the_stage_goes_on(site: Site) -> None:
    site.run("head -c 30M /dev/urandom >/shared/data")
    tasks = ["-N4", "--ntasks-per-node=2", "bash", "-c", "echo $(hostname) $STAGE_FAILED_NODES"]
    with site.nvme("n3", "loop", "20M"), pytest.raises(CommandFailed) as ended:
        site.run(["srun", "-Q", "--stage=/shared/data:/nvme/data", "--stage-tolerate=1", *tasks])
    assert ended.value.code == 5
    assert sorted(ended.value.stdout.split("\n")) == [
        "", *(f"{node} n3" for node in ("n1", "n1", "n2", "n2", "n4", "n4"))
    ]  # fmt: skip
    assert "stage: went on without n3 (1 of 4 nodes): /nvme: not enough room: " in (
        ended.value.stderr
    )


def test_each_srun_of_salloc_tries_again_on_its_nodes_that_failed(site: Site) -> None:
    site.run("head -c 1M /dev/urandom >/shared/data")
    site.run("echo mine >/nvme/data", on="n3")
    show = "bash -c 'echo $(hostname) $STAGE_FAILED_NODES' | sort; echo code ${PIPESTATUS[0]}"
    steps = [
        *(f"srun {nodes} {show}" for nodes in ("-N4", "-N4", "-N3 -x n3", "-N1 -w n3")),
        "touch /shared/tried; until test -e /shared/mended; do sleep 0.1; done",
        f"srun -N4 {show}",
    ]
    option = ["--stage=/shared/data:/nvme/data", "--stage-tolerate=1"]
    shell = site.popen(["salloc", "-N4", *option, "bash", "-c", "\n".join(steps)])
    wait_until(site.shared("tried").exists)
    site.run("rm /nvme/data", on="n3")
    site.run("touch /shared/mended")
    said, told = shell.communicate(timeout=60)
    others = "n1 n3\nn2 n3\nn4 n3\n"
    alone = "n1\nn2\nn4\ncode 0\n"
    assert said == (f"{others}code 6\n{others}code 6\n{alone}code 6\nn1\nn2\nn3\nn4\ncode 0\n")
    own = (
        "/nvme/data is a plain file that was not staged; it is kept: move it, "
        "delete it, choose another destination, or add the option replace"
    )
    without = f"stage: went on without n3 (1 of 4 nodes): {own}"
    lines = [line for line in told.splitlines() if line.startswith("stage:")]
    assert [re.sub(r"in .* node\)|\d+\.\d s", "T", line) for line in lines] == [
        without,
        "stage: /nvme/data: 1.0 MiB from /shared/data to n[1-2,4] (3 nodes) T",
        without,
        *["stage: /nvme/data: current on n[1-2,4] (3 nodes), nothing moved (1.0 MiB, T)"] * 2,
        f"stage: n3: {own}",
        "stage: the stage was started on n3, so it cannot go on without that node",
        NOT_STARTED.format(6).strip(),
        "stage: /nvme/data: 1.0 MiB from the copy on n1 to n3 T; current on n[1-2,4] (3 nodes)",
    ]


@pytest.mark.parametrize(
    ("options", "env", "code", "said"),
    [
        (
            ["--stage-tolerate=some"], {}, 2,
            ("--stage-tolerate=some: write a number of nodes, or a share of the job's nodes such "
            "as 10%"),
        ),
        (
            [], {"SBATCH_STAGE_TOLERATE": "1/2"}, 2,
            ("--stage-tolerate=1/2: write a number of nodes, or a share of the job's nodes such "
            "as 10%"),
        ),
    ],
)  # fmt: skip
def test_a_number_that_cannot_be_is_refused_at_once(
    site: Site, options: list[str], env: dict[str, str], code: int, said: str
) -> None:
    with pytest.raises(CommandFailed) as refused:
        site.run(["sbatch", *options, "--wrap", "true"], env=env)
    assert (refused.value.code, refused.value.stderr) == (code, f"stage: {said}\n")
    assert site.run(["squeue", "-h"]).stdout == ""
