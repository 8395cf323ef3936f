"""A stage that does not move ends with the name of the node that is behind; a slow one does not."""

from __future__ import annotations

import re
import subprocess
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.mid_transfer import BEHIND, SERVER, SLOW, cut_off, receives, stopped
from tests.cluster.site import POLICY, PYTHON, REPOSITORY, STAGECTL, digest, wait_until
from tests.support.nightly import repeated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.cluster import Job
    from tests.cluster.site import Site

#: The seconds of the limit, and those within which the job must have ended after that.
LIMIT, PATIENCE = 6, 30
LIMITED = f"{POLICY}[transfer]\nstall_timeout = {LIMIT}\n"
NOT_STARTED = "stage: the job's own program was not started (exit code 8)\n"
REMEDY = "submit again; if it fails again, use other nodes (--exclude) and tell the administrator"
SILENT = (
    f"no answer for {LIMIT} s: the node or its network has failed, or the staging process there is "
    "stopped"
)
#: Folders that n1 sees through FUSE, with the microseconds that each answer takes: a file of 48 MiB
#: in the first takes more than 30 s, a chunk of a file in the second longer than the limit.
SLOWER = "/shared/slower"
LATENCY = {SLOW: 200_000, SLOWER: 800_000}
FUSE = REPOSITORY / "tests/bench/slow_folder.c"


@pytest.fixture(scope="module")
def slow_site(installed_site: Site) -> Iterator[Site]:
    """Mount the slow folders on n1, the node that reads the sources."""
    site = installed_site
    flags = ["-O2", "-I/usr/include/fuse3", str(FUSE), "-lfuse3"]
    subprocess.run(["gcc", "-o", str(site.shared("slow_folder")), *flags], check=True)
    site.run(
        f"mkdir {BEHIND} {SLOW} {SLOWER}; cd {BEHIND}\n"
        "head -c 48M /dev/urandom > large; head -c 3M large > middle; head -c 2M large > small\n"
        "mkdir many; cd many; for i in $(seq 4); do echo $i >$i; done"
    )
    with ExitStack() as stack:
        for folder, microseconds in LATENCY.items():
            line = ["/shared/slow_folder", BEHIND, folder, str(microseconds)]
            site.run(line, user="root", on="n1")
            stack.callback(site.run, ["umount", "--lazy", folder], user="root", on="n1")
        yield site
    site.run(f"rm -r {BEHIND} {SLOW} {SLOWER} /shared/slow_folder", user="root")


@pytest.fixture(autouse=True)
def _limit(slow_site: Site, site: Site) -> Iterator[None]:
    site.run("rm -f /shared/started")
    with site.policy(LIMITED):
        yield


def submit(site: Site, source: str = f"{SLOW}/large", nodes: str = "-N4") -> Job:
    """Submit a job that stages to all nodes; return when n1 and n3 have begun to receive."""
    job = site.sbatch(
        "touch /shared/started", nodes, "--no-requeue", f"--stage={source}:/nvme/data"
    )
    for node in ("n1", "n3"):
        wait_until(partial(receives, site, node))
    return job


@contextmanager
def busy(site: Site) -> Iterator[None]:
    """Keep two cores busy, for a with block."""
    loops = [site.popen("while :; do :; done") for _ in range(2)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def fails(site: Site, job: Job, message: str) -> None:
    """Check that the job ends in time, with this as its message, and that nothing was published."""
    said = f"stage: staging ended early: {message}; {REMEDY}\n{NOT_STARTED}"
    wait_until(lambda: NOT_STARTED in job.output(), LIMIT + PATIENCE)
    assert job.output().endswith(said)
    lines = job.output().removesuffix(said).splitlines()
    assert all(line.startswith("stage: /nvme/data: ") for line in lines)  # progress
    assert not any(site.copy(node, "/nvme/data").exists() for node in site.nodes)


def ends(site: Site, job: Job) -> None:
    """Check, once all is as it was, that the job ends with code 8 and nothing is left."""
    state = job.wait(90)
    assert (state.state, state.exit_code) == ("FAILED", "8:0")
    wait_until(lambda: set(site.node_states().values()) == {"idle"}, 90)
    wait_until(lambda: site.leftovers() == [], 30)
    assert not any(site.copy(node, "/nvme/data").exists() for node in site.nodes)
    assert not any(site.records(node) for node in site.nodes)
    assert not site.shared("started").exists()


def works(site: Site, job: Job, source: str) -> None:
    """Check that the job ends well."""
    assert job.wait(120).exit_code == "0:0", job.output()
    behind = site.path("login", f"{BEHIND}/{Path(source).name}")
    for node in site.nodes:
        assert digest(site.copy(node, "/nvme/data")) == digest(behind)
    assert site.shared("started").exists()


def test_a_node_that_loses_its_link_is_named_though_all_cores_are_busy(site: Site) -> None:
    with busy(site):
        job = submit(site)
        with cut_off(site, "n3"):
            fails(site, job, f"n3: {SILENT}")
        ends(site, job)


def test_a_launching_node_that_loses_its_link_is_named(site: Site) -> None:
    job = submit(site)
    with cut_off(site, "n1"):
        said = (
            f"n1: no other node has answered for {LIMIT} s: the network of this node has probably "
            "failed"
        )
        fails(site, job, said)
    ends(site, job)


@pytest.mark.parametrize("process", ["stager.rank", repeated(r"slurmstepd: .[0-9]*\.0.")])
def test_a_node_whose_staging_process_is_stopped_is_named(site: Site, process: str) -> None:
    job = submit(site)
    with stopped(site, "n3", process):
        fails(site, job, f"n3: {SILENT}")
        if process != "stager.rank":  # nobody ends the rank, which must not publish by itself
            wait_until(lambda: not _has_rank(site, "n3"))
            assert not site.copy("n3", "/nvme/data").exists()
    ends(site, job)


#: Has a rank on this node stop itself before its Python begins.
STOP_EARLY = f"""\
cp $(readlink -f {PYTHON}) /run/real-python3
cat >/run/stopping-python3 <<'END'
#!/bin/bash
case "$*" in *stager.rank*) kill -STOP $$ ;; esac
exec -a {PYTHON} /run/real-python3 "$@"
END
chmod 755 /run/stopping-python3
mount --bind /run/stopping-python3 {PYTHON}
"""


def test_a_node_whose_rank_is_stopped_before_mpi_is_named(site: Site) -> None:
    site.run(STOP_EARLY, user="root", on="n3")
    try:
        with site.policy(f"{POLICY}[launch]\nstart_timeout = {LIMIT}\n"):
            job = site.sbatch("true", "-N4", "--no-requeue", f"--stage={BEHIND}/small:/nvme/data")
            ends(site, job)
    finally:
        site.run(f"umount {PYTHON}; rm /run/*-python3", user="root", on="n3")
    assert job.output().startswith(
        f"stage: MPI did not start within {LIMIT} s: the staging process on n3 has not begun; the "
        "node or its network has failed, or the process is stopped or cannot read its Python; "
    )


def _has_rank(site: Site, node: str) -> bool:
    return site.run(["pgrep", "-f", "stager.rank"], on=node, check=False).returncode == 0


def test_tasks_that_wait_on_other_nodes_end_too(site: Site) -> None:
    line = ["srun", "-N4", "--ntasks-per-node=2", f"--stage={SLOW}/large:/nvme/data"]
    srun = site.popen([*line, "touch", "/shared/started"])
    for node in ("n1", "n3"):
        wait_until(partial(receives, site, node))
    with stopped(site, "n3", "stager.rank"):
        _, complaint = srun.communicate(timeout=LIMIT + PATIENCE)
        assert srun.returncode == 8
        assert f"stage: staging ended early: n3: {SILENT}; {REMEDY}\n" in complaint
    assert not site.shared("started").exists()


def test_a_source_that_does_not_answer_is_named_with_its_reader(site: Site) -> None:
    job = submit(site)
    with stopped(site, "n1", SERVER):
        fails(site, job, f"n1: no progress for {LIMIT} s while reading {SLOW}/large")
    ends(site, job)


def _has_room(site: Site, node: str, size: int) -> bool:
    """Whether the room for a file of this size is allocated there: next it is written."""
    look = "find /proc/[0-9]*/fd -lname '/nvme/.slurm-stage/*' -exec stat -Lc %b {} + 2>/dev/null"
    blocks = site.run(look, user="root", on=node, check=False).stdout.split()
    return any(int(count) * 512 >= size for count in blocks)


def test_a_disk_that_does_not_answer_is_named_with_its_node(site: Site) -> None:
    # As long as the others have buffers, they move.
    with site.policy(f'{LIMITED}memory = "4MiB"\n'), site.nvme("n2", "loop", "200M"):
        job = submit(site)
        wait_until(lambda: _has_room(site, "n2", 48 << 20))
        site.run(["fsfreeze", "--freeze", "/nvme"], user="root", on="n2")
        try:
            fails(site, job, f"n2: no progress for {LIMIT} s while writing /nvme/data")
        finally:
            site.run(["fsfreeze", "--unfreeze", "/nvme"], user="root", on="n2")
        ends(site, job)


def test_a_rank_that_is_stopped_for_a_moment_goes_on(site: Site) -> None:
    job = submit(site, f"{SLOW}/middle")
    with stopped(site, "n3", "stager.rank"):
        time.sleep(LIMIT / 2)
    works(site, job, "middle")


def test_a_slow_source_that_moves_is_no_stall(site: Site) -> None:
    begun = time.monotonic()
    job = submit(site, f"{SLOWER}/small")
    works(site, job, "small")
    assert time.monotonic() - begun > 2 * LIMIT


def test_a_job_that_is_suspended_goes_on(site: Site) -> None:
    job = submit(site, f"{SLOW}/middle")
    site.run(["scontrol", "suspend", job.id], user="root")
    time.sleep(LIMIT + 3)
    site.run(["scontrol", "resume", job.id], user="root")
    works(site, job, "middle")


def test_a_suspended_job_goes_on_though_who_stages_is_not_suspended(site: Site) -> None:
    line = f"{STAGECTL} stage {SLOW}/middle:/nvme/data && touch /shared/started"
    shell = site.popen(["salloc", "-N4", "--job-name=outside", "bash", "-c", line])
    wait_until(lambda: receives(site, "n3"))
    job = site.run(["squeue", "-h", "--name=outside", "--format=%i"]).stdout.strip()
    site.run(["scontrol", "suspend", job], user="root")
    time.sleep(LIMIT + 3)
    site.run(["scontrol", "resume", job], user="root")
    _, complaint = shell.communicate(timeout=60)
    assert shell.returncode == 0, complaint
    assert site.shared("started").exists()


def test_what_a_node_does_is_told_while_no_bytes_move(site: Site) -> None:
    job = site.sbatch("true", "-wn1,n2", f"--stage={SLOWER}/many:/nvme/many")
    assert job.wait().exit_code == "0:0", job.output()
    told = rf"^stage: n1 is reading {SLOWER}/many, [0-9]+\.[0-9] s since the start$"
    assert re.search(told, job.written(), re.MULTILINE)
