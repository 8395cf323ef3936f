"""Ways to put a Python environment of tens of thousands of files on every node.

``python -m tests.bench.trees`` runs several rounds of each way in turn, in one job on the test
cluster, and prints medians and ratios within a round. Packages come from pip's package index.

The test cluster's shared folder is a local disk. `slow_folder.c` adds the latency of remote storage
to it: ``--latency`` passes before each look-up, listing, open and read is answered.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from tests.bench.bench import OURS, run_rounds, table
from tests.cluster.site import PYTHON, STAGECTL, Site

HERE = Path(__file__).parent
#: Packages whose environment has more than 20,000 files.
PACKAGES = ("numpy", "scipy", "pandas", "matplotlib", "scikit-learn", "sympy", "jupyterlab")
ENVIRONMENT, COPY, LOCAL = "/shared/bench.env", "/nvme/bench.env", "/nvme/bench.local"
ARCHIVE, SLOW = f"{ENVIRONMENT}.tar.zst", "/shared/bench.slow"
EMPTY = "/shared/bench.empty"
ALONE = "import json, sys; print('alone', sum(i['seconds'] for i in json.load(sys.stdin)['items']))"


def make_environment(folder: Path) -> int:
    """Make a virtual environment in ``folder``; return its number of files."""
    with tempfile.TemporaryDirectory() as made:
        subprocess.run([sys.executable, "-m", "venv", made], check=True)
        pip = [f"{made}/bin/python", "-m", "pip", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, "--quiet", *PACKAGES], check=True)
        subprocess.run(["cp", "-a", made, folder], check=True)
    return sum(1 for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def mount_slow(site: Site, microseconds: int) -> None:
    """Show the environment at SLOW on each node, as if it were a client of remote storage."""
    program = site.shared("slow_folder")
    flags = ["-O2", "-I/usr/include/fuse3", str(HERE / "slow_folder.c"), "-lfuse3"]
    subprocess.run(["gcc", "-o", str(program), *flags], check=True)
    site.shared("bench.slow").mkdir()
    for node in site.nodes:
        line = ["/shared/slow_folder", ENVIRONMENT, SLOW, str(microseconds)]
        site.run(line, user="root", on=node)


def stage(wish: str) -> str:
    """Return the command that stages and prints how long that alone took."""
    return f'{STAGECTL} stage --json {wish} | {PYTHON} -c "{ALONE}"'


def slow_ways(nodes: int) -> dict[str, tuple[str, str]]:
    """Return ways from storage with a latency: untimed preparation, timed command."""
    each = f"srun -N{nodes} -n{nodes} --ntasks-per-node=1"
    forget = f"{each} rm -rf {COPY}"
    return {
        OURS: (forget, stage(f"{SLOW}:{COPY}")),
        "slurm-stage, nothing changed": ("true", stage(f"{SLOW}:{COPY}")),
        "cp -a on every node": (forget, f"{each} cp -a {SLOW} {COPY}"),
    }


def archive_ways(nodes: int) -> dict[str, tuple[str, str]]:
    """Return ways from an archive: untimed preparation, timed command."""
    each = f"srun -N{nodes} -n{nodes} --ntasks-per-node=1"
    one = "srun -N1 -n1 -wn1"
    forget = f"{each} bash -c 'rm -rf {COPY} {COPY}.tar.zst; mkdir {COPY}'"
    untar = f"tar --zstd -xf {ARCHIVE} -C {COPY}"
    return {
        OURS: (f"{forget}; {each} rmdir {COPY}", stage(f"{ARCHIVE}:{COPY},extract")),
        "slurm-stage, the archive as it is": (forget, stage(f"{ARCHIVE}:{COPY}.tar.zst")),
        "tar on one node": (forget, f"{one} {untar}"),
        "tar on every node": (forget, f"{each} {untar}"),
    }


def ways(nodes: int) -> dict[str, tuple[str, str]]:
    """Return each way's shell commands: untimed preparation, timed command."""
    each = f"srun -N{nodes} -n{nodes} --ntasks-per-node=1"
    one = "srun -N1 -n1 -wn1"
    forget = f"{each} rm -rf {COPY}"
    ours = stage(f"{ENVIRONMENT}:{COPY}")
    local = f"{each} bash -c '[ -d {LOCAL} ] || cp -a {ENVIRONMENT} {LOCAL}'"
    tar = "/nvme/bench.tar"
    pack = f"tar -cf {tar} -C {ENVIRONMENT} . && sbcast --force {tar} {tar}.copy"
    return {
        OURS: (forget, ours),
        "slurm-stage, one file changed": (
            f"date >> {ENVIRONMENT}/pyvenv.cfg",
            ours,
        ),
        "slurm-stage, nothing changed": ("true", ours),
        "slurm-stage, one empty file, current": ("true", stage(f"{EMPTY}:/nvme/empty")),
        "cp -a on every node": (forget, f"{each} cp -a {ENVIRONMENT} {COPY}"),
        "cp -a on one node, local": (
            f"{forget}; {local}",
            f"{one} cp -a {LOCAL} {COPY}",
        ),
        "cp -a on every node, local": (f"{forget}; {local}", f"{each} cp -a {LOCAL} {COPY}"),
        "tar, sbcast, untar": (
            f"{forget}; {each} bash -c 'rm -f {tar}*; mkdir {COPY}'",
            f"{pack} && {each} tar -xf {tar}.copy -C {COPY}",
        ),
    }


def run(site: Site, found: dict[str, tuple[str, str]], rounds: int, title: str) -> None:
    """Run these ways and print their table."""
    commands = {
        name: {"before": before, "run": f"set -o pipefail; {line}"}
        for name, (before, line) in found.items()
    }
    Console().print(table(run_rounds(site, commands, rounds), title))


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--nvme", choices=["tmpfs", "folder"], default="tmpfs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency", type=int, default=500, help="microseconds of the slow storage")
    options = parser.parse_args()
    with Site(options.nodes, options.nvme) as site:
        count = make_environment(site.shared("bench.env"))
        site.run(["chown", "-R", "alice:", ENVIRONMENT], user="root")
        where = f"{count} files, {options.nodes} nodes, {options.nvme}"
        site.run(f"touch {EMPTY}")
        run(site, ways(options.nodes), options.rounds, where)
        site.run([STAGECTL, "pack", ENVIRONMENT], timeout=300)
        run(site, archive_ways(options.nodes), options.rounds, f"{where}, from a .tar.zst")
        mount_slow(site, options.latency)
        slow = f"{where}, shared folder with {options.latency} us for each answer"
        run(site, slow_ways(options.nodes), options.rounds, slow)
    return 0


if __name__ == "__main__":
    sys.exit(main())
