"""A folder to hosts without Slurm, over ssh: beside a fan-out of rsync.

``python -m tests.bench.hosts`` runs several rounds of both in turn on nodes of the test cluster, by
their sshd, and prints medians and ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.bench.bench import OURS, table
from tests.cluster.site import PYTHON, STAGECTL, Site

HERE = Path(__file__).parent
FOLDER, COPY = "/shared/bench.folder", "/nvme/bench.folder"
FAN_OUT = "rsync fan-out over ssh"
#: Bytes of a file. The wheels of PyTorch 2.13 (for CPUs), transformers 5.24 and all that they need
#: have 20,239 files, 44,629 bytes each on average.
SIZE = 45_000
#: Makes the folder: files of random bytes, 100 in each of its folders.
MAKE = """
import os
for number in range({files}):
    folder = f"{folder}/{{number // 100}}"
    os.makedirs(folder, exist_ok=True)
    with open(f"{{folder}}/{{number}}", "wb") as file:
        file.write(os.urandom({size}))
"""


def ways(nodes: list[str]) -> dict[str, dict[str, str]]:
    """Return the shell commands of each way: an untimed preparation and the timed run."""
    hosts = " ".join(nodes)
    forget = f"for host in {hosts}; do ssh $host rm -rf {COPY}; done"
    ours = f"{STAGECTL} stage --hosts {','.join(nodes)} {FOLDER}:{COPY}"
    return {
        OURS: {"before": forget, "run": ours},
        f"{OURS}, nothing changed": {"before": "true", "run": ours},
        FAN_OUT: {"before": forget, "run": f"{PYTHON} /shared/fan_out.py {FOLDER} {COPY} {hosts}"},
    }


def run_rounds(site: Site, rounds: int) -> list[dict[str, Any]]:
    """Return the results of all runs on the first node except the warm-up."""
    plan = {"rounds": rounds, "tools": ways(site.nodes)}
    site.shared("plan.json").write_text(json.dumps(plan))
    for name in ("rounds.py", "fan_out.py"):
        shutil.copy(HERE / name, site.shared(name))
    line = [PYTHON, "/shared/rounds.py", "/shared/plan.json"]
    told = site.run(line, on=site.nodes[0], timeout=3600).stdout
    results = [json.loads(line) for line in told.splitlines()]
    if failed := [result for result in results if result["code"]]:
        raise SystemExit(str(failed))
    for node in site.nodes:
        site.run(["diff", "-r", FOLDER, COPY], on=node)
    return [result for result in results if result["round"]]


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--nvme", choices=["tmpfs", "folder"], default="tmpfs")
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--size", type=int, default=SIZE, help="bytes of each file")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with Site(options.nodes, options.nvme) as site, site.sshd(*site.nodes):
        make = MAKE.format(files=options.files, folder=FOLDER, size=options.size)
        site.run([PYTHON, "-c", make])
        for node in site.nodes:
            # Hides root's part, which would make the nodes ready only at the start of a job.
            site.run("mount -t tmpfs -o mode=755 none /run/slurm-stage", user="root", on=node)
            site.run([STAGECTL, "prepare"], on=node)
        results = run_rounds(site, options.rounds)
    where = f"{options.files} files of {options.size} bytes, {options.nodes} nodes, {options.nvme}"
    Console().print(table(results, where))
    return 0


if __name__ == "__main__":
    sys.exit(main())
