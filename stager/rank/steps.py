"""Stage all items of a request: look, lock, survey, plan, make room, deliver, report.

Every function that calls MPI, directly or not, is marked "Collective.": all ranks call it together.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from stager.base.errors import BusyError, Failure, StageError
from stager.base.options import Mode
from stager.base.outcome import Note, NoteKind
from stager.base.telemetry import Phase, about
from stager.rank.agree import NoEntryError, RefusedError, StaleError, Wanted, locked, together
from stager.rank.plan import Form, Task, plan_item, plan_views, settings_for, settings_to_send
from stager.rank.report import Delivered, Progress, item_report, tell, view_report
from stager.rank.survey import Surveyor
from stager.store.validity import Reason

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from stager.base.outcome import Evicted, ItemReport, Pace
    from stager.base.telemetry import Stopwatch
    from stager.rank.agree import Busy, Context, Held
    from stager.rank.file_transfer import Transfer
    from stager.rank.plan import TransferPlan
    from stager.rank.survey import SourcedItem
    from stager.request.items import StageItem
    from stager.source.endpoints import RemoteSettings
    from stager.store.cache import Cache
    from stager.store.locks import Locks
    from stager.store.validity import Survey
    from stager.wire.layout import Settings

#: Attempts in which the source changed while it was read, after which the stage fails.
_ATTEMPTS = 3
#: Bytes of a file that is staged together with others, and how many are: each has two open files.
_SMALL, _BATCH = 1 << 20, 64
#: Seconds to wait, in turn, for the clean-up after a job that used what is to be replaced.
_CLEAN_UP = (0.2, 0.8, 2.0)


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """An item with its plan, and the ``surveys`` of all nodes in rank order.

    ``transfer`` is None if no node receives anything. An entry of the node's store has ``views``.
    """

    task: Task
    surveys: Sequence[Survey]
    transfer: Transfer | None = None
    views: Sequence[PlannedItem] = ()

    def is_spoiled(self, rank: int) -> bool:
        """Whether in what a node has, if this is an entry, something was put: it is dropped."""
        return self.surveys[rank].reason in (Reason.NAMES_CHANGED, Reason.REPLACED)


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
        self._surveyor = Surveyor(context)
        self.to_evict: list[Evicted] = []
        self.evictions = 0
        #: How fast each node wrote what was staged, in rank order; empty if nothing moved.
        self.paces: list[Pace] = []
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
            except NoEntryError as error:
                self._surveyor.direct.update(error.why)
            except StaleError as stale:
                # Those with damaged copies are not counted: no copy is found current again.
                attempts += not stale.damaged
                if attempts == _ATTEMPTS:
                    raise RefusedError([stale.why]) from None

    def _attempt(self) -> list[ItemReport]:
        """Take all steps once. Collective."""
        self._watch.enter(Phase.SURVEY)
        items: Sequence[SourcedItem] = self._surveyor.look()
        if any(one.views for one in items):
            # Of an entry that all nodes have, several jobs of a node make theirs at once.
            reports, items = self._attempt_locked(items, shared=True)
            if reports is not None:
                return reports
        reports, _ = self._attempt_locked(items, shared=False)
        assert reports is not None
        return reports

    def _attempt_locked(
        self, items: Sequence[SourcedItem], *, shared: bool
    ) -> tuple[list[ItemReport] | None, Sequence[SourcedItem]]:
        """Take all steps but the first with all locks, those of entries ``shared``. Collective.

        Return the reports, None if an entry would have to be changed, and the items as they are.
        """
        self._watch.enter(Phase.WAIT)
        names = {one.item.destination: one.shown for one in items}
        wanted = self._to_lock(items, shared=shared)
        with locked(self._context, wanted, self._tell_wait, names) as held:
            self._watch.enter(Phase.SURVEY)
            begun = time.monotonic()
            if held.waited:
                items = self._surveyor.look_again(items)
            self._surveyor.is_alone = not shared
            planned = self._plan_unused(items)
            if shared and any(one.views and one.task.plan.receivers for one in planned):
                return None, items
            planned = self._make_transfers(planned, held)
            _forget_gone(planned, held)
            reports: list[ItemReport] = []
            for batch in _batches(planned):
                delivered = self._deliver(batch)
                _make_views(self._context, batch)
                seconds = (time.monotonic() - begun) / len(batch)
                begun = time.monotonic()
                for one, found in zip(batch, delivered, strict=True):
                    self._add_paces(found.paces)
                    reports += self._reports(one, found, seconds)
            self._surveyor.note_uses(items)
            return reports, items

    def _add_paces(self, paces: Sequence[Pace]) -> None:
        if paces and self.paces:
            paces = [old + new for old, new in zip(self.paces, paces, strict=True)]
        self.paces = list(paces) or self.paces

    def _to_lock(self, items: Sequence[SourcedItem], *, shared: bool) -> list[Wanted]:
        """Return the destinations to lock: none in a dry run, which waits for no other job."""
        if self._context.request.dry_run:
            return []
        of_site = self._surveyor.is_of_site
        return [
            Wanted(part.cache, part.item.destination, shared and bool(part.views))
            for one in items
            for part in one.parts
            if not (of_site(part) or (part.is_shared and self._rank))
        ]

    def _tell_wait(self, busy: Busy, seconds: float) -> None:
        if self._rank == 0:
            tell("waiting", **busy._asdict(), seconds=seconds)

    def _plan_unused(self, items: Sequence[SourcedItem]) -> list[PlannedItem]:
        """Plan, unless a copy would be replaced that a job uses. Collective. Raise RefusedError.

        What a job used that has just ended is still noted until its clean-up, which may never come.
        """
        for pause in (*_CLEAN_UP, 0.0):
            planned = self._plan(items, self._surveyor.survey(items))
            parts = [part for one in planned for part in (one, *one.views)]
            own = (one.surveys for one in parts if not one.task.cache.shared)
            ended = self._surveyor.ended_jobs(chain.from_iterable(own))
            used = [(one, why) for one in parts for why in _uses_in_the_way(one, ended)]
            if not used:
                break
            if not pause or self._context.request.dry_run:
                raise _refusal(used)
            time.sleep(pause)
        return planned

    def _plan(
        self, items: Sequence[SourcedItem], answers: Sequence[Sequence[Survey]]
    ) -> list[PlannedItem]:
        of_parts = iter(zip(*answers, strict=True))  # of each item and view, in rank order
        planned: list[PlannedItem] = []
        for one in items:
            surveys = next(of_parts)
            of_views = [(view, next(of_parts)) for view in one.views]
            if of_views and not one.is_linked and all(map(_is_current, of_views)):
                surveys = of_views[0][1]  # nobody needs the entry, be it there or not
            whole = self._plan_item(one, surveys)
            # Another split of a folder makes another part of each node's.
            anew = one.item.options.mode is Mode.SHARD and bool(whole.task.plan.receivers)
            views = [self._plan_view(view, found, anew=anew) for view, found in of_views]
            planned.append(replace(whole, views=views))
        return planned

    def _plan_item(self, one: SourcedItem, surveys: Sequence[Survey]) -> PlannedItem:
        request = self._context.request
        settings = settings_for(
            one.item, one.source, request.transfer, request.remote, len(surveys)
        )
        plan = plan_item(one.item, one.source, surveys, settings.readers, is_shared=one.is_shared)
        settings = settings_to_send(settings, plan)
        remote = request.remote.shared_by(len(plan.senders))
        planned = PlannedItem(self._task(one, plan, settings, remote), surveys)
        if one.views and planned.is_spoiled(self._rank):
            return replace(planned, task=replace(planned.task, standing=None))
        return planned

    def _plan_view(self, one: SourcedItem, surveys: Sequence[Survey], *, anew: bool) -> PlannedItem:
        plan = plan_views(one.source.facts.size, surveys, anew=anew)
        task = self._task(one, plan, self._context.request.transfer, self._context.request.remote)
        return PlannedItem(replace(task, way=surveys[self._rank].way), surveys)

    def _task(
        self, one: SourcedItem, plan: TransferPlan, settings: Settings, remote: RemoteSettings
    ) -> Task:
        request = self._context.request
        return Task(
            item=one.item,
            source=one.source,
            plan=plan,
            settings=settings,
            remote=remote,
            space=request.space,
            job=request.job,
            cache=one.cache,
            node=self._context.node,
            rank=self._rank,
            since=self._surveyor.since,
            standing=self._surveyor.standings.get(one.item.destination),
            shown=one.shown if one.views else "",
        )

    def _make_transfers(self, planned: Sequence[PlannedItem], held: Held) -> list[PlannedItem]:
        """Make a transfer for each item that any node receives, and room for it. Collective.

        The modules that move data are imported here, so that a stage whose copies are all current
        does without them.
        """
        if not any(part.task.plan.receivers for one in planned for part in (one, *one.views)):
            return list(planned)
        from stager.rank.provision import make_room, make_transfer

        _drop_spoiled(self._context, planned)

        listings = self._surveyor.listings
        planned = [
            replace(one, transfer=make_transfer(self._context, one.task, listings))
            if one.task.plan.receivers
            else one
            for one in planned
        ]
        wanted = {one.task.item.destination for one in planned}
        for one in planned:  # a user may stage a copy to another place on the node
            source, plan = one.task.item.source, one.task.plan
            is_read_here = plan.receivers and plan.from_source and one.task.sends
            if is_read_here and not one.task.item.scheme.is_url:
                for path in (source, os.path.realpath(source)):
                    wanted |= _with_folders_above(path)
        transfers = [one.transfer for one in planned if one.transfer]
        views = [(view.task, one.task) for one in planned for view in one.views]
        chosen = make_room(self._context, transfers, views, wanted, held.locks, self._note_evicted)
        if self._context.request.dry_run:
            self.to_evict += chosen
        return planned

    def _note_evicted(self, one: Evicted) -> None:
        self.evictions += 1
        tell("evicted", node=one.node, destination=one.destination, size=one.size)

    def _deliver(self, batch: Sequence[PlannedItem]) -> list[Delivered]:
        """Bring items to their receivers, and note the use of current ones. Collective."""
        for one in batch:
            is_noted = self._rank in one.task.plan.current and one.task.is_recorder
            if is_noted and not self._context.request.dry_run:
                about(one.task.item.destination)
                one.task.note_use()
        transfers = [one.transfer for one in batch if one.transfer]
        if not transfers or self._context.request.dry_run:
            return [_nothing_sent(one.task) for one in batch]
        from stager.rank.delivery import deliver  # not needed where all copies are current

        tell = [Progress(one.task.place).tell for one in transfers]
        sent = iter(deliver(self._context, transfers, self._watch, tell))
        return [next(sent) if one.transfer else _nothing_sent(one.task) for one in batch]

    def _reports(self, one: PlannedItem, found: Delivered, seconds: float) -> list[ItemReport]:
        dry_run = self._context.request.dry_run
        report = item_report(one.task, one.surveys, found, seconds, dry_run=dry_run)
        if report.received:
            self._earlier[one.task.item] = report
        report = self._earlier.get(one.task.item, report)
        if one.views:
            return [view_report(report, v.task, v.surveys, dry_run=dry_run) for v in one.views]
        if why := self._surveyor.direct.get(one.task.item.destination):
            note = Note(NoteKind.REMARK, f"note: not kept for the next job: {why}")
            report = replace(report, notes=[*report.notes, note])
        return [report]


def _refusal(used: Sequence[tuple[PlannedItem, Failure]]) -> NoEntryError | RefusedError:
    """Return the error for items that jobs use. Of an entry, that is no reason not to stage."""
    kept = {
        view.task.item.destination: f"{failure.node}: {failure.message}"
        for one, failure in used
        for view in one.views
    }
    return NoEntryError(kept) if kept else RefusedError([failure for _, failure in used])


def _is_current(view: tuple[SourcedItem, Sequence[Survey]]) -> bool:
    return all(survey.current for survey in view[1])


def _make_views(context: Context, batch: Sequence[PlannedItem]) -> None:
    """Make what jobs see of the entries of the store. Collective."""
    views = [(view.task, one.task) for one in batch for view in one.views]
    if not views or context.request.dry_run:
        return
    for view, _ in views:
        if view.rank in view.plan.current:
            view.note_use()
    if any(view.plan.receivers for view, _ in views):
        from stager.rank.view import make_views  # not needed where all views are current

        make_views(context, views)


def _drop_spoiled(context: Context, planned: Sequence[PlannedItem]) -> None:
    """Remove entries of the store that were changed, each on its nodes. Collective."""
    spoiled = [
        (one.task, rank)
        for one in planned
        if one.views
        for rank in one.task.plan.receivers
        if one.is_spoiled(rank)
    ]

    def drop() -> None:
        from stager.store.removal import discard  # rarely needed

        for task, rank in spoiled:
            if rank == task.rank:
                discard(task.cache, task.item.destination)

    if spoiled and not context.request.dry_run:
        together(context, drop)


def _uses_in_the_way(one: PlannedItem, ended: Collection[int]) -> Iterator[Failure]:
    """Yield a failure for each node where a job uses what ``one`` would replace."""
    place, other = one.task.item.destination, "choose another destination, or "
    if one.views:
        place, other = f"the copy of {one.task.item.source} in the node's store", ""
    for rank in one.task.plan.receivers:
        survey = one.surveys[rank]
        jobs = [job for job in survey.jobs if job not in ended]
        if one.task.job in jobs:
            from shlex import quote  # only for this failure

            text = (
                f"{place} was staged from {survey.replaces} by this job; choose another "
                f"destination, or evict it first: stagectl evict {quote(place)}"
            )
        elif jobs:
            several = len(jobs) > 1
            text = (
                f"{place} is used by job{'s' * several} {','.join(map(str, jobs))}, and "
                f"would be replaced ({_why_replaced(survey)}); {other}"
                f"submit again when {'they have' if several else 'it has'} ended"
            )
        else:
            continue
        yield Failure(BusyError.code, text, survey.node)


def _forget_gone(planned: Sequence[PlannedItem], held: Held) -> None:
    """Forget the copies in what a new folder replaces: the survey has found that all are gone.

    Else a file of the new folder would be taken for one of them.
    """
    for one in chain.from_iterable((whole, *whole.views) for whole in planned):
        item, cache = one.task.item, one.task.cache
        locks = held.locks.get(cache)
        if not (locks and one.task.receives and one.task.form in (Form.FOLDER, Form.UNPACKED)):
            continue
        inner: list[str] = []
        with suppress(OSError):
            inner += [one.destination for one in cache.records()]
        for path in inner:
            if path.startswith(f"{item.destination}/"):
                with suppress(OSError, StageError):
                    _forget(cache, locks, path)


def _batches(planned: Sequence[PlannedItem]) -> Iterator[list[PlannedItem]]:
    """Yield the items in order, small files together: an exchange takes longer than one of them."""
    batch: list[PlannedItem] = []
    for one in planned:
        is_small = not one.transfer or _is_small(one.task)
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
    return task.form is Form.FILE and task.plan.size <= _SMALL


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
