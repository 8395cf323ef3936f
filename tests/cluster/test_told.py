"""What a stage tells outside of its job: in the job's comment, and in each node's system log."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.cluster.site import POLICY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cluster.cluster import Job
    from tests.cluster.site import Site

#: Plays the log daemon of a node: appends what comes to the file.
LISTEN = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o666)
print("listening", flush=True)
while True:
    with open(sys.argv[2], "ab") as file:
        file.write(listener.recv(4096) + b"\\n")
"""
#: Where /dev/log of each machine leads to: there the C library and stager.base.log send.
LOG = "/run/dev-log"
MISSING = (
    "n1: /shared/none: No such file or directory; check the path, and that the compute nodes "
    "mount this filesystem"
)


@pytest.fixture(autouse=True)
def _source(site: Site) -> None:
    site.run("head -c 3000000 /dev/urandom > /shared/a")


@contextmanager
def logging(site: Site) -> Iterator[list[Path]]:
    """Have each node log to a file of its own, for a ``with`` block. Yield the files."""
    logs = [site.shared(f"{node}.log") for node in site.nodes]
    daemons = []
    try:
        for node, file in zip(site.nodes, logs, strict=True):
            file.unlink(missing_ok=True)
            line = ["python3", "-c", LISTEN, LOG, f"/shared/{node}.log"]
            daemons.append(site.popen(line, user="root", on=node))
            output = daemons[-1].stdout
            assert output
            assert output.readline() == "listening\n"
        yield logs
    finally:
        for daemon, node in zip(daemons, site.nodes, strict=False):
            daemon.kill()
            daemon.wait()
            site.run(["rm", "-f", LOG], user="root", on=node)


def lines(file: Path) -> str:
    """Return what stages logged. Slurm's daemons may log there, too."""
    text = file.read_text() if file.exists() else ""
    return "".join(line for line in text.splitlines(keepends=True) if "slurm-stage: job=" in line)


def comment(site: Site, job: str) -> str:
    """Return the comment of a job that has ended, as anyone sees it."""
    shown = site.run(["scontrol", "show", "job", job]).stdout
    found = re.search(r"^   Comment=(.*)$", shown, re.M)
    return found[1].strip() if found else ""


def test_how_a_stage_ended_is_seen_without_the_jobs_output(site: Site) -> None:
    with logging(site) as logs:
        good = site.sbatch("true", "-N2", "-wn[1-2]", "--stage=/shared/a:/nvme/a")
        assert good.wait().exit_code == "0:0"
        bad = site.sbatch(
            "true", "-N2", "-wn[1-2]", "--comment=my run", "--stage=/shared/none:/nvme/b"
        )
        assert bad.wait().exit_code == "4:0"
        # No part of a URL that may be a secret is told to others.
        secret = site.sbatch("#STAGE https://h/x?sig=s3cret:/nvme/x\ntrue", "-wn1")
        assert secret.wait().exit_code == "2:0"
        forbidden = site.sbatch("#STAGE /shared/a:/elsewhere/a\ntrue", "-wn1")
        assert forbidden.wait().exit_code == "3:0"
        hub = {"HF_ENDPOINT": "https://alice:s3cret@host"}
        with site.policy(f'{POLICY}[source]\nallow = ["hf://"]\n'):
            endpoint = site.sbatch("#STAGE hf://org/model:/nvme/x\ntrue", "-wn1", env=hub)
            assert endpoint.wait().exit_code == "3:0", endpoint.output()
        told = [lines(file) for file in logs]
    assert comment(site, good.id) == ""
    assert comment(site, bad.id) == f"my run; slurm-stage: failed with code 4: {MISSING}"
    why = (
        "/elsewhere/a is not beneath a folder that this site stages to; choose a destination "
        "beneath /nvme"
    )
    noted = comment(site, secret.id)
    assert noted.startswith(
        "slurm-stage: failed with code 2: the source has a '?' or '#': what follows "
    )
    controller = (site.base / "log/slurmctld.log").read_text(errors="replace")
    everything = [noted, comment(site, endpoint.id), told[0], controller, secret.output()]
    assert not [text for text in everything if "s3cret" in text]
    assert comment(site, forbidden.id) == f"slurm-stage: failed with code 3: {why}"

    def line(job: Job, size: int, code: str) -> str:
        found = rf"<14>slurm-stage: job={job.id} user=alice bytes={size} seconds=\d+\.\d{{3}} "
        return rf"{found}code={code}\n"

    both = line(good, 3_000_000, "0") + line(bad, 0, re.escape(f"4: {MISSING}"))
    both_here = both + line(secret, 0, "2: the source has .*")
    both_here += line(forbidden, 0, re.escape(f"3: {why}"))
    assert re.fullmatch(both_here + line(endpoint, 0, "3: HF_ENDPOINT is not the URL .*"), told[0])
    assert re.fullmatch(both, told[1])
    assert told[2:] == ["", ""]


def test_the_site_chooses_what_is_told(site: Site) -> None:
    policy = f'{POLICY}[report]\nsyslog = false\njob_comment = "all"\n'
    with site.policy(policy), logging(site) as logs:
        job = site.sbatch("true", "-N1", "--array=1-2", "--stage=/shared/a:/nvme/a")
        assert job.wait().exit_code == "0:0"
        assert [lines(file) for file in logs] == ["", "", "", ""]
    for task in (1, 2):
        # Each has its own: Slurm takes the number of an array for all of its jobs.
        assert re.match(
            r"slurm-stage: /nvme/a: (2\.9 MiB from |current )", comment(site, f"{job.id}_{task}")
        )
    with site.policy(policy.replace("all", "none")):
        job = site.sbatch("true", "-N1", "--stage=/shared/none:/nvme/a")
        assert job.wait().exit_code == "4:0"
    assert comment(site, job.id) == ""
