"""The MPI program's main, one rank a node: a StageRequest in, events and an Outcome on stdout.

The only place that knows COMM_WORLD.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from mpi4py import MPI

from stager.base.errors import (
    MPI_REMEDY,
    Failure,
    LaunchError,
    PolicyRefusal,
    StageError,
    UsageError,
)
from stager.base.options import Mode, Relocate, Validate
from stager.base.outcome import Counts, Evicted, ItemReport, Outcome, event
from stager.base.phases import Phase, Stopwatch, process_begun
from stager.copies import evict
from stager.copies.survey import Survey, survey, survey_shared
from stager.disk.cache import Cache, look_for_cache, open_cache, plan_cache
from stager.disk.jobs import note_figures, note_uses
from stager.disk.step_status import StepStatus
from stager.rank.agree import Held, Here, RefusedError, locked, together
from stager.rank.cargo import Task
from stager.rank.delivery import Delivered, StaleError, deliver
from stager.rank.file_cargo import FileCargo
from stager.rank.guard import Guard
from stager.rank.plan import make_plan, plan_parts
from stager.request.items import REQUEST_VARIABLE, StageItem, StageRequest
from stager.source.posix import Source, for_all, look_at_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from stager.rank.agree import Busy
    from stager.rank.cargo import Cargo
    from stager.rank.plan import TransferPlan
    from stager.rank.shard_cargo import Split
    from stager.rank.tree_cargo import Reuse
    from stager.source.posix import Listings
    from stager.tree.listing import Listing
    from stager.wire.settings import Settings

#: How often a source that changes while it is read makes all start over.
_ATTEMPTS = 3
#: Seconds for the end of MPI, once all is told.
_LAST_PATIENCE = 30
#: Seconds between two progress events.
_PROGRESS_PERIOD = 1.0


def main() -> None:
    """Do what the environment's request asks; end with 0 when all ranks agreed on an outcome."""
    request = StageRequest.from_json(os.environ[REQUEST_VARIABLE])
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the user's program, which is not here yet
    comm = MPI.COMM_WORLD
    watch = Stopwatch(process_begun(), Phase.MPI_INIT)
    watch.enter(Phase.SURVEY)
    act = _measure if request.bench else run
    here = _here(request, comm.rank)
    with _guarded(comm, request, here):
        outcome = act(comm, request, here, watch)
    if comm.rank == 0:
        _tell("result", outcome=outcome.to_json())
    # Python is gone when MPI_Finalize, at the very end, waits for all slurmstepds, without end for
    # one that is killed: only the kernel can end this process then. All is done and told by now.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LAST_PATIENCE)


@contextmanager
def _guarded(comm: MPI.Intracomm, request: StageRequest, here: Here) -> Iterator[None]:
    """End this rank when another one dies: it would be waited for in vain. Collective."""

    def lost(node: str) -> None:
        _tell("crashed", node=node, error="the rank is gone, or its slurmstepd")
        os._exit(1)

    guard = None
    if comm.size > 1 and not request.local_root:  # where mpiexec sees to it by itself
        with suppress(OSError):
            guard = Guard(here.name, lost)
        ring = comm.allgather(guard.address if guard else None)
        addresses = [address for address in ring if address]
        if guard and len(addresses) == comm.size:
            guard.watch(addresses, comm.rank)
        comm.Barrier()
    # Until now the launcher's patience is limited, from now on nobody can be missed in vain.
    if comm.rank == 0:
        _tell("started", nodes=comm.size)
    yield
    if guard:
        guard.leave()


def run(comm: MPI.Intracomm, request: StageRequest, here: Here, watch: Stopwatch) -> Outcome:
    """Stage all items, or tell why not; on every rank the same, but for times. Collective."""

    evicted: list[Evicted] = []

    def outcome(items: list[ItemReport], failures: list[Failure]) -> Outcome:
        watch.enter(Phase.END)
        return Outcome(items, failures, watch.total, request.dry_run, watch.seconds, evicted)

    try:
        _check_world(comm, request, here)
        with _word(comm, request, here) as say:
            items: list[ItemReport] = []
            failures: list[Failure] = []
            try:
                items = _stage(comm, request, here, watch, evicted)
            except RefusedError as refused:
                failures = refused.failures
            code = outcome(items, failures).code
            _note_figures(here, request, items, evicted, code, watch.total)
            say(code)
            # The job goes on when rank 0 has reported: by then every node must have its word.
            comm.Barrier()
            return outcome(items, failures)
    except RefusedError as refused:
        return outcome([], refused.failures)


def _note_figures(
    here: Here,
    request: StageRequest,
    items: Sequence[ItemReport],
    evicted: Sequence[Evicted],
    code: int,
    seconds: float,
) -> None:
    """What this node's figures for the administrator gain by this stage."""
    if request.job and not request.dry_run:
        hits = sum(here.name in item.current for item in items)
        misses = sum(here.name in item.received for item in items)
        gone = sum(one.node == here.name for one in evicted)
        note_figures(
            here.uid, request.job, (hits, misses, gone, int(code != 0), seconds)
        )  # fmt: skip


def _measure(comm: MPI.Intracomm, request: StageRequest, here: Here, watch: Stopwatch) -> Outcome:
    """Measure instead of staging; the rates are told as events. Collective."""
    from stager.rank.measure import measure  # what a stage need not import

    failures: list[Failure] = []
    try:
        _check_world(comm, request, here)
        measure(comm, request, here, _tell)
    except RefusedError as refused:
        failures = refused.failures
    watch.enter(Phase.END)
    return Outcome([], failures, watch.total, False, watch.seconds)


def _here(request: StageRequest, rank: int) -> Here:
    uid = os.getuid()
    if request.local_root:
        name = f"node{rank + 1}"
        return Here(name, f"{request.local_root}/{name}", uid)
    return Here(os.environ.get("SLURMD_NODENAME") or socket.gethostname(), "", uid)


def _tell(kind: str, **fields: object) -> None:
    # One write a line: the launcher merges the output of all ranks by lines.
    sys.stdout.write(event(kind, **fields) + "\n")
    sys.stdout.flush()


def _check_world(comm: MPI.Intracomm, request: StageRequest, here: Here) -> None:
    """One rank on each node, no more and no less; else MPI did not start as it was told to."""
    if comm.size != request.nodes:
        ranks = "1 rank" if comm.size == 1 else f"{comm.size} ranks"
        problem = f"MPI started as a world of {ranks}, where the job has {request.nodes} nodes"
        text = f"{problem}; {MPI_REMEDY}"
        raise RefusedError([Failure(LaunchError.code, text, comm.bcast(here.name))])
    names = comm.allgather(here.name)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        text = "MPI put more than one rank on this node, where each node needs one"
        raise RefusedError([Failure(LaunchError.code, text, twice[0])])


@contextmanager
def _word(
    comm: MPI.Intracomm, request: StageRequest, here: Here
) -> Iterator[Callable[[int], None]]:
    """Hold this node's other tasks of the job until the yielded function told them the code."""
    if not request.status_file or request.dry_run:
        yield lambda _: None
        return
    words = StepStatus(here.uid)
    try:
        together(comm, here, lambda: words.hold(request.status_file, request.step))
        lists = [item.shard_list for item in request.items if item.shard_list]
        yield lambda code: words.write(code, request.directives, lists)
    finally:
        words.close()


def _stage(
    comm: MPI.Intracomm,
    request: StageRequest,
    here: Here,
    watch: Stopwatch,
    evicted: list[Evicted],
) -> list[ItemReport]:
    attempts = 0
    while True:
        try:
            return _stage_once(comm, request, here, watch, evicted)
        except StaleError as stale:
            attempts += not stale.damaged
            if attempts == _ATTEMPTS:
                raise RefusedError([stale.why]) from None


def _stage_once(
    comm: MPI.Intracomm,
    request: StageRequest,
    here: Here,
    watch: Stopwatch,
    evicted: list[Evicted],
) -> list[ItemReport]:
    watch.enter(Phase.SURVEY)
    listings: Listings = {}  # which rank 0 alone has
    looked: dict[str, str] = {}
    looks = together(
        comm, here, lambda: _look(comm.rank, request, here, listings, looked), patient=True
    )
    sources = looks[0].sources
    items = _settle(request.items, sources, [look.folders for look in looks])
    caches = looks[comm.rank].caches
    wanted = [
        (cache, item.destination)
        for cache, item in zip(caches, items, strict=True)
        # A plan waits for nobody, and who uses what is root's has nothing to lock there.
        if not request.dry_run and not (item.shared and here.uid)
    ]

    def waiting(busy: Busy, seconds: float) -> None:
        if comm.rank == 0:
            _tell("waiting", **busy._asdict(), seconds=seconds)

    watch.enter(Phase.WAIT)
    with locked(comm, here, wanted, request.lock_timeout, waiting) as held:
        watch.enter(Phase.SURVEY)
        begun = time.monotonic()
        if held.waited:  # what was seen of the sources then may have changed since
            listings.clear()
            looked.clear()
            sources = together(
                comm, here, lambda: _look_at_sources(comm.rank, items, here, listings)
            )[0]
        surveys = together(
            comm,
            here,
            lambda: _survey(request, items, sources, caches, here, looked),
            patient=any(item.options.validate is Validate.CHECKSUM for item in items),
        )
        by_item = [[answers[index] for answers in surveys] for index in range(len(items))]
        plans = [_plan(request, *each) for each in zip(items, sources, by_item, strict=True)]
        tasks = [
            Task(_settings(request, *each[:2]), request.job, *each, here, comm.rank, request.space)
            for each in zip(items, sources, plans, caches, strict=True)
        ]
        cargos = [_cargo(comm, task, listings) for task in tasks]
        if any(plan.receivers for plan in plans):
            needs = _needs(comm, tasks, cargos)
            wishes = [
                evict.Need(
                    task.item.root, task.cache, task.item.destination, need, cargo.need_in_all()
                )
                for task, cargo, need in zip(tasks, cargos, needs, strict=True)
                if task.receives
            ]
            evicted += _make_room(comm, request, here, items, wishes, held)
        reports: list[ItemReport] = []
        for task, cargo, answers in zip(tasks, cargos, by_item, strict=True):
            delivered = Delivered(task.plan.digest, task.plan.senders[:1])
            if not request.dry_run:
                progress = _Progress(task.item.destination).tell
                delivered = deliver(comm, task, cargo, watch, progress)
            seconds, begun = time.monotonic() - begun, time.monotonic()
            reports.append(_report(task, answers, delivered, seconds))
        return reports


def _plan(
    request: StageRequest, item: StageItem, source: Source, surveys: Sequence[Survey]
) -> TransferPlan:
    if item.options.mode is Mode.SHARD:
        return plan_parts(source.facts.size, surveys)
    readers = _settings(request, item, source).readers
    return make_plan(source.facts.size, surveys, readers, from_copies=not item.options.extract)


def _survey(
    request: StageRequest,
    items: Sequence[StageItem],
    sources: Sequence[Source],
    caches: Sequence[Cache],
    here: Here,
    looked: Mapping[str, str],
) -> list[Survey]:
    if request.job and not request.dry_run:
        # Before anything is found current, so that it cannot go any more.
        note_uses(here.uid, request.job, [item.destination for item in items])
    answers: list[Survey] = []
    for item, source, cache in zip(items, sources, caches, strict=True):
        look = survey_shared if item.shared and here.uid else _survey_of(item, source, looked)
        answers.append(look(item, here.path(item.destination), source, cache, here.name))
    return answers


def _survey_of(item: StageItem, source: Source, looked: Mapping[str, str]) -> Callable[..., Survey]:
    if not source.is_tree and not item.options.extract:
        return survey
    from stager.copies.survey_tree import survey_tree  # what a file need not import

    return partial(survey_tree, looked=looked)


def _look_at_copies(
    items: Sequence[StageItem], caches: Sequence[Cache], here: Here
) -> Iterator[tuple[str, str]]:
    """The destinations at which trees are recorded, with the digests of what is there."""
    for item, cache in zip(items, caches, strict=True):
        record = cache.load(item.destination)
        if record and record.tree:
            from stager.copies.survey_tree import copy_digest  # what a file need not import

            yield item.destination, copy_digest(here.path(item.destination))


def _settings(request: StageRequest, item: StageItem, source: Source) -> Settings:
    """How the item's bytes are to move."""
    if item.options.extract:  # what is unpacked as it comes must come in order
        return replace(request.transfer, writers=1)
    if source.is_tree:  # whose names one rank alone looks at
        return replace(request.transfer, readers=1)
    return request.transfer


def _cargo(comm: MPI.Intracomm, task: Task, listings: Listings) -> Cargo:
    """What this rank does for the task. Collective."""
    if task.item.options.extract and task.plan.receivers:
        from stager.rank.archive_cargo import ArchiveCargo  # what a file need not import

        return ArchiveCargo(task)
    if not task.source.is_tree or not task.plan.receivers:
        return FileCargo(task)
    from stager.rank.tree_cargo import (
        TreeCargo,
        look_for_kept,  # what a file need not import
    )

    item = task.item
    listing = comm.bcast(listings.get((item.source, item.options.include, item.options.exclude)))
    assert listing is not None
    kept: list[Reuse] = []
    together(
        comm, task.here, lambda: kept.append(look_for_kept(task, listing)), patient=True
    )  # fmt: skip
    if item.options.mode is Mode.SHARD:
        return _shard_cargo(comm, task, listing, kept[0])
    return TreeCargo(task, listing, kept[0])


def _shard_cargo(comm: MPI.Intracomm, task: Task, listing: Listing, kept: Reuse) -> Cargo:
    """This rank's part of a folder. Collective."""
    from stager.rank.shard_cargo import (
        ShardCargo,
        marks,
        split,  # what few need
    )

    held = together(comm, task.here, lambda: (marks(kept), task.here.name))

    def deal() -> Split | None:
        return None if comm.rank else split(task, listing, *zip(*held, strict=True))

    whole = together(comm, task.here, deal, patient=True)[0]
    assert whole is not None
    return ShardCargo(task, listing, whole, kept)


def _needs(comm: MPI.Intracomm, tasks: Sequence[Task], cargos: Sequence[Cargo]) -> list[int]:
    """Bytes that each item will take on this rank's disk. Collective."""

    def is_tree(task: Task) -> bool:
        return task.source.is_tree or task.item.options.extract

    def look() -> list[int]:
        # Of a file the first rank alone asks shared storage; of a tree each node lacks its own.
        return [
            cargo.need() if is_tree(task) or comm.rank == 0 else 0
            for task, cargo in zip(tasks, cargos, strict=True)
        ]

    answers = together(comm, tasks[0].here, look)
    return [answers[comm.rank if is_tree(task) else 0][index] for index, task in enumerate(tasks)]


def _make_room(
    comm: MPI.Intracomm,
    request: StageRequest,
    here: Here,
    items: Sequence[StageItem],
    wishes: Sequence[evict.Need],
    held: Held,
) -> list[Evicted]:
    """Have room for the ``wishes`` on all nodes, or refuse and remove nothing. Collective."""
    wanted = [item.destination for item in items]
    rooms: list[evict.RoomPlan] = []

    def plan() -> list[Evicted]:
        others = [cache for root in request.space.roots for cache in _look_for(root, here)]
        rooms.extend(evict.rooms(wishes, wanted, request.space, here.disk, others))
        return [
            Evicted(here.name, one.record.destination, one.size)
            for room in rooms
            for one in room.plan()
        ]

    gone = together(comm, here, plan)
    if any(gone) and not request.dry_run:
        gone = together(
            comm, here, lambda: [one for room in rooms for one in room.make(held.locks, here.name)]
        )
    return [one for every in gone for one in every]


def _look_for(root: str, here: Here) -> Iterator[Cache]:
    """The user's cache beneath ``root``, if there is one."""
    with suppress(StageError):
        yield look_for_cache(here.path(root), here.uid)


@dataclass(frozen=True, slots=True)
class _Look:
    """A rank's first look: its caches, which destinations are folders; rank 0 adds the sources."""

    caches: tuple[Cache, ...]
    folders: tuple[bool, ...]
    sources: tuple[Source, ...]


def _look(
    rank: int,
    request: StageRequest,
    here: Here,
    listings: Listings,
    looked: dict[str, str],
) -> _Look:
    items = request.items
    opener = plan_cache if request.dry_run else open_cache
    sources = _look_at_sources(rank, items, here, listings)
    caches = tuple(opener(here.path(item.root), here.uid, shared=item.shared) for item in items)
    folders = tuple(os.path.isdir(here.path(item.destination)) for item in items)
    if rank:  # while the first rank is at the sources, the others look at their copies
        looked.update(_look_at_copies(items, caches, here))
    return _Look(caches, folders, sources)


def _look_at_sources(
    rank: int, items: Sequence[StageItem], here: Here, listings: Listings
) -> tuple[Source, ...]:
    # One rank asks shared storage; hundreds of stats at once are what we are here to spare it.
    if rank:
        return ()
    places = [(item.source, item.destination) for item in items if item.options.is_whole_copy]
    return tuple(_look_at_source(item, places, here, listings) for item in items)


def _look_at_source(
    item: StageItem, places: Sequence[tuple[str, str]], here: Here, listings: Listings
) -> Source:
    # What root staged is for those only who might have read the source themselves.
    source = look_at_source(
        item.source, item.options.include, item.options.exclude, listings, to_be_read=item.shared
    )
    if item.options.relocate is not Relocate.NONE and not (source.is_tree or item.options.extract):
        raise UsageError(f"{item.source} is no folder; relocate is for Python environments")
    if item.options.relocate is Relocate.VENV:
        from stager.tree.venv import check_place  # what few need

        check_place(item.destination)
    if item.options.relocate is Relocate.VENV and source.is_tree:
        from stager.tree.venv import (
            find_interpreter,
            staged_at,  # what few need
        )

        found = find_interpreter(item.source, item.source)
        if found:
            found = replace(found, at=staged_at(found.path, places))
        source = replace(source, interpreter=found)
    if item.options.mode is Mode.SHARD and not source.is_tree:
        raise UsageError(f"{item.source} is no folder; mode=shard is for the files of one")
    if source.is_tree and item.options.extract:
        raise UsageError(f"{item.source} is a folder; extract is for archives")
    if (source.is_tree or item.options.extract) and item.shared:
        raise PolicyRefusal(
            f"{item.destination} would be a folder, and {item.root} takes files for all users; "
            "stage an archive there as it is, or the folder beneath another root"
        )
    return for_all(item.source, source) if item.shared and here.uid == 0 else source


def _settle(
    items: Sequence[StageItem], sources: Sequence[Source], folders: Sequence[tuple[bool, ...]]
) -> tuple[StageItem, ...]:
    """The items with a file's name appended where a node has a folder at the destination."""
    return tuple(
        replace(item, destination=f"{item.destination}/{item.name}")
        if any(answers[index] for answers in folders)
        and not (source.is_tree or item.options.extract)
        else item
        for index, (item, source) in enumerate(zip(items, sources, strict=True))
    )


class _Progress:
    """Tells how many bytes of an item were sent, at most once in a period."""

    def __init__(self, destination: str) -> None:
        self._destination = destination
        self._begun = self._told = time.monotonic()

    def tell(self, sent: int, size: int) -> None:
        now = time.monotonic()
        if now - self._told >= _PROGRESS_PERIOD:
            self._told = now
            seconds = now - self._begun
            _tell("progress", destination=self._destination, sent=sent, size=size,
                  seconds=seconds)  # fmt: skip


def _report(
    task: Task, surveys: Sequence[Survey], delivered: Delivered, seconds: float
) -> ItemReport:
    item, plan = task.item, task.plan
    names = [answer.node for answer in surveys]
    return ItemReport(
        source=item.source,
        destination=item.destination,
        size=plan.size,
        received=[names[rank] for rank in plan.receivers],
        current=[names[rank] for rank in plan.current],
        senders=[] if plan.from_source else [names[rank] for rank in delivered.readers],
        reasons=_reasons([surveys[rank] for rank in plan.receivers]),
        digest=delivered.digest,
        source_bytes_read=delivered.source_bytes_read,
        peak_memory=delivered.peak_memory,
        seconds=seconds,
        tree=delivered.tree or _counts(task, surveys),
        shard_list=item.shard_list,
        note=delivered.note or _note(task.source),
    )


def _reasons(surveys: Sequence[Survey]) -> list[str]:
    reasons: list[str] = sorted({survey.reason for survey in surveys if survey.reason})
    # Each node has a part that is current, and together they have not all.
    return reasons or ["spread over other nodes"] if surveys else []


def _note(source: Source) -> str:
    if not source.interpreter or source.interpreter_at or not source.interpreter.is_shared:
        return ""
    from stager.tree.venv import note  # what few need

    return note(source.interpreter.path, may_be_staged=True)


def _counts(task: Task, surveys: Sequence[Survey]) -> Counts | None:
    """Of a tree that is current, or would be staged."""
    if task.source.is_tree:
        return Counts(task.source.files)
    return Counts(max(survey.files for survey in surveys)) if task.item.options.extract else None


if __name__ == "__main__":
    main()
