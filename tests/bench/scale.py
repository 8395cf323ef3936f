"""``python -m tests.bench.scale``: the test cluster with more and more nodes.

Stages files to all nodes of clusters of several sizes, again when all are current, and while one
node fails in mid-transfer. Prints the seconds from sbatch to the first line of the job's script, or
from the fault to the message that names the node, or to the script of a job that goes on without
that node. Keeps them as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tests.cluster.cluster import USERS
from tests.cluster.processes import is_rank, is_step, processes
from tests.cluster.site import POLICY, REPOSITORY, Site

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cluster.cluster import Job, NvmeKind

SOURCE, COPY = "/shared/scale.data", "/nvme/scale.data"
MIB = 1 << 20
#: Seconds: the limit for a stage that stands still, and how long a job may take to end.
STALL, PATIENCE = 10, 300
NOT_STARTED = "stage: the job's own program was not started"


def submit(site: Site, *options: str) -> tuple[Job, float]:
    """Submit a job that stages to all nodes; return it with the time of its submission."""
    begun = time.time()
    job = site.sbatch(
        "date +STARTED=%s.%N", f"-N{len(site.nodes)}", "-c1", "--no-requeue",
        f"--stage={SOURCE}:{COPY}", *options,
    )  # fmt: skip
    return job, begun


def until_started(site: Site) -> float:
    """Stage to all nodes; return the seconds until the script started."""
    job, begun = submit(site)
    return _started(job) - begun


def _started(job: Job) -> float:
    """Return when the job's script started."""
    state = job.wait(PATIENCE)
    output = job.output()
    if state.exit_code != "0:0":
        raise SystemExit(f"{state}\n{output}")
    return float(output.partition("STARTED=")[2])


def renew(site: Site, size: int) -> None:
    """Give the source a new version of ``size`` bytes."""
    site.run(f"head -c {size} /dev/urandom >{SOURCE}.new && mv {SOURCE}.new {SOURCE}", timeout=600)


def kill_step(site: Site, node: str) -> None:
    """Kill the slurmstepd of the ranks' step on a node."""
    for process in processes(site):
        if process.node == node and is_step(process):
            process.kill()


def cut_off(site: Site, node: str) -> None:
    """Take the node's link down."""
    site.run(["ip", "link", "set", node, "down"], user="root")


def until_told(site: Site, fault: Callable[[Site, str], None]) -> float:
    """Stage, and do the fault to the last node; return the seconds until the job says so."""
    victim = site.nodes[-1]
    job, _ = submit(site)
    _await(lambda: _receives(site, victim))
    begun = time.monotonic()
    fault(site, victim)
    try:
        _await(lambda: NOT_STARTED in job.output())
        seconds = time.monotonic() - begun
    finally:
        site.run(["ip", "link", "set", victim, "up"], user="root")
    state = job.wait(PATIENCE)
    said = f"stage: staging ended early: {victim}: "
    if state.exit_code != "8:0" or said not in job.output():
        raise SystemExit(f"{state}\n{job.output()}")
    site.assert_healthy(PATIENCE)
    if left := site.leftovers():
        raise SystemExit(f"left: {left}")
    return seconds


def until_gone_on(site: Site) -> float:
    """Kill the last node's slurmstepd; return the seconds until the script starts without it."""
    victim = site.nodes[-1]
    job, _ = submit(site, "--stage-tolerate=1")
    _await(lambda: _receives(site, victim))
    begun = time.time()
    kill_step(site, victim)
    seconds = _started(job) - begun
    if f"stage: went on without {victim} (1 of {len(site.nodes)} nodes): " not in job.output():
        raise SystemExit(job.output())
    site.assert_healthy(PATIENCE)
    return seconds


def _receives(site: Site, node: str) -> bool:
    partial = f"/nvme/.slurm-stage/{USERS['alice']}/partial"
    there = (process for process in processes(site) if process.node == node and is_rank(process))
    return any(rank.has_open_beneath(partial) for rank in there)


def _await(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        if time.monotonic() > deadline:
            raise SystemExit("the time is up")
        time.sleep(0.02)


def measure(nodes: int, sizes: list[int], kind: NvmeKind) -> list[dict[str, float]]:
    """Return the figures of a cluster, one dict for each size in MiB."""
    rows: list[dict[str, float]] = []
    with Site(nodes, kind) as site:
        site.write_policy(f"{POLICY}[transfer]\nstall_timeout = {STALL}\n")
        for size in sizes:
            row: dict[str, float] = {"nodes": nodes, "MiB": size}
            renew(site, size * MIB)
            until_started(site)  # a warm-up
            renew(site, size * MIB)
            row["staged"] = until_started(site)
            row["current"] = until_started(site)
            renew(site, size * MIB)
            row["slurmstepd killed"] = until_told(site, kill_step)
            row["link down"] = until_told(site, cut_off)
            row["gone on"] = until_gone_on(site)
            rows.append(row)
            for node in site.nodes:
                with suppress(FileNotFoundError):
                    site.copy(node, COPY).unlink()
    return rows


def table(rows: list[dict[str, float]]) -> Table:
    """Return the figures as a table, times in seconds."""
    shown = Table(title="seconds by number of nodes", title_justify="left")
    for header in rows[0]:
        shown.add_column(header, justify="right")
    for row in rows:
        shown.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    return shown


def main() -> None:
    """Measure all clusters and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 512], help="MiB")
    parser.add_argument("--nvme", default="tmpfs", help="kind of the disks: tmpfs, folder, loop")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "build" / "scale.json")
    options = parser.parse_args()
    rows: list[dict[str, float]] = []
    for nodes in options.nodes:
        rows += measure(nodes, options.sizes, options.nvme)
        options.json.parent.mkdir(exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1))
    Console().print(table(rows))


if __name__ == "__main__":
    main()
