"""How soon a job goes on without a node that fails in mid-transfer, at seeded moments.

Run as root: ``python -m tests.bench.tolerate --moments 20``. Each row of the table that it prints
is one job on four nodes with ``--stage-tolerate=1``: what was done to n3 and when, the seconds from
then to the script's first line, and beside them those of the new stage alone. It ends with code 1
if a job did not go on, or its nodes did not have the file.

``--size`` is that of the file in MiB. It is read through FUSE at about 1 MiB a second, so that
there is a mid-transfer to hit.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from contextlib import ExitStack

from tests.cluster.mid_transfer import (
    BEHIND,
    await_transfer,
    cut_off,
    kill_rank,
    kill_slurmstepd,
    slow_source,
    submit,
)
from tests.cluster.site import Site, digest, wait_until

#: The script notes when it begins; all machines of the cluster have one clock.
SCRIPT = "date +begun=%s.%N; echo failed=$STAGE_FAILED_NODES nodes=$SLURM_JOB_NODELIST\n"
KINDS = ("rank", "slurmstepd", "link")
#: Seconds from the failure within which the script must begin.
LIMIT = 30.0
_NUMBER = r"(\d+(?:\.\d+)?)"


def from_scratch(site: Site) -> float:
    """Return the seconds from the submission of a job without any failure to its script."""
    begun = time.time()
    job = submit(site, "--stage-tolerate=1", SCRIPT)
    job.wait()
    return float(_found(rf"begun={_NUMBER}", job.output())) - begun


def trial(site: Site, kind: str, share: float, seconds: float) -> tuple[str, bool]:
    """Let n3 fail after that ``share`` of a transfer of ``seconds``. Return a row, and if it held.

    The transfer is that of the file, as measured.
    """
    job = submit(site, "--stage-tolerate=1", SCRIPT)
    await_transfer(site)
    time.sleep(share * seconds)
    struck = time.time()
    with ExitStack() as stack:
        if kind == "link":
            stack.enter_context(cut_off(site, "n3"))
        elif kind == "rank":
            kill_rank(site, "n3")
        else:
            kill_slurmstepd(site, "n3", job)
        wait_until(lambda: "begun=" in job.output() or "not started" in job.output(), 120)
    ended = job.wait()
    said = job.output()
    if "begun=" not in said:
        return f"{kind:<11} {share:5.0%}  did not go on: {said!r}", False
    whole = float(_found(rf"begun={_NUMBER}", said)) - struck
    again = float(_found(rf" in {_NUMBER} s \(", said))
    behind = digest(site.path("login", f"{BEHIND}/data"))
    holds = (
        ended.exit_code == "0:0"
        and "failed=n3 nodes=n[1-2,4]\n" in said
        and all(digest(site.copy(node, "/nvme/data")) == behind for node in ("n1", "n2", "n4"))
        and whole <= LIMIT
    )
    row = f"{kind:<11} {share:5.0%} {whole:10.1f} {again:10.1f} {whole - again:10.1f}"
    return f"{row}  {'ok' if holds else f'WRONG: {said!r}'}", holds


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, text
    return match[1]


def clean(site: Site) -> None:
    """Return when nothing is left of the last job, then empty the disks."""
    wait_until(lambda: not site.leftovers())
    site.assert_healthy(60)
    site.empty_disks()


def main() -> int:
    """Run the trials and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=20, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--size", type=int, default=6, metavar="MIB")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    bad = 0
    with Site() as site, slow_source(site, args.size << 20):
        print(f"from scratch, sbatch to script: {from_scratch(site):.1f} s", flush=True)
        clean(site)
        print(f"{'n3 loses':<11} {'after':>5} {'to script':>10} {'new stage':>10} {'rest':>10}")
        for _ in range(args.moments):
            for kind in args.kinds:
                row, holds = trial(site, kind, chance.uniform(0, 0.7), args.size)
                bad += not holds
                print(row, flush=True)
                clean(site)
    print(f"{bad} of {args.moments * len(args.kinds)} did not hold")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
