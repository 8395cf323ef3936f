"""Roots that the site makes for one job alone, by its prolog, and removes by its epilog."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.cluster.cluster import USERS
from tests.cluster.site import STAGECTL, digest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
#: Jobs with this comment get no folder.
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
    site.reconfigure(
        "Prolog=/etc/slurm/make\nEpilog=/etc/slurm/remove\nPrologFlags=Alloc,DeferBatch\n"
    )
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


STAGE = f'stagectl stage "/shared/x:{OWN}/sub/x"'


def test_a_job_stages_to_its_own_folder_and_leaves_nothing(site: Site, source: Path) -> None:
    look = f"srun sha256sum {OWN}/sub/x; ls -A /run/slurm-stage/$UID; stagectl status --by file"
    job = run(site, f"set -e; {STAGE}; {STAGE}; {look}", "-N2", "--ntasks-per-node=1")
    said = job.output()
    assert job.info()["ExitCode"] == "0:0", said
    assert said.count(digest(source)) == 2
    assert "current" in said
    assert ".uses" not in said
    for node in site.nodes:
        assert [*site.path(node, "/nvme").iterdir()] == []


def test_without_the_folder_the_job_is_told_how_to_ask_for_it(site: Site, source: Path) -> None:
    job = run(site, f"srun rmdir {OWN}; {STAGE}", "-N2", "--ntasks-per-node=1")
    path = f"{PARENT}/alice.{job.id}.0"
    assert f"there is no {path}: ask for it by {HINT}" in job.output()


def test_a_folder_that_another_user_has_made_first_is_not_used(site: Site, source: Path) -> None:
    job = site.sbatch("sleep 60", "-wn1")
    job.wait_for(lambda record: record["JobState"] == "RUNNING")
    path = f"{PARENT}/alice.{job.id}.0"
    assert site.path("n1", path).stat().st_uid == USERS["alice"]
    site.run(f"chown bob {path}", user="root", on="n1")
    line = [STAGECTL, "stage", f"--job={job.id}", f"/shared/x:{path}/x"]
    done = site.run(line, check=False)
    assert (done.returncode, [*site.path("n1", path).iterdir()]) == (6, [])
    assert f"{path}: bob could replace what is staged there" in done.stderr
    site.run(f"chown alice {path}", user="root", on="n1")
    assert site.run(line).returncode == 0
    assert path in site.run([STAGECTL, "status", f"--job={job.id}", "--by", "file"]).stdout
    job.cancel()
    job.wait()
