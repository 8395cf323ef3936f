"""A Python environment of tens of thousands of files on every node, beside other ways to do it.

``python -m tests.bench.trees``: several rounds of each way in turn, in one job on the test cluster;
medians, and their ratios round by round. Packages come from the package index that pip is set to.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

from rich.console import Console

from tests.bench.bench import OURS, run_rounds, table
from tests.cluster.site import PYTHON, STAGECTL, Site

if TYPE_CHECKING:
    from pathlib import Path

#: What makes an environment of more than 20,000 files.
PACKAGES = ("numpy", "scipy", "pandas", "matplotlib", "scikit-learn", "sympy", "jupyterlab")
ENVIRONMENT, COPY, LOCAL = "/shared/bench.env", "/nvme/bench.env", "/nvme/bench.local"
ALONE = "import json, sys; print('alone', sum(i['seconds'] for i in json.load(sys.stdin)['items']))"


def make_environment(folder: Path) -> int:
    """A virtual environment in ``folder``; how many files it has."""
    with tempfile.TemporaryDirectory() as made:
        subprocess.run([sys.executable, "-m", "venv", made], check=True)
        pip = [f"{made}/bin/python", "-m", "pip", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, "--quiet", *PACKAGES], check=True)
        subprocess.run(["cp", "-a", made, folder], check=True)
    return sum(1 for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def ways(nodes: int) -> dict[str, dict[str, str]]:
    """Each way's shell commands: what comes before, not timed, and what is timed."""
    each = f"srun -N{nodes} -n{nodes} --ntasks-per-node=1"
    one = "srun -N1 -n1 -wn1"
    forget = f"{each} rm -rf {COPY}"
    stage = f'{STAGECTL} stage --json {ENVIRONMENT}:{COPY} | {PYTHON} -c "{ALONE}"'
    local = f"{each} bash -c '[ -d {LOCAL} ] || cp -a {ENVIRONMENT} {LOCAL}'"
    tar = "/nvme/bench.tar"
    pack = f"tar -cf {tar} -C {ENVIRONMENT} . && sbcast --force {tar} {tar}.copy"
    found = {
        OURS: (forget, stage),
        "slurm-stage, one file changed": (
            f"date >> {ENVIRONMENT}/pyvenv.cfg",
            stage,
        ),
        "slurm-stage, nothing changed": ("true", stage),
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
    return {
        name: {"before": before, "run": f"set -o pipefail; {line}"}
        for name, (before, line) in found.items()
    }


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--nvme", choices=["tmpfs", "folder"], default="tmpfs")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with Site(options.nodes, options.nvme) as site:
        count = make_environment(site.shared("bench.env"))
        site.run(["chown", "-R", "alice:", ENVIRONMENT], user="root")
        results = run_rounds(site, ways(options.nodes), options.rounds)
    title = f"{count} files, {options.nodes} nodes, {options.nvme}"
    Console().print(table(results, title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
