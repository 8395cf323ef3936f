"""A node with a slow disk is named, with its rate and that of the others, wherever stages are told.

The disk is a filesystem in a file that a program of FUSE writes at a limited rate.
"""

from __future__ import annotations

import re
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.cluster.site import POLICY, REPOSITORY, STAGECTL, digest, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.site import Site

pytestmark = [pytest.mark.cluster, pytest.mark.root]

#: Bytes that are staged, and that the slow disk takes in a second.
SIZE, RATE = 48_000_000, 5_000_000
PROGRAM = REPOSITORY / "tests/support/slow_disk.c"
SLOW = "n3"
PUT = f"""\
set -e
mkdir /run/slow /run/shown
truncate --size=300M /run/slow/image
mkfs.ext4 -q -m 0 -O ^has_journal -E lazy_itable_init=0 /run/slow/image
/shared/slow_disk /run/slow/image /run/shown {RATE}
mount -o loop,noatime /run/shown/disk /nvme
chmod 1777 /nvme
"""
UNDO = """\
umount /nvme; umount /run/shown
rm -r /run/slow /run/shown
"""
#: n3 writes at most 5 MB/s, the others whatever this machine can do.
LINE = re.compile(
    r"stage: n3 is slow: it writes [1-5]\.\d MB/s, the others [\d.]+ [MG]B/s, which took "
    r"(\d+)\.\d s more; tell the administrator"
)
MEANWHILE = re.compile(
    r"stage: n3 is slow: it writes [1-5]\.\d MB/s, the others [\d.]+ [MG]B/s; they wait for it"
)
TOO_SLOW = re.compile(
    r"stage: went on without n3 \(1 of 4 nodes\): too slow: it writes [1-5]\.\d MB/s, the others "
    r"[\d.]+ [MG]B/s, and cost them \d+\.\d s"
)


@contextmanager
def slow_disk(site: Site) -> Iterator[None]:
    """Have /nvme of one node on a slow disk."""
    flags = ["-O2", "-Wall", "-Werror", "-I/usr/include/fuse3"]
    program = str(site.shared("slow_disk"))
    subprocess.run(["gcc", "-o", program, *flags, str(PROGRAM), "-lfuse3"], check=True)
    site.run(PUT, user="root", on=SLOW)
    try:
        yield
    finally:
        site.run(UNDO, user="root", on=SLOW)


def test_a_slow_disk_is_told_with_its_node_and_both_rates(site: Site) -> None:
    site.run(f"head -c {SIZE} /dev/urandom > /shared/data")
    # Counts of earlier tests.
    for node in site.nodes:
        site.path(node, "/run/slurm-stage/figures.json").unlink(missing_ok=True)
    # With this time limit, each node says every two seconds how far it is.
    policy = '[metrics]\ntextfile = "/run/figures.prom"\n[transfer]\nstall_timeout = 12\n'
    with slow_disk(site), site.policy(POLICY + policy):
        job = site.sbatch(f"{STAGECTL} bench --size 8", "-N4", "--stage=/shared/data:/nvme/data")
        assert job.wait().exit_code == "0:0", job.output()
        site.assert_healthy()
        meanwhile, summary, line, *measured = job.output().splitlines()
        assert digest(site.copy(SLOW, "/nvme/data")) == digest(site.shared("data"))
    assert summary.startswith("stage: /nvme/data: 45.8 MiB from /shared/data to n[1-4] (4 nodes) ")
    assert MEANWHILE.fullmatch(meanwhile), job.output()
    match = LINE.fullmatch(line)
    assert match, job.output()
    assert 5 <= int(match[1]) <= 30
    header, *rows = measured[-5:]
    assert header.split() == ["NODE", "WRITE", "READ", "NETWORK", "SLOW"]
    # Its own reads, the network and the disks of the others are what this machine can do at that
    # moment: any of these may be slow too.
    [slowest] = [row for row in rows if row.startswith("n3 ")]
    assert re.fullmatch(r"n3 +[\d.]+ MB/s .* write(, \w+)*", slowest)
    counts = [counted(site, node) for node in site.nodes]
    for node in site.nodes:
        site.path(node, "/run/figures.prom").unlink()
    assert counts == [0, 0, 1, 0]


def test_a_job_that_may_begins_without_a_node_that_is_too_slow(site: Site) -> None:
    site.run(f"head -c {2 * SIZE} /dev/urandom > /shared/data")
    policy = "[launch]\ntolerate_slow = 5\n[transfer]\nstall_timeout = 12\n"
    with slow_disk(site), site.policy(POLICY + policy):
        wish = "--stage=/shared/data:/nvme/data"
        job = site.sbatch("echo $SLURM_JOB_NODELIST", "-N4", "--stage-tolerate=1", wish)
        assert job.wait().exit_code == "0:0", job.output()
        site.assert_healthy()
        meanwhile, without, summary, *rest = job.output().splitlines()
        # Its rank may be in a system call of the slow disk.
        wait_until(lambda: site.leftovers() == [])
        assert not site.copy(SLOW, "/nvme/data").exists()
    assert MEANWHILE.fullmatch(meanwhile), job.output()
    assert TOO_SLOW.fullmatch(without), job.output()
    assert summary.startswith("stage: /nvme/data: 91.6 MiB from /shared/data to n[1-2,4] (3 nodes)")
    assert rest == ["n[1-2,4]"]
    assert digest(site.copy("n4", "/nvme/data")) == digest(site.shared("data"))


def counted(site: Site, node: str) -> int:
    """Return how many stages the node says it held back."""
    figures = site.path(node, "/run/figures.prom").read_text()
    return int(figures.rpartition("slurm_stage_slow_total ")[2])
