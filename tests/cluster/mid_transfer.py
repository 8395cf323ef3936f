"""A slow source, so that a node can fail in the middle of a transfer, and ways to let it fail."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.cluster.cluster import USERS
from tests.cluster.processes import is_rank, processes
from tests.cluster.site import REPOSITORY, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.cluster import Job
    from tests.cluster.site import Site

#: A folder that n1, which reads the source, sees through FUSE. Each answer takes so many
#: microseconds: the file moves at about 1 MiB/s.
SLOW, BEHIND, MICROSECONDS = "/shared/slow", "/shared/behind", 200_000
#: The command line of the program that shows it.
SERVER = f"slow_folder {BEHIND} {SLOW} "
#: The command line of a rank, but not that of the srun that starts it.
RANK = "^[^ ]*python3 -I -m stager.rank"
PARTIAL = f"/nvme/.slurm-stage/{USERS['alice']}/partial"


@contextmanager
def slow_source(site: Site, size: int) -> Iterator[None]:
    """Make SLOW/data, of so many bytes, for a with block."""
    flags = ["-O2", "-I/usr/include/fuse3", f"{REPOSITORY}/tests/bench/slow_folder.c", "-lfuse3"]
    subprocess.run(["gcc", "-o", str(site.shared("slow_folder")), *flags], check=True)
    site.run(f"mkdir {BEHIND} {SLOW}; head -c {size} /dev/urandom >{BEHIND}/data")
    line = ["/shared/slow_folder", BEHIND, SLOW, str(MICROSECONDS)]
    site.run(line, user="root", on="n1")
    yield
    site.run(["umount", "--lazy", SLOW], user="root", on="n1")
    site.run(f"rm -r {BEHIND} {SLOW} /shared/slow_folder", user="root")


@contextmanager
def stopped(site: Site, node: str, pattern: str) -> Iterator[None]:
    """Stop the processes whose command line matches, for a with block."""
    site.run(["pkill", "-STOP", "-f", pattern], user="root", on=node)
    try:
        yield
    finally:
        site.run(["pkill", "-CONT", "-f", pattern], user="root", on=node, check=False)


def submit(site: Site, tolerate: str, script: str, *options: str) -> Job:
    """Submit a job that stages the slow file to four nodes."""
    wish = f"--stage={SLOW}/data:/nvme/data"
    return site.sbatch(script, "-N4", "--no-requeue", wish, tolerate, *options)


def await_transfer(site: Site) -> None:
    """Return when all nodes have begun to write the copy."""
    wait_until(lambda: all(receives(site, node) for node in site.nodes))


def receives(site: Site, node: str, partial: str = PARTIAL) -> bool:
    """Whether a rank there has begun to write the copy, in the folder of what is not whole yet."""
    ranks = (one for one in processes(site) if one.node == node and is_rank(one))
    return any(one.has_open_beneath(partial) for one in ranks)


def kill_rank(site: Site, node: str) -> None:
    """Kill the rank on a node."""
    site.run(["pkill", "-9", "-f", RANK], on=node, user="root")


def kill_slurmstepd(site: Site, node: str, job: Job) -> None:
    """Kill the slurmstepd of the rank on a node."""
    site.run(["pkill", "-9", "-f", rf"slurmstepd: .{job.id}.0."], on=node, user="root")


@contextmanager
def cut_off(site: Site, node: str) -> Iterator[None]:
    """Take the link of a node down, for a with block."""
    site.run(["ip", "link", "set", node, "down"], user="root")
    try:
        yield
    finally:
        site.run(["ip", "link", "set", node, "up"], user="root")
