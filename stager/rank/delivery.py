"""One item's Task and Cargo in, the copies published and recorded on its nodes.

Open, broadcast, compare digests, seal, publish, record: each step is taken by all ranks together,
and nothing gets its final name until every receiver has every byte on its disk.
"""

from __future__ import annotations

import resource
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from stager.base.errors import Failure, IntegrityError
from stager.base.options import Verify
from stager.base.outcome import total
from stager.base.phases import Phase
from stager.rank.agree import RefusedError, together
from stager.rank.plan import joint_digest
from stager.wire.transfer import Transferred, broadcast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpi4py import MPI

    from stager.base.outcome import Counts
    from stager.base.phases import Stopwatch
    from stager.rank.cargo import Cargo, Task
    from stager.rank.plan import TransferPlan
    from stager.wire.layout import Layout


class StaleError(Exception):
    """What was surveyed is no longer so: survey again. ``why`` is for when that does not help.

    ``damaged``: because of a copy whose record is forgotten now, and which is not met again.
    """

    def __init__(self, why: Failure, *, damaged: bool) -> None:
        super().__init__(why)
        self.why = why
        self.damaged = damaged


@dataclass(frozen=True, slots=True)
class Delivered:
    """The digest of the bytes, the ranks that read them, how many of them all ranks together read
    from the source, and the most memory that a rank took, in bytes; of a ``tree`` its files.
    """

    digest: str
    readers: tuple[int, ...] = ()
    source_bytes_read: int = 0
    peak_memory: int = 0
    tree: Counts | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What a rank has to say after the broadcast; seconds, bytes read, and bytes of memory."""

    node: str
    digest: str
    stale: Failure | None
    reading: float
    writing: float
    bytes_read: int
    peak_memory: int


def deliver(
    comm: MPI.Intracomm,
    task: Task,
    cargo: Cargo,
    watch: Stopwatch,
    progress: Callable[[int, int], None],
) -> Delivered:
    """Bring the item to the plan's receivers. Collective.

    ``progress`` is called on the first sender with the bytes sent so far, and with how many there
    are to send: holes are not sent. Raises RefusedError, or StaleError where the source changed
    meanwhile or a sender's copy proved damaged.
    """
    plan = task.plan
    if task.rank in plan.current:
        task.note_use()
    if not plan.receivers:
        return Delivered(plan.digest, plan.senders[:1])
    watch.enter(Phase.OPEN)
    with closing(cargo):
        layout = _open(comm, task, cargo)
        watch.enter(Phase.BROADCAST)
        delivered = _broadcast(comm, task, cargo, layout, watch, progress)
        together(comm, task.here, cargo.seal, patient=True)
        if task.item.options.verify is Verify.READBACK:
            watch.enter(Phase.VERIFY)
            together(comm, task.here, partial(cargo.verify, delivered.digest), patient=True)
        watch.enter(Phase.PUBLISH)
        together(comm, task.here, cargo.announce, patient=True)
        published = together(comm, task.here, partial(cargo.publish, delivered.digest))
        tree = _counts(plan, [one.tree for one in published if one.tree])
        first = published[plan.receivers[0]]
        digest = joint_digest(one.digest for one in published) if plan.apart else first.digest
        return replace(delivered, digest=digest, tree=tree, note=first.note)


def _counts(plan: TransferPlan, trees: Sequence[Counts]) -> Counts | None:
    """What became of all files, from what the nodes say of theirs."""
    if plan.apart:
        return total(trees)
    # What was deleted may differ: a node may have had another old version, or none.
    return max(trees, key=lambda one: one.deleted) if trees else None


def _open(comm: MPI.Intracomm, task: Task, cargo: Cargo) -> Layout:
    """Open the senders' and receivers' files; what is to travel."""
    opened = together(comm, task.here, cargo.open, patient=True)
    for one in opened:
        if one.stale:
            raise StaleError(one.stale, damaged=True)
    layout = cargo.layout(opened)
    together(comm, task.here, lambda: cargo.allocate(layout), patient=True)
    return layout


def _broadcast(
    comm: MPI.Intracomm,
    task: Task,
    cargo: Cargo,
    layout: Layout,
    watch: Stopwatch,
    progress: Callable[[int, int], None],
) -> Delivered:
    """Move the bytes among the plan's members; all of them have the same digest then."""
    plan = task.plan
    result = Transferred("", None, 0.0, 0.0, 0.0)
    with _members(comm, plan) as group:
        if group:
            # Of a folder's parts, the first node's stands for all.
            first = comm.rank == plan.senders[0] and layout.data > 0
            senders = 1 if plan.apart else len(plan.senders)
            result = broadcast(
                group, layout, senders, task.settings, cargo.reader, cargo.writer,
                lambda sent: progress(sent, layout.data) if first else None, cargo.digester,
            )  # fmt: skip
    verdicts = together(comm, task.here, lambda: _judge(task, cargo, result), patient=True)
    reading = max(verdict.reading for verdict in verdicts)
    writing = max(verdict.writing for verdict in verdicts)
    watch.enter(Phase.FSYNC, {Phase.READ: reading, Phase.WRITE: writing})
    for verdict in verdicts:
        if verdict.stale:
            raise StaleError(verdict.stale, damaged=not plan.from_source)
    readers = tuple(rank for rank, verdict in enumerate(verdicts) if verdict.bytes_read)
    read = sum(verdict.bytes_read for verdict in verdicts) if plan.from_source else 0
    peak = max(verdict.peak_memory for verdict in verdicts)
    return Delivered(_agreed_digest(task, verdicts), readers or plan.senders[:1], read, peak)


@contextmanager
def _members(comm: MPI.Intracomm, plan: TransferPlan) -> Iterator[MPI.Intracomm | None]:
    """The communicator of the ranks that move bytes, the senders its first."""
    members = (comm.rank,) if plan.apart else plan.members
    if members == tuple(range(comm.size)):
        yield comm
    elif comm.rank not in members:
        yield None
    else:
        group = comm.Create_group(comm.group.Incl(list(members)))
        yield group
        group.Free()


def _judge(task: Task, cargo: Cargo, result: Transferred) -> _Verdict:
    """What this rank makes of the broadcast; raises its error."""
    stale = cargo.staleness(result)
    if result.error and not stale:
        raise result.error
    read = cargo.reader.bytes_read if cargo.reader else 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return _Verdict(
        task.here.name, result.digest, stale, result.reading, result.writing, read, peak
    )


def _agreed_digest(task: Task, verdicts: Sequence[_Verdict]) -> str:
    expected = verdicts[task.plan.senders[0]].digest
    if task.plan.apart:  # each has other bytes
        return expected
    text = f"{task.item.destination}: the bytes that came differ from those sent; submit again"
    members = [verdicts[rank] for rank in task.plan.members]
    wrong = [verdict.node for verdict in members if verdict.digest != expected]
    if wrong:
        raise RefusedError([Failure(IntegrityError.code, text, node) for node in wrong])
    return expected
