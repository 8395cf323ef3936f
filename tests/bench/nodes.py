"""``python -m tests.bench.nodes``: how long it takes until 1, 2, 4 and 8 nodes have a file.

Measures slurm-stage, sbcast and a copy that each node makes for itself, in turn in one job, from
storage that reads ``--rate`` MB a second for all nodes together (`slow_folder.c`). Keeps the
medians in nodes.json, beside this file. ``--svg FILE`` draws what is in there, and measures
nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path
from typing import TypedDict

from tests.bench.bench import COPY, run_rounds
from tests.bench.plot import curve, document, rule, text
from tests.cluster.site import STAGECTL, Site

HERE = Path(__file__).parent
FIGURES = HERE / "nodes.json"
BEHIND, STORAGE = "/shared/bench.behind", "/shared/bench.storage"
OPTIONS = "allow_other,default_permissions,ro,max_threads=64"
OURS, SBCAST, EACH = "slurm-stage", "sbcast", "each node for itself"
COLOURS = {OURS: "blue", SBCAST: "green", EACH: "orange"}
NODES = (1, 2, 4, 8)
MB, MIB = 10**6, 1 << 20
#: KiB.
READ_AHEAD = 8192

#: Of the plot, in pixels.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 740, 320, 48, 560, 40, 270


class Figures(TypedDict):
    """The file's size, the storage's rate in MB/s, and each way's seconds by number of nodes."""

    MiB: int
    rate: int
    seconds: dict[str, list[float]]


def ways(nodes: int) -> dict[str, dict[str, str]]:
    """Return each way's shell commands: untimed preparation, timed command."""
    each = f"srun -N{nodes} -n{nodes} --ntasks-per-node=1"
    file = f"{STORAGE}/data"
    found = {
        OURS: f"{STAGECTL} stage {file}:{COPY}",
        SBCAST: f"sbcast --force {file} {COPY}",
        EACH: f"{each} cp {file} {COPY}",
    }
    return {name: {"before": f"{each} rm -f {COPY}", "run": line} for name, line in found.items()}


def mount(site: Site, rate: int) -> None:
    """Show BEHIND at STORAGE on each node, as if all were clients of one storage."""
    flags = ["-O2", "-I/usr/include/fuse3", str(HERE / "slow_folder.c"), "-lfuse3"]
    subprocess.run(["gcc", "-o", str(site.shared("slow_folder")), *flags], check=True)
    site.run(["mkdir", STORAGE])
    server = ["/shared/slow_folder", BEHIND, STORAGE, "0", OPTIONS, str(rate), "/shared/clock"]
    # As much as clients of network filesystems read ahead, without which sbcast would be slower.
    ahead = f"echo {READ_AHEAD} >/sys/class/bdi/$(mountpoint -d {STORAGE})/read_ahead_kb"
    for node in site.nodes:
        site.run(server, user="root", on=node)
        site.run(ahead, user="root", on=node)


def measure(size: int, rate: int, rounds: int) -> Figures:
    """Return the medians of all ways on all numbers of nodes."""
    seconds: dict[str, list[float]] = {name: [] for name in COLOURS}
    for nodes in NODES:
        with Site(nodes, "tmpfs") as site:
            site.run(f"mkdir {BEHIND} && head -c {size} /dev/urandom >{BEHIND}/data", timeout=600)
            mount(site, rate * MB)
            results = run_rounds(site, ways(nodes), rounds)
        for name, found in seconds.items():
            runs = [result["seconds"] for result in results if result["tool"] == name]
            found.append(round(statistics.median(runs), 2))
        print(nodes, {name: found[-1] for name, found in seconds.items()}, flush=True)
    return {"MiB": size // MIB, "rate": rate, "seconds": seconds}


def svg(figures: Figures) -> str:
    """Draw the seconds by number of nodes, each line with its name at its end."""
    longest = max(value for found in figures["seconds"].values() for value in found)
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100) if longest / step <= 6)
    highest = step * -(-longest // step)

    def x(nodes: float) -> float:
        return LEFT + (RIGHT - LEFT) * nodes / NODES[-1]

    def y(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * value / highest

    title = f"Seconds until all nodes have a file of {figures['MiB']} MiB"
    parts = [text(LEFT, 20, title, "start", "title")]
    for value in range(0, int(highest) + 1, step):
        parts += [
            rule(LEFT, y(value), RIGHT, y(value)),
            text(LEFT - 8, y(value) + 4, f"{value}", "end"),
        ]
    for nodes in NODES:
        parts += [
            rule(x(nodes), BOTTOM, x(nodes), BOTTOM + 4),
            text(x(nodes), BOTTOM + 18, f"{nodes}"),
        ]
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 38, "nodes"))
    for name, found in figures["seconds"].items():
        points = [(x(nodes), y(value)) for nodes, value in zip(NODES, found, strict=True)]
        parts.append(curve(points, COLOURS[name]))
        words = f"{name}: {found[-1]:.1f} s"
        parts.append(text(RIGHT + 8, points[-1][1] + 4, words, "start"))
    return document(WIDTH, HEIGHT, title, parts)


def main() -> None:
    """Measure, or draw what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=256 * MIB, help="bytes")
    parser.add_argument("--rate", type=int, default=100, help="MB/s of the storage")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--svg", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.svg:
        options.svg.write_text(svg(json.loads(FIGURES.read_text())))
    else:
        figures = measure(options.size, options.rate, options.rounds)
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
