"""Stage all items of a request: look, lock, survey, plan, make room, deliver, report.

Every function that calls MPI, directly or not, is marked "Collective.": all ranks call it together.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING

from stager.base.codec import FLAG, NUMBER, TEXT, list_of, member_of, optional, record_of, tuple_of
from stager.base.errors import BusyError, Failure, StageError
from stager.base.options import Lifetime, Mode
from stager.base.telemetry import Phase, about
from stager.rank.agree import RefusedError, StaleError, locked, together
from stager.rank.plan import plan_item, settings_for, settings_to_send
from stager.rank.report import Delivered, Progress, item_report, tell
from stager.rank.sources import SOURCES, look_at_sources, selection_of
from stager.rank.task import Task
from stager.source.facts import Listings, Source
from stager.store.cache import Cache, RootFacts, open_cache, plan_cache
from stager.store.leases import note_uses
from stager.store.validity import (
    Reason,
    Survey,
    check_apart,
    open_to,
    other_source,
    survey,
    survey_shared,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from stager.base.outcome import Evicted, ItemReport, Pace
    from stager.base.telemetry import Stopwatch
    from stager.rank.agree import Busy, Context, Held
    from stager.rank.cargo import Cargo
    from stager.rank.publication import Reuse
    from stager.rank.shard_cargo import Split
    from stager.request.items import StageItem
    from stager.store.locks import Locks
    from stager.store.record import Record
    from stager.store.tree_validity import Standing
    from stager.tree.listing import Listing

#: Attempts in which the source changed while it was read, after which the stage fails.
_ATTEMPTS = 3
#: Bytes of a file that is staged together with others, and how many are: each has two open files.
_SMALL, _BATCH = 1 << 20, 64
#: Seconds to wait, in turn, for the clean-up after a job that used what is to be replaced.
_CLEAN_UP = (0.2, 0.8, 2.0)


_SURVEYS = list_of(
    record_of(
        Survey,
        node=TEXT,
        reason=optional(member_of(Reason)),
        digest=TEXT,
        files=NUMBER,
        note=TEXT,
        split=TEXT,
        changed=FLAG,
        pinned=FLAG,
        jobs=tuple_of(NUMBER),
        replaces=TEXT,
        open_to=TEXT,
    )
)


@dataclass(frozen=True, slots=True)
class SourcedItem:
    """An item, its source as rank 0 sees it, and the cache that it is in on this node."""

    item: StageItem
    source: Source
    cache: Cache


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """An item with its plan, and the ``surveys`` of all nodes in rank order.

    ``cargo`` is None if no node receives anything.
    """

    task: Task
    surveys: Sequence[Survey]
    cargo: Cargo | None = None


class StageRun:
    """Stages the items of the context's request, large ones one after the other.

    No node gets an item before all its receivers have every byte of it. If an item fails, those
    before it stay, but for small files, which are staged together. `evictions` counts the copies
    that are removed here to make room, `to_evict` has those that a dry run would remove on all
    nodes, and `paces` grows with each item that is staged: also if the stage fails then.
    """

    def __init__(self, context: Context, watch: Stopwatch) -> None:
        self._context = context
        self._watch = watch
        self._rank = context.comm.rank
        self.to_evict: list[Evicted] = []
        self.evictions = 0
        #: The jobs that use each destination, of the caches that were looked at in this survey.
        self._jobs: dict[Cache, dict[str, list[int]]] = {}
        #: How fast each node wrote what was staged, in rank order; empty if nothing moved.
        self.paces: list[Pace] = []
        #: This node's cache of each item.
        self._caches: tuple[Cache, ...] = ()
        #: The listings of source folders; only rank 0 has them.
        self._listings = Listings()
        #: By destination, how this node's copies of folders are.
        self._standings: dict[str, Standing] = {}
        #: When this attempt began to look at the node, in nanoseconds since 1970.
        self._since = 0
        #: What an earlier attempt told of the items that it staged: this one finds them current.
        self._earlier: dict[StageItem, ItemReport] = {}

    def run(self) -> list[ItemReport]:
        """Stage, and start over if a source changes or a sender's copy is damaged. Collective.

        Raise RefusedError if any rank fails, or if a source changes in `_ATTEMPTS` attempts.
        """
        attempts = 0
        while True:
            try:
                return self._attempt()
            except StaleError as stale:
                # Those with damaged copies are not counted: no copy is found current again.
                attempts += not stale.damaged
                if attempts == _ATTEMPTS:
                    raise RefusedError([stale.why]) from None

    def _attempt(self) -> list[ItemReport]:
        """Take all steps once. Collective."""
        self._watch.enter(Phase.SURVEY)
        self._forget_looks()
        self._since = time.time_ns()
        items = self._look()
        self._watch.enter(Phase.WAIT)
        with locked(self._context, self._to_lock(items), self._report_wait) as held:
            self._watch.enter(Phase.SURVEY)
            begun = time.monotonic()
            if held.waited:
                self._since = time.time_ns()
                items = self._look_again(items)
            planned = self._plan_unused(items)
            planned = self._make_cargos(planned)
            self._make_room(planned, held)
            self._forget_gone(planned, held)
            reports: list[ItemReport] = []
            for batch in _batches(planned):
                delivered = self._deliver(batch)
                seconds = (time.monotonic() - begun) / len(batch)
                begun = time.monotonic()
                for one, found in zip(batch, delivered, strict=True):
                    self._add_paces(found.paces)
                    report = item_report(one.task, one.surveys, found, seconds)
                    if report.received:
                        self._earlier[one.task.item] = report
                    reports.append(self._earlier.get(one.task.item, report))
            self._note_uses(items)
            return reports

    def _add_paces(self, paces: Sequence[Pace]) -> None:
        if paces and self.paces:
            paces = [old + new for old, new in zip(self.paces, paces, strict=True)]
        self.paces = list(paces) or self.paces

    def _forget_looks(self) -> None:
        self._listings.clear()
        self._standings.clear()

    def _look(self) -> list[SourcedItem]:
        """Look at sources and caches on all nodes. Collective."""
        sources = together(self._context, self._look_here, SOURCES)[0]
        return [
            SourcedItem(item, source, cache)
            for item, source, cache in zip(
                self._context.request.items, sources, self._caches, strict=True
            )
        ]

    def _look_here(self) -> tuple[Source, ...]:
        """Return the sources; rank 0 alone has them."""
        context, request, node = self._context, self._context.request, self._context.node
        items = request.items
        open_or_plan = plan_cache if request.dry_run else open_cache
        sources = look_at_sources(context, items, self._listings)
        by_root: dict[str, Cache] = {}
        for item in items:
            if item.root not in by_root:
                by_root[item.root] = open_or_plan(
                    node.path(item.root),
                    request.shared_owner if item.shared else node.uid,
                    shared=item.shared,
                    by_user=bool(request.hosts),
                    of_root=RootFacts(
                        item.root in request.space.private, request.space.hints.get(item.root, "")
                    ),
                    disk=node.disk,
                )
        self._caches = tuple(by_root[item.root] for item in items)
        if self._rank:  # while rank 0 lists the sources, the others look at their copies
            self._standings.update(self._look_at_copies(items, self._caches))
        return sources

    def _look_at_copies(
        self, items: Sequence[StageItem], caches: Sequence[Cache]
    ) -> Iterator[tuple[str, Standing]]:
        """Yield the destinations that have a tree by their record, and what is there now."""
        for item, cache in zip(items, caches, strict=True):
            record = cache.load(item.destination)
            if record and record.tree and not cache.is_updating(item.destination):
                from stager.store.tree_validity import standing_of  # not needed for files

                path = self._context.node.path(item.destination)
                if standing := standing_of(path, cache, record):
                    yield item.destination, standing

    def _look_again(self, items: Sequence[SourcedItem]) -> list[SourcedItem]:
        """Look at the sources again: they may have changed during the wait. Collective."""
        self._forget_looks()
        wanted = [one.item for one in items]
        sources = together(
            self._context, lambda: look_at_sources(self._context, wanted, self._listings), SOURCES
        )[0]
        return [replace(one, source=source) for one, source in zip(items, sources, strict=True)]

    def _to_lock(self, items: Sequence[SourcedItem]) -> list[tuple[Cache, str]]:
        """Return the destinations to lock: none in a dry run, which waits for no other job."""
        if self._context.request.dry_run:
            return []
        return [(one.cache, one.item.destination) for one in items if not self._is_of_site(one)]

    def _report_wait(self, busy: Busy, seconds: float) -> None:
        if self._rank == 0:
            tell("waiting", **busy._asdict(), seconds=seconds)

    def _is_of_site(self, one: SourcedItem) -> bool:
        """Whether only another account stages the item: this user uses a current copy or fails."""
        return one.cache.uid != self._context.node.uid

    def _plan_unused(self, items: Sequence[SourcedItem]) -> list[PlannedItem]:
        """Plan, unless a copy would be replaced that a job uses. Collective. Raise RefusedError.

        What a job used that has just ended is still noted until its clean-up, which may never come.
        """
        for pause in (*_CLEAN_UP, 0.0):
            planned = self._plan(items, self._survey(items))
            ended = self._ended_jobs(planned)
            used = [failure for one in planned for failure in self._uses_in_the_way(one, ended)]
            if not used:
                break
            if not pause or self._context.request.dry_run:
                raise RefusedError(used)
            time.sleep(pause)
        return planned

    def _ended_jobs(self, planned: Sequence[PlannedItem]) -> Collection[int]:
        """Return the jobs that have ended, as Slurm says, of those in the way. Collective.

        Not those of other users, as a site may show users their own alone.
        """
        own = self._context.request.job
        surveys = (one for each in planned if not each.task.cache.shared for one in each.surveys)
        noted = {job for survey in surveys for job in survey.jobs} - {own}
        if not (own and noted):
            return ()
        from stager.rank.ended import ended_jobs  # rarely needed

        return self._context.channel.bcast(
            [] if self._rank else ended_jobs(own, sorted(noted)), list_of(NUMBER)
        )

    def _uses_in_the_way(self, one: PlannedItem, ended: Collection[int]) -> Iterator[Failure]:
        """Yield a failure for each node where a job uses what ``one`` would replace."""
        place = one.task.item.destination
        for rank in one.task.plan.receivers:
            survey = one.surveys[rank]
            jobs = [job for job in survey.jobs if job not in ended]
            if self._context.request.job in jobs:
                text = (
                    f"{place} was staged from {survey.replaces} by this job; choose another "
                    f"destination, or evict it first: stagectl evict {quote(place)}"
                )
            elif jobs:
                several = len(jobs) > 1
                text = (
                    f"{place} is used by job{'s' * several} {','.join(map(str, jobs))}, and "
                    f"would be replaced ({_why_replaced(survey)}); choose another destination, or "
                    f"submit again when {'they have' if several else 'it has'} ended"
                )
            else:
                continue
            yield Failure(BusyError.code, text, survey.node)

    def _survey(self, items: Sequence[SourcedItem]) -> list[list[Survey]]:
        """Survey all items on all nodes. Return the answers of each rank. Collective."""
        return together(self._context, lambda: self._survey_here(items), _SURVEYS)

    def _survey_here(self, items: Sequence[SourcedItem]) -> list[Survey]:
        # Nobody holds the locks of these: before they are found current, so that they stay.
        self._note_uses_here([one for one in items if self._is_of_site(one)])
        self._jobs.clear()
        return [self._survey_item(one) for one in items]

    def _note_uses(self, items: Sequence[SourcedItem]) -> None:
        """Note on all nodes what this job uses, while others can't evict it yet. Collective.

        Not before it is there: what is there until then may be of another source.
        """
        own = [one for one in items if not self._is_of_site(one)]
        if own and self._context.request.job and not self._context.request.dry_run:
            together(self._context, lambda: self._note_uses_here(own))

    def _note_uses_here(self, items: Sequence[SourcedItem]) -> None:
        request, node = self._context.request, self._context.node
        if not request.job or request.dry_run:
            return
        of_site = any(self._is_of_site(one) for one in items)
        reader = request.shared_owner if of_site else 0
        destinations = [
            one.item.destination for one in items if one.item.root not in request.space.of_job
        ]
        if destinations:
            note_uses(node.uid, request.job, destinations, reader)

    def _survey_item(self, one: SourcedItem) -> Survey:
        item, source, node = one.item, one.source, self._context.node
        path = node.path(item.destination)
        if not self._rank and not item.scheme.is_url:
            check_apart(item.source, path)
        if one.cache.is_updating(item.destination) and self._may_finish(one):
            from stager.store.removal import finish  # rarely needed

            finish(one.cache, path, item.destination, force=item.options.replace)
        found = self._survey_function(one)(item, path, source, one.cache, node.name)
        found = replace(found, open_to=open_to(path, one.cache))
        if not self._is_of_site(one):
            found = self._with_what_is_there(found, one, path)
        if item.options.lifetime is Lifetime.JOB and (record := one.cache.load(item.destination)):
            return replace(found, pinned=record.pinned)
        return found

    def _may_finish(self, one: SourcedItem) -> bool:
        return not (self._is_of_site(one) or self._context.request.dry_run)

    def _with_what_is_there(self, found: Survey, one: SourcedItem, path: str) -> Survey:
        """Return the survey of an item with what its user is to be told of what is at ``path``."""
        item, cache = one.item, one.cache
        is_part = item.options.mode is Mode.SHARD  # which may be replaced though it is current
        if (is_part or not found.current) and os.path.lexists(path):
            record = cache.load(item.destination)
            found = replace(
                found, jobs=self._jobs_in_the_way(one, record), replaces=other_source(item, record)
            )
        return found

    def _jobs_in_the_way(self, one: SourcedItem, record: Record | None) -> tuple[int, ...]:
        """Return the jobs that use the copy there; this job only if it has it of another source.

        Simulated nodes have none.
        """
        if self._context.node.disk:
            return ()
        own, cache = self._context.request.job, one.cache
        if one.item.root in self._context.request.space.of_job:  # of which there are no lists
            jobs = {own} if own and record and record.used_by_job == own else set()
        else:
            if cache not in self._jobs:
                self._jobs[cache] = cache.jobs()
            jobs = {*self._jobs[cache].get(one.item.destination, ())}
        if not other_source(one.item, record):
            jobs.discard(own)
        return tuple(sorted(jobs))

    def _survey_function(self, one: SourcedItem) -> Callable[..., Survey]:
        if self._is_of_site(one):
            return survey_shared
        if not one.source.is_tree and not one.item.options.extract:
            return survey
        from stager.store.tree_validity import survey_tree  # not needed for files

        return partial(survey_tree, standings=self._standings)

    def _plan(
        self, items: Sequence[SourcedItem], answers: Sequence[Sequence[Survey]]
    ) -> list[PlannedItem]:
        request = self._context.request
        planned: list[PlannedItem] = []
        for index, one in enumerate(items):
            surveys = [of_rank[index] for of_rank in answers]
            settings = settings_for(
                one.item, one.source, request.transfer, request.remote, len(surveys)
            )
            plan = plan_item(one.item, one.source, surveys, settings.readers)
            task = Task(
                item=one.item,
                source=one.source,
                plan=plan,
                settings=settings_to_send(settings, plan),
                remote=request.remote.shared_by(len(plan.senders)),
                space=request.space,
                job=request.job,
                cache=one.cache,
                node=self._context.node,
                rank=self._rank,
                since=self._since,
                standing=self._standings.get(one.item.destination),
            )
            planned.append(PlannedItem(task, surveys))
        return planned

    def _make_cargos(self, planned: Sequence[PlannedItem]) -> list[PlannedItem]:
        """Make a Cargo for each item that any node receives. Collective."""
        return [
            replace(one, cargo=self._make_cargo(one.task)) if one.task.plan.receivers else one
            for one in planned
        ]

    def _make_cargo(self, task: Task) -> Cargo:
        """Make the Cargo of one item. Collective.

        The modules that move data are imported here, so that a stage whose copies are all current
        does without them.
        """
        if task.item.options.extract:
            from stager.rank.archive_cargo import ArchiveCargo  # not needed for files

            return ArchiveCargo(task)
        if task.source.is_tree:
            return self._make_tree_cargo(task)
        if task.item.scheme.is_made:
            from stager.rank.image_cargo import ImageCargo

            return ImageCargo(task)
        if task.item.options.decompress:
            from stager.rank.decompress_cargo import DecompressCargo

            return DecompressCargo(task)
        from stager.rank.file_cargo import FileCargo

        return FileCargo(task)

    def _make_tree_cargo(self, task: Task) -> Cargo:
        """Make the Cargo of a folder; all ranks get its listing from rank 0. Collective."""
        from stager.rank.publication import find_reusable  # not needed for files
        from stager.rank.tree_cargo import TreeCargo

        listing = self._share_listing(task)
        found: list[Reuse] = []  # it is large, so it is not sent to the other ranks
        together(self._context, lambda: found.append(find_reusable(task, listing)))
        reuse = found[0]
        if task.item.options.decompress:
            from stager.rank.decompress_cargo import DecompressTreeCargo

            return DecompressTreeCargo(task, listing, reuse)
        if task.item.options.mode is not Mode.SHARD:
            return TreeCargo(task, listing, reuse)
        from stager.rank.shard_cargo import ShardCargo

        return ShardCargo(task, listing, self._split(task, listing, reuse.marks()), reuse)

    def _share_listing(self, task: Task) -> Listing:
        """Return a folder's listing, from rank 0, with the modes of copies. Collective."""
        from stager.tree.listing import Listing

        item, source, options = task.item, task.source, task.item.options
        found: list[Listing] = []

        def look() -> None:
            listing = self._listings.get(item.source, selection_of(options))
            if listing is not None:
                found.append(listing.as_copied(options.share, source.group))

        together(self._context, look)
        channel = self._context.channel
        text = channel.bcast_bytes(found[0].to_bytes() if found else b"")
        try:
            return found[0] if found else Listing.from_bytes(text)
        except ValueError as error:
            raise channel.unreadable(0, error) from None

    def _split(self, task: Task, listing: Listing, held: bytes) -> Split:
        """Assign a folder's files to the nodes; rank 0 decides for all. Collective."""
        from stager.rank.shard_cargo import Split, split  # only for mode=shard

        channel = self._context.channel
        marks = channel.allgather_bytes(held)
        found: list[Split] = []

        def assign() -> None:
            if not self._rank:
                found.append(split(task, listing, marks, channel.nodes))

        together(self._context, assign)
        text = channel.bcast_bytes(found[0].to_bytes() if found else b"")
        try:
            return Split.from_bytes(text, len(listing), len(channel.nodes))
        except ValueError as error:
            raise channel.unreadable(0, error) from None

    def _make_room(self, planned: Sequence[PlannedItem], held: Held) -> None:
        """Evict copies on nodes that have too little room for what they receive. Collective."""
        cargos = [one.cargo for one in planned if one.cargo]
        if not cargos:
            return
        from stager.rank.free_space import make_room  # not needed where all copies are current

        wanted = {one.task.item.destination for one in planned}
        for one in planned:  # a user may stage a copy to another place on the node
            task = one.task
            is_read_here = task.plan.from_source and self._rank in task.plan.senders
            if one.cargo and is_read_here and not task.item.scheme.is_url:
                for path in (task.item.source, os.path.realpath(task.item.source)):
                    wanted |= _with_folders_above(path)
        chosen = make_room(self._context, cargos, wanted, held.locks, self._note_evicted)
        if self._context.request.dry_run:
            self.to_evict += chosen

    def _forget_gone(self, planned: Sequence[PlannedItem], held: Held) -> None:
        """Forget the copies in what a new folder replaces: the survey has found that all are gone.

        Else a file of the new folder would be taken for one of them.
        """
        for one in planned:
            item, cache, source = one.task.item, one.task.cache, one.task.source
            locks = held.locks.get(cache)
            if not (locks and one.task.receives and (source.is_tree or item.options.extract)):
                continue
            inner: list[str] = []
            with suppress(OSError):
                inner += [one.destination for one in cache.records()]
            for path in inner:
                if path.startswith(f"{item.destination}/"):
                    with suppress(OSError, StageError):
                        _forget(cache, locks, path)

    def _note_evicted(self, one: Evicted) -> None:
        self.evictions += 1
        tell("evicted", node=one.node, destination=one.destination, size=one.size)

    def _deliver(self, batch: Sequence[PlannedItem]) -> list[Delivered]:
        """Bring items to their receivers, and note the use of current ones. Collective."""
        for one in batch:
            if self._rank in one.task.plan.current and not self._context.request.dry_run:
                about(one.task.item.destination)
                one.task.note_use()
        cargos = [one.cargo for one in batch if one.cargo]
        if not cargos or self._context.request.dry_run:
            return [_nothing_sent(one.task) for one in batch]
        from stager.rank.delivery import deliver  # not needed where all copies are current

        tell = [Progress(cargo.task.item.destination).tell for cargo in cargos]
        sent = iter(deliver(self._context, cargos, self._watch, tell))
        return [next(sent) if one.cargo else _nothing_sent(one.task) for one in batch]


def _batches(planned: Sequence[PlannedItem]) -> Iterator[list[PlannedItem]]:
    """Yield the items in order, small files together: an exchange takes longer than one of them."""
    batch: list[PlannedItem] = []
    for one in planned:
        is_small = not one.cargo or _is_small(one.task)
        if batch and not (is_small and len(batch) < _BATCH):
            yield batch
            batch = []
        batch.append(one)
        if not is_small:
            yield batch
            batch = []
    if batch:
        yield batch


def _is_small(task: Task) -> bool:
    options, source = task.item.options, task.source
    is_plain = not (source.is_tree or options.extract or options.decompress)
    return is_plain and not task.item.scheme.is_made and task.plan.size <= _SMALL


def _why_replaced(survey: Survey) -> str:
    if survey.replaces:
        return f"it is of {survey.replaces}"
    return survey.reason or Reason.OTHER_NODES


def _forget(cache: Cache, locks: Locks, destination: str) -> None:
    """Forget a copy that is gone, unless another job stages it. Raise StageError."""
    if locks.take(destination):
        try:
            cache.forget(destination)
        finally:
            locks.release(destination)


def _nothing_sent(task: Task) -> Delivered:
    return Delivered(task.plan.digest, task.plan.senders[:1])


def _with_folders_above(path: str) -> set[str]:
    """Return a ``path`` and the folders that it lies in; nothing for a URL. Pure.

    >>> sorted(_with_folders_above("/nvme/set/a"))
    ['/nvme', '/nvme/set', '/nvme/set/a']
    """
    found: set[str] = set()
    while path.startswith("/") and path != "/":
        found.add(path)
        path = os.path.dirname(path)
    return found
