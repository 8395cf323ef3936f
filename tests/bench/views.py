"""``python -m tests.bench.views``: what it costs to make views of what is in a node's store.

Makes a large file and a folder of small ones again by each way, on a disk of this machine as a loop
device and in memory, beside cp. Prints the least of some rounds. Needs root, to mount disks.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table

from stager.fs.clone import Way, fill, link
from stager.fs.files import CREATE, READ_FILE, opened
from tests.cluster.site import REPOSITORY
from tests.support.disks import ext4, tmpfs, xfs

if TYPE_CHECKING:
    from collections.abc import Callable

#: Small files, their bytes, and how many are in a folder.
FILES, SMALL, TOGETHER = 30_000, 4000, 100


class Case(NamedTuple):
    """A way on a kind of disk, and the options by which cp does the same."""

    name: str
    disk: str
    way: Way
    cp: str


CASES = (
    Case("reflink, XFS", "xfs", Way.REFLINK, "--reflink=always"),
    Case("hard link, ext4", "ext4", Way.HARD_LINK, "--link"),
    Case("copy, ext4", "ext4", Way.COPY, "--reflink=never"),
    Case("copy, tmpfs", "tmpfs", Way.COPY, "--reflink=never"),
)
DISKS = {"xfs": xfs, "ext4": ext4, "tmpfs": tmpfs}


class Cost(NamedTuple):
    """Seconds by the clock, and of the processors."""

    seconds: float
    cpu: float


def fill_disk(disk: Path, size: int) -> None:
    """Write what is made again: a file of ``size`` bytes, and the folder."""
    block = os.urandom(1 << 20)
    with (disk / "large").open("wb") as file:
        for _ in range(size >> 20):
            file.write(block)
    for number in range(FILES):
        folder = disk / f"small/{number // TOGETHER}"
        if not number % TOGETHER:
            folder.mkdir(parents=True)
        (folder / str(number)).write_bytes(block[:SMALL])
    os.sync()


def view(way: Way, source: str, target: str) -> None:
    """Make a file again."""
    if way is Way.HARD_LINK:
        assert link(source, target)
        return
    with opened(source, READ_FILE) as one, opened(target, CREATE) as other:
        assert fill(way, one, other) is way


def views(way: Way, disk: Path) -> None:
    """Make all files of the folder again."""
    above, below = f"{disk}/small", f"{disk}/target"
    os.mkdir(below)
    for folder in os.listdir(above):
        os.mkdir(f"{below}/{folder}")
        for name in os.listdir(f"{above}/{folder}"):
            view(way, f"{above}/{folder}/{name}", f"{below}/{folder}/{name}")


def cpu() -> float:
    """Return the seconds that this process, and those that it waited for, had of the processors."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def cost_of(act: Callable[[], object], disk: Path) -> Cost:
    """Return what an action costs, and remove what it made."""
    before, begun = cpu(), time.monotonic()
    act()
    cost = Cost(time.monotonic() - begun, cpu() - before)
    target = disk / "target"
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    os.sync()
    return cost


def measure(case: Case, size: int, rounds: int) -> dict[str, Cost]:
    """Return the least costs of each action."""
    with DISKS[case.disk](str(2 * size + (2 << 30))) as disk:
        fill_disk(disk, size)

        def cp(name: str) -> None:
            subprocess.run(["cp", "-a", case.cp, disk / name, disk / "target"], check=True)

        actions: dict[str, Callable[[], None]] = {
            "file": lambda: view(case.way, f"{disk}/large", f"{disk}/target"),
            "file, cp": lambda: cp("large"),
            "folder": lambda: views(case.way, disk),
            "folder, cp": lambda: cp("small"),
        }
        costs: dict[str, list[Cost]] = {name: [] for name in actions}
        for _ in range(rounds):
            for name, act in actions.items():
                costs[name].append(cost_of(act, disk))
    return {name: Cost(*map(min, zip(*of, strict=True))) for name, of in costs.items()}


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, default=4 << 30, help="bytes of the large file")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "build" / "views.json")
    options = parser.parse_args()
    found = {case.name: measure(case, options.size, options.rounds) for case in CASES}
    title = f"one file of {options.size / (1 << 30):g} GiB, {FILES:,} files of {SMALL:,} bytes"
    table = Table(title=title, title_justify="left")
    for header in ("what", "seconds", "of the processors", "cp", "of the processors"):
        table.add_column(header, justify="left" if header == "what" else "right")
    for name, costs in found.items():
        for what in ("file", "folder"):
            parts = (f"{part:.3f}" for part in (*costs[what], *costs[f"{what}, cp"]))
            table.add_row(f"{name}, {what}", *parts)
    Console().print(table)
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
