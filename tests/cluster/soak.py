"""``python -m tests.cluster.soak``: what users, administrators and bad luck do, at random.

For some minutes three users run jobs that stage to overlapping nodes, the same files and others,
while jobs are cancelled and requeued, sources replaced and slurmds restarted. Then processes of a
stage are killed at random moments of a transfer. What was found wrong is printed and makes the exit
code 1. The same seed makes the same choices; what meets what is up to the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ClusterShell.NodeSet import NodeSet

from tests.cluster.cluster import USERS
from tests.cluster.site import Site, digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.cluster.cluster import Job

#: Jobs that are there at a time, and files a user.
JOBS, FILES = 20, 3
#: Seconds within which every job must have ended that nobody holds up any longer.
PATIENCE = 150
MIB = 1 << 20
FOLDER = "/shared/soak"
#: Bytes of the file during whose transfer processes are killed; it takes a second or so.
LARGE = 1024 * MIB
MOVED = re.compile(r"^stage: (\S+): .* from .* to (\S+)(?: \(\d+ nodes\))? in ", re.MULTILINE)
CHECKED = re.compile(r"^CHECK (\S+) ([0-9a-f]{64})  (\S+)$", re.MULTILINE)
#: What a job may end with when the slurmd of one of its nodes was not there in that moment.
LAUNCH_FAILED = "8:0"


def file_of(user: str, number: int) -> str:
    """A source; its copies lie at the same name beneath /nvme."""
    return f"{user}-{number}"


# The plan: every choice is made here.


@dataclass(frozen=True)
class Wish:
    """A job to be: who, where, which files, how long it runs on, in seconds."""

    user: str
    nodes: tuple[str, ...]
    files: tuple[int, ...]
    seconds: float

    @property
    def names(self) -> list[str]:
        """The names of its files."""
        return [file_of(self.user, number) for number in self.files]

    def directive(self, number: int) -> str:
        """How the job asks for one of its files; the last one of each user goes with its jobs."""
        name = file_of(self.user, number)
        lifetime = ",lifetime=job" if number == FILES - 1 else ""
        return f"{FOLDER}/{name}:/nvme/{name}{lifetime}"

    @property
    def script(self) -> str:
        """Tells the digests of all copies on all nodes."""
        paths = " ".join(f"/nvme/{name}" for name in self.names)
        check = f"sha256sum {paths} | sed s/^/CHECK\\ $SLURMD_NODENAME\\ /"
        return f"srun --overlap bash -c '{check}'\nsleep {self.seconds:.1f}"


def make_wish(dice: random.Random, nodes: list[str]) -> Wish:
    """A random job."""
    chosen = tuple(sorted(dice.sample(nodes, dice.randint(1, len(nodes)))))
    files = tuple(dice.sample(range(FILES), dice.randint(1, FILES)))
    return Wish(dice.choice(sorted(USERS)), chosen, files, dice.choice([0, 0, 1, 3]))


def choose_action(dice: random.Random) -> str:
    """What happens next to a full cluster."""
    kinds = {"nothing": 2, "cancel": 2, "requeue": 2, "replace": 3, "restart": 1}
    return dice.choices(list(kinds), list(kinds.values()))[0]


# What is known of what was done


@dataclass
class Version:
    """A source's content, and when another took its place, in seconds since 1970."""

    digest: str
    replaced: float = float("inf")


@dataclass
class Trace:
    """A job and what was done to it."""

    wish: Wish
    job: Job
    submitted: float
    disturbed: bool = False


@dataclass
class Tally:
    """What happened, and what should not have."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def note(self, fault: str) -> None:
        """One more fault."""
        print(f"FAULT {fault}", flush=True)
        self.faults.append(fault)

    def lines(self) -> Iterator[str]:
        """The summary."""
        yield ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        yield f"{len(self.faults)} faults"
        yield from self.faults


class Soak:
    """Jobs at random for a while."""

    def __init__(self, site: Site, dice: random.Random, tally: Tally) -> None:
        self._site = site
        self._dice = dice
        self._tally = tally
        self._versions: dict[str, list[Version]] = {}
        self._traces: list[Trace] = []
        self._restarts: list[tuple[float, str]] = []

    def run(self, seconds: float) -> None:
        """Disturb and be disturbed; then all must come to rest."""
        for user in sorted(USERS):
            for number in range(FILES):
                self._replace(file_of(user, number))
        end = time.time() + seconds
        while time.time() < end:
            live = [trace for trace in self._traces if not self._has_ended(trace)]
            for _ in range(min(3, JOBS - len(live))):
                self._submit()
            self._act(choose_action(self._dice), live)
            time.sleep(0.2)
        self._settle()
        for trace in self._traces:
            self._check_job(trace)
        self._check_moves()
        check_rest(self._site, self._tally)

    # Doing

    def _submit(self) -> None:
        wish = make_wish(self._dice, self._site.nodes)
        stages = [f"--stage={wish.directive(number)}" for number in wish.files]
        options = [f"-w{','.join(wish.nodes)}", f"-N{len(wish.nodes)}", "--ntasks-per-node=1"]
        job = self._site.sbatch(wish.script, *options, *stages, user=wish.user)
        self._traces.append(Trace(wish, job, time.time()))
        self._tally.counts["jobs"] += 1

    def _act(self, action: str, live: list[Trace]) -> None:
        if action == "cancel" and live:
            self._disturb("scancel", self._dice.choice(live))
        elif action == "requeue" and live:
            self._disturb("scontrol requeue", self._dice.choice(live))
        elif action == "replace":
            user = self._dice.choice(sorted(USERS))
            self._replace(file_of(user, self._dice.randrange(FILES)))
        elif action == "restart" and time.time() - self._last_restart() > 8:
            node = self._dice.choice(self._site.nodes)
            self._restarts.append((time.time(), node))
            self._site.restart_slurmd(node)
            self._tally.counts["restarts"] += 1

    def _last_restart(self) -> float:
        return self._restarts[-1][0] if self._restarts else 0.0

    def _disturb(self, command: str, trace: Trace) -> None:
        done = self._site.run(f"{command} {trace.job.id}", user="root", check=False)
        if done.returncode == 0:
            trace.disturbed = True
            self._tally.counts[command] += 1

    def _replace(self, name: str) -> None:
        """A new version of a source takes the place of the old one at once."""
        fresh = self._dice.randbytes(self._dice.randint(1, 24) * MIB + self._dice.randint(0, 5000))
        versions = self._versions.setdefault(name, [])
        versions.append(Version(hashlib.sha256(fresh).hexdigest()))
        folder = self._site.shared("soak")
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}.new"
        path.write_bytes(fresh)
        path.chmod(0o644)
        path.rename(folder / name)
        if len(versions) > 1:
            versions[-2].replaced = time.time()
            self._tally.counts["new versions"] += 1

    def _has_ended(self, trace: Trace) -> bool:
        self._look()
        return trace.job.id not in self._queue

    def _look(self) -> None:
        now = time.monotonic()
        if now - getattr(self, "_looked", 0.0) > 0.5:
            self._looked = now
            listed = self._site.run(["squeue", "-h", "-o", "%A"], user="root").stdout
            self._queue = set(listed.split())

    def _settle(self) -> None:
        """Requeued jobs are let start at once, and all must end."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            listed = self._site.run(["squeue", "-h", "-o", "%A %t"], user="root").stdout
            if not listed:
                return
            for line in listed.splitlines():
                number, state = line.split()
                if state == "PD":
                    update = ["scontrol", "update", f"JobId={number}", "StartTime=now"]
                    self._site.run(update, user="root", check=False)
            time.sleep(1)
        self._tally.note(f"not ended after {PATIENCE} s: {listed}")
        self._site.run(["scancel", "--user=alice,bob,carol"], user="root", check=False)
        time.sleep(10)

    # Checking

    def _check_job(self, trace: Trace) -> None:
        record = trace.job.info()
        state, code, output = record["JobState"], record["ExitCode"], trace.job.output()
        if state == "COMPLETED" or (state == "CANCELLED" and trace.disturbed):
            self._tally.counts[state.lower()] += 1
        elif code == LAUNCH_FAILED and self._was_near_restart(trace):
            self._tally.counts["lost to a restart"] += 1
        else:
            self._tally.note(f"job {trace.job.id} {trace.wish}: {state} {code}\n{output}")
        if state == "COMPLETED":
            wanted = {(node, name) for node in trace.wish.nodes for name in trace.wish.names}
            seen = {(node, path[len("/nvme/") :]) for node, _, path in CHECKED.findall(output)}
            if not seen >= wanted:
                self._tally.note(f"job {trace.job.id} lacks {wanted - seen}\n{output}")
        for node, found, path in CHECKED.findall(output):
            possible = {
                version.digest
                for version in self._versions[path[len("/nvme/") :]]
                if version.replaced >= trace.submitted
            }
            if found not in possible:
                self._tally.note(f"job {trace.job.id}: wrong bytes of {path} on {node}: {found}")

    def _was_near_restart(self, trace: Trace) -> bool:
        begun = self._epoch(trace.job.info().get("StartTime", ""))
        return any(
            node in trace.wish.nodes and begun - 10 <= at <= begun + 60
            for at, node in self._restarts
        )

    @staticmethod
    def _epoch(text: str) -> float:
        try:
            return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
        except ValueError:
            return 0.0

    def _check_moves(self) -> None:
        """Each version came to each node once, unless something took it away or broke it off."""
        moves: Counter[tuple[str, str, str]] = Counter()
        excused: set[tuple[str, str]] = set()
        for trace in self._traces:
            output = trace.job.output()
            where = {
                (node, f"/nvme/{name}") for node in trace.wish.nodes for name in trace.wish.names
            }
            if trace.disturbed or trace.job.info()["JobState"] != "COMPLETED":
                excused |= where
                continue
            found = {(node, path): seen for node, seen, path in CHECKED.findall(output)}
            for path, nodes in MOVED.findall(output):
                for node in NodeSet(nodes):
                    moves[node, path, found.get((node, path), "?")] += 1
                    self._tally.counts["moves"] += 1
        for (node, path, seen), count in moves.items():
            goes_with_jobs = path.endswith(f"-{FILES - 1}")
            if count > 1 and not goes_with_jobs and (node, path) not in excused:
                self._tally.note(f"{path}, {seen} came to {node} {count} times")


def check_rest(site: Site, tally: Tally) -> None:
    """Nothing of any job is left on a cluster at rest, and no node is drained."""
    states = site.node_states()
    deadline = time.monotonic() + 30
    while set(states.values()) != {"idle"} and time.monotonic() < deadline:
        time.sleep(0.5)
        states = site.node_states()
    if set(states.values()) != {"idle"}:
        reasons = site.run(["sinfo", "--list-reasons"], user="root").stdout
        tally.counts["nodes that Slurm took away"] += 1
        tally.note(f"nodes: {states}\n{reasons}")
        site.resume()
    for left in site.leftovers():
        tally.note(f"left: {left}")
    for held in locks_held(site):
        tally.note(f"locked: {held}")


def locks_held(site: Site) -> list[str]:
    """The locks of destinations that some process holds still."""
    with open("/proc/locks", encoding="ascii") as lines:
        inodes = {line.split()[5].rpartition(":")[2] for line in lines if len(line.split()) > 5}
    paths = [
        path for node in site.nodes for path in site.path(node, "/nvme").glob(".slurm-stage/*/lock")
    ]
    return [str(path) for path in paths if str(path.stat().st_ino) in inodes]


# Kills

#: Who is killed, by the pattern of its command line; the job's number is put in. Of a batch step
#: whose slurmstepd is gone Slurm learns by itself only after minutes: such a job is cancelled.
VICTIMS = {
    "rank": "[s]tager.start",
    "gate": "[s]lurmstepd: .{job}.batch",
    "helper": "[s]tager gate",
    "slurmstepd": "[s]lurmstepd: .{job}.0.",
    "batch slurmstepd": "[s]lurmstepd: .{job}.batch",
}


class Kills:
    """Processes of a stage killed in mid-transfer, one a round."""

    def __init__(self, site: Site, dice: random.Random, tally: Tally) -> None:
        self._site = site
        self._dice = dice
        self._tally = tally
        self._source = site.shared("soak-large")
        self._digests: list[str] = []

    def run(self, rounds: int) -> None:
        """Kill as often, each kind in turn."""
        for number in range(rounds):
            self._round(list(VICTIMS)[number % len(VICTIMS)])
        self._source.unlink()

    def _round(self, kind: str) -> None:
        site = self._site
        self._renew()
        job = site.sbatch(
            "true", "-wn1,n2,n3", "-N3", "--no-requeue", "--stage=/shared/soak-large:/nvme/large"
        )
        killed = self._kill(kind, job)
        self._tally.counts[f"kills of a {kind}" if killed else "kills that came too late"] += 1
        try:
            state = job.wait(180)  # what dies in MPI's start is waited for by start_timeout
        except AssertionError as error:
            self._tally.note(f"after the kill of a {kind}: {error}")
            job.cancel()
            return
        if killed and state.state == "COMPLETED":
            self._tally.counts["kills that the stage survived"] += 1
        self._check_copies(f"after the kill of a {kind}", self._digests, needed=False)
        self._await_rest(kind)
        again = site.sbatch("true", "-wn1,n2,n3", "-N3", "--stage=/shared/soak-large:/nvme/large")
        if again.wait(120).exit_code != "0:0":
            self._tally.note(f"the job after the kill of a {kind}: {again.output()}")
        self._check_copies(f"the job after the kill of a {kind}", self._digests[-1:], needed=True)

    def _renew(self) -> None:
        """Another version: its head differs; the rest is there, so that it has to travel."""
        fresh = self._source.with_suffix(".new")
        with fresh.open("wb") as file:
            file.write(os.urandom(MIB))
            os.posix_fallocate(file.fileno(), 0, LARGE)
        fresh.chmod(0o644)
        self._digests = [*self._digests[-1:], digest(fresh)]
        fresh.rename(self._source)

    def _kill(self, kind: str, job: Job) -> bool:
        """Whether one was found and killed while the job was not over."""
        anywhere = kind in ("rank", "slurmstepd")
        node = self._dice.choice(["n1", "n2", "n3"]) if anywhere else "n1"
        deadline = time.monotonic() + 30
        while not self._pids(node, VICTIMS["rank"]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        time.sleep(self._dice.uniform(0, 1.2))
        pids = self._pids(node, VICTIMS[kind].format(job=job.id))
        in_time = "stage: /nvme/large: " not in job.output()
        # A batch step has two processes of that name: slurmstepd, and the task that is to start.
        victims = {"gate": pids[1:], "batch slurmstepd": pids[:1]}.get(kind, pids)
        for pid in victims:
            self._site.run(["kill", "-9", pid], user="root", on=node, check=False)
        if kind == "batch slurmstepd":
            time.sleep(5)
            self._site.run(["scancel", job.id], user="root", check=False)
        return bool(victims) and in_time

    def _pids(self, node: str, pattern: str) -> list[str]:
        by = ["pgrep", "-f", pattern]
        return self._site.run(by, user="root", on=node, check=False).stdout.split()

    def _check_copies(self, when: str, possible: list[str], *, needed: bool) -> None:
        for node in ("n1", "n2", "n3"):
            copy: Path = self._site.copy(node, "/nvme/large")
            if copy.exists() and digest(copy) not in possible:
                self._tally.note(f"{when}: a part or a mixture on {node}")
            elif not copy.exists() and needed:
                self._tally.note(f"{when}: nothing on {node}")

    def _await_rest(self, kind: str) -> None:
        before = len(self._tally.faults)
        check_rest(self._site, self._tally)
        if len(self._tally.faults) > before:
            self._tally.note(f"…after the kill of a {kind}")


def soak(site: Site, seed: int, seconds: float, kills: int) -> Tally:
    """Both parts; what came of it."""
    tally = Tally()
    dice = random.Random(seed)
    parts: list[Callable[[], None]] = [
        lambda: Soak(site, dice, tally).run(seconds),
        lambda: Kills(site, dice, tally).run(kills),
    ]
    for part in parts:
        part()
    return tally


def main() -> int:
    """Run it on a cluster of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with Site(4, "tmpfs") as site:
        tally = soak(site, options.seed, 60 * options.minutes, options.kills)
    print("\n".join(tally.lines()))
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
