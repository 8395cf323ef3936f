"""``python -m tests.bench.startup``: the cost to a job that finds its file on every node.

Starts the test cluster and measures, in turn for several rounds, a bare srun of an MPI program that
ends at once, the nested step that stages, and ``stagectl stage`` around it; then jobs with and
without ``--stage``, and the gate within them. Prints medians, and the medians of differences within
a round. The figures are saved as JSON.
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

from tests.cluster.site import POLICY, PREFIX, PYTHON, REPOSITORY, STAGECTL, Site

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HERE = Path(__file__).parent
NODES = 4
WISH = "/shared/startup.data:/nvme/startup.data"
BARE, NESTED, COMMAND = "bare srun", "nested step", "stagectl stage"
WITHOUT, WITH = "a job: srun true", "a job: srun --stage true"
GATE, INNER = "the gate", "the nested step in it"

#: Writes a shell script that starts the same step as `stagectl stage`.
NESTED_SCRIPT = """
import os, shlex, sys
from dataclasses import replace
from pathlib import Path
from stager.launch import job
from stager.launch.job import find_srun
from stager.launch.environment import rank_environment
from stager.launch.mpi import settle
from stager.launch.mpi import library_for, peer_key
from stager.launch.srun import srun_argv
from stager.request import policy
from stager.request.grammar import parse_value
from stager.request.items import StageRequest
from stager.request.names import Names
from stager.request.resolve import resolve
found = policy.load(Path("/etc/slurm/stage.toml"))
srun = find_srun(found.launch.srun)
rules = settle(found, srun)
context = job.find(os.environ, rules.launch.srun)
items = resolve(parse_value(sys.argv[1], Names.of(os.environ, {})), rules)
wanted = StageRequest(items, context.node_count, rules.lock_timeout, job=context.job)
library = library_for(context.node_count, rules)
environment = rank_environment(os.environ, rules, wanted, peer_key() if library else None)
words = [f"{name}={value}" for name, value in environment.items()]
print("exec", shlex.join(["env", "-i", *words, *srun_argv(srun, context, rules, library)]))
"""
#: Replaces a program: runs it and notes when it began and ended. Runs that belong neither to the
#: gate nor to the nested step are passed on at once.
TIMED = """#!/bin/sh
case " $* " in *" gate "* | *stager.rank*) ;; *) exec {program} "$@" ;; esac
begun=$(date +%s.%N)
{program} "$@"
code=$?
echo "{name} $begun $(date +%s.%N)" >>/shared/times
exit $code
"""
#: A job that begins while the last one ends would wait for Slurm's scheduler.
IDLE = "while squeue -h | grep -q .; do sleep 0.05; done; sleep 0.3"


def rounds(site: Site, tools: Mapping[str, str], before: str, count: int, *, in_job: bool) -> Any:
    """Return the seconds of each tool's runs except the warm-up: ``{tool: [seconds, …]}``."""
    plan = {name: {"before": before, "run": line} for name, line in tools.items()}
    site.shared("plan.json").write_text(json.dumps({"rounds": count, "tools": plan}))
    line = [PYTHON, "/shared/rounds.py", "/shared/plan.json"]
    if in_job:
        job = site.sbatch(" ".join(line), f"-N{NODES}")
        job.wait(timeout=600)
        output = job.output()
    else:
        output = site.run(line, timeout=600).stdout
    results = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    failed = [result for result in results if result["code"]]
    if failed or len(results) != (count + 1) * len(tools):
        raise SystemExit(f"{failed or output}")
    seconds: dict[str, list[float]] = {name: [] for name in tools}
    for result in results:
        if result["round"]:
            seconds[result["tool"]].append(result["seconds"])
    return seconds


def measure(count: int) -> dict[str, list[float]]:
    """Return the seconds of everything, by round."""
    with Site(NODES, "tmpfs") as site:
        shutil.copy(HERE / "rounds.py", site.shared("rounds.py"))
        site.shared("nested.py").write_text(NESTED_SCRIPT)
        site.run("head -c 1000000 /dev/urandom >/shared/startup.data")
        site.run(["srun", f"-N{NODES}", f"--stage={WISH}", "true"])
        each = f"srun -N{NODES} -n{NODES} --ntasks-per-node=1"
        # As for the ranks: there are more of them than cores.
        bare = f"OMPI_MCA_mpi_yield_when_idle=1 {each} --mpi=pmix {PYTHON}"
        tools = {
            BARE: f"{bare} -c 'import mpi4py.MPI'",
            NESTED: ". /shared/nested.sh",
            COMMAND: f"{STAGECTL} stage {WISH}",
        }
        write = f"{PYTHON} -I /shared/nested.py {WISH} >/shared/nested.sh"
        seconds: dict[str, list[float]] = rounds(site, tools, write, count, in_job=True)
        jobs = {WITHOUT: f"{each} true", WITH: f"{each} --stage={WISH} true"}
        seconds |= rounds(site, jobs, IDLE, count, in_job=False)
        return seconds | time_gates(site, jobs[WITH], count)


def time_gates(site: Site, line: str, count: int) -> dict[str, list[float]]:
    """Time the gates of ``count`` jobs, each with the nested step that it waited for."""
    programs = {"gate": PYTHON, "step": "/usr/bin/srun"}
    for name, program in programs.items():
        script = site.path("login", f"{PREFIX}/libexec/timed-{name}")
        script.write_text(TIMED.format(name=name, program=program))
        script.chmod(0o755)
    site.write_policy(f'{POLICY}[launch]\nsrun = "{PREFIX}/libexec/timed-step"\n')
    plugin = f"{PREFIX}/lib/spank_stage.so python={PREFIX}/libexec/timed-gate"
    site.write_plugstack(f"required {plugin} config=/etc/slurm/stage.toml\n")
    rounds(site, {WITH: line}, IDLE, count, in_job=False)
    found: dict[str, list[float]] = {"gate": [], "step": []}
    for noted in site.shared("times").read_text().splitlines():
        name, begun, ended = noted.split()
        found[name].append(float(ended) - float(begun))
    return {GATE: found["gate"][1:], INNER: found["step"][1:]}  # without the warm-up


def table(seconds: Mapping[str, Sequence[float]]) -> Table:
    """Return medians; ratios and differences are within a round, so that drift cancels."""
    shown = Table(title=f"all current on {NODES} nodes", title_justify="left")
    for header in ("what", "median", "fastest", "beside", "ratio", "more"):
        shown.add_column(header, justify="left" if header in ("what", "beside") else "right")
    beside = {NESTED: BARE, COMMAND: NESTED, WITH: WITHOUT, GATE: INNER}
    for name, values in seconds.items():
        cells = [name, f"{statistics.median(values):.3f} s", f"{min(values):.3f} s"]
        if other := beside.get(name):
            pairs = list(zip(values, seconds[other], strict=True))
            cells += [other, f"{statistics.median(a / b for a, b in pairs):.2f}",
                      f"{statistics.median(a - b for a, b in pairs):+.3f} s"]  # fmt: skip
        shown.add_row(*cells)
    return shown


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, default=REPOSITORY / "build" / "startup.json")
    options = parser.parse_args()
    seconds = measure(options.rounds)
    Console().print(table(seconds))
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(seconds, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
