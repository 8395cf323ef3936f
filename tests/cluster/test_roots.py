"""Roots that the site makes for one job alone, by its prolog, and removes by its epilog."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.cluster import USERS
from tests.cluster.processes import processes
from tests.cluster.site import STAGECTL, digest, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.cluster import Job
    from tests.cluster.site import Site

#: Where the site makes a folder for each job, on each node.
PARENT = "/localscratch"
OWN = f"{PARENT}/$USER.$SLURM_JOB_ID.0"
HINT = "--gres=localscratch:GB"
POLICY = f"""
[[roots]]
path = "{PARENT}/%u.%j.%r"
hint = "{HINT}"
[variables]
SLURM_TMPDIR = "{PARENT}/%u.%j.%r"
"""
SCRIPTS = "Prolog=/etc/slurm/make\nEpilog=/etc/slurm/remove\nPrologFlags=Alloc,DeferBatch\n"
_MAKE = f"""#!/bin/bash
folder={PARENT}/$SLURM_JOB_USER.$SLURM_JOB_ID.0
mkdir -m 700 $folder && chown $SLURM_JOB_UID $folder
"""
_REMOVE = f"#!/bin/bash\nrm -rf {PARENT}/$SLURM_JOB_USER.$SLURM_JOB_ID.*\n"


@pytest.fixture(scope="module", autouse=True)
def _by_job(installed_site: Site) -> Iterator[None]:
    """Make the folders as a site does, whose parent is root's and closed."""
    site = installed_site
    site.run(f"mkdir -m 755 {PARENT}", user="root")
    for node in site.nodes:
        site.run(
            f"mkdir -m 755 /var/spool/disk; mount --bind /var/spool/disk {PARENT}",
            user="root",
            on=node,
        )
    for name, text in (("make", _MAKE), ("remove", _REMOVE)):
        site.write_config(name, text)
        (site.base / "etc/slurm" / name).chmod(0o755)
    site.reconfigure(SCRIPTS)
    try:
        with site.policy(POLICY):
            yield
    finally:
        site.reconfigure()
        for node in site.nodes:
            site.run(f"umount {PARENT}; rm -r /var/spool/disk", user="root", on=node)
        site.run(f"rmdir {PARENT}", user="root")


@pytest.fixture(autouse=True)
def _no_folder_is_left(site: Site) -> Iterator[None]:
    yield
    site.await_epilogs()
    assert [left for node in site.nodes for left in site.path(node, PARENT).iterdir()] == []


@pytest.fixture
def source(site: Site) -> Path:
    """A file of alice's."""
    site.run("head -c 3000000 /dev/urandom >/shared/x")
    return site.shared("x")


def run(site: Site, script: str, *options: str, user: str = "alice") -> Job:
    """Return a job of this script that has ended."""
    job = site.sbatch(f"PATH=$PATH:{os.path.dirname(STAGECTL)}\n{script}", *options, user=user)
    job.wait()
    return job


def test_a_job_stages_to_its_own_folder_and_leaves_nothing(site: Site, source: Path) -> None:
    wish = "/shared/x:$SLURM_TMPDIR/sub/x"
    script = f"""
set -e
{STAGECTL} stage "/shared/x:{OWN}/sub/x"
srun --stage='{wish};/shared/x:$SLURM_TMPDIR/y' --stage="/shared/x:{OWN}/z" sha256sum {OWN}/sub/x
ls -A /run/slurm-stage/$UID
"""
    job = run(site, script, "-N2", "--ntasks-per-node=1", f"--stage={wish}")
    said = job.output()
    assert job.info()["ExitCode"] == "0:0", said
    assert said.count(digest(source)) == 2
    for name, what in (
        ("sub/x", "2.9 MiB"),
        ("sub/x", "current"),
        ("y", "2.9 MiB"),
        ("z", "2.9 MiB"),
    ):
        assert f"stage: {PARENT}/alice.{job.id}.0/{name}: {what}" in said
    assert ".uses" not in said
    for node in site.nodes:
        assert [*site.path(node, "/nvme").iterdir()] == []


@pytest.mark.usefixtures("source")
def test_tasks_of_an_array_have_folders_of_their_own(site: Site) -> None:
    look = f"ls {OWN}"
    wish = "--stage=/shared/x:/localscratch/$USER.%j.${SLURM_RESTART_COUNT}/%A-%a"
    job = run(site, look, "--array=1,2", "-wn1", wish)
    lines = [line for line in job.output().splitlines() if not line.startswith("stage: ")]
    assert sorted(lines) == [f"{job.id}-1", f"{job.id}-2"]


@pytest.fixture
def job(site: Site) -> Iterator[Job]:
    """A job of alice's that runs on n1, and does nothing.

    Its state is RUNNING while the prolog still makes the folder: the script begins after it.
    """
    running = site.sbatch("echo begun; sleep 600", "-wn1")
    wait_until(lambda: "begun" in running.written())
    yield running
    running.cancel()
    running.wait()


def own_folder(job: Job) -> str:
    return f"{PARENT}/alice.{job.id}.0"


def refused(site: Site, job: Job, code: int, command: str = "stage") -> str:
    """Return what is said where the file cannot be staged to the job's folder."""
    value = f"/shared/x:{own_folder(job)}/x"
    done = site.run([STAGECTL, command, f"--job={job.id}", value], check=False)
    assert done.returncode == code, done
    return done.stdout + done.stderr


@pytest.mark.usefixtures("source")
def test_only_a_folder_that_nobody_else_can_replace_is_used(site: Site, job: Job) -> None:
    path = own_folder(job)
    assert site.path("n1", path).stat().st_uid == USERS["alice"]

    def as_root(command: str) -> None:
        site.run(command, user="root", on="n1")

    as_root(f"chown bob {path}")
    assert f"{path}: bob (uid 5002) could replace what is staged there" in refused(site, job, 6)
    as_root(f"mv {path} {path}.away; ln -s {path}.away {path}; chown -h bob {path}")
    assert f"{path}: bob (uid 5002) could replace" in refused(site, job, 6)
    as_root(f"rm {path}; mv {path}.away {path}; chown alice {path}; chmod 777 {path}")
    assert f"{path}: all users could replace" in refused(site, job, 6)
    as_root(f"chmod 700 {path}; chmod 777 {PARENT}")
    assert f"{path}: all users could replace" in refused(site, job, 6)
    as_root(f"chmod 755 {PARENT}; mv {path} {path}.away")
    for command in ("stage", "plan"):
        assert f"there is no {path}: ask for it by {HINT}" in refused(site, job, 6, command)
    assert [*site.path("n1", f"{path}.away").iterdir()] == []
    as_root(f"mv {path}.away {path}")
    refused(site, job, 0)


@pytest.mark.usefixtures("source")
def test_what_is_in_a_folder_of_the_users_is_used_by_jobs(site: Site, job: Job) -> None:
    path = f"{PARENT}/alice"
    site.run(f"mkdir -m 700 {path}; chown alice {path}", user="root", on="n1")
    with site.policy(f'roots = ["{PARENT}/%u"]\n'):
        site.run([STAGECTL, "stage", f"--job={job.id}", f"/shared/x:{path}/x"])
    site.write_policy(POLICY)
    uses = site.path("n1", f"/run/slurm-stage/{USERS['alice']}/{job.id}.uses")
    assert uses.read_text() == f"{path}/x\0"
    site.run(f"rm -r {path}", user="root", on="n1")


@pytest.mark.usefixtures("source")
def test_status_says_in_which_job_it_looked(site: Site, job: Job) -> None:
    path = own_folder(job)
    refused(site, job, 0)
    inside = f"srun --jobid={job.id} --overlap -N1 -n1 {STAGECTL} status --by=file"
    shown = site.run(inside).stdout
    assert f"{path}/x" in shown
    assert shown.endswith(f"{path}: as seen in job {job.id}\n")
    inside = f"srun --jobid={job.id} --overlap -N1 -n1 {STAGECTL} doctor"
    told = [line for line in site.run(inside, check=False).stdout.splitlines() if path in line]
    assert told[0] == f"ok       n1: {path} is there for this job or user alone"
    assert all(line.startswith("ok ") for line in told)
    pattern = f"{PARENT}/%u.%j.%r"
    assert f"{pattern}: there in a job only" in site.run([STAGECTL, "status"]).stdout
    done = site.run([STAGECTL, "stage", "--hosts=n1", f"/shared/x:{path}/x"], check=False)
    assert f"choose a destination beneath {pattern} (in a job)" in done.stderr
    shown = site.run([STAGECTL, "site"]).stdout
    assert f"variables      $SLURM_TMPDIR: {pattern}\nask for        {pattern} by {HINT}\n" in shown


def test_where_the_space_ends_the_job_is_told_how_to_ask_for_more(site: Site, job: Job) -> None:
    site.run("fallocate -l 400M /shared/x")
    path = own_folder(job)
    site.run(f"mount -t tmpfs -o size=1m,mode=700,uid=alice none {path}", user="root", on="n1")
    try:
        assert f": ask for more by {HINT}, or stage less" in refused(site, job, 5)
        site.run(f"mount -o remount,size=8g {path}", user="root", on="n1")
        with little_memory(site, "n1"):
            for command in ("stage", "plan"):
                said = refused(site, job, 5, command)
                assert f"{path}: this folder is in memory, and there is not enough" in said
                assert "ask for more by --mem, or stage less" in said
        assert [*site.path("n1", path).glob("x*")] == []
    finally:
        site.run(f"umount {path}", user="root", on="n1")


@contextmanager
def little_memory(site: Site, node: str) -> Iterator[None]:
    """Limit what starts on the node, as Slurm does a job, to 300 MiB of memory."""
    memory = Path("/sys/fs/cgroup/memory")
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    before = memory / next(line for line in lines if ":memory:" in line).split(":", 2)[2].lstrip(
        "/"
    )
    [slurmd] = [one for one in processes(site) if one.node == node and one.name == "slurmd"]
    group = memory / f"slurm-stage-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(300 << 20))
        (group / "cgroup.procs").write_text(str(slurmd.pid))
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                (before / "cgroup.procs").write_text(pid)
        group.rmdir()


def test_a_root_may_be_a_link_of_roots_own(site: Site, source: Path) -> None:
    site.run("ln -s /nvme /data", user="root")
    try:
        with site.policy('roots = ["/data"]\n'):
            for _ in range(2):
                job = run(site, "cat /data/set/x | sha256sum", "--stage=/shared/x:/data/set/x")
                assert digest(source) in job.output()
            assert "current" in job.output()
    finally:
        site.run("rm /data", user="root")
        site.write_policy(POLICY)


@pytest.mark.usefixtures("source")
def test_two_jobs_have_one_private_path_with_two_contents(site: Site) -> None:
    site.run("echo one >/shared/one; echo two >/shared/two")
    folder = site.path("login", "/etc/slurm")
    (folder / "job_container.conf").write_text("AutoBasePath=true\nBasePath=/cluster/private\n")
    site.reconfigure("JobContainerType=job_container/tmpfs\nPrologFlags=Contain\n")
    try:
        with site.policy('[[roots]]\npath = "/tmp"\nprivate = true\n'):
            jobs = [start(site, name) for name in ("one", "two")]
            for job in jobs:
                Path(site.path("login", f"/shared/go-{job.id}")).touch()
                job.wait()
            for job, name in zip(jobs, ("one", "two"), strict=True):
                assert f"is {name}\nstage: /tmp/x: evicted on n1\n" in job.output()
                assert "still" not in job.output()
            assert not site.path("n1", "/tmp/.slurm-stage").exists()
    finally:
        site.run(["scancel", "--user=alice"], user="root")
        site.assert_healthy(120)
        site.reconfigure(SCRIPTS)
        (folder / "job_container.conf").unlink()
        site.write_policy(POLICY)


def start(site: Site, name: str) -> Job:
    """Return a job that has staged a file to /tmp/x, and looks at it again when it may go on."""
    script = f"""
cat /tmp/x; ls -A /run/slurm-stage/$UID/*.uses
until [ -e /shared/go-$SLURM_JOB_ID ]; do sleep 0.1; done
echo "is $(cat /tmp/x)"; {STAGECTL} evict /tmp/x 2>&1; [ -e /tmp/x ] && echo still
"""
    for _ in range(20):  # Slurm 22.05 fails to make a namespace now and then, and holds the job
        job = site.sbatch(script, "-wn1", f"--stage=/shared/{name}:/tmp/x")
        job.wait_for(lambda record: f"{name}\n" in job.output() or "eld" in record["Reason"])  # noqa: B023
        if f"{name}\n" in job.output():
            return job
        job.cancel()
        job.wait()
    raise AssertionError("Slurm started none of the jobs")
