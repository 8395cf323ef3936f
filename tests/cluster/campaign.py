"""``make campaign``: one fault after another on the test cluster, and what becomes of the jobs.

For each fault of the plan, jobs of one to three users stage files to some nodes, and the fault is
done at its moment. Then an oracle looks: every job ended in time; it completed with the right bytes
on every node, or failed as its kind of fault may make it fail, with one message that says what and
where; no node holds anything but a whole version; nothing is left, no node is drained; and the next
job works. Violations are printed and make the exit code 1.

A campaign is kept in ``build/campaign/SEED.json`` after each fault. One that was interrupted goes
on with the next fault: the same seed makes the same plan. Not among the faults are steps of the
clock, which would be those of the whole machine.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tarfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from ClusterShell.NodeSet import NodeSet
from rich.console import Console
from rich.table import Table

from tests.cluster.cluster import USERS, ClusterError, is_reached
from tests.cluster.faults import CANCELLED, COMPLETED, KINDS, REQUEUED, Moment, plan
from tests.cluster.inflict import (
    NEED_RANK,
    PREEMPTION,
    SLOW,
    MissedError,
    Scene,
    inflicted,
    install,
    prepared,
)
from tests.cluster.processes import is_gate, is_rank, processes
from tests.cluster.rest import unrest
from tests.cluster.site import POLICY, REPOSITORY, Site, digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from tests.cluster.cluster import Job
    from tests.cluster.faults import Fault
    from tests.cluster.processes import Process

#: Seconds: of stall_timeout and start_timeout; within which a job must have said after a fault how
#: its stage ended; within which it must have ended once the fault is undone; and in which the
#: moment of a fault must come. (Ranks that srun has not started are started again after 40 s, and a
#: stage that has succeeded waits as long for srun to end; srun waits up to 30 s for slurmctld while
#: it is restarted, and slurmstepd tells it only minutes later of a job that ended meanwhile.)
STALL, BEGIN, TOLD_WITHIN, ENDED_WITHIN, MOMENT_WITHIN = 5, 60, 100, 180, 60
#: Bytes of a source, and files in a folder.
SIZE, FILES = 8 << 20, 12
KEPT = REPOSITORY / "build" / "campaign"
FUSE = REPOSITORY / "tests/bench/slow_folder.c"
#: Kinds of faults whose victim a message must name, if it names nodes.
WITH_VICTIM = (
    "rank killed", "slurmstepd killed", "rank stopped", "link down", "link flaps", "disk full",
    "disk read-only", "disk errors", "disk stutters", "slurmd restarted", "node rebooted",
    "memory short",
)  # fmt: skip
NOT_STARTED = "stage: the job's own program was not started (exit code {})"
#: What the script prints when it starts, and for each file that lifetime=job will remove.
STARTED = "the script has started"
CHECKED = re.compile(r"^CHECK (\S+) ([0-9a-f]{64})  (.+)$", re.MULTILINE)
#: Messages that can name no node: ranks have not found each other, or srun has failed.
_NOWHERE = re.compile(
    "stage: (MPI (did not start|started, but did not connect all nodes)"
    "|staging ended early: srun (ended with code|was ended by signal))[: ]"
)
#: Lines of a job's output that are Slurm's, belong to the message before them, or say why it waits
#: or starts again.
_PASSED_OVER = re.compile(
    r"(slurmstepd|srun|slurm_script): |  |stage: waiting for |stage: .* since the start$|"
    r"stage: .*; the staging starts again$"
)
_PARTIAL = re.compile(r"left: n\d+: [0-9a-f]{16}")
MISSED = "missed"

#: The files of one version of a source, or of one copy: digests by name, "" for a single file.
Contents = dict[str, str]


@dataclass
class Result:
    """What became of a fault: the outcome of each user's job, the first user's first.

    ``told`` is how many seconds after the fault all jobs had said how their stages ended.
    """

    number: int
    kind: str
    moment: str
    cargo: str
    hit: bool
    outcomes: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0
    told: float = 0.0


# Sources and copies


class Sources:
    """The users' sources, and the contents of each version that they have had."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._versions: dict[tuple[str, str], list[Contents]] = {}

    def renew(self, user: str, cargo: str) -> None:
        """Give a user's source a new version, in one step for a file or an archive."""
        files = {f"part-{n:02}": os.urandom(SIZE // FILES) for n in range(FILES)}
        single = b"".join(files.values())
        path = self._site.shared(f"campaign/{user}-{cargo}")
        if cargo == "file":
            _replace(path, single)
        elif cargo == "archive":
            _replace(path.with_suffix(".tar"), _tar(files))
        else:
            path.mkdir(exist_ok=True)
            for name, data in files.items():
                _replace(path / name, data)
        whole = {"": single} if cargo == "file" else files
        version = {name: hashlib.sha256(data).hexdigest() for name, data in whole.items()}
        self._versions.setdefault((user, cargo), []).append(version)

    def newest(self, user: str, cargo: str) -> Contents:
        """Return the contents of the source as it is now."""
        return self._versions[user, cargo][-1]

    def is_whole(self, found: Contents, user: str, cargo: str) -> bool:
        """Whether what a node holds is nothing, or one version (of shards: files of one only)."""
        if cargo == "shards":
            return any(found.items() <= version.items() for version in self._versions[user, cargo])
        return not found or found in self._versions[user, cargo]


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_name(f".new-{path.name}")
    fresh.write_bytes(data)
    fresh.chmod(0o644)
    fresh.rename(path)


def _tar(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def destination(user: str, cargo: str) -> str:
    """Return where a user's copies are."""
    return f"/nvme/{user}-{cargo}"


def contents(site: Site, node: str, user: str, cargo: str) -> Contents:
    """Return what a node holds of a user's copy; {} if nothing."""
    path = site.copy(node, destination(user, cargo))
    if path.is_file():
        return {"": digest(path)}
    found = (file for file in path.rglob("*") if file.name != ".stage-shards.tsv")
    return {str(file.relative_to(path)): digest(file) for file in found}


# Jobs


#: Prints what lifetime=job will remove before anybody else can look.
_CHECK = (
    "srun --overlap bash -c 'find {} -type f -exec sha256sum {{}} + |"
    " sed s/^/CHECK\\ $SLURMD_NODENAME\\ /'"
)


def submit(site: Site, fault: Fault, user: str, *, after: bool = False) -> Job:
    """Submit a user's job; ``after`` the fault: one that leaves its copies and is not requeued."""
    target = destination(user, fault.cargo)
    source = f"{SLOW}/{user}-{fault.cargo}{'.tar' * (fault.cargo == 'archive')}"
    options = {"archive": ",extract", "shards": ",mode=shard"}.get(fault.cargo, "")
    lifetime = fault.lifetime and not after
    looks = lifetime and fault.moment is not Moment.SCRIPT  # else the fault would end its srun
    requeue = fault.kind in ("job preempted", "job requeued") and not after
    return site.sbatch(
        f"echo {STARTED}; {'true' if after else _CHECK.format(target) if looks else 'sleep 1'}",
        f"-w{','.join(fault.nodes)}", f"-N{len(fault.nodes)}", "--ntasks-per-node=1", "-c1",
        "--requeue" if requeue else "--no-requeue", "--open-mode=append",
        f"--stage={source}:{target}{options}{',lifetime=job' * lifetime}",
        user=user,
    )  # fmt: skip


def outcome_of(record: dict[str, str]) -> str:
    """Return how a job ended, from Slurm's record of it."""
    code, _, number = record["ExitCode"].partition(":")
    match record["JobState"]:
        case "COMPLETED":
            return COMPLETED if record["Restarts"] == "0" else REQUEUED
        case "CANCELLED":
            return CANCELLED
        case "NODE_FAIL":
            return "node failed"
        case "FAILED":
            return f"signal {number}" if number != "0" else f"code {code}"
    return record["JobState"].lower()


def wrong_messages(output: str, code: int, fault: Fault, user: str) -> list[str]:
    """Return what is wrong with the output of a job that failed with this code of a stage."""
    *told, last = messages(output, destination(user, fault.cargo)) or [""]
    if last != NOT_STARTED.format(code):
        return [f"code {code} without its last line"]
    if len(told) != 1 or not told[0].startswith("stage: "):
        return [f"{len(told)} messages instead of one that begins with stage:"]
    return [] if places(told[0]) or _NOWHERE.match(told[0]) else ["a message that names no place"]


def messages(output: str, target: str) -> list[str]:
    """Return what a job's output says, but for Slurm's lines and how far ``target`` is."""
    lines = (line for line in output.splitlines() if line and not _PASSED_OVER.match(line))
    return [line for line in lines if not line.startswith(f"stage: {target}: ")]


def places(message: str) -> NodeSet | str:
    """Return the nodes that a message is about, or else the path that it has."""
    found = re.search(rf"(?:^|: |on )(n\d|n\[[\d,-]+\])[:;] |({SLOW}/\S+|/nvme\S*)", message)
    return NodeSet(found[1]) if found and found[1] else found[2] if found else ""


# A fault


class Round:
    """One fault, the jobs that it meets, and the job after it."""

    def __init__(self, site: Site, sources: Sources, fault: Fault) -> None:
        self._site = site
        self._sources = sources
        self._fault = fault
        self._jobs: dict[str, Job] = {}
        #: Jobs that were told to start soon.
        self._hurried: set[str] = set()
        self.result = Result(fault.number, fault.kind, fault.moment, fault.cargo, hit=False)

    def run(self) -> None:
        """Do the fault and check everything; what is wrong is in the result."""
        begun = time.monotonic()
        fault = self._fault
        for user in fault.users:
            self._sources.renew(user, fault.cargo)
        with ExitStack() as stack:
            scene = self._scene()
            stack.enter_context(prepared(scene))
            self.result.hit = self._inflict(stack)
            self._await_told()
            if fault.kind.startswith("disk "):
                self._await_ends()
        self._await_ends()
        wrong = unrest(self._site, ENDED_WITHIN)
        if fault.kind == "node rebooted":  # the clean-up of the next job removes partial files
            wrong = [one for one in wrong if not _PARTIAL.fullmatch(one)]
        self._note(wrong)
        for user, job in self._jobs.items():
            self._check_job(user, job)
            self._check_copies(user)
        self._check_next()
        self.result.seconds = round(time.monotonic() - begun, 1)

    def _note(self, violations: Iterable[str]) -> None:
        self.result.violations.extend(violations)

    def _scene(self) -> Scene:
        fault = self._fault
        first = fault.users[0]
        return Scene(
            self._site, fault, self._jobs.get(first),
            lambda: self._sources.renew(first, fault.cargo),
        )  # fmt: skip

    # The fault

    def _inflict(self, stack: ExitStack) -> bool:
        """Submit the jobs and do the fault at its moment; return whether it came in time."""
        if self._fault.moment is Moment.BEFORE:
            stack.enter_context(inflicted(self._scene()))
            self._submit()
            return True
        earlier = self._published()
        self._submit()
        if not self._await_moment(earlier):
            return False
        try:
            stack.enter_context(inflicted(self._scene()))
        except MissedError:
            return False
        return True

    def _submit(self) -> None:
        for user in self._fault.users:
            self._jobs[user] = submit(self._site, self._fault, user)

    @property
    def _first(self) -> Job:
        return self._jobs[self._fault.users[0]]

    def _await_moment(self, earlier: dict[str, tuple[int, int] | None]) -> bool:
        """Wait for the fault's moment; return whether it came, and is not over."""
        waits: dict[str, Callable[[], bool]] = {
            Moment.START: self._has_begun,
            Moment.TRANSFER: self._Transfer(self).has_come,
            Moment.PUBLICATION: lambda: self._published() != earlier,
            Moment.SCRIPT: lambda: STARTED in self._first.output(),
        }
        come = waits[self._fault.moment]
        if not is_reached(lambda: come() or self._is_told(self._first), MOMENT_WITHIN, 0.03):
            return False
        return self._fault.moment is Moment.SCRIPT or not self._is_told(self._first)

    def _has_begun(self) -> bool:
        if self._fault.share < 0.5 and self._fault.kind not in NEED_RANK:
            return any(is_gate(process) for process in processes(self._site))
        victim = self._fault.victim
        return any(is_rank(process) and process.node == victim for process in self._own())

    def _own(self) -> Iterator[Process]:
        """Yield the processes of the first user."""
        uid = USERS[self._fault.users[0]]
        return (process for process in processes(self._site) if process.user() == uid)

    class _Transfer:
        """Whether the victim's rank has written its share of the bytes, and writes on."""

        def __init__(self, around: Round) -> None:
            fault = around._fault
            parts = len(fault.nodes) if fault.cargo == "shards" else 1
            self._around = around
            self._wanted = fault.share * 0.8 * SIZE / parts
            self._rank: Process | None = None
            self._before = 0

        def has_come(self) -> bool:
            if self._rank is None:
                self._find()
            if self._rank is None or not _is_receiving(self._rank):
                return False
            return self._rank.written() - self._before >= self._wanted

        def _find(self) -> None:
            for process in self._around._own():
                here = process.node == self._around._fault.victim
                if here and is_rank(process) and _is_receiving(process):
                    self._rank, self._before = process, process.written()

    def _published(self) -> dict[str, tuple[int, int] | None]:
        """Return which copy of the first user each node has."""
        found: dict[str, tuple[int, int] | None] = {}
        for node in self._fault.nodes:
            found[node] = None
            with suppress(OSError):
                path = destination(self._fault.users[0], self._fault.cargo)
                facts = self._site.copy(node, path).stat()
                found[node] = facts.st_ino, facts.st_ctime_ns
        return found

    # The end

    def _is_told(self, job: Job) -> bool:
        """Whether a job's script has started, or its output says that it will not."""
        with suppress(FileNotFoundError):
            text = self._site.path(
                "login", f"{_home(job, self._jobs)}/job-{job.id}.out"
            ).read_text()
            return STARTED in text or NOT_STARTED.partition("(")[0] in text
        return False

    def _await_told(self) -> None:
        """Wait until all jobs have said how their stages ended, or have ended without a word."""

        def told() -> bool:
            silent = {job.id for job in self._jobs.values() if not self._is_told(job)}
            return not (silent and silent & self._live())

        begun = time.monotonic()
        is_told = is_reached(told, TOLD_WITHIN, pause=0.2)
        self.result.told = round(time.monotonic() - begun, 1)
        if not is_told:
            self._note([f"not told within {TOLD_WITHIN} s: {self._squeue('%A %u %t %R')}"])

    def _squeue(self, columns: str) -> list[str]:
        return self._site.run(["squeue", "-h", "-o", columns], user="root").stdout.splitlines()

    def _live(self) -> set[str]:
        """Return the jobs that have not ended; have those that were requeued start soon."""
        listed = dict(line.split() for line in self._squeue("%A %t"))
        for number in {number for number, state in listed.items() if state == "PD"} - self._hurried:
            # Slurm revokes the credential of a job that starts in the second of its requeue.
            update = ["scontrol", "update", f"JobId={number}", "StartTime=now+2"]
            self._site.run(update, user="root", check=False)
            self._hurried.add(number)
        return set(listed)

    def _await_ends(self) -> None:
        """Wait until all jobs have ended; cancel those that do not."""

        def ended() -> bool:
            return not self._live()

        if not is_reached(ended, ENDED_WITHIN, pause=0.2):
            self._note([f"not ended within {ENDED_WITHIN} s: {self._squeue('%A %u %t %R')}"])
            self._site.run(["scancel", f"--user={','.join(USERS)}"], user="root", check=False)

    # The oracle

    def _check_job(self, user: str, job: Job) -> None:
        record, output = job.info(), job.output()
        outcome = outcome_of(record)
        self.result.outcomes.append(outcome)
        kind = KINDS[self._fault.kind]
        hit = self.result.hit and (user == self._fault.users[0] or not kind.spares_others)
        wrong: list[str] = []
        if outcome not in (kind.outcomes if hit else {COMPLETED}):
            wrong.append("an outcome that is not expected")
        code = re.fullmatch(r"code ([2-9])", outcome)
        if code:
            wrong += wrong_messages(output, int(code[1]), self._fault, user)
            wrong += self._wrong_names(user, output) if hit else []
        if code and STARTED in output:
            wrong.append("the script has started")
        if outcome in (COMPLETED, REQUEUED):
            wrong += self._wrong_bytes(user, output)
        self._note(f"job {job.id} of {user}, {outcome}: {one}\n{output}" for one in wrong)

    def _wrong_names(self, user: str, output: str) -> list[str]:
        """Return what is wrong with the nodes that a message names: the victim must be there."""
        named = places(messages(output, destination(user, self._fault.cargo))[0])
        # Of two nodes that do not hear each other, neither knows whose link is down.
        is_known = not (self._fault.kind.startswith("link ") and len(self._fault.nodes) == 2)
        if self._fault.kind in WITH_VICTIM and is_known and isinstance(named, NodeSet):
            return [] if self._fault.victim in named else [f"{named} named, not the victim"]
        return []

    def _wrong_bytes(self, user: str, output: str) -> Iterator[str]:
        """Yield what is wrong with the copies of a job that completed, on its nodes."""
        fault = self._fault
        if fault.kind in ("disk full", "disk read-only", "disk errors", "disk stutters"):
            return  # the disk is not there any more
        found = {node: contents(self._site, node, user, fault.cargo) for node in fault.nodes}
        if fault.lifetime and fault.moment is Moment.SCRIPT:
            return  # the script does not look
        if fault.lifetime:
            found = {node: {} for node in fault.nodes}
            for node, sha, path in CHECKED.findall(output):
                name = path.removeprefix(destination(user, fault.cargo)).lstrip("/")
                found[node][name] = sha
        yield from self._incomplete(user, found)

    def _incomplete(self, user: str, found: dict[str, Contents]) -> Iterator[str]:
        newest = self._sources.newest(user, self._fault.cargo)
        if self._fault.cargo == "shards":
            names = [name for held in found.values() for name in held]
            whole = {name: sha for held in found.values() for name, sha in held.items()}
            replaced = self._fault.kind == "source replaced"
            if len(names) != len(set(names)) or (whole != newest and not replaced):
                yield f"wrong parts: {found}"
            return
        for node, held in found.items():
            right = held == newest
            if self._fault.kind == "source replaced":
                right = bool(held) and self._sources.is_whole(held, user, self._fault.cargo)
            if not right:
                yield f"wrong bytes on {node}: {sorted(held)}"

    def _check_copies(self, user: str) -> None:
        """Check that each node of the cluster holds nothing but whole versions."""
        for node in self._site.nodes:
            found = contents(self._site, node, user, self._fault.cargo)
            if not self._sources.is_whole(found, user, self._fault.cargo):
                self._note([f"a part or a mixture of {user} on {node}: {found}"])

    def _check_next(self) -> None:
        """Check that the next job works and finds the right bytes."""
        user = self._fault.users[0]
        job = submit(self._site, self._fault, user, after=True)
        with suppress(AssertionError):
            job.wait(ENDED_WITHIN)
        outcome = outcome_of(job.info())
        if outcome != COMPLETED:
            job.cancel()
            self._note([f"the next job {job.id}, {outcome}\n{job.output()}"])
            return
        fault = self._fault
        newest = self._sources.newest(user, fault.cargo)
        found = {node: contents(self._site, node, user, fault.cargo) for node in fault.nodes}
        whole = {name: sha for held in found.values() for name, sha in held.items()}
        if fault.cargo == "shards":
            right = whole == newest and sum(map(len, found.values())) == len(newest)
        else:
            right = all(held == newest for held in found.values())
        if not right:
            self._note([f"the next job {job.id} has wrong bytes: {found}\n{job.output()}"])
        self._note(f"after the next job: {wrong}" for wrong in unrest(self._site))


def _is_receiving(rank: Process) -> bool:
    """Whether a rank has a file that is not yet published open."""
    folder = f"/nvme/.slurm-stage/{rank.user()}/partial"
    return rank.has_open_beneath(folder)


def _home(job: Job, jobs: dict[str, Job]) -> str:
    user = next(user for user, other in jobs.items() if other == job)
    return f"/home/{user}"


# A campaign


class Campaign:
    """The results of all faults so far, kept in a file."""

    def __init__(self, name: str, folder: Path = KEPT) -> None:
        self._path = folder / f"{name}.json"
        self.results: list[Result] = []
        if self._path.exists():
            kept = json.loads(self._path.read_text())
            self.results = [Result(**result) for result in kept]

    def add(self, result: Result) -> None:
        """Keep and print a result."""
        self.results.append(result)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps([asdict(one) for one in self.results], indent=1))
        fresh.rename(self._path)
        outcomes = ", ".join(result.outcomes) if result.hit else MISSED
        print(
            f"{result.number} {result.kind}, {result.moment}, {result.cargo}: {outcomes} "
            f"(told after {result.told} s, {result.seconds} s in all)", flush=True,
        )  # fmt: skip
        for violation in result.violations:
            print(f"VIOLATION {violation}", flush=True)


def table(results: Iterable[Result]) -> Table:
    """Return how often each kind of fault had which outcome for the job that it hit."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for result in results:
        seen = counts[result.kind]
        first = result.outcomes[0] if result.outcomes else "no outcome"
        seen[first if result.hit else MISSED] += 1
        seen["faults"] += 1
        seen["in mid-transfer"] += result.hit and result.moment == Moment.TRANSFER
        seen["violations"] += bool(result.violations)
    fixed = ("faults", "in mid-transfer", MISSED, "violations")
    columns = sorted({name for seen in counts.values() for name in seen} - set(fixed))
    shown = Table(title="faults and outcomes", title_justify="left")
    shown.add_column("kind")
    for name in (*fixed, *columns):
        shown.add_column(name, justify="right")
    total = sum(counts.values(), Counter[str]())
    for kind, seen in [*counts.items(), ("all", total)]:
        if seen:
            shown.add_row(kind, *(str(seen[name] or "") for name in (*fixed, *columns)))
    return shown


def new_site() -> Site:
    """Return a cluster for a campaign, which is not yet started."""
    return Site(4, "tmpfs", extra_conf=PREEMPTION)


def fit_out(site: Site) -> None:
    """Give a cluster what the faults need."""
    flags = ["-O2", "-I/usr/include/fuse3", str(FUSE), "-lfuse3"]
    subprocess.run(["gcc", "-o", str(site.shared("slow_folder")), *flags], check=True)
    limits = f"[transfer]\nstall_timeout = {STALL}\n[launch]\nstart_timeout = {BEGIN}\n"
    site.write_policy(POLICY + limits)
    install(site)


def run(campaign: Campaign, faults: Iterator[Fault], site: Site, until: float) -> bool:
    """Do faults until the time.monotonic() ``until``; return whether the cluster was lost."""
    sources = Sources(site)
    for fault in faults:
        around = Round(site, sources, fault)
        lost = False
        try:
            around.run()
        except (AssertionError, ClusterError, OSError, subprocess.SubprocessError) as error:
            around.result.violations.append(f"the cluster: {error}")
            lost = True
        campaign.add(around.result)
        if lost or time.monotonic() > until:
            return lost
    return False


def main() -> int:
    """Run a campaign on clusters of its own: after a fault that breaks one, there is another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--only", type=int, metavar="NUMBER", help="a fault of the plan, repeated")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    campaign = Campaign(
        str(options.seed) if options.only is None else f"{options.seed}-{options.only}"
    )
    until = time.monotonic() + 3600 * options.hours
    lost = len(campaign.results) < options.faults
    while lost:
        with new_site() as site:
            fit_out(site)
            planned = plan(options.seed, site.nodes)
            if options.only is not None:
                planned = itertools.repeat(next(itertools.islice(planned, options.only, None)))
            rest = itertools.islice(planned, len(campaign.results), options.faults)
            lost = run(campaign, rest, site, until) and time.monotonic() < until
    Console(width=200).print(table(campaign.results))
    return 1 if any(result.violations for result in campaign.results) else 0


if __name__ == "__main__":
    sys.exit(main())
