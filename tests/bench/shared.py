"""``python -m tests.bench.shared``: a disk that all nodes see is filled once, by all of them.

The nodes are ranks of one machine; the disk is an ext4 on a loop device, which counts what it is
given to write. Prints the medians of each way. Needs root, to mount the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.bench import OURS
from tests.bench.moosefs import NETWORK, RIGHTS, Filesystem
from tests.cluster.site import REPOSITORY
from tests.support.disks import ext4

#: Files of the folder, their bytes, and how many are in one of its folders.
FILES, SMALL, TOGETHER = 8000, 20_000, 100
CP = "cp -a"
#: What nodes do that don't know that all see the disk.
EACH = "cp -a on every node"
Results = list[dict[str, Any]]


def stage(source: object, **options: object) -> dict[str, object]:
    """Return the way of this project."""
    return {"source": str(source), "options": options}


def shell(line: str, *, alone: bool = False) -> dict[str, object]:
    """Return a way of the shell's."""
    return {"line": line, "alone": alone}


def run_ranks(
    folder: Path, disk: Path | Filesystem, ways: dict[str, dict[str, object]], *, ranks: int,
    rounds: int, environment: dict[str, str] | None = None, log: str = "",
) -> Results:  # fmt: skip
    """Return the results of all runs except the warm-up."""
    made = Filesystem(disk, [[]], [], []) if isinstance(disk, Path) else disk
    content = {"folder": str(folder), "ways": ways, "rounds": rounds, "log": log}
    plan = folder / "plan.json"
    plan.write_text(json.dumps(made._asdict() | content, default=str))
    mpi = {
        "OMPI_MCA_mpi_yield_when_idle": "1",  # as in this project's ranks
        "PYTHONPATH": f"{REPOSITORY}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    if made.servers:  # where mpiexec listens, for ranks of other networks
        mpi["PMIX_MCA_ptl_base_if_include"] = NETWORK
    program = [sys.executable, "-m", "tests.bench.shared_ranks", str(plan)]
    line = [*(RIGHTS if made.servers else ()), f"{Path(sys.executable).parent}/mpiexec"]
    line.append("--oversubscribe")
    for rank in range(ranks):
        entered = made.entered[rank % len(made.entered)]
        line += [*([":"] if rank else []), "-n", "1", *entered, *program]
    done = subprocess.run(
        line, env=os.environ | mpi | (environment or {}), cwd=REPOSITORY, check=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    # The ranks print what they tell of their progress, too.
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"round"')]
    return [result for result in found if result["round"]]


def table(results: Results, title: str) -> Table:
    """Return a table of medians. Ratios are within a round, so that the machine's drift cancels."""
    shown = Table(title=title, title_justify="left")
    for header in (
        "way",
        "seconds",
        "ours / it",
        "synced",
        "ours / it",
        "processors",
        "written",
        "received",
        "asked",
    ):
        shown.add_column(header, justify="left" if header == "way" else "right")
    by_way: dict[str, Results] = {}
    for result in results:
        by_way.setdefault(result["way"], []).append(result)
    ours = next(runs for name, runs in by_way.items() if name.startswith(OURS))
    for name, runs in by_way.items():
        cells = [name]
        for figure in ("seconds", "synced"):
            ratios = [mine[figure] / one[figure] for mine, one in zip(ours, runs, strict=True)]
            cells += [
                f"{statistics.median(one[figure] for one in runs):.2f} s",
                f"{statistics.median(ratios):.2f}",
            ]
        cells.append(f"{statistics.median(one['cpu'] for one in runs):.2f} s")
        for figure in ("written", "received"):
            cells.append(f"{statistics.median(one[figure] for one in runs) / 1e6:.1f} MB")
        cells.append(f"{statistics.median(one['asked'] for one in runs):.0f}")
        shown.add_row(*cells)
    return shown


def make_files(folder: Path) -> None:
    """Write the small files."""
    block = os.urandom(1 << 20)
    for number in range(FILES):
        place = folder / f"{number // TOGETHER}"
        if not number % TOGETHER:
            place.mkdir(parents=True)
        at = number % 1000
        (place / f"{number}").write_bytes(block[at : at + SMALL])


def main() -> int:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=1 << 30, help="bytes of the large file")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "build" / "shared.json")
    options = parser.parse_args()
    with ext4(str((2 + options.ranks) * options.size + (1 << 30))) as disk:
        folder = disk.parent
        make_files(folder / "source")
        large = folder / "large"
        with large.open("wb") as file:
            for _ in range(options.size >> 20):
                file.write(os.urandom(1 << 20))
        os.sync()
        kept = {}
        for title, source in (
            (f"{FILES} files of {SMALL} bytes", folder / "source"),
            (f"one file of {options.size} bytes", large),
        ):
            ways = {
                OURS: stage(source),
                CP: shell(f'{CP} {source} "$COPY"', alone=True),
                EACH: shell(f'{CP} {source} "$COPY.$RANK"'),
            }
            kept[title] = run_ranks(folder, disk, ways, ranks=options.ranks, rounds=options.rounds)
            Console().print(table(kept[title], f"{title}, {options.ranks} nodes"))
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(kept, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
