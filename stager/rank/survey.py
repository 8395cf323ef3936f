"""Look at the items' sources from rank 0, and survey all nodes: what is there, and is it current?

The options of an item are checked against what its source is.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from stager.base.codec import NUMBER, TEXT, Codec, list_of, record_of, row_of, tuple_of
from stager.base.errors import DestinationError, SourceError, StageError, UsageError
from stager.base.mounts import is_network, mount_of
from stager.base.options import Lifetime, Mode, Share, Via
from stager.base.telemetry import Kind, doing
from stager.base.text import listed
from stager.fs.files import OPEN_FOLDER, WRITABLE, copy_mode, opened
from stager.rank.agree import together
from stager.rank.sharing import find_shared
from stager.request.items import check_options
from stager.source.access import look_at
from stager.source.description import Listings, Source, SourceFacts
from stager.source.schemes import Scheme
from stager.store.cache import Cache, RootFacts, open_cache, plan_cache
from stager.store.entries import as_checked, as_entry, entry_of, has_entry
from stager.store.leases import linked, lists_in, note_shared_uses, note_uses, remove_list
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
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from stager.rank.agree import Context
    from stager.request.items import StageItem, StageRequest
    from stager.store.record import Record
    from stager.store.tree_validity import Standing
    from stager.tree.environments import Environment

#: Seconds in which squeue must answer; without it, none has ended.
_LIMIT = 10
#: What squeue needs of a rank's environment.
_NEEDED = ("PATH", "SLURM_CONF")


def _environment() -> Codec[Environment]:
    from stager.tree.environments import Environment  # rarely needed

    return row_of(Environment)


#: How what rank 0 sees travels to the other ranks.
SOURCES = tuple_of(
    record_of(
        Source,
        facts=row_of(SourceFacts),
        mode=NUMBER,
        group=NUMBER,
        allocated=NUMBER,
        files=NUMBER,
        listing=TEXT,
        environments=tuple_of(
            Codec(
                lambda value: _environment().to_data(value),
                lambda data: _environment().from_data(data),
            )
        ),
        relocation=TEXT,
        environment_note=TEXT,
        unmatched=tuple_of(TEXT),
        leaving=NUMBER,
    )
)


def look_at_sources(
    context: Context, items: Sequence[StageItem], listings: Listings
) -> tuple[Source, ...]:
    """Return what rank 0 sees of the sources; return nothing on other ranks.

    Only rank 0 asks shared storage: hundreds of nodes that do so at once are slow. The listings of
    folders are added to ``listings``. Raise SourceError if a source is missing or cannot be read;
    it names others that are missing, too. Raise UsageError or PolicyRefusal if an item's options do
    not fit its source.
    """
    if context.comm.rank:
        return ()
    sources: list[Source] = []
    for at, item in enumerate(items):
        try:
            with doing(Kind.READ, item.source):
                sources.append(_look_at(context.request, item, listings))
        except SourceError as error:
            others = _missing(items[at + 1 :], item.source)
            if not others:
                raise
            either = " either" if _missing([item]) else ""
            raise SourceError(f"{error.message}; not found{either}: {listed(others)}") from None
    return tuple(sources)


def _missing(items: Iterable[StageItem], known: str = "") -> list[str]:
    """Return which sources are missing, without URLs, which may take a while, and the ``known``."""
    missing: list[str] = []
    for source in dict.fromkeys(item.source for item in items if item.source != known):
        if not Scheme.of(source).is_url:
            with doing(Kind.READ, source):
                try:
                    os.stat(source)
                except (FileNotFoundError, NotADirectoryError):
                    missing.append(source)
                except OSError:
                    pass  # it is there
    return missing


def _look_at(request: StageRequest, item: StageItem, listings: Listings) -> Source:
    # What was staged for all users is used only by those who could read the source.
    selection = item.selection
    source = look_at(item.source, selection, listings, request.remote, to_be_read=item.shared)
    check_options(item, is_folder=source.is_tree)
    source = replace(source, unmatched=listings.unmatched(item.source, selection))
    if item.options.extract:  # its environments are known when it is unpacked
        source = replace(source, relocation=item.options.relocate.value)
    elif source.environments:
        source = _relocated(item, source)
    return _permitted(source, item)


def _permitted(source: Source, item: StageItem) -> Source:
    """Return the ``source`` with the mode and the group of its copy. Raise UsageError."""
    share, group = item.options.share, os.getegid()
    if item.shared and share is Share.NONE:
        share = Share.ALL  # `way` sees to it that all can read the source
    if share is Share.GROUP:
        if source.group not in (group, *os.getgroups()):
            raise UsageError(
                f"{item.source}: share=group is for the source's group (gid {source.group}), and "
                "you are not in it"
            )
        group = source.group
    mode = copy_mode(source.mode, share, is_folder=source.is_tree)
    return replace(source, mode=mode, group=group)


def _relocated(item: StageItem, source: Source) -> Source:
    from stager.tree.environments import not_plain, relocation_digest  # rarely needed

    if note := not_plain(item.source, item.destination):
        return replace(source, environments=(), environment_note=note)
    return replace(source, relocation=relocation_digest(source.environments))


_SURVEYS = row_of(list[Survey])


@dataclass(frozen=True, slots=True)
class _Looked:
    """What a rank saw first: the sources on rank 0, and why it has no store, if it has none."""

    sources: tuple[Source, ...]
    no_store: str


_LOOKED = record_of(_Looked, sources=SOURCES, no_store=TEXT)


@dataclass(frozen=True, slots=True)
class SourcedItem:
    """An item, its source as rank 0 sees it, and the cache that it is in on this node.

    An entry of the node's store has ``views``: the items whose destinations are made of it.
    """

    item: StageItem
    source: Source
    cache: Cache
    views: tuple[SourcedItem, ...] = ()
    #: Whether all nodes see the same copy. Rank 0 alone looks at it, locks and records it.
    is_shared: bool = False

    @property
    def parts(self) -> tuple[SourcedItem, ...]:
        """What is surveyed: the item itself, then its views."""
        return (self, *self.views)

    @property
    def is_linked(self) -> bool:
        """Whether a view is a symbolic link to this entry."""
        return any(view.item.options.via is Via.LINK for view in self.views)

    @property
    def shown(self) -> str:
        """The destination that its user knows."""
        return self.views[0].item.destination if self.views else self.item.destination


class Surveyor:
    """Looks at the sources of the context's request, and at what is on this node.

    ``since`` is when that began, in nanoseconds since 1970. Only rank 0 has ``listings`` of source
    folders; ``standings`` are how this node's copies of folders are, by destination.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._rank = context.comm.rank
        #: The jobs that use each destination, of the caches that were looked at in this survey.
        self._jobs: dict[Cache, dict[str, list[int]]] = {}
        #: This node's cache of each root.
        self._caches: dict[str, Cache] = {}
        #: The roots that all nodes share.
        self._shared: frozenset[str] = frozenset()
        #: Those in whose caches rank 0 notes what this job uses, for jobs on other nodes.
        self._listed: frozenset[str] = frozenset()
        self.listings = Listings()
        self.standings: dict[str, Standing] = {}
        self.since = 0
        #: Whether no other process has a lock of what is surveyed.
        self.is_alone = True
        #: The destinations of which the nodes' stores keep nothing, and why, for the user.
        self.direct: dict[str, str] = {}

    def look(self) -> list[SourcedItem]:
        """Look at sources and caches on all nodes. Collective."""
        self._begin()
        self._shared = find_shared(self._context, self._open_caches)
        looked = together(self._context, self._look_here, _LOOKED)
        if why := next((one.no_store for one in looked if one.no_store), ""):
            items = self._context.request.items
            self.direct |= {one.destination: why for one in items if self._entry_of(one)}
        found = map(self._sourced, self._context.request.items, looked[0].sources)
        return self._with_entries([*found])

    def _perhaps_shared(self) -> frozenset[str]:
        """Return the roots that jobs on other nodes may see, as only this node can look."""
        found = set()
        for root, cache in self._caches.items() if self._context.comm.size == 1 else ():
            if cache.uid == self._context.node.uid and os.path.isdir(cache.folder):
                with opened(cache.folder, OPEN_FOLDER) as folder:
                    mount = mount_of(folder)
                if mount and is_network(mount.kind):
                    found.add(root)
        return frozenset(found)

    def _remove_ended_lists(self) -> None:
        """Remove the lists of jobs that have ended, whose nodes may have died, from shared caches.

        The lists of a node's own jobs go at its end or at its next start.
        """
        own = self._context.request.job
        folders = [self._caches[root].folder for root in self._listed]
        noted = {int(job) for folder in folders for job in lists_in(folder)} - {own}
        if own and noted and not self._context.request.dry_run:
            for job in _ended_jobs(own, sorted(noted)):
                for folder in folders:
                    remove_list(folder, job)

    def _sourced(self, item: StageItem, source: Source) -> SourcedItem:
        is_shared = item.root in self._shared
        return SourcedItem(item, source, self._caches[item.root], is_shared=is_shared)

    def _with_entries(self, items: Sequence[SourcedItem]) -> list[SourcedItem]:
        """Return what is staged: entries of the store in the place of items that have one."""
        found: dict[str, SourcedItem] = {}
        for one in items:
            whole = one
            if entry := self._entry_of(one.item):
                whole = found.get(entry.destination) or self._sourced(entry, as_entry(one.source))
                checked = as_checked(whole.item, entry)
                whole = replace(whole, item=checked, views=(*whole.views, one))
            found[whole.item.destination] = whole
        return [*found.values()]

    def _entry_of(self, item: StageItem) -> StageItem | None:
        space = self._context.request.space
        is_direct = item.destination in self.direct or item.root in self._shared
        if is_direct or not has_entry(item, space):
            return None
        return entry_of(item, space.store, self._context.node.uid)

    def _begin(self) -> None:
        self.listings.clear()
        self.standings.clear()
        self.since = time.time_ns()

    def _look_here(self) -> _Looked:
        """Return the sources; rank 0 alone has them."""
        if self._rank == 0:
            self._listed = self._shared or self._perhaps_shared()
            self._remove_ended_lists()
        request = self._context.request
        sources = look_at_sources(self._context, request.items, self.listings)
        no_store = ""
        entries = [entry for item in request.items if (entry := self._entry_of(item))]
        try:
            if entries and entries[0].root not in self._caches:
                self._caches[entries[0].root] = self._open(entries[0])
        except StageError as error:
            entries, no_store = [], f"{self._context.node.name}: {error.message}"
        if self._rank:  # while rank 0 lists the sources, the others look at their copies
            own = [one for one in (*request.items, *entries) if one.root not in self._shared]
            self.standings.update(self._look_at_copies(own))
        return _Looked(sources, no_store)

    def _open_caches(self) -> Mapping[str, Cache]:
        for item in self._context.request.items:
            if item.root not in self._caches:
                self._caches[item.root] = self._open(item)
        return self._caches

    def _open(self, item: StageItem) -> Cache:
        """Return this node's cache of an item's root."""
        request, node = self._context.request, self._context.node
        open_or_plan = plan_cache if request.dry_run else open_cache
        return open_or_plan(
            node.path(item.root),
            request.shared_owner if item.shared else node.uid,
            shared=item.shared,
            of_root=RootFacts(
                item.root in request.space.private,
                request.space.hints.get(item.root, ""),
                by_user=bool(request.hosts),
            ),
            disk=node.disk,
        )

    def _look_at_copies(self, items: Iterable[StageItem]) -> Iterator[tuple[str, Standing]]:
        """Yield the destinations that have a tree by their record, and what is there now."""
        for item in items:
            cache = self._caches[item.root]
            record = cache.load(item.destination)
            if record and record.tree and not cache.is_updating(item.destination):
                from stager.store.tree_validity import standing_of  # not needed for files

                if standing := standing_of(cache.path_of(item.destination), cache, record):
                    yield item.destination, standing

    def look_again(self, items: Sequence[SourcedItem]) -> list[SourcedItem]:
        """Look at the sources again: they may have changed during a wait. Collective."""
        self._begin()
        wanted = [view.item for one in items for view in one.views or (one,)]
        sources = together(
            self._context, lambda: look_at_sources(self._context, wanted, self.listings), SOURCES
        )[0]
        return self._with_entries([*map(self._sourced, wanted, sources)])

    def is_of_site(self, one: SourcedItem) -> bool:
        """Whether only another account stages the item: this user uses a current copy or fails."""
        return one.cache.uid != self._context.node.uid

    def survey(self, items: Sequence[SourcedItem]) -> list[list[Survey]]:
        """Survey all items on all nodes. Return the answers of each rank. Collective.

        The answers for the views of an item follow its own.
        """
        answers = together(self._context, lambda: self._survey_here(items), _SURVEYS)
        parts = [part for one in items for part in one.parts]
        for at, one in enumerate(parts):
            if one.is_shared:
                for found in answers:
                    found[at] = replace(answers[0][at], node=found[at].node)
        return answers

    def _survey_here(self, items: Sequence[SourcedItem]) -> list[Survey]:
        self._note_uses_here([one for one in items if self._is_noted_before(one)])
        self._jobs.clear()
        return [
            _with_way(self._survey_item(part, one), one, part)
            for one in items
            for part in one.parts
        ]

    def _is_noted_before(self, one: SourcedItem) -> bool:
        """Whether the use of an item is noted before what is there is looked at.

        What the site stages has no lock of this user's, so that it stays when it is found current;
        of what has no record yet, the clean-up must know if the stage is killed.
        """
        record = one.cache.record_path(one.item.destination)
        return self.is_of_site(one) or not os.path.exists(record)

    def ended_jobs(self, surveys: Iterable[Survey]) -> list[int]:
        """Return the jobs that have ended, as Slurm says, of those in the way. Collective.

        The ``surveys`` are not of copies for all, as a site may show users their own jobs alone.
        """
        own = self._context.request.job
        noted = {job for survey in surveys for job in survey.jobs} - {own}
        if not (own and noted):
            return []
        return self._context.channel.bcast(
            [] if self._rank else _ended_jobs(own, sorted(noted)), list_of(NUMBER)
        )

    def note_uses(self, items: Sequence[SourcedItem]) -> None:
        """Note on all nodes what this job uses, while others can't evict it yet. Collective.

        Not before it is there: what is there until then may be of another source.
        """
        own = [one for one in items if not self.is_of_site(one)]
        if own and self._context.request.job and not self._context.request.dry_run:
            together(self._context, lambda: self._note_uses(own))

    def _note_uses(self, items: Sequence[SourcedItem]) -> None:
        self._note_uses_here(items)
        if self._rank == 0:
            for root in self._listed:
                uses = [one.item.destination for one in items if one.item.root == root]
                if uses:
                    note_shared_uses(self._caches[root].folder, self._context.request.job, uses)

    def _note_uses_here(self, items: Sequence[SourcedItem]) -> None:
        request, node = self._context.request, self._context.node
        if not request.job or request.dry_run:
            return
        of_site = any(self.is_of_site(one) for one in items)
        reader = request.shared_owner if of_site else 0
        destinations = [
            one.item.destination for one in items if one.item.root not in request.space.of_job
        ]
        destinations += [linked(one.item.destination) for one in items if one.is_linked]
        if destinations:
            note_uses(node.uid, request.job, destinations, reader)

    def _survey_item(self, one: SourcedItem, whole: SourcedItem) -> Survey:
        """Return the survey of one part of the ``whole``: of an entry, or of one of its views."""
        item, source, node = one.item, one.source, self._context.node
        if one.is_shared and self._rank:
            return Survey(node.name, None, "")  # rank 0 looks at it
        path = one.cache.path_of(item.destination)
        if not self._rank and not item.scheme.is_url:
            check_apart(item.source, path)
        if one.cache.is_updating(item.destination) and self._may_finish(one):
            from stager.store.removal import finish  # rarely needed

            finish(one.cache, item.destination, force=item.options.replace)
        try:
            found = self._survey_function(one, whole)(item, path, source, one.cache, node.name)
        except DestinationError:
            if not one.views:
                raise
            # Whatever is in the place of an entry is nobody's own, and goes.
            found = Survey(node.name, Reason.REPLACED, "", changed=True)
        if one.views:
            found = _judged(found, one, self.standings)
        found = replace(found, open_to=open_to(path, one.cache))
        if not self.is_of_site(one):
            found = self._with_what_is_there(found, one, path)
        if item.options.lifetime is Lifetime.JOB and (record := one.cache.load(item.destination)):
            return replace(found, pinned=record.pinned)
        return found

    def _may_finish(self, one: SourcedItem) -> bool:
        return self.is_alone and not (self.is_of_site(one) or self._context.request.dry_run)

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
            # What is made of an entry stays as it is without it, but for a link.
            used = linked(one.item.destination) if one.views else one.item.destination
            jobs = {*self._jobs[cache].get(used, ())}
        if not other_source(one.item, record):
            jobs.discard(own)
        return tuple(sorted(jobs))

    def _survey_function(self, one: SourcedItem, whole: SourcedItem) -> Callable[..., Survey]:
        if self.is_of_site(one):
            return survey_shared
        if whole is not one and one.item.options.via is Via.LINK:
            from stager.rank.view import survey_link, takes_link  # rarely needed

            if takes_link(one.cache.path_of(one.item.destination)):
                return partial(survey_link, entry=whole.cache.path_of(whole.item.destination))
        if not one.source.is_tree and not one.item.options.extract:
            return survey
        from stager.store.tree_validity import survey_tree  # not needed for files

        return partial(survey_tree, standings=self.standings)


def _with_way(found: Survey, one: SourcedItem, part: SourcedItem) -> Survey:
    """Return the survey of a part with how it is made of its entry, if it is a view to be made."""
    if part is one or (found.current and part.item.options.mode is not Mode.SHARD):
        return found
    from stager.rank.view import way_of  # not needed without a store

    way, why = way_of(part.item, one.cache, part.cache)
    return replace(found, way=way, why=why)


def _judged(found: Survey, entry: SourcedItem, standings: Mapping[str, Standing]) -> Survey:
    """Return the survey of an entry: nobody may write to it, nor put anything into its folders.

    In a folder of a user's own, further files are welcome; here nobody would find them.
    """
    path = entry.cache.path_of(entry.item.destination)
    if standing := standings.get(entry.item.destination):
        from stager.store.tree_validity import names_changed  # not needed for files

        if names_changed(path, standing.table):
            return replace(found, reason=Reason.NAMES_CHANGED, changed=True)
    elif found.current and os.lstat(path).st_mode & WRITABLE:
        return replace(found, reason=Reason.COPY_CHANGED, changed=True)
    return found


def _ended_jobs(own: int, jobs: Sequence[int]) -> list[int]:
    """Return those of this user's ``jobs`` that neither run nor are about to end.

    The job ``own`` runs: squeue's answer counts only if it names it.
    """
    from stager.source.tool import run  # rarely needed

    asked = ",".join(map(str, (own, *jobs)))
    command = ["squeue", "--noheader", f"--jobs={asked}", "--format=%A %T"]
    environment = {name: os.environ[name] for name in _NEEDED if name in os.environ}
    with suppress(OSError, TimeoutError):
        told = run(command, environment, "/", _LIMIT).output.decode(errors="replace")
        # One that was requeued has its number still, and has ended here.
        states = (line.split() for line in told.splitlines())
        alive = {state[0] for state in states if state[1:] != ["PENDING"]}
        if str(own) in alive:
            return [job for job in jobs if str(job) not in alive]
    return []
