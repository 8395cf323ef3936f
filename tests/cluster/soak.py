"""``python -m tests.cluster.soak``: random jobs and random failures on the test cluster.

For some minutes three users submit jobs that stage files, some of them the same, to overlapping
sets of nodes, while jobs are cancelled and requeued, sources replaced and slurmds restarted. Faults
are printed and make the exit code 1. The same seed makes the same choices; their timing depends on
the machine. (`campaign.py` does one fault at a time, and knows what must become of it.)
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ClusterShell.NodeSet import NodeSet

from stager.base.text import bytes_text
from tests.cluster.cluster import USERS
from tests.cluster.rest import unrest
from tests.cluster.site import Site, digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tests.cluster.cluster import Job

#: Jobs queued or running at a time, and files of each user.
JOBS, FILES = 20, 3
#: Seconds within which every job must end after the last disturbance.
PATIENCE = 150
MIB = 1 << 20
FOLDER = "/shared/soak"
MOVED = re.compile(
    r"^stage: (/nvme/\S+): (\S+ \S+) from .* to (\S+)(?: \(\d+ nodes\))? in ", re.MULTILINE
)
CHECKED = re.compile(r"^CHECK (\S+) ([0-9a-f]{64})  /nvme/(\S+)$", re.MULTILINE)
#: The exit code of a job that started while the slurmd of one of its nodes was restarting.
LAUNCH_FAILED = "8:0"


def file_of(user: str, number: int) -> str:
    """Return the name of a source; its copies have the same name beneath /nvme."""
    return f"{user}-{number}"


def goes_with_jobs(name: str) -> bool:
    """Return whether jobs stage the file with lifetime=job: so it is with each user's last file."""
    return name.endswith(f"-{FILES - 1}")


# The plan: every choice is made here. A share, from 0 to 1, selects a victim from those running.


@dataclass(frozen=True)
class Wish:
    """A job to submit: its user, nodes and files, and how many seconds it runs after its checks."""

    user: str
    nodes: tuple[str, ...]
    files: tuple[int, ...]
    seconds: float

    @property
    def names(self) -> list[str]:
        """The names of its files."""
        return [file_of(self.user, number) for number in self.files]

    @property
    def options(self) -> list[str]:
        """sbatch's options. Without --open-mode=append, a requeue would truncate the output."""
        stages = [
            f"--stage={FOLDER}/{name}:/nvme/{name}{',lifetime=job' * goes_with_jobs(name)}"
            for name in self.names
        ]
        where = [f"-w{','.join(self.nodes)}", f"-N{len(self.nodes)}", "--ntasks-per-node=1", "-c1"]
        return [*where, *stages, "--open-mode=append"]

    @property
    def script(self) -> str:
        """The job's script, which prints the digests of all copies on all nodes."""
        paths = " ".join(f"/nvme/{name}" for name in self.names)
        check = f"set -o pipefail; sha256sum {paths} | sed s/^/CHECK\\ $SLURMD_NODENAME\\ /"
        return f"set -e\nsrun --overlap bash -c '{check}'\nsleep {self.seconds:.1f}"


@dataclass(frozen=True)
class Replace:
    """A new version of a source, of ``tenths`` tenths of a MiB: all sizes differ."""

    name: str
    tenths: int


@dataclass(frozen=True)
class Disturb:
    """Run a Slurm command on one of the jobs that are queued or running."""

    command: str
    share: float


@dataclass(frozen=True)
class Restart:
    """Restart a node's slurmd."""

    node: str


Action = Wish | Replace | Disturb | Restart


def plan(seed: int, nodes: Sequence[str]) -> Iterator[Action]:
    """Yield a version of every source, then random actions without end. Pure."""
    dice = random.Random(f"jobs of {seed}")
    names = [file_of(user, number) for user in sorted(USERS) for number in range(FILES)]
    sizes = {name: itertools.cycle(dice.sample(range(10, 641), 631)) for name in names}
    yield from (Replace(name, next(sizes[name])) for name in names)
    kinds = {"wish": 70, "replace": 12, "scancel": 8, "scontrol requeue": 6, "restart": 3}
    while True:
        kind = dice.choices(list(kinds), list(kinds.values()))[0]
        if kind == "wish":
            yield make_wish(dice, nodes)
        elif kind == "replace":
            name = dice.choice(names)
            yield Replace(name, next(sizes[name]))
        elif kind == "restart":
            yield Restart(dice.choice(nodes))
        else:
            yield Disturb(kind, dice.random())


def make_wish(dice: random.Random, nodes: Sequence[str]) -> Wish:
    """Return a random job."""
    chosen = tuple(sorted(dice.sample(nodes, dice.randint(1, len(nodes)))))
    files = tuple(dice.sample(range(FILES), dice.randint(1, FILES)))
    return Wish(dice.choice(sorted(USERS)), chosen, files, dice.choice([0, 0, 1, 3]))


# What was done, and what it led to


@dataclass
class Version:
    """A version of a source, and when it was replaced, in seconds since 1970."""

    digest: str
    #: As in a summary line.
    size: str
    replaced: float = float("inf")


@dataclass
class Trace:
    """A submitted job, and whether it was disturbed."""

    wish: Wish
    job: Job
    submitted: float
    disturbed: bool = False


@dataclass
class Tally:
    """Counts of what happened, and the faults."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def note(self, fault: str) -> None:
        """Record and print a fault."""
        print(f"FAULT {fault}", flush=True)
        self.faults.append(fault)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the summary."""
        yield ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        yield f"{len(self.faults)} faults"
        yield from self.faults


def moves(output: str) -> Iterator[tuple[str, str, str]]:
    """Yield node, name and size of each file that a job's summary lines report as moved."""
    for path, size, nodes in MOVED.findall(output):
        for node in NodeSet(nodes):
            yield node, path.removeprefix("/nvme/"), size


def moved_again(outputs: Iterable[str]) -> list[tuple[str, str, str]]:
    """Return moves that happened more than once: node, name, size (each version has its own).

    No job is exempt: once a summary line was written, the copies are recorded on all nodes, and
    nothing that is done to the job afterwards removes them.
    """
    counts = Counter(move for output in outputs for move in moves(output))
    return sorted(
        move for move, count in counts.items() if count > 1 and not goes_with_jobs(move[1])
    )


class Soak:
    """Run random jobs and disturb them for a while."""

    def __init__(self, site: Site, tally: Tally) -> None:
        self._site = site
        self._tally = tally
        self._versions: dict[str, list[Version]] = {}
        self._traces: list[Trace] = []
        self._restarts: list[tuple[float, str]] = []

    def run(self, actions: Iterator[Action], seconds: float) -> None:
        """Do the actions for ``seconds``, then wait for all jobs to end and check everything."""
        self._site.shared("soak").mkdir(exist_ok=True)
        end = time.monotonic() + seconds
        for action in actions:
            self._await_room(end)
            if time.monotonic() > end:
                break
            self._do(action)
        self._settle()
        for trace in self._traces:
            self._check_job(trace)
        for move in moved_again(trace.job.output() for trace in self._traces):
            self._tally.note(f"came more than once: {move}{self._story(move)}")
        self._check_copies()
        for wrong in unrest(self._site):
            self._tally.note(wrong)

    # Actions

    def _await_room(self, end: float) -> None:
        """Return when fewer than JOBS jobs are left, or at ``end``."""
        while len(self._live()) >= JOBS and time.monotonic() < end:
            time.sleep(0.3)

    def _live(self) -> list[Trace]:
        listed = set(self._squeue("%A"))
        return [trace for trace in self._traces if trace.job.id in listed]

    def _squeue(self, columns: str) -> list[str]:
        return self._site.run(["squeue", "-h", "-o", columns], user="root").stdout.splitlines()

    def _do(self, action: Action) -> None:
        if isinstance(action, Wish):
            self._submit(action)
        elif isinstance(action, Replace):
            self._replace(action)
        elif isinstance(action, Disturb):
            self._disturb(action)
        else:
            self._restart(action.node)

    def _submit(self, wish: Wish) -> None:
        job = self._site.sbatch(wish.script, *wish.options, user=wish.user)
        self._traces.append(Trace(wish, job, time.time()))
        self._tally.counts["jobs"] += 1

    def _disturb(self, action: Disturb) -> None:
        if live := self._live():
            trace = live[int(action.share * len(live))]
            command = f"{action.command} {trace.job.id}"
            if self._site.run(command, user="root", check=False).returncode == 0:
                trace.disturbed = True
                self._tally.counts[action.command] += 1

    def _restart(self, node: str) -> None:
        self._restarts.append((time.time(), node))
        self._site.restart_slurmd(node)
        self._tally.counts["restarts"] += 1

    def _replace(self, action: Replace) -> None:
        """Replace a source atomically by a new version."""
        fresh = os.urandom(action.tenths * MIB // 10)
        versions = self._versions.setdefault(action.name, [])
        versions.append(Version(hashlib.sha256(fresh).hexdigest(), bytes_text(len(fresh))))
        path = self._site.shared(f"soak/{action.name}.new")
        path.write_bytes(fresh)
        path.chmod(0o644)
        path.rename(path.with_suffix(""))
        if len(versions) > 1:
            versions[-2].replaced = time.time()
            self._tally.counts["new versions"] += 1

    def _settle(self) -> None:
        """Start requeued jobs soon, and wait until all jobs have ended."""
        deadline = time.monotonic() + PATIENCE
        hurried: set[str] = set()
        while (listed := self._squeue("%A %t")) and time.monotonic() < deadline:
            pending = {line.split()[0] for line in listed if line.endswith(" PD")} - hurried
            for number in pending:
                # Slurm revokes the credential of a job that starts in the second of its requeue.
                update = ["scontrol", "update", f"JobId={number}", "StartTime=now+3"]
                self._site.run(update, user="root", check=False)
            hurried |= pending
            time.sleep(0.5)
        if listed:
            self._tally.note(f"not ended after {PATIENCE} s: {listed}")
            self._site.run(["scancel", f"--user={','.join(USERS)}"], user="root", check=False)
            time.sleep(10)

    # Checks

    def _check_job(self, trace: Trace) -> None:
        record = trace.job.info()
        state, code, output = record["JobState"], record["ExitCode"], trace.job.output()
        self._tally.counts["moves"] += sum(1 for _ in moves(output))
        if state == "COMPLETED" or (state == "CANCELLED" and trace.disturbed):
            self._tally.counts[state.lower()] += 1
        elif code == LAUNCH_FAILED and self._was_near_restart(trace, record["StartTime"]):
            self._tally.counts["lost to a restart"] += 1
        else:
            self._tally.note(f"job {trace.job.id} {trace.wish}: {state} {code}\n{output}")
        wanted = {(node, name) for node in trace.wish.nodes for name in trace.wish.names}
        seen = {(node, name) for node, _, name in CHECKED.findall(output)}
        if state == "COMPLETED" and seen != wanted:
            self._tally.note(f"job {trace.job.id} lacks {wanted - seen}\n{output}")
        for node, found, name in CHECKED.findall(output):
            if found not in self._digests(name, trace.submitted):
                self._tally.note(f"job {trace.job.id}: wrong bytes of {name} on {node}: {found}")

    def _digests(self, name: str, since: float = 0.0) -> set[str]:
        """Return the digests of all versions that the source has had since then."""
        versions = self._versions[name]
        return {version.digest for version in versions if version.replaced >= since}

    def _was_near_restart(self, trace: Trace, start: str) -> bool:
        begun = time.mktime(time.strptime(start, "%Y-%m-%dT%H:%M:%S"))
        return any(
            node in trace.wish.nodes and begun - 10 <= at <= begun + 60
            for at, node in self._restarts
        )

    def _story(self, move: tuple[str, str, str]) -> str:
        """Return the lines about this file from all jobs that staged it there, by job id."""
        node, name, _ = move
        return "".join(
            f"\n  job {trace.job.id} on {','.join(trace.wish.nodes)}: {line}"
            for trace in self._traces
            if node in trace.wish.nodes and name in trace.wish.names
            for line in trace.job.output().splitlines()
            if f"/nvme/{name}:" in line or f"/nvme/{name} is" in line
        )

    def _check_copies(self) -> None:
        """Check that each copy on the nodes is one complete version, whatever jobs went through."""
        for node in self._site.nodes:
            for name in self._versions:
                copy = self._site.copy(node, f"/nvme/{name}")
                if copy.exists() and digest(copy) not in self._digests(name):
                    self._tally.note(f"{name} on {node} is no version of its source")


def soak(site: Site, seed: int, seconds: float) -> Tally:
    """Run random jobs; return what happened."""
    tally = Tally()
    Soak(site, tally).run(plan(seed, site.nodes), seconds)
    return tally


def main() -> int:
    """Run the soak on a cluster of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with Site(4, "tmpfs") as site:
        tally = soak(site, options.seed, 60 * options.minutes)
    print("\n".join(tally.lines()))
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
