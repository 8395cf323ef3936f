"""A compressed file that arrives decompressed, beside moving it alone and decompressing it alone.

``python -m tests.bench.decompress`` runs several rounds of each in turn, in one job on the test
cluster. It prints medians, and the ratio of ``,decompress`` to the slower of the two parts within a
round. All nodes share the cores of one machine: where these are always busy, the time is the sum of
both parts. ``--wire`` holds each node to a rate, as a network does; then the two can overlap.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tests.bench.bench import ALONE, OURS, run_rounds, table
from tests.cluster.site import PYTHON, STAGECTL, Site

if TYPE_CHECKING:
    from pathlib import Path

DATA, COPY = "/shared/bench.data", "/nvme/bench.data"
MIB = 1 << 20
#: MiB of the data that are different; zstd looks back less far.
_PERIOD = 32
MOVING, DECODING = "moving the compressed file alone", "decompressing alone, on every node"
#: By suffix, what compresses a file to the standard output, and what does the reverse.
FORMATS = {"zst": ("zstd -qcT0", "zstd -dqc"), "gz": ("gzip -c", "gzip -dc")}


def make_data(path: Path, size: int) -> None:
    """Write ``size`` bytes: in turn a MiB that cannot be compressed and a MiB of random words."""
    dice = random.Random(0)
    words = [dice.randbytes(dice.randint(1, 9)).hex() for _ in range(5000)]
    text = " ".join(dice.choices(words, k=_PERIOD * MIB // 18)).encode()
    pieces = [
        dice.randbytes(MIB) if number % 2 else text[number // 2 * MIB : (number // 2 + 1) * MIB]
        for number in range(_PERIOD)
    ]
    block = b"".join(pieces)
    with path.open("wb") as file:
        for at in range(0, size, len(block)):
            file.write(block[: size - at])


def ways(nodes: int, suffix: str) -> dict[str, dict[str, str]]:
    """Return each way's shell commands: untimed preparation, timed command."""
    each = f"srun -N{nodes} -n{nodes} --ntasks-per-node=1"
    forget = f"{each} rm -f {COPY} {COPY}.{suffix}"
    decode = f"{FORMATS[suffix][1]} {COPY}.{suffix} >{COPY}"
    stage = f'{STAGECTL} stage --json {{}} | {PYTHON} -c "{ALONE}"'
    move = stage.format(f"{DATA}.{suffix}:{COPY}.{suffix}")
    slowest = "sort -n | tail -1 | sed 's/^/alone /'"
    found = {
        OURS: (forget, stage.format(f"{DATA}.{suffix}:{COPY},decompress")),
        MOVING: (forget, move),
        DECODING: (
            f"{forget}; {move}",
            f"{each} bash -c 'TIMEFORMAT=%R; time {decode}' 2>&1 | {slowest}",
        ),
        "one after the other": (forget, f"{move} && {each} sh -c '{decode}'"),
    }
    return {
        name: {"before": before, "run": f"set -o pipefail; {line}"}
        for name, (before, line) in found.items()
    }


def hold(site: Site, rate: int) -> None:
    """Let each node send ``rate`` MB a second at most."""
    for node in site.nodes:
        links = json.loads(site.run(["ip", "-json", "link"], user="root", on=node).stdout)
        (device,) = (link["ifname"] for link in links if link["ifname"] != "lo")
        limit = ["rate", f"{8 * rate}mbit", "burst", "1mb", "latency", "50ms"]
        line = ["tc", "qdisc", "add", "dev", device, "root", "tbf", *limit]
        site.run(line, user="root", on=node)


def ratio(results: list[dict[str, Any]], figure: str) -> float:
    """Return the median of ours by the slower of the two parts, within a round."""
    rounds: dict[int, dict[str, float]] = {}
    for result in results:
        rounds.setdefault(result["round"], {})[result["tool"]] = result[figure]
    return statistics.median(
        times[OURS] / max(times[MOVING], times[DECODING]) for times in rounds.values()
    )


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--nvme", choices=["tmpfs", "folder"], default="tmpfs")
    parser.add_argument("--size", type=int, default=3 << 29, help="bytes before compression")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--format", choices=FORMATS, default="zst")
    parser.add_argument("--wire", type=int, default=0, help="MB/s that a node sends; 0: no limit")
    options = parser.parse_args()
    console = Console()
    for nodes in options.nodes:
        with Site(nodes, options.nvme) as site:
            make_data(site.shared("bench.data"), options.size)
            file = f"{DATA}.{options.format}"
            site.run(f"{FORMATS[options.format][0]} {DATA} >{file}", timeout=600)
            compressed = site.shared(f"bench.data.{options.format}").stat().st_size
            if options.wire:
                hold(site, options.wire)
            results = run_rounds(site, ways(nodes, options.format), options.rounds)
        wire = f", {options.wire} MB/s" if options.wire else ""
        title = f"{compressed} bytes of {options.size}, {nodes} nodes, {options.nvme}{wire}"
        console.print(table(results, title))
        by_figure = {figure: ratio(results, figure) for figure in ("seconds", "alone")}
        console.print(
            f"ours / the slower of moving and decompressing: {by_figure['seconds']:.2f} "
            f"whole commands, {by_figure['alone']:.2f} alone"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
