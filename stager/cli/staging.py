"""Run a request on the nodes of a job, or on simulated nodes, and print its outcome."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stager.base import linux
from stager.base.errors import LaunchError, PolicyRefusal, UsageError
from stager.base.text import columns
from stager.cli.arguments import absolute
from stager.cli.local_disks import make_disk
from stager.cli.options import load_policy, read_policy
from stager.cli.progress import Progress
from stager.cli.render import evicted_lines, phase_line, summary
from stager.cli.terminal import Blocks, complain, ignore, say, width
from stager.launch import job
from stager.launch.credentials import read_url_files, with_stores
from stager.launch.environment import rank_environment
from stager.launch.health import Paces, Pulses
from stager.launch.job import FOLDERS, find_srun
from stager.launch.mpi import library_for, peer_key, settle
from stager.launch.mpiexec import (
    folder_of_launcher,
    mpiexec_argv,
    mpiexec_environment,
    simulated_names,
)
from stager.launch.run import SHORT, USUAL, NotStartedError, run, with_evictions
from stager.launch.schedulers import choose, read_text
from stager.launch.srun import srun_argv
from stager.request.grammar import parse_value
from stager.request.items import Space, StageItem, StageRequest
from stager.request.names import Names, current_folder, letters_at_submission, letters_of
from stager.request.resolve import resolve
from stager.wire.layout import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from stager.base.outcome import Outcome
    from stager.cli.on_hosts import HostNodes
    from stager.cli.options import RunOptions
    from stager.cli.tolerant import Tolerated
    from stager.launch.job import JobContext
    from stager.launch.same_line import Line
    from stager.request.grammar import Directive
    from stager.request.policy import Policy, Transfer

    OnEvent = Callable[[dict[str, Any]], None]

#: The folder for the disks of simulated nodes if none is named.
_LOCAL_ROOT = "stage-nodes"


@dataclass(frozen=True, slots=True)
class JobNodes:
    """The nodes of the job that this process runs in."""

    rules: Policy
    context: JobContext

    @classmethod
    def find(cls, config: Path, job_id: int | None = None, *, of_step: bool = False) -> JobNodes:
        """Return the job's nodes, or those of this process's own srun.

        With ``job_id``, this process acts as one of that job from now.
        Raise UsageError outside of a job, PolicyRefusal, LaunchError.
        """
        if not job_id:
            job.number(os.environ)  # whoever is outside of a job may lack stage.toml, too
        rules = read_policy(config, simulated=False)
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
        from stager.cli.tolerant import tolerated

        return tolerated(text, self.rules, self.context.node_count)

    def run(
        self, request: StageRequest, on_event: OnEvent, tolerance: Tolerated | None = None
    ) -> Outcome:
        """Run ``request`` on these nodes, or on as many as the ``tolerance`` wants.

        Raise LaunchError, UsageError if it is too long, PolicyRefusal for root.
        """
        if (os.getuid() == 0 or os.geteuid() == 0) and not linux.is_alone():
            raise PolicyRefusal(f"root cannot stage: {_instead(self.rules)}")
        request = replace(
            request, nodes=self.context.node_count, job=self.context.job,
            log_user=own_user(os.environ) if self.rules.report.syslog else "",
        )  # fmt: skip
        srun = find_srun(self.rules.launch.srun)
        rules = settle(self.rules, srun)
        on_event({"event": "launch", "mpi": rules.launch.mpi})
        if tolerance is None:
            return with_evictions(partial(self._start, request, rules, srun, on_event))
        from stager.cli.tolerant import run_tolerantly  # most jobs want all nodes

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
        # The first rank may have to ask Slurm, too (`rank.ended`).
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
            from stager.cli.in_the_way import what_is_in_the_way  # only for this failure

            reason = what_is_in_the_way(self.context, self.rules)
            raise LaunchError(reason or error.message) from None


@dataclass(frozen=True, slots=True)
class SimulatedNodes:
    """Nodes that this machine plays; the disk of each is a folder beneath ``root``."""

    rules: Policy
    count: int
    root: Path

    @classmethod
    def find(cls, options: RunOptions) -> SimulatedNodes:
        """Return the nodes that ``--local`` asks for. Raise UsageError or PolicyRefusal."""
        root = absolute(str(options.local_root or _LOCAL_ROOT))
        return cls(load_policy(options.config, simulated=True), options.local, Path(root))

    def run(self, request: StageRequest, on_event: OnEvent) -> Outcome:
        """Run ``request`` on these nodes. Raise LaunchError, and UsageError if it is too long.

        As root, they have a network of their own (`launch.alone`): no server can be reached there.
        """
        url = next((item.source for item in request.items if item.scheme.is_url), "")
        if url and os.getuid() == 0:
            problem = "simulated nodes of root reach no server"
            raise UsageError(f"{url}: {problem}; run this as an ordinary user")
        request = replace(request, nodes=self.count, local_root=str(self.root))
        if not request.dry_run:
            self._make_disks()
        pulses = Pulses(lambda: simulated_names(self.count), "", request.stall_timeout)
        limit = self.rules.launch.start_timeout
        argv = mpiexec_argv(self.count)
        with folder_of_launcher(is_shared_memory=True) as folder:
            environment = rank_environment(
                with_stores(request), self.rules, request, mpiexec_environment(folder)
            )
            return with_evictions(lambda: run(argv, environment, limit, on_event, pulses))

    def _make_disks(self) -> None:
        for name in simulated_names(self.count):
            for cache_root in self.rules.roots:
                make_disk(str(self.root), f"/{name}{cache_root}")


def own_user(environment: Mapping[str, str]) -> str:
    """Return the name of the job's user, which Slurm has looked up, else the uid."""
    return environment.get("SLURM_JOB_USER") or str(os.getuid())


def _instead(rules: Policy) -> str:
    """Return what root may do instead of staging."""
    if not rules.shared_roots:
        return "submit as an ordinary user"
    return (
        f"submit as an ordinary user; to stage for all users, submit as {rules.shared.owner}, the "
        "owner in [shared] of stage.toml"
    )


def find_nodes(options: RunOptions) -> JobNodes | SimulatedNodes | HostNodes:
    """Return the nodes that ``options`` and the environment mean.

    Raise UsageError, PolicyRefusal, LaunchError.
    """
    file = str(options.hostfile or "")
    if options.job_id:
        if options.local or options.hosts or file or options.launcher:
            raise UsageError("use only one of --job, --hosts, --hostfile, --launcher and --local")
        return JobNodes.find(options.config, options.job_id)
    if options.local:
        if options.hosts or file or options.launcher:
            raise UsageError("--local simulates nodes: remove --hosts, --hostfile and --launcher")
        return SimulatedNodes.find(options)
    launcher, hosts = choose(
        os.environ, read_text, hosts=options.hosts, file=file, launcher=options.launcher or ""
    )
    if hosts is None:
        return JobNodes.find(options.config)
    from stager.cli.on_hosts import HostNodes  # only without Slurm

    rules = load_policy(options.config, simulated=False)
    wait = rules.launch.wait if options.wait is None else options.wait
    return HostNodes(rules, launcher, hosts, wait)


def parse_values(values: Iterable[str], names: Names) -> list[Directive]:
    """Return the directives of ``SRC:DST[,key=value]`` values. Raise DirectiveError."""
    return [directive for value in values for directive in parse_value(value, names)]


def build_request(items: tuple[StageItem, ...], rules: Policy) -> StageRequest:
    """Return the request to stage ``items`` by the site's rules, for one node as yet."""
    return StageRequest(
        items=items, nodes=1, lock_timeout=rules.lock_timeout,
        stall_timeout=rules.transfer.stall_timeout, shared_owner=rules.shared_owner,
        transfer=_settings(rules.transfer), space=space_limits(rules), remote=rules.source.settings,
        interface=rules.launch.named_interface,
    )  # fmt: skip


def space_limits(rules: Policy) -> Space:
    """Return the site's limits on what staged files may take of a disk."""
    limits = rules.cache
    return Space(
        keep_free=limits.keep_free,
        user_limit=limits.user_limit,
        roots=rules.roots,
        private=rules.private_roots,
        of_job=rules.job_roots,
        hints=rules.hints,
        unpacked_size=limits.unpacked_size,
        unpacked_members=limits.unpacked_members,
    )


def _settings(transfer: Transfer) -> Settings:
    return Settings(
        chunk=transfer.chunk,
        depth=transfer.depth,
        readers=(transfer.readers,) if transfer.readers else (),
        writers=transfer.writers,
        algorithm=transfer.algorithm,
        direct=transfer.direct,
    )


def _names_here(nodes: JobNodes | SimulatedNodes | HostNodes) -> Names:
    """Return the names of a command line, whose paths begin in the current folder, also in a job.

    On simulated nodes, what only a job has stands for itself, as in their roots.
    """
    names = replace(Names.of(os.environ, nodes.rules.variables), folder=current_folder())
    if isinstance(nodes, SimulatedNodes):
        return replace(names, letters={**letters_at_submission(os.environ), **names.letters})
    return names


def stage_values(
    values: Sequence[str],
    options: RunOptions,
    *,
    dry_run: bool = False,
    as_json: bool = False,
    verbose: bool = False,
) -> int:
    """Stage what ``values`` ask for, print the outcome and return its exit code.

    Raise StageError if the ranks cannot be started at all.
    """
    nodes = find_nodes(options)
    directives = parse_values(values, _names_here(nodes))
    directives = read_url_files(directives, os.environ)
    request = build_request(resolve(directives, nodes.rules), nodes.rules)
    tell, screen = (ignore, None) if as_json else (say, sys.stdout)
    told: dict[str, str] = {}
    with Progress(tell, bars=screen, verbose=verbose) as progress:

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "hosts":
                told["launcher"] = event["line"]
            progress.show(event)

        request = replace(request, dry_run=dry_run)
        line = None if dry_run else same_line(nodes, values)
        if line:
            request = replace(request, line=line.name)
        if line and line.later and not isinstance(nodes, JobNodes | SimulatedNodes):
            outcome = _wait_for_first(nodes, line, request, on_event)
        elif isinstance(nodes, JobNodes):
            outcome = nodes.run(request, on_event)
        else:
            outcome = nodes.run(request, on_event)
    if as_json:
        click.echo(json.dumps(outcome.to_json() | told, indent=1))
    else:
        print_outcome(outcome, say, complain)
        if verbose:
            _say_times(outcome)
    return outcome.code


def same_line(nodes: JobNodes | SimulatedNodes | HostNodes, values: Iterable[str]) -> Line | None:
    """Return the command line that several processes run to stage ``values`` to these hosts."""
    if isinstance(nodes, JobNodes | SimulatedNodes):
        return None
    from stager.launch.same_line import find

    return find(os.environ, nodes.hosts.names, values)


def _wait_for_first(
    nodes: HostNodes, line: Line, request: StageRequest, on_event: OnEvent
) -> Outcome:
    from stager.launch.same_line import wait_for_first

    nodes.check_user()
    on_event({"event": "hosts", "line": f"{line.later}: the first stages, this one waits"})
    return wait_for_first(line, request, nodes.rules.launch.start_timeout)


def _say_times(outcome: Outcome) -> None:
    """Print where the time went, on a terminal also as bars."""
    say(phase_line(outcome))
    bars = Blocks.of(sys.stdout).scale(outcome.phases, width() - columns("stage: "))
    if bars:
        say(bars)


def end_step(config: Path, step: str) -> None:
    """Terminate the tasks of this job's step, but not this process, which is one of them.

    If stage.toml, which may name Slurm's folder, is at fault itself, look for scancel without it.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    srun = "srun"
    with suppress(PolicyRefusal):
        srun = load_policy(config, simulated=False).launch.srun
    job.end_step(os.environ, step, srun)


def print_outcome(
    outcome: Outcome, say: Callable[[str], None], complain: Callable[[str], None]
) -> None:
    """Print one line for each item by ``say``, or one for each failure by ``complain``.

    Nodes that the stage went on without have failed. Copies that were evicted are told also if the
    stage failed then.
    """
    for line in evicted_lines(outcome.evicted, job.fold) if outcome.failures else ():
        say(line)
    lines = summary(outcome, job.fold)
    failed = len(lines) if outcome.failures else bool(outcome.failed_nodes)
    for number, line in enumerate(lines):
        (complain if number < failed else say)(line)
