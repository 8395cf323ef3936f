"""Make room for the new copies on all nodes, or remove nothing on any."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base.codec import NUMBER, TEXT, list_of, pair_of, record_of
from stager.base.errors import StageError
from stager.base.outcome import Evicted
from stager.rank.agree import together
from stager.store.cache import look_for_cache
from stager.store.space import Need, rooms

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from stager.rank.agree import Context, Node
    from stager.rank.cargo import Cargo
    from stager.store.cache import Cache
    from stager.store.locks import Locks
    from stager.store.space import RoomPlan

_EVICTED = list_of(record_of(Evicted, node=TEXT, destination=TEXT, size=NUMBER))
#: `Cargo.need` and `Cargo.need_in_all` of each cargo.
_NEEDS = list_of(pair_of(NUMBER, NUMBER))


def make_room(
    context: Context,
    cargos: Sequence[Cargo],
    wanted: Collection[str],
    locks: Mapping[Cache, Locks],
    on_evicted: Callable[[Evicted], None],
) -> list[Evicted]:
    """Evict copies until all ``cargos`` fit on their nodes. Collective.

    Return those of all nodes that are to go: a dry run evicts none. ``on_evicted`` is called with
    each that is gone on this node: what fails later may be the end of all ranks. No ``wanted``
    destination is evicted. Raise RefusedError if a node has too little room even so; none was
    evicted then, unless another process took the room meanwhile.
    """
    needs = _needs_here(context, cargos)
    plans: list[RoomPlan] = []

    def plan() -> list[Evicted]:
        request, node = context.request, context.node
        lasting = [root for root in request.space.roots if root not in request.space.of_job]
        others = [cache for root in lasting for cache in _look_for(root, node)]
        plans.extend(rooms(needs, wanted, request.space, node.disk, others))
        return [
            Evicted(node.name, one.record.destination, one.size)
            for room in plans
            for one in room.plan()
        ]

    def make() -> None:
        for room in plans:
            for one in room.make(locks, context.node.name):
                on_evicted(one)

    chosen = [one for of_node in together(context, plan, _EVICTED) for one in of_node]
    if chosen and not context.request.dry_run:
        together(context, make)
    return chosen


def _needs_here(context: Context, cargos: Sequence[Cargo]) -> list[Need]:
    """Return what each cargo that this rank receives takes on its disk. Collective."""

    def look() -> list[tuple[int, int]]:
        # A file takes the same everywhere, so rank 0 alone asks shared storage for its size. Of a
        # tree each node may lack other files; of what is unpacked, its old copy is the estimate.
        is_asked = (cargo.task.needs_differ or context.comm.rank == 0 for cargo in cargos)
        return [
            (cargo.need() if asked else 0, cargo.need_in_all())
            for cargo, asked in zip(cargos, is_asked, strict=True)
        ]

    answers = together(context, look, _NEEDS)
    mine, first = answers[context.comm.rank], answers[0]
    return [
        Need(
            cargo.task.item.root,
            cargo.task.cache,
            cargo.task.item.destination,
            mine[index][0] if cargo.task.needs_differ else first[index][0],
            mine[index][1],
            cargo.task.need_is_estimate,
        )
        for index, cargo in enumerate(cargos)
        if cargo.task.receives
    ]


def _look_for(root: str, node: Node) -> Iterator[Cache]:
    """Yield the user's cache beneath ``root``, if there is one."""
    with suppress(StageError):
        yield look_for_cache(node.path(root), node.uid, disk=node.disk)
