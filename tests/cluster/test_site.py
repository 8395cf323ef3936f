"""What the fixture ``site`` finds that a test has left, and that the next test does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.cluster.site import wait_until

if TYPE_CHECKING:
    from tests.cluster.site import Site

LEAVE = """
set -e
mkdir -p /run/slurm-stage/jobs /run/slurm-stage/5001 /nvme/.slurm-stage/5001/partial
touch /run/slurm-stage/jobs/77.5001 /nvme/.slurm-stage/5001/partial/half
mount -t tmpfs none /run/slurm-stage/5001
"""


def test_what_a_test_leaves_is_named_and_taken_away(site: Site) -> None:
    job = site.sbatch("sleep 1000", "-wn1")
    job.wait_for(lambda record: record["JobState"] == "RUNNING")
    site.run(LEAVE, user="root", on="n2")
    rank = site.popen(["bash", "-c", "sleep 1000; true", "stager.rank"], on="n3")
    drain = ["scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=a test"]
    site.run(drain, user="root")
    site.run("pkill -f ^slurmd", user="root", on="n3")
    wait_until(lambda: len(site.left_behind(0)) == 5)
    unhealthy, *left = site.left_behind(0)
    assert unhealthy.startswith("nodes: {")
    assert "'n4': 'drained'" in unhealthy
    assert "daemons that ended: ['slurmd-n3']" in unhealthy
    assert "a test" in unhealthy
    assert left == [
        "n3: bash -c sleep 1000; true stager.rank",
        "n2: half",
        "n2: job 77.5001",
        "n2: /run/slurm-stage/5001 is mounted",
    ]
    site.take_away()
    assert site.left_behind() == []
    assert site.path("n2", "/run/slurm-stage/jobs").is_dir()  # or no job would be marked
    assert rank.wait(10) != 0
    assert job.wait().state == "CANCELLED"
    assert site.sbatch("srun hostname", "-N4").wait().exit_code == "0:0"
