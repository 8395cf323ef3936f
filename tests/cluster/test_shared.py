"""A destination that all nodes see: written once, kept for the jobs of all nodes, closed to others.

The attacks are tried for real, by bob against alice; none succeeds.
"""

from __future__ import annotations

import re
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.cluster.cluster import USERS
from tests.cluster.mid_transfer import SLOW, receives, slow_source
from tests.cluster.site import STAGECTL, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.cluster import Job
    from tests.cluster.site import Site

ROOT = "/shared/scratch"
X, Y, DST = "/shared/x", "/shared/y", f"{ROOT}/x"
RECORDS = f"{ROOT}/.slurm-stage"
CACHE = f"{RECORDS}/{USERS['alice']}"
WISH = f"--stage={X}:{DST}"


@pytest.fixture(scope="module", autouse=True)
def _policy(installed_site: Site) -> Iterator[None]:
    with installed_site.policy(f'roots = ["/nvme", "{ROOT}"]\n'):
        yield


@pytest.fixture(autouse=True)
def _root(site: Site) -> Iterator[None]:
    site.run(f"mkdir -m 1777 {ROOT}", user="root")
    site.run(f"rm -f {X} {Y}; head -c 3000000 /dev/urandom >{X}; head -c 9 {X} >{Y}")
    yield
    site.run(f"rm -r {ROOT}", user="root")


def stage(site: Site, nodes: str, *words: str, script: str = "true") -> Job:
    return site.sbatch(script, f"-w{nodes}", *(words or (WISH,)))


def ended(job: Job) -> str:
    """Return the output of a job that has succeeded."""
    assert job.wait().exit_code == "0:0", job.output()
    return job.output()


@contextmanager
def using(site: Site, nodes: str) -> Iterator[Job]:
    """Keep a job running that has staged X."""
    job = stage(site, nodes, script="echo started; sleep 600")
    job.wait_for(lambda _: "started" in job.output())
    yield job
    job.cancel()
    job.wait()
    site.await_epilogs()


def facts(site: Site) -> tuple[int, int]:
    there = site.path("login", DST).stat()
    return there.st_ino, there.st_mtime_ns


def test_it_is_written_once_for_all_nodes_and_jobs(site: Site) -> None:
    ended(stage(site, "n[1-2]", f"--stage={Y}:{ROOT}/y"))  # makes alice's cache
    dry = site.run(
        ["srun", "-Q", "-wn[1-2]", "--stage-dry-run", WISH, "true"], check=False
    )
    assert f" once for n[1-2] (2 nodes) (absent)" in dry.stdout + dry.stderr
    said = ended(stage(site, "n[1-2]"))
    assert re.search(r"x: 2\.9 MiB from /shared/x once for n\[1-2\] ", said)
    first = facts(site)
    assert "current on n[3-4] (2 nodes), nothing moved" in ended(stage(site, "n[3-4]"))
    assert facts(site) == first
