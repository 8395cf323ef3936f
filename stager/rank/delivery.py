"""Deliver one item: take the steps of its Cargo on all ranks together.

Open, broadcast, compare digests, seal, verify, announce, publish. Nothing gets its final name
before every receiver has every byte on its disk.
"""

from __future__ import annotations

import resource
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from stager.base.digest import Digest
from stager.base.errors import Failure, IntegrityError
from stager.base.options import Verify
from stager.base.outcome import total
from stager.base.phases import Phase
from stager.base.slow import Pace
from stager.rank.agree import FAILURE, RefusedError, StaleError, together
from stager.rank.cargo import OPENED, PUBLISHED
from stager.rank.plan import joint_digest
from stager.rank.report import Delivered
from stager.wire.codec import NUMBER, REAL, TEXT, optional, record_of
from stager.wire.keyed import KeyedDigest
from stager.wire.transfer import Transferred, broadcast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpi4py import MPI

    from stager.base.outcome import Counts
    from stager.base.phases import Stopwatch
    from stager.rank.agree import Context
    from stager.rank.cargo import Cargo
    from stager.rank.plan import TransferPlan
    from stager.rank.task import Task
    from stager.wire.layout import Layout
    from stager.wire.ring import Digester


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What a rank reports after the broadcast: times in seconds, reads and memory in bytes.

    ``failure`` is that of its transfer.
    """

    node: str
    digest: str
    keyed_digest: str
    stale: Failure | None
    failure: Failure | None
    reading: float
    writing: float
    written: int
    write_seconds: float
    bytes_read: int
    retries: int
    peak_memory: int


_VERDICT = record_of(
    _Verdict,
    node=TEXT,
    digest=TEXT,
    keyed_digest=TEXT,
    stale=optional(FAILURE),
    failure=optional(FAILURE),
    reading=REAL,
    writing=REAL,
    written=NUMBER,
    write_seconds=REAL,
    bytes_read=NUMBER,
    retries=NUMBER,
    peak_memory=NUMBER,
)


def deliver(
    context: Context,
    cargo: Cargo,
    watch: Stopwatch,
    on_progress: Callable[[int, int, int], None],
) -> Delivered:
    """Bring one item to the receivers of its plan, of which there is at least one. Collective.

    The first sender calls ``on_progress`` with the bytes sent so far and all bytes to send, holes
    not counted, and the files of a folder that are sent. Raise RefusedError if a step fails on any
    rank; StaleError if the source changed or a sender's copy is damaged.
    """
    task = cargo.task
    watch.enter(Phase.OPEN)
    with closing(cargo):
        layout = _open(context, cargo)
        watch.enter(Phase.BROADCAST)
        result = _broadcast(context, cargo, layout, on_progress)
        delivered = _judge_together(context, cargo, result, watch)
        if cargo.file_digests is not None:
            sent = context.channel.bcast_bytes(bytes(cargo.file_digests), task.plan.senders[0])
            memoryview(cargo.file_digests)[:] = sent
        sealing = together(context, partial(_timed, cargo.seal), REAL)
        paces = tuple(map(_with_seal, delivered.paces, sealing))
        if task.item.options.verify is Verify.READBACK:
            watch.enter(Phase.VERIFY)
            together(context, partial(cargo.verify, delivered.digest))
        watch.enter(Phase.PUBLISH)
        together(context, partial(cargo.announce, delivered.digest))
        published = together(context, partial(cargo.publish, delivered.digest), PUBLISHED)
        tree = _counts(task.plan, [one.tree for one in published if one.tree])
        first = published[task.plan.receivers[0]]
        digests = (one.digest for one in published)
        digest = joint_digest(digests) if task.plan.apart else first.digest
        return replace(delivered, digest=digest, tree=tree, note=first.note, paces=paces)


def _timed(step: Callable[[], None]) -> float:
    """Take a step; return the seconds that it took."""
    begun = time.monotonic()
    step()
    return time.monotonic() - begun


def _with_seal(pace: Pace, seconds: float) -> Pace:
    """Count the end of writing too: a disk may take there what it only seemed to have written."""
    return pace + Pace(pace.node, 0, seconds, seconds)


def _counts(plan: TransferPlan, trees: Sequence[Counts]) -> Counts | None:
    """Return the counts of a folder from those of each receiver."""
    if plan.apart:
        return total(trees)
    # Only ``deleted`` differs: some nodes had another old version, or none.
    return max(trees, key=lambda one: one.deleted) if trees else None


def _open(context: Context, cargo: Cargo) -> Layout:
    """Open and allocate on all ranks; return what is sent. Collective."""
    opened = together(context, cargo.open, OPENED)
    for one in opened:
        if one.stale:
            raise StaleError(one.stale, damaged=not cargo.task.plan.from_source)
    layout = cargo.layout(opened)
    together(context, lambda: cargo.allocate(layout))
    return layout


def _broadcast(
    context: Context, cargo: Cargo, layout: Layout, on_progress: Callable[[int, int, int], None]
) -> Transferred:
    """Move the bytes among the plan's members; other ranks return at once. Collective."""
    task, plan = cargo.task, cargo.task.plan
    keyed = KeyedDigest(context.channel.fresh_key())
    with _members(context.comm, plan) as group:
        if not group:
            return Transferred("", "", None, 0.0, 0.0, 0.0)
        # Where each rank reads its own part, only the first one's progress is reported.
        reports = task.rank == plan.senders[0] and layout.data > 0

        def tell(sent: int) -> None:
            if reports:
                read = cargo.reader.bytes_read if cargo.reader else 0
                on_progress(_so_far(sent, read, layout), layout.data, cargo.files)

        return broadcast(
            group,
            layout,
            plan.readers,
            task.settings,
            reader=cargo.reader,
            writer=cargo.writer,
            progress=tell,
            digest=_digester(cargo),
            keyed=keyed,
        )


def _so_far(sent: int, read: int, layout: Layout) -> int:
    """Return the bytes that progress counts: of the next chunk, those that were read. Pure.

    A chunk can have thousands of small objects, each of which a store takes its time for.
    """
    return max(sent, min(read, sent + layout.chunk - 1, layout.data - 1))


def _digester(cargo: Cargo) -> Digester | None:
    """Return what computes the digest of the data on this rank, None if none does.

    One rank has to: that the others have the same bytes is known by the keyed digests.
    """
    task = cargo.task
    if task.rank == task.plan.senders[0] or task.plan.apart:
        return cargo.digester or Digest()
    return None


@contextmanager
def _members(comm: MPI.Intracomm, plan: TransferPlan) -> Iterator[MPI.Intracomm | None]:
    """Yield a communicator of the ranks that move bytes, the senders first; None on other ranks."""
    members = (comm.rank,) if plan.apart else plan.members
    if members == tuple(range(comm.size)):
        yield comm
    elif comm.rank not in members:
        yield None
    else:
        everyone = comm.Get_group()
        chosen = everyone.Incl(list(members))
        among_members = comm.Create_group(chosen)
        chosen.Free()
        everyone.Free()
        yield among_members
        among_members.Free()


def _judge_together(
    context: Context, cargo: Cargo, result: Transferred, watch: Stopwatch
) -> Delivered:
    """Find out whether all members have the bytes that were to be sent. Collective.

    Raise StaleError if the source or a sender's copy is not what was surveyed, else RefusedError
    if the transfer failed: of a source that changed, a receiver may get what it cannot unpack.
    """
    plan = cargo.task.plan
    verdicts = together(context, lambda: _judge(cargo, result), _VERDICT)
    reading = max(verdict.reading for verdict in verdicts)
    writing = max(verdict.writing for verdict in verdicts)
    watch.enter(Phase.FSYNC, {Phase.READ: reading, Phase.WRITE: writing})
    for verdict in verdicts:
        if verdict.stale:
            raise StaleError(verdict.stale, damaged=not plan.from_source)
    if failures := [verdict.failure for verdict in verdicts if verdict.failure]:
        raise RefusedError(failures)
    readers = tuple(rank for rank, verdict in enumerate(verdicts) if verdict.bytes_read)
    read = sum(verdict.bytes_read for verdict in verdicts)
    return Delivered(
        digest=_agreed_digest(cargo.task, verdicts),
        readers=readers or plan.senders[:1],
        source_bytes_read=read if plan.from_source else 0,
        peak_memory=max(verdict.peak_memory for verdict in verdicts),
        retries=sum(verdict.retries for verdict in verdicts),
        paces=tuple(
            Pace(one.node, one.written, one.write_seconds, one.writing) for one in verdicts
        ),
    )


def _judge(cargo: Cargo, result: Transferred) -> _Verdict:
    """Return this rank's verdict."""
    node = cargo.task.node.name
    return _Verdict(
        node=node,
        digest=result.digest,
        keyed_digest=result.keyed_digest,
        stale=cargo.staleness(result),
        failure=Failure.of(result.error, node) if result.error else None,
        reading=result.reading,
        writing=result.writing,
        written=result.written,
        write_seconds=result.write_seconds,
        bytes_read=cargo.reader.bytes_read if cargo.reader else 0,
        retries=cargo.reader.retries if cargo.reader else 0,
        # getrusage(2) counts in KiB.
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _agreed_digest(task: Task, verdicts: Sequence[_Verdict]) -> str:
    """Return the first sender's digest. Raise RefusedError if another member has other bytes.

    That is found by the keyed digests: others than the ranks can make two texts of equal xxh3-128.
    """
    first = verdicts[task.plan.senders[0]]
    if task.plan.apart:  # each rank has other bytes
        return first.digest
    members = [verdicts[rank] for rank in task.plan.members]
    wrong = [one.node for one in members if one.keyed_digest != first.keyed_digest]
    if wrong:
        text = f"{task.item.destination}: the bytes received differ from those sent; submit again"
        raise RefusedError([Failure(IntegrityError.code, text, node) for node in wrong])
    return first.digest
