"""Run the MPI program, one rank on each node: do what the request in the environment asks.

Only this module, and `__main__` to abort, uses COMM_WORLD. The launching process reads the events
and the Outcome on stdout.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from mpi4py import MPI

from stager.base.errors import (
    HOSTS_REMEDY,
    LARGER_DISKS,
    MPI_REMEDY,
    NO_PLUGIN,
    Failure,
    LaunchError,
    SpaceError,
    StageError,
)
from stager.base.outcome import Outcome
from stager.base.telemetry import Phase, Stopwatch, process_begun
from stager.base.text import listed
from stager.rank.agree import Context, Node, RefusedError, together
from stager.rank.pulse import Pulse
from stager.rank.report import tell
from stager.rank.shared_mount import prepare_shared_mount
from stager.rank.start import is_started_by_plugin
from stager.rank.steps import StageRun
from stager.request.items import REQUEST_VARIABLE, StageRequest, Work
from stager.store.leases import note_figures
from stager.wire.channel import Channel, interrupted, meet, refuse_pickle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stager.base.outcome import ItemReport, Slow
    from stager.node.job_state import StepStatus
    from stager.request.items import Space

#: Seconds that the end of MPI may take, after the outcome is reported.
_MPI_END_PATIENCE = 10
#: Seconds in which a rank's report reaches the launcher before its neighbours report its end.
_REPORT_LEAD = 0.5
#: Seconds of silence after which a rank gives up a neighbour: where there is no limit for a stage
#: that does not move, and beyond that limit.
_SILENCE, _LATER = 90.0, 15.0
#: Nodes that a line of the system log names.
_MOST_NAMED = 8
#: Seconds in which the last event of a rank that ends must be written.
_TELL_PATIENCE = 5.0


def main() -> None:
    """Stage or measure, report, and let this process end with 0 once all ranks agree.

    A stage that was refused also ends with 0: its exit code is in the Outcome.
    """
    request = StageRequest.from_json(os.environ[REQUEST_VARIABLE])
    refuse_pickle()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they are for the user's program, not yet started
    comm = MPI.COMM_WORLD
    if (request.hosts or request.local_root) and comm.rank:
        # Long lines reach mpiexec in several pieces, and it does not keep other ranks' lines out of
        # them. Only the first rank has such lines to tell.
        os.dup2(2, 1)
    watch = Stopwatch(process_begun(), Phase.MPI_INIT)
    watch.enter(Phase.SURVEY)
    node = _node(request, comm.rank)
    pulse = Pulse(node, request, watch)
    if request.stall_timeout or request.silence:
        pulse.start()
    act = _measure if request.work is Work.MEASURE else run
    try:
        channel = Channel(comm, bytes.fromhex(request.key), node.name)
        context = Context(comm, node, request, channel)
        with _guarded(context):
            pulse.find_disks()
            with line_status(context) as tell_line:
                outcome = act(context, watch)
                tell_line(outcome)
    except LaunchError as error:
        _end_all(node.name, error, by=node.name)
    except MPI.Exception as error:
        _end_all(node.name, interrupted(error), by=node.name)
    if comm.rank == 0:
        tell("result", outcome=outcome.to_json())
    # MPI_Finalize comes after this and waits for every slurmstepd, for ever if one was killed.
    # Only the kernel can end this process then; its work is done and reported.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_MPI_END_PATIENCE)


def run(context: Context, watch: Stopwatch) -> Outcome:
    """Stage all items and return the outcome, equal on all ranks but for times. Collective."""
    stage_run = StageRun(context, watch)

    def end(items: list[ItemReport], failures: list[Failure]) -> Outcome:
        watch.enter(Phase.END)
        return Outcome(
            items, failures, watch.total, context.request.dry_run, watch.seconds,
            stage_run.to_evict, _slow(stage_run),
        )  # fmt: skip

    try:
        _check_world(context)
        with _step_status(context) as publish_status:
            items: list[ItemReport] = []
            failures: list[Failure] = []
            try:
                prepare_shared_mount(context)
                items = stage_run.run()
            except RefusedError as refused:
                failures = [_with_hint(one, context.request.space) for one in refused.failures]
            # The job starts when rank 0 has reported: by then every node must have its status.
            unpublished = _publish_together(context, publish_status, failures)
            if unpublished:
                items, failures = [], [*unpublished, *failures]
            outcome = end(items, failures)
            _note_figures(context, outcome, stage_run.evictions)
    except RefusedError as refused:
        outcome = end([], refused.failures)
    _log_result(context, outcome)
    return end(outcome.items, outcome.failures)  # with the time that this took


def _with_hint(failure: Failure, space: Space) -> Failure:
    """Return a failure for want of space with how to ask for more, if the site says how."""
    for root, hint in space.hints.items() if failure.code == SpaceError.code else ():
        if failure.message.startswith((f"{root}/", f"{root}:")):
            text, more = failure.message, f"ask for more by {hint}"
            told = text.replace(LARGER_DISKS, more) if LARGER_DISKS in text else f"{text}; {more}"
            return replace(failure, message=told)
    return failure


def _slow(stage_run: StageRun) -> list[Slow]:
    """Return the nodes that held all others back."""
    if not stage_run.paces:
        return []
    from stager.base.outcome import slow_nodes  # not needed where all copies are current

    return slow_nodes(stage_run.paces)


def _measure(context: Context, watch: Stopwatch) -> Outcome:
    """Measure instead of staging; the rates are reported as events. Collective."""
    from stager.rank.measure import measure  # not needed to stage

    failures: list[Failure] = []
    try:
        _check_world(context)
        measure(context, tell)
    except RefusedError as refused:
        failures = refused.failures
    watch.enter(Phase.END)
    return Outcome([], failures, watch.total, False, watch.seconds)


def _node(request: StageRequest, rank: int) -> Node:
    uid = os.getuid()
    if request.local_root:
        name = f"node{rank + 1}"
        return Node(name, f"{request.local_root}/{name}", uid)
    name = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    if request.hosts:
        from stager.base.interfaces import name_here  # only without Slurm

        name = name_here(request.hosts) or name
    return Node(name, "", uid)


@contextmanager
def _guarded(context: Context) -> Iterator[None]:
    """End this rank if a neighbour dies: MPI would wait for it for ever. Collective."""
    comm, guard = context.comm, None
    if comm.size > 1 and not context.request.local_root:  # mpiexec ends simulated nodes by itself
        from stager.base.codec import optional
        from stager.rank.guard import ADDRESS, Guard

        host = _choose_address(context)
        request, own = context.request, context.node.name
        with suppress(OSError):
            # If a node is silent, the launching process says so first: it hears all nodes.
            least = request.silence or request.stall_timeout
            silence = least + _LATER if least else _SILENCE
            on_unwatched = partial(_tell_unwatched, context.node)
            guard = Guard(own, partial(_end_because_of, own), on_unwatched, silence, host)
        ring = context.channel.allgather(guard.address if guard else None, optional(ADDRESS))
        addresses = [address for address in ring if address]
        if guard and len(addresses) == comm.size:
            guard.watch(addresses, comm.rank)
        elif not guard:
            _tell_unwatched(context.node, "any other node")
        meet(comm)
    # The launcher waits for this event for a limited time. From now on the ranks watch each other.
    if comm.rank == 0:
        # Hosts may have other names than the launcher knows them by.
        names = {"names": context.channel.nodes} if context.request.hosts else {}
        step = os.environ.get("SLURM_STEP_ID", "")
        tell("started", nodes=comm.size, step=step, **names)
    yield
    if guard:
        guard.leave()


def _choose_address(context: Context) -> str:
    """Return the address at which this rank listens; nothing if no network is shared. Collective.

    End all ranks if a node lacks the interface that the site names.
    """
    from stager.rank.network import OFFERS, choose, missing, offers

    wanted = context.request.interface
    ranks = context.channel.allgather(offers(wanted), OFFERS)
    lacking = [name for name, one in zip(context.channel.nodes, ranks, strict=True) if not one]
    if wanted and lacking:
        _end_all(lacking[0], missing(wanted), by="")
    chosen = choose(ranks)
    if not chosen:
        return ""
    first = chosen[0]
    if context.comm.rank == 0:
        tell(
            "network", node=context.node.name, name=first.name, type=first.kind, speed=first.speed,
            network=first.network, named=bool(wanted),
        )  # fmt: skip
    return chosen[context.comm.rank].host


def _tell_unwatched(node: Node, neighbour: str) -> None:
    tell("unwatched", node=node.name, neighbour=neighbour)


def _end_because_of(own: str, node: str) -> None:
    """End this rank, which is on node ``own``, because its neighbour ``node`` is lost."""
    from threading import Timer  # slow to import; the guard has imported it

    text = "the staging process there was killed, or the node failed"
    Timer(_TELL_PATIENCE, os._exit, (1,)).start()  # if nobody reads this rank's events any more
    tell("crashed", node=node, error=text, by=own)
    os._exit(1)


def _end_all(node: str, error: LaunchError, by: str) -> NoReturn:
    """End the ranks of all nodes because of ``node``. Each tells the ``error`` itself.

    ``by`` is the node that ends by itself; nothing if ``node`` is to blame (`launch.run`).
    """
    tell("crashed", node=node, error=error.message, by=by)
    time.sleep(_REPORT_LEAD)
    os._exit(LaunchError.code)


def _check_world(context: Context) -> None:
    """Raise RefusedError unless MPI started exactly one rank on each node. Pure.

    A hello wants as many, wherever they are.
    """
    comm, request, names = context.comm, context.request, context.channel.nodes
    if comm.size != request.nodes:
        started = "1 process" if comm.size == 1 else f"{comm.size} processes"
        nodes = "1 node" if request.nodes == 1 else f"{request.nodes} nodes"
        problem = f"MPI started {started}, but the job has {nodes}"
        text = f"{problem}; {HOSTS_REMEDY if request.hosts else MPI_REMEDY}"
        raise RefusedError([Failure(LaunchError.code, text, "")])
    repeated = [name for name in names if names.count(name) > 1]
    if repeated and request.work is not Work.HELLO:
        text = (
            "MPI started more than one process on this node, but each node needs exactly one; "
            "submit again, and tell the administrator"
        )
        raise RefusedError([Failure(LaunchError.code, text, repeated[0])])


@contextmanager
def line_status(context: Context) -> Iterator[Callable[[Outcome], None]]:
    """Make those who run the same command line here wait. Yield what tells them its outcome."""
    request, node = context.request, context.node
    if not request.line:
        yield lambda _: None
        return
    from stager.node.job_state import hold_line  # few stages are asked for in this way

    root, by_user = node.path(request.line_root), bool(request.hosts)
    with hold_line(request.line, root, node.uid, by_user=by_user) as tell_code:
        yield lambda outcome: tell_code(outcome.code)


@contextmanager
def _step_status(context: Context) -> Iterator[Callable[[Sequence[Failure]], None]]:
    """Make this node's other tasks of the job wait. Yield what tells them of the failures, if any.

    Collective.
    """
    waiting = context.request.waiting
    if not waiting or context.request.dry_run:
        yield lambda _: None
        return
    from stager.node.job_state import StepStatus  # only where tasks wait

    status = StepStatus(context.node.uid)

    def hold() -> None:
        if waiting.needs_plugin and not is_started_by_plugin():
            raise LaunchError(NO_PLUGIN)
        status.hold(waiting.status_file, waiting.step)

    try:
        together(context, hold)
        yield partial(_publish, context, status)
    finally:
        status.close()


def _publish(context: Context, status: StepStatus, failures: Sequence[Failure]) -> None:
    """Tell this node's tasks how the stage has ended. Raise LaunchError or SpaceError."""
    request = context.request
    code = failures[0].code if failures else 0
    place = request.items[0].destination if request.items else ""
    status.write(code, place, request.variables)


def _publish_together(
    context: Context, publish: Callable[[Sequence[Failure]], None], failures: Sequence[Failure]
) -> list[Failure]:
    """Publish the exit code on all nodes. Return the failures of nodes that cannot. Collective.

    If there are any, the nodes that can publish a failure in its place: their tasks wait as long as
    the status is held.
    """
    try:
        together(context, lambda: publish(failures))
    except RefusedError as refused:
        with suppress(StageError):
            publish([Failure(LaunchError.code, one.message, one.node) for one in refused.failures])
        return refused.failures
    return []


def _note_figures(context: Context, outcome: Outcome, evictions: int) -> None:
    """Add this stage to the figures that this node keeps for the administrator."""
    request, node = context.request, context.node
    if request.job and not request.dry_run:
        hits = sum(node.name in item.current for item in outcome.items)
        misses = sum(node.name in item.received for item in outcome.items)
        slow = sum(one.node == node.name for one in outcome.slow)
        figures = hits, misses, evictions, int(outcome.code != 0), outcome.seconds, slow
        note_figures(node.uid, request.job, figures)


def _log_result(context: Context, outcome: Outcome) -> None:
    """Log how this stage ended, in one line, on this node."""
    request, name, failures = context.request, context.node.name, outcome.failures
    if not request.log_user or request.dry_run:
        return
    from stager.base.log import log, result_line  # not for each stage that is only planned

    received = [item for item in outcome.items if name in item.received]
    moved = sum(_moved_size(item, context.comm.rank) for item in received)
    told = [one.text for one in outcome.slow if one.node == name]
    if request.failed_nodes:
        told.insert(0, f"went on without {listed(request.failed_nodes, most=_MOST_NAMED)}")
    why = f"{failures[0].node}: {failures[0].message}" if failures else "; ".join(told)
    log(result_line(request.job, request.log_user, moved, outcome.seconds, outcome.code, why))


def _moved_size(item: ItemReport, rank: int) -> int:
    """Return the bytes of an item that were moved to the node of this rank."""
    if not item.tree:
        return item.size
    return item.tree.parts[rank] if item.tree.parts else item.tree.moved_size
