"""Prepare a delivery on all ranks: make the transfers, and room for the new copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from stager.base.codec import row_of
from stager.base.errors import SpaceError
from stager.base.options import Mode
from stager.base.outcome import Evicted
from stager.fs.clone import Way
from stager.rank.agree import NoEntryError, together
from stager.rank.file_transfer import SIDES, FileSender, Sender, Sink, Transfer
from stager.rank.plan import Form
from stager.store.cache import caches_in
from stager.store.space import Need, disk_of, rooms

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from stager.rank.agree import Context
    from stager.rank.plan import Task
    from stager.source.description import Listings
    from stager.store.cache import Cache
    from stager.store.locks import Locks
    from stager.store.space import RoomPlan

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Planned:
    """What a node would evict, or why it cannot keep what becomes some destinations."""

    evicted: list[Evicted] = field(default_factory=list)
    unkept: list[tuple[str, str]] = field(default_factory=list)


_PLANNED = row_of(_Planned)
#: `Sink.need` of each item.
_NEEDS = row_of(list[tuple[int, int]])


def make_transfer(context: Context, task: Task, listings: Listings) -> Transfer:
    """Make the transfer of one item that a node receives. Collective."""
    if task.form is Form.FOLDER:
        return _folder_transfer(context, task, listings)
    if task.form is Form.UNPACKED:
        from stager.rank.tree_transfer import UnpackSink  # not needed for files

        sides: tuple[type[Sender], type[Sink]] = FileSender, UnpackSink
        if task.plan.is_shared and len(task.plan.receivers) > 1:
            from stager.rank.shared import UnpackMakerSink, UnpackPartSink  # rarely needed

            sides = FileSender, UnpackMakerSink if task.is_recorder else UnpackPartSink
    else:
        sides = SIDES[task.form]
    sender, sink = sides
    if task.plan.is_shared and task.plan.is_sharded:
        from stager.rank.shared import FileMakerSink, FilePartSink  # rarely needed

        sink = FileMakerSink if task.is_recorder else FilePartSink
    return Transfer(
        task,
        sender(task) if task.sends else Sender(task),
        sink(task) if task.receives else Sink(task),
    )


def _folder_transfer(context: Context, task: Task, listings: Listings) -> Transfer:
    """Make the transfer of a folder; all ranks get its listing from rank 0. Collective."""
    from stager.rank.reuse import Split, find_reusable, part_for, split  # not needed for files
    from stager.rank.tree_transfer import Folder, FolderSink, TreeSender
    from stager.tree.listing import Listing

    item, channel = task.item, context.channel

    def look() -> Listing:
        """Return the listing with the modes of copies."""
        listing = listings.get(item.source, item.selection)
        assert listing is not None
        return listing.as_copied(item.options.share, task.source.group)

    listing = _from_first(context, look, Listing.to_bytes, Listing.from_bytes)
    reusable = _here(context, lambda: find_reusable(task, listing))
    made: dict[int, bytes] = {}
    name = ""
    if item.options.mode is Mode.SHARD and not task.plan.is_shared:
        marks = channel.allgather_bytes(reusable.marks())
        names = channel.nodes
        whole = _from_first(
            context,
            lambda: split(task, listing, marks, names),
            Split.to_bytes,
            lambda text: Split.from_bytes(text, len(listing), len(names)),
        )
        name = whole.name
        listing, reusable, made = part_for(task, listing, whole, reusable)
    folder = Folder(listing, made)
    kind = FolderSink
    if task.plan.is_shared:
        from stager.rank.shared import FolderMakerSink, FolderPartSink  # rarely needed

        kind = FolderMakerSink if task.is_recorder else FolderPartSink
    return Transfer(
        task,
        TreeSender(task, folder) if task.sends else Sender(task),
        kind(task, folder, reusable, name) if task.receives else Sink(task),
        folder,
    )


def _here(context: Context, step: Callable[[], T]) -> T:
    """Take a step on all ranks; return this rank's result, which is too large to be sent."""
    found: list[T] = []
    together(context, lambda: found.append(step()))
    return found[0]


def _from_first(
    context: Context,
    make: Callable[[], T],
    write: Callable[[T], bytes],
    read: Callable[[memoryview], T],
) -> T:
    """Return what rank 0 makes; the others ``read`` what it has written. Collective."""
    made = _here(context, lambda: None if context.comm.rank else make())
    text = context.channel.bcast_bytes(b"" if made is None else write(made))
    try:
        return read(text) if made is None else made
    except ValueError as error:
        raise context.channel.unreadable(0, error) from None


def make_room(
    context: Context,
    transfers: Sequence[Transfer],
    views: Sequence[tuple[Task, Task]],
    wanted: Collection[str],
    locks: Mapping[Cache, Locks],
    on_evicted: Callable[[Evicted], None],
) -> list[Evicted]:
    """Evict copies until all new ones and the ``views`` of entries fit on their nodes. Collective.

    Return those of all nodes that are to go: a dry run evicts none. ``on_evicted`` is called with
    each that is gone on this node: what fails later may be the end of all ranks. No ``wanted``
    destination is evicted. Raise RefusedError if a node has too little room even so, NoEntryError
    if it lacks in its store; none was evicted then, unless another process took the room meanwhile.
    """
    needs = _needs_here(context, transfers)
    needs += [need for one in views if one[0].receives for need in _view_needs(*one)]
    # What a full store need not keep: all that would be written there, or beside it.
    unkept = [
        view.item.destination
        for view, entry in views
        if view.receives and (entry.receives or view.way == Way.COPY)
    ]
    plans: list[RoomPlan] = []

    def plan() -> _Planned:
        space, node = context.request.space, context.node
        lasting = [root for root in space.roots if root not in space.of_job]
        others = caches_in(lasting, node.uid, disk=node.disk)
        plans.extend(rooms(needs, wanted, space, others))
        return _planned(plans, node.name, space.store, unkept)

    def make() -> None:
        for room in plans:
            for one in room.make(locks, context.node.name):
                on_evicted(one)

    answers = together(context, plan, _PLANNED)
    if why := {place: text for one in answers for place, text in one.unkept}:
        raise NoEntryError(why)
    chosen = [one for of_node in answers for one in of_node.evicted]
    if chosen and not context.request.dry_run:
        together(context, make)
    return chosen


def _planned(plans: Sequence[RoomPlan], node: str, store: str, unkept: Sequence[str]) -> _Planned:
    """Return what a node would evict; what is ``unkept`` if its ``store`` has too little room.

    Raise SpaceError if another disk has, or if nothing would be written to the store.
    """
    evicted: list[Evicted] = []
    for room in plans:
        try:
            evicted += [Evicted(node, one.shown, one.size) for one in room.plan()]
        except SpaceError as error:
            if store not in room.roots or not unkept:
                raise
            return _Planned(unkept=[(place, f"{node}: {error.message}") for place in unkept])
    return _Planned(evicted)


def _needs_here(context: Context, transfers: Sequence[Transfer]) -> list[Need]:
    """Return what each item that this rank receives takes on its disk. Collective."""
    # A file takes the same everywhere, so one rank alone asks shared storage for its size. Of a
    # folder each node may lack other files; of what is unpacked, its old copy is the estimate.
    askers = [
        one.task.plan.receivers[0] if one.task.form is Form.FILE else context.comm.rank
        for one in transfers
    ]

    def look() -> list[tuple[int, int]]:
        mine = [rank == context.comm.rank for rank in askers]
        return [
            one.sink.need() if asked else (0, 0) for one, asked in zip(transfers, mine, strict=True)
        ]

    answers = together(context, look, _NEEDS)
    return [
        _need(one.task, *answers[rank][index])
        for index, (one, rank) in enumerate(zip(transfers, askers, strict=True))
        if one.task.receives and one.task.is_recorder
    ]


def _view_needs(view: Task, entry: Task) -> Iterator[Need]:
    """Yield what a view takes beside its entry: as much again if it is a copy."""
    size = 0
    if view.way == Way.COPY:
        record = entry.cache.load(entry.item.destination)
        there = 0
        if record:
            there = record.tree.allocated if record.tree else record.copy_facts.size
        size = max(there, entry.source.allocated, 0 if there else entry.source.facts.size)
    is_estimate = bool(size) and entry.item.options.is_unpacked
    item = view.item
    yield Need(item.root, view.cache, item.destination, size, size, is_estimate)
    if size and disk_of(view.cache) == disk_of(entry.cache):
        yield Need(entry.item.root, entry.cache, entry.item.destination, 0)


def _need(task: Task, need: int, whole: int) -> Need:
    is_estimate = task.item.options.is_unpacked or task.form is Form.IMAGE
    item = task.item
    return Need(item.root, task.cache, item.destination, need, whole, is_estimate)
