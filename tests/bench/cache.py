"""``python -m tests.bench.cache``: the costs of a node's cache of 10,000 files and of one of 10.

Makes both on a disk of this machine, and measures in turn, for several rounds, a survey of one
file, root's part before a job and at its end, and ``stagectl status``. Needs root, for root's
parts. The figures are saved as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from stager.base.options import Options, Validate
from stager.fs.files import CopyFacts
from stager.request.items import StageItem
from stager.source.posix import look_at_source
from stager.store.cache import open_cache
from stager.store.record import VERSION, Record
from stager.store.validity import survey
from tests.cluster.site import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Callable

FEW, MANY = 10, 10_000
SURVEYS = 200
STAGECTL = Path(sys.executable).with_name("stagectl")


class Node:
    """A node's disk that holds ``count`` staged files of 100 bytes."""

    def __init__(self, folder: Path, count: int) -> None:
        self.nodes = folder / str(count)
        self.disk = self.nodes / "node1"
        self.disk.mkdir(parents=True)
        self.cache = open_cache(str(self.disk), os.getuid())
        self.source = folder / f"source-{count}"
        self.source.write_bytes(b"x" * 100)
        for number in range(count):
            self._stage(f"/file{number:05}", number)
        self.config = self.nodes / "stage.toml"
        self.config.write_text(f'roots = ["{self.disk}"]\n')

    def _stage(self, name: str, at: int) -> None:
        shutil.copy(self.source, f"{self.disk}{name}")
        there = os.stat(f"{self.disk}{name}")
        copy = CopyFacts(there.st_size, there.st_mtime_ns, there.st_ino, there.st_uid)
        source = look_at_source(str(self.source)).facts
        record = Record(
            version=VERSION, source=str(self.source), destination=name, source_facts=source,
            copy_facts=copy, digest="0" * 32, staged_at=at, used_at=at, used_by_job=17,
            lifetime="cache", pinned=False,
        )  # fmt: skip
        Path(self.cache.record_path(name)).write_text(record.to_json())

    def survey(self) -> None:
        """Do what a rank does for one file that is current."""
        item = StageItem(str(self.source), "/file00003", "", Options(validate=Validate.STAT))
        for _ in range(SURVEYS):
            cache = open_cache(str(self.disk), os.getuid())
            source = look_at_source(item.source)
            answer = survey(item, f"{self.disk}{item.destination}", source, cache, "node1")
            assert answer.current

    def prepare(self) -> None:
        """Do root's part before a job."""
        _run(sys.executable, "-I", "-m", "stager.node.prolog", f"--config={self.config}", "0")

    def epilog(self) -> None:
        """Do root's part at a job's end; this reads all records, for the figures."""
        _run(sys.executable, "-I", "-m", "stager.node.tidy", "--usage", f"--config={self.config}")

    def status(self) -> None:
        """Run ``stagectl status`` as a user."""
        _run(STAGECTL, "status", f"--config={self.nodes}/none", "--local-root", self.nodes)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)


def seconds_of(act: Callable[[], None]) -> float:
    """Return the seconds that ``act`` takes."""
    begun = time.monotonic()
    act()
    return time.monotonic() - begun


def measure(rounds: int) -> dict[str, dict[int, list[float]]]:
    """Return the seconds of each round, by action and number of files."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        nodes = {count: Node(Path(folder), count) for count in (FEW, MANY)}
        names = ("survey", "prepare", "epilog", "status")
        found: dict[str, dict[int, list[float]]] = {name: {FEW: [], MANY: []} for name in names}
        for _ in range(rounds):
            for name in names:
                for count, node in nodes.items():
                    found[name][count].append(seconds_of(getattr(node, name)))
        found["survey"] = {
            count: [seconds / SURVEYS for seconds in of] for count, of in found["survey"].items()
        }
        return found


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=REPOSITORY / "build" / "cache.json")
    options = parser.parse_args()
    found = measure(options.rounds)
    table = Table(title="medians", title_justify="left")
    for header in ("what", f"{FEW} files", f"{MANY} files", "ratio"):
        table.add_column(header, justify="left" if header == "what" else "right")
    for name, of in found.items():
        ratio = statistics.median(many / few for few, many in zip(of[FEW], of[MANY], strict=True))
        medians = (f"{1000 * statistics.median(of[count]):.2f} ms" for count in (FEW, MANY))
        table.add_row(name, *medians, f"{ratio:.2f}")
    Console().print(table)
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
