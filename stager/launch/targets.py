"""Run a request on the nodes that a user means: those of a job, named hosts, or simulated ones."""

from __future__ import annotations

import os
import signal
import stat
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from stager.base import linux
from stager.base.errors import HOSTS_REMEDY, LaunchError, PolicyRefusal, UsageError
from stager.base.interfaces import name_here
from stager.base.paths import SITE_CONFIG, SLURM
from stager.fs.files import name_of, who_could_replace
from stager.launch import job
from stager.launch.credentials import read_url_files, with_stores
from stager.launch.environment import rank_environment
from stager.launch.health import Paces, Pulses
from stager.launch.job import FOLDERS, find_srun
from stager.launch.mpi import library_for, peer_key, settle
from stager.launch.run import SHORT, USUAL, NotStartedError, run, with_evictions
from stager.launch.srun import HELLO_RANKS, hello_argv, srun_argv
from stager.request.grammar import parse_value
from stager.request.items import StageRequest, Work
from stager.request.names import Names, absolute, current_folder, letters_at_submission, letters_of
from stager.request.resolve import build_request, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stager.base.outcome import Outcome
    from stager.launch.job import JobContext
    from stager.launch.schedulers import Hosts, Line
    from stager.launch.tolerate import Tolerated
    from stager.request.grammar import Directive
    from stager.request.policy import Policy

    OnEvent = Callable[[dict[str, Any]], None]


#: The folder for the disks of simulated nodes if none is named.
_LOCAL_ROOT = "stage-nodes"


class Nodes(Protocol):
    """Nodes on which a request can be run."""

    @property
    def rules(self) -> Policy:
        """The site's rules there."""

    @property
    def letters(self) -> Mapping[str, str]:
        """What stands for the `LETTERS` in paths, but for what the environment says."""

    @property
    def waits_for(self) -> str:
        """What says that another process runs requests for this one, too; empty if none does."""

    def run(self, request: StageRequest, on_event: OnEvent) -> Outcome:
        """Run ``request`` on these nodes, and pass what the ranks and their launcher tell on.

        Raise LaunchError, UsageError if it is too long, PolicyRefusal if this user may not stage.
        """


@dataclass(frozen=True, slots=True)
class JobNodes:
    """The nodes of the job that this process runs in."""

    rules: Policy
    context: JobContext
    letters: ClassVar[Mapping[str, str]] = {}
    waits_for: ClassVar[str] = ""

    @classmethod
    def find(cls, config: Path, job_id: int | None = None, *, of_step: bool = False) -> JobNodes:
        """Return the job's nodes, or those of this process's own srun.

        With ``job_id``, this process acts as one of that job from now.
        Raise UsageError outside of a job, PolicyRefusal, LaunchError.
        """
        if not job_id:
            job.number(os.environ)  # whoever is outside of a job may lack stage.toml, too
        from stager.request.policy import load  # takes a while, as it imports pydantic

        rules = load(config)
        if job_id:
            job.enter(job_id, os.environ, rules.launch.srun)
        rules = rules.at(letters_of(os.environ))
        find = job.find_step if of_step else job.find
        return cls(rules, find(os.environ, rules.launch.srun))

    def tolerated(self, text: str) -> Tolerated | None:
        """Return how many of these nodes may fail, by a user's option or by stage.toml.

        None means that no node may. Raise UsageError.
        """
        if not text and not self.rules.launch.tolerate.number:
            return None
        from stager.launch.tolerate import tolerated  # few jobs tolerate a failed node

        return tolerated(text, self.rules, self.context.node_count)

    def run(
        self, request: StageRequest, on_event: OnEvent, tolerance: Tolerated | None = None
    ) -> Outcome:
        """Do what `Nodes` says on these nodes, or on as many as the ``tolerance`` wants."""
        _refuse_root(_instead(self.rules))
        request = replace(
            request, nodes=self.context.node_count, job=self.context.job,
            log_user=own_user(os.environ) if self.rules.report.syslog else "",
        )  # fmt: skip
        srun = find_srun(self.rules.launch.srun)
        rules = settle(self.rules, srun)
        on_event({"event": "launch", "mpi": rules.launch.mpi})
        if tolerance is None:
            return with_evictions(partial(self._start, request, rules, srun, on_event))
        from stager.launch.tolerate import run_tolerantly  # few jobs do

        return run_tolerantly(
            self.context, request, tolerance, srun, partial(self._start, rules=rules, srun=srun),
            on_event,
        )  # fmt: skip

    def _start(
        self,
        request: StageRequest,
        rules: Policy,
        srun: str,
        on_event: OnEvent,
        nodes: Sequence[str] = (),
        most_slow: int = 0,
    ) -> Outcome:
        """Run ``request`` on ``nodes``, without any on all nodes. Raise LaunchError, UsageError.

        So many nodes may be too slow: the error names them then.
        """
        own = job.own_name(os.environ)
        library = library_for(self.context.node_count, rules)
        # The first rank may have to ask Slurm, too (`rank.survey`).
        path = ":".join(dict.fromkeys((*FOLDERS, os.path.dirname(srun))))
        for_srun = self.context.variables | {"PATH": path} | (peer_key() if library else {})
        try:
            return run(
                srun_argv(srun, self.context, rules, library, nodes),
                rank_environment(with_stores(request), rules, request, for_srun),
                rules.launch.start_timeout,
                on_event,
                Pulses(
                    names=lambda: list(nodes) or job.unfold(self.context.nodes),
                    own=own,
                    limit=request.stall_timeout,
                    is_suspended=lambda: job.is_suspended(self.context.job, srun),
                    silence=request.silence,
                ),
                patience=SHORT if request.silence else USUAL,
                paces=Paces(rules.launch.tolerate_slow, most_slow, own),
            )
        except NotStartedError as error:
            if error.blamed and request.silence:
                raise
            from stager.launch.nodes import why_not_started  # only for this failure

            reason = why_not_started(self.context, self.rules)
            raise LaunchError(reason or error.message) from None


@dataclass(frozen=True, slots=True)
class HostNodes:
    """Hosts on which ``launcher`` starts the ranks, once all answer within ``wait`` seconds."""

    rules: Policy
    launcher: str
    hosts: Hosts
    wait: float
    #: The command line that several processes run to stage to these hosts.
    line: Line | None = None
    letters: ClassVar[Mapping[str, str]] = {}

    @property
    def waits_for(self) -> str:
        """The variable by which this process is not the first of its line."""
        return self.line.later if self.line else ""

    def run(self, request: StageRequest, on_event: OnEvent) -> Outcome:
        """Do what `Nodes` says on these hosts; the first process of a line stages for all."""
        from stager.launch import mpiexec  # needed without Slurm only
        from stager.launch.schedulers import wait_for_first

        _refuse_root("stage as an ordinary user")
        if self.line and not (request.dry_run or request.bench):
            request = replace(request, line=self.line.name)
            if self.line.later:
                waits = f"{self.line.later}: the first stages, this one waits"
                on_event({"event": "hosts", "line": waits})
                return wait_for_first(self.line, request, self.rules.launch.start_timeout)
        names = list(self.hosts.names)
        request = replace(
            request, nodes=len(names), hosts=self.hosts.names,
            log_user=str(os.getuid()) if self.rules.report.syslog else "",
        )  # fmt: skip
        library = library_for(len(names), self.rules)
        by = mpiexec.launch_by_flux if self.launcher == "flux" else mpiexec.launch_by_mpiexec
        extra = peer_key() if library else {}
        ranks = mpiexec.Ranks(self.hosts, self.rules, request, with_stores(request), extra, library)
        known = list(names)

        def on_rank_event(event: dict[str, Any]) -> None:
            if event["event"] == "started":
                known[:] = map(str, event["names"])
            on_event(event)

        with by(ranks) as launch:
            nodes = "1 node" if len(names) == 1 else f"{len(names)} nodes"
            on_event(
                {"event": "hosts", "line": f"by {launch.name} on {nodes}, from {self.hosts.origin}"}
            )
            if launch.agent and self.wait:
                from stager.launch.reach import wait_for  # slow to import

                wait_for(
                    mpiexec.others(self.hosts), launch.agent, launch.environment, self.wait,
                    lambda silent, seconds: on_event(
                        {"event": "silent", "nodes": silent, "seconds": seconds}
                    ),
                )  # fmt: skip
            pulses = Pulses(
                names=lambda: known,
                own=name_here(names),
                limit=request.stall_timeout,
                launcher=launch.name,
            )
            limit = self.rules.launch.start_timeout
            start = partial(run, launch.argv, launch.environment, limit, on_rank_event, pulses)
            return with_evictions(partial(start, HOSTS_REMEDY))


@dataclass(frozen=True, slots=True)
class SimulatedNodes:
    """Nodes that this machine plays; the disk of each is a folder beneath ``root``."""

    rules: Policy
    count: int
    #: An absolute path.
    root: str
    waits_for: ClassVar[str] = ""

    @property
    def letters(self) -> dict[str, str]:
        """What only a job has stands for itself, as in the roots of these nodes."""
        return letters_at_submission(os.environ)

    def run(self, request: StageRequest, on_event: OnEvent) -> Outcome:
        """Do what `Nodes` says on these nodes.

        As root, they have a network of their own (`launch.alone`): no server can be reached there.
        """
        from stager.launch import mpiexec  # needed without Slurm only

        url = next((item.source for item in request.items if item.scheme.is_url), "")
        if url and os.getuid() == 0:
            problem = "simulated nodes of root reach no server"
            raise UsageError(f"{url}: {problem}; run this as an ordinary user")
        request = replace(request, nodes=self.count, local_root=self.root)
        if not request.dry_run:
            self._make_disks()
        pulses = Pulses(lambda: mpiexec.simulated_names(self.count), "", request.stall_timeout)
        limit = self.rules.launch.start_timeout
        argv = mpiexec.mpiexec_argv(self.count)
        with mpiexec.folder_of_launcher(is_shared_memory=True) as folder:
            environment = rank_environment(
                with_stores(request), self.rules, request, mpiexec.mpiexec_environment(folder)
            )
            return with_evictions(lambda: run(argv, environment, limit, on_event, pulses))

    def _make_disks(self) -> None:
        from stager.launch.mpiexec import simulated_names

        for name in simulated_names(self.count):
            for cache_root in self.rules.roots:
                make_disk(self.root, f"/{name}{cache_root}")


def own_user(environment: Mapping[str, str]) -> str:
    """Return the name of the job's user, which Slurm has looked up, else the uid."""
    return environment.get("SLURM_JOB_USER") or str(os.getuid())


def _refuse_root(instead: str) -> None:
    """Raise PolicyRefusal for root, which may do something ``instead``."""
    if (os.getuid() == 0 or os.geteuid() == 0) and not linux.is_alone():
        raise PolicyRefusal(f"root cannot stage: {instead}")


def _instead(rules: Policy) -> str:
    """Return what root may do instead of staging."""
    if not rules.shared_roots:
        return "submit as an ordinary user"
    return (
        f"submit as an ordinary user; to stage for all users, submit as {rules.shared.owner}, the "
        "owner in [shared] of stage.toml"
    )


def find_nodes(
    config: Path = Path(SITE_CONFIG),
    *,
    local: int = 0,
    local_root: Path | None = None,
    job_id: int | None = None,
    hosts: str = "",
    hostfile: Path | None = None,
    launcher: str | None = None,
    wait: float | None = None,
    values: Sequence[str] = (),
) -> Nodes:
    """Return the nodes that are named, else those of the job that the environment tells of.

    At most one of them is named: ``local`` simulated nodes with disks beneath ``local_root``, the
    Slurm job ``job_id``, ``hosts``, or those of a ``hostfile`` or of another scheduler's
    ``launcher``. Hosts have to answer within ``wait`` seconds, None for the site's. ``values`` are
    what is to be staged there. Raise UsageError, PolicyRefusal, LaunchError.
    """
    file = str(hostfile or "")
    if job_id and (local or hosts or file or launcher):
        raise UsageError("use only one of --job, --hosts, --hostfile, --launcher and --local")
    if local and (hosts or file or launcher):
        raise UsageError("--local simulates nodes: remove --hosts, --hostfile and --launcher")
    from stager.request.policy import load_here  # takes a while, as it imports pydantic

    if local:
        rules = load_here(config, os.environ, simulated=True)
        return SimulatedNodes(rules, local, absolute(str(local_root or _LOCAL_ROOT)))
    from stager.launch.schedulers import choose, find_line, read_text  # needed without Slurm only

    launcher = SLURM if job_id else launcher or ""
    by, found = choose(os.environ, read_text, hosts=hosts, file=file, launcher=launcher)
    if found:
        rules = load_here(config, os.environ)
        line = find_line(os.environ, found.names, values)
        return HostNodes(rules, by, found, rules.launch.wait if wait is None else wait, line)
    return JobNodes.find(config, job_id)


def stage(
    values: Sequence[str | Directive],
    nodes: Nodes | None = None,
    *,
    dry_run: bool = False,
    on_event: OnEvent = lambda _: None,
) -> Outcome:
    """Stage what ``values`` ask for to ``nodes``, and return what was done, or why it failed.

    A value is a Directive, or the text of some as ``--stage`` has it: ``SRC:DST``. ``nodes`` are by
    default those that `find_nodes` finds. A ``dry_run`` says what would move. ``on_event`` gets
    what the ranks tell meanwhile. Raise StageError if no ranks can be started at all.
    """
    texts = [str(value) for value in values]
    nodes = nodes or find_nodes(values=texts)
    names = Names.of(os.environ, nodes.rules.variables)
    # The paths of a command line begin in the current folder, also in a job.
    names = replace(names, folder=current_folder(), letters={**nodes.letters, **names.letters})
    directives = [directive for text in texts for directive in parse_value(text, names)]
    items = resolve(read_url_files(directives, os.environ), nodes.rules)
    request = build_request(items, nodes.rules, Work.PLAN if dry_run else Work.STAGE)
    return nodes.run(request, on_event)


#: Seconds in which both ranks must start, and then answer. A stage's may take longer, since there
#: may be thousands of them.
_SMOKE_PATIENCE = 20.0


def smoke_test(
    nodes: Sequence[str], context: JobContext, policy: Policy, environment: Mapping[str, str]
) -> int:
    """Start two ranks on one or two ``nodes`` of a job, as a stage starts its own.

    They stage nothing. Return how many found each other; `stagectl doctor` says what came of it.
    Raise LaunchError if a rank does not start or ends early.
    """
    worlds: list[int] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "started":
            worlds.append(event["nodes"])

    request = StageRequest(
        (), HELLO_RANKS, policy.lock_timeout, _SMOKE_PATIENCE, job=context.job,
        work=Work.HELLO,
        # A stage on one node needs none.
        interface=policy.launch.named_interface if len(nodes) > 1 else "",
    )  # fmt: skip
    library = None
    with suppress(LaunchError):  # that it is missing is another finding
        library = library_for(len(nodes), policy)
    for_srun = context.variables | (peer_key() if library else {})
    outcome = run(
        hello_argv(find_srun(policy.launch.srun), context, policy, nodes, library),
        rank_environment(environment, policy, request, for_srun),
        min(policy.launch.start_timeout, _SMOKE_PATIENCE),
        on_event,
        Pulses(lambda: [*nodes], job.own_name(environment), _SMOKE_PATIENCE),
    )
    found = min(worlds, default=0)
    if outcome.failures and found in (0, HELLO_RANKS):  # a rank refused to begin, or both are there
        raise LaunchError(outcome.failures[0].message)
    return found


def end_step(config: Path, step: str) -> None:
    """Terminate the tasks of this job's step, but not this process, which is one of them.

    If stage.toml, which may name Slurm's folder, is at fault itself, look for scancel without it.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from stager.request.policy import load  # takes a while, as it imports pydantic

    srun = "srun"
    with suppress(PolicyRefusal):
        srun = load(config).launch.srun
    job.end_step(os.environ, step, srun)


_REMEDY = "choose another --local-root"


def make_disk(root: str, disk: str) -> None:
    """Make the folder ``disk`` beneath ``root``, both absolute paths, for this user alone.

    Links above ``root`` are followed if they are root's or this user's. Raise UsageError.
    """
    above = os.path.dirname(root)
    try:
        for path in _steps(above):
            _check(path)
        # What is checked first cannot be replaced by others while the rest is.
        above = os.path.realpath(above)
        for path in _steps(f"{above}/{os.path.basename(root)}{disk}"):
            if not os.path.lexists(path):
                os.mkdir(path, 0o700)
            if len(path) > len(above) and os.path.islink(path):
                raise UsageError(f"{path} is a symbolic link, which is not followed; {_REMEDY}")
            _check(path)
    except OSError as error:
        raise UsageError(f"{root}{disk}: {error.strerror}; {_REMEDY}") from None


def _steps(path: str) -> list[str]:
    """Return ``path`` and all folders above it, those first."""
    return [*accumulate(["/", *filter(None, path.split("/"))], os.path.join)]


def _check(path: str) -> None:
    """Raise UsageError if others could replace what is in the folder ``path``, or the link itself.

    Return if it is missing.
    """
    # In a container of the user's, what is root's may belong to another uid.
    owners = {0, os.getuid(), os.stat("/").st_uid}
    with suppress(FileNotFoundError):
        facts = os.lstat(path)
        who = "" if facts.st_uid in owners else name_of(facts.st_uid)
        if not who and (not stat.S_ISLNK(facts.st_mode) or os.path.isdir(path)):
            there = os.stat(path)
            # Who works in a folder of a group's trusts the group; root does not.
            if os.getuid() == 0 or there.st_uid not in owners or there.st_mode & stat.S_IWOTH:
                who = who_could_replace(there, owners)
        if who:
            raise UsageError(f"{path or '/'}: {who} could replace what is in it; {_REMEDY}")
