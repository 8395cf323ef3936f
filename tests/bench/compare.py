"""Compare this checkout with another revision of it, in one job on the test cluster.

``python -m tests.bench.compare REVISION`` installs both, runs each case with both in turn for
several rounds, and prints medians and the median ratio of the times within a round, so that a
change of the machine's speed cancels. A ratio above 1 means that this checkout is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tests.bench.bench import run_rounds
from tests.cluster.site import PREFIX, REPOSITORY, Site

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Where the other revision is installed.
OTHER = "/opt/other"
PREFIXES = {"this": PREFIX, "other": OTHER}
FILE, SMALL, FOLDER = "/shared/compare.file", "/shared/compare.small", "/shared/compare.folder"
#: Where copies are: on each node's disk, and where all nodes see them.
EACH, ALL = "/nvme", "/shared/compare"
#: A folder of files of three bytes, each of which gets a directive, and their number.
MANY, DIRECTIVES = "/shared/compare.many", 300
#: Bytes of the smallest and of the largest file in the folder.
SMALLEST, LARGEST = 100, 40_000


def make_folder(folder: Path, files: int) -> None:
    """Fill ``folder`` with ``files`` files of random sizes, 100 in each of its folders."""
    dice = random.Random(1)
    for number in range(files):
        if number % 100 == 0:
            inner = folder / f"part-{number // 100:04}"
            inner.mkdir(parents=True)
        (inner / f"{number:06}").write_bytes(os.urandom(dice.randint(SMALLEST, LARGEST)))


def install_other(site: Site, revision: str) -> None:
    """Install ``revision`` of this repository beneath OTHER."""
    source = site.base / "other"
    source.mkdir()
    archive = subprocess.run(
        ["git", "-C", str(REPOSITORY), "archive", revision], capture_output=True, check=True
    )
    subprocess.run(["tar", "-x", "-C", str(source)], input=archive.stdout, check=True)
    line = ["/cluster/other/packaging/install", OTHER]
    environment = {"PYTHON": "/usr/bin/python3"}
    site.run(line, user="root", env=environment, host_net=True, timeout=600)


def cases(nodes: int) -> Iterator[tuple[str, str, str, str]]:
    """Yield each case: its name, its source, where its copy is, and the commands before each run.

    In these, braces stand for the copy.
    """
    forget = f"srun -N{nodes} -n{nodes} --ntasks-per-node=1 rm -rf {{}}"
    yield "a large file", FILE, EACH, forget
    yield "a small file, current", SMALL, EACH, "true"
    yield "a folder", FOLDER, EACH, forget
    yield "a folder, nothing changed", FOLDER, EACH, "true"
    yield "a folder, one file changed", FOLDER, EACH, f"date +%N >{FOLDER}/part-0000/000000"
    yield "a folder that all nodes see", FOLDER, ALL, "rm -rf {}"
    yield f"{DIRECTIVES} directives", MANY, EACH, forget


def values(source: str, destination: str) -> str:
    """Return what is staged, in the language of the shell."""
    if source != MANY:
        return f"{source}:{destination}"
    return f"$(for i in $(seq 100 {99 + DIRECTIVES}); do echo {source}/$i:{destination}/$i; done)"


def commands(nodes: int, versions: Sequence[str], chosen: str) -> dict[str, dict[str, str]]:
    """Return the shell commands of the ``chosen`` case, or of all, with ``versions`` in order."""
    return {
        f"{case}|{version}": {
            "before": before.format(copy),
            "run": f"{prefix}/bin/stagectl stage {values(source, copy)}",
        }
        for case, source, root, before in cases(nodes)
        if chosen in ("", case)
        for version in versions
        for prefix in (PREFIXES[version],)
        for copy in (f"{root}/{version}.{Path(source).name}",)
    }


def table(results: list[dict[str, Any]], title: str) -> Table:
    """Return a table of both versions' medians and of the median ratio within a round."""
    shown = Table(title=title, title_justify="left")
    for header in ("case", "this", "other", "this / other", "least to most"):
        shown.add_column(header, justify="left" if header == "case" else "right")
    times: dict[str, dict[str, dict[int, float]]] = {}
    for result in results:
        case, _, version = result["tool"].partition("|")
        times.setdefault(case, {}).setdefault(version, {})[result["round"]] = result["seconds"]
    for case, by_version in times.items():
        this, other = (by_version[version] for version in PREFIXES)
        ratios = [this[number] / other[number] for number in this]
        medians = [f"{statistics.median(one.values()):.3f} s" for one in (this, other)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        shown.add_row(case, *medians, f"{statistics.median(ratios):.3f}", spread)
    return shown


def main() -> int:
    """Run the comparison and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", help="what git knows the other version by")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--size", type=int, default=1 << 30, help="bytes of the large file")
    parser.add_argument("--files", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=4, help="in each order")
    names = [case for case, *_ in cases(1)]
    parser.add_argument("--case", choices=names, default="", help="this case alone")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "build" / "compare.json")
    options = parser.parse_args()
    with Site(options.nodes, "tmpfs") as site:
        install_other(site, options.revision)
        site.run(["mkdir", "-m", "1777", ALL], user="root")
        site.write_policy(f'roots = ["{EACH}", "{ALL}"]\n')
        make_folder(site.shared("compare.folder"), options.files)
        site.run(["chown", "-R", "alice:", FOLDER], user="root")
        site.run(f"head -c {options.size} /dev/urandom >{FILE}", timeout=600)
        site.run(f"head -c 1000000 /dev/urandom >{SMALL}")
        site.run(
            f"mkdir {MANY}; for i in $(seq 100 {99 + DIRECTIVES}); do printf $i >{MANY}/$i; done"
        )
        results: list[dict[str, Any]] = []
        # The second of two finds the source in the page cache of the first: each is second once.
        for turn, versions in enumerate((tuple(PREFIXES), tuple(PREFIXES)[::-1])):
            chosen = commands(options.nodes, versions, options.case)
            found = run_rounds(site, chosen, options.rounds)
            results += [{**one, "round": one["round"] + turn * options.rounds} for one in found]
    title = f"this checkout beside {options.revision}, {options.nodes} nodes, tmpfs"
    Console().print(table(results, title))
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
