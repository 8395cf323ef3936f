"""``make bench``: this project and other ways to put a file on every node of a cluster.

Starts the test cluster, runs every tool in turn for several rounds in one job, and prints the
medians of whole commands, and of each round's ratios to this project's time. The figures are saved
as JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tests.cluster.site import PREFIX, PYTHON, REPOSITORY, SOURCE, STAGECTL, Site

if TYPE_CHECKING:
    from tests.cluster.cluster import NvmeKind

DATA, COPY = "/shared/bench.data", "/nvme/bench.data"
HERE = Path(__file__).parent
OURS = "slurm-stage"
#: Prints the seconds that the ranks needed from the opened files to the published copies.
ALONE = "import json, sys; print('alone', sum(i['seconds'] for i in json.load(sys.stdin)['items']))"


def tools(nodes: int, size: int, kind: NvmeKind) -> dict[str, dict[str, str]]:
    """Return the shell commands of each tool: an untimed preparation and the timed run."""
    each = f"srun -N{nodes} -n{nodes} --ntasks-per-node=1"
    empty = f"{each} bash -c 'rm -f {COPY}; sync -f /nvme'"
    # As in this project's ranks: where there are more ranks than cores, waiting ranks yield.
    mpi = f"export OMPI_MCA_mpi_yield_when_idle=1; {each} --mpi=pmix"
    flush = "conv=fsync"
    # The time of the slowest node, from dd's output.
    slowest = "sed -n 's/.*copied, \\([0-9.]*\\) s.*/\\1/p' | sort -n | tail -1 | sed 's/^/alone /'"
    found = {
        OURS: f'{STAGECTL} stage --json {DATA}:{COPY} | {PYTHON} -c "{ALONE}"',
        "sbcast": f"sbcast --force {DATA} {COPY}",
        "sbcast -s64m -F4": f"sbcast --force -s 64m -F 4 {DATA} {COPY}",
        "cp on every node": f"{each} cp {DATA} {COPY}",
        "cp on every node, fsync": f"{each} dd if={DATA} of={COPY} bs=4M {flush}",
        "C MPI_Bcast loop": f"{mpi} {PREFIX}/bench/bcast {size} | sed 's/^/alone /'",
        "plain O_DIRECT write": (
            f"{each} dd if=/dev/zero of={COPY} bs=4M count={size >> 22} oflag=direct {flush} 2>&1"
            f" | {slowest}"
        ),
    }
    if kind == "tmpfs":
        del found["plain O_DIRECT write"]
    if shutil.which("rsync"):
        found["rsync on every node"] = f"{each} rsync {DATA} {COPY}"
    return {
        name: {"before": empty, "run": f"set -o pipefail; {line}"} for name, line in found.items()
    }


def run_rounds(
    site: Site, commands: dict[str, dict[str, str]], rounds: int
) -> list[dict[str, Any]]:
    """Return the results of all runs except the warm-up."""
    nodes = len(site.nodes)
    plan = {"rounds": rounds, "tools": commands}
    site.shared("plan.json").write_text(json.dumps(plan))
    shutil.copy(HERE / "rounds.py", site.shared("rounds.py"))
    job = site.sbatch(f"{PYTHON} /shared/rounds.py /shared/plan.json", f"-N{nodes}")
    state = job.wait(timeout=3600)
    results = [json.loads(line) for line in job.output().splitlines() if line.startswith("{")]
    failed = [result for result in results if result["code"]]
    if state.exit_code != "0:0" or failed:
        raise SystemExit(f"{state}\n{failed or job.output()}")
    return [result for result in results if result["round"]]


def table(results: list[dict[str, Any]], title: str) -> Table:
    """Return a table of medians. Ratios are within a round, so that the machine's drift cancels."""
    shown = Table(title=title, title_justify="left")
    for header in ("tool", "whole command", "ours / it", "alone", "ours / it, alone"):
        shown.add_column(header, justify="left" if header == "tool" else "right")
    by_tool: dict[str, dict[int, dict[str, Any]]] = {}
    for result in results:
        by_tool.setdefault(result["tool"], {})[result["round"]] = result
    for name, runs in by_tool.items():
        cells = [name]
        for figure in ("seconds", "alone"):
            values = {number: run[figure] for number, run in runs.items()}
            if None in values.values():
                cells += ["", ""]
                continue
            ratios = [by_tool[OURS][number][figure] / values[number] for number in values]
            cells += [f"{statistics.median(values.values()):.2f} s",
                      f"{statistics.median(ratios):.2f}"]  # fmt: skip
        shown.add_row(*cells)
    return shown


def main() -> int:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--nvme", nargs="+", default=["tmpfs", "folder"])
    parser.add_argument("--size", type=int, default=1 << 30, help="bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=REPOSITORY / "build" / "bench.json")
    options = parser.parse_args()
    kept: list[dict[str, Any]] = []
    console = Console()
    for nodes in options.nodes:
        for kind in options.nvme:
            with Site(nodes, kind) as site:
                site.run(f"head -c {options.size} /dev/urandom > {DATA}", timeout=600)
                site.run(["mkdir", f"{PREFIX}/bench"], user="root")
                line = [
                    "mpicc",
                    "-O2",
                    "-o",
                    f"{PREFIX}/bench/bcast",
                    f"{SOURCE}/tests/bench/bcast.c",
                ]
                site.run(line, user="root")
                results = run_rounds(site, tools(nodes, options.size, kind), options.rounds)
            kept += [{**result, "nodes": nodes, "nvme": kind} for result in results]
            console.print(table(results, f"{options.size} bytes, {nodes} nodes, {kind}"))
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(kept, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
