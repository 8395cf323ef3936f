"""``python -m tests.bench.partial``: staging to the 3 of 8 nodes that lack the file.

Compares it with 3 nodes alone and with all 8. tests/cluster asserts the bytes on the network; this
measures the time of the transfer alone, as medians of paired rounds, saved as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.cluster.site import REPOSITORY, STAGECTL, Site

WISH = "/shared/bench.data:/nvme/bench.data"
NODES, LACKING = 8, ("n6", "n7", "n8")
CASES = ("3 of 8 lack it", "3 nodes, none has it", "8 nodes, none has it")


def stage(site: Site, *options: str) -> float:
    """Return the seconds of the transfer in a job."""
    job = site.sbatch(f"{STAGECTL} stage --json {WISH}", *options)
    state = job.wait(timeout=600)
    if state.exit_code != "0:0":
        raise SystemExit(f"{state}\n{job.output()}")
    (item,) = json.loads(job.output())["items"]
    return float(item["seconds"])


def run_round(site: Site) -> dict[str, float]:
    """Run each case once, on disks prepared for it."""
    site.empty_disks()
    few = stage(site, f"-N{len(LACKING)}", "-w", ",".join(LACKING))
    site.empty_disks()
    everywhere = stage(site, f"-N{NODES}")
    for node in LACKING:
        site.copy(node, "/nvme/bench.data").unlink()
    return dict(zip(CASES, (stage(site, f"-N{NODES}"), few, everywhere), strict=True))


def main() -> int:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1 << 30, help="bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=REPOSITORY / "build" / "partial.json")
    options = parser.parse_args()
    with Site(NODES, "tmpfs") as site:
        site.run(f"head -c {options.size} /dev/urandom > /shared/bench.data", timeout=600)
        run_round(site)  # warms up
        rounds = [run_round(site) for _ in range(options.rounds)]
    shown = Table(title=f"{options.size} bytes, tmpfs, transfer alone", title_justify="left")
    for header in ("case", "median", "first / it"):
        shown.add_column(header, justify="left" if header == "case" else "right")
    for case in CASES:
        ratio = statistics.median(times[CASES[0]] / times[case] for times in rounds)
        median = statistics.median(times[case] for times in rounds)
        shown.add_row(case, f"{median:.2f} s", f"{ratio:.2f}")
    Console().print(shown)
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(rounds, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
