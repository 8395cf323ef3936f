"""Deliver items: take the steps of their transfers on all ranks together.

Open, broadcast, compare digests, seal, verify, announce, publish. Nothing gets its final name
before every receiver has every byte on its disk.
"""

from __future__ import annotations

import resource
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from stager.base.codec import NOTHING, REAL, list_of, row_of
from stager.base.digest import KeyedDigest, digest_of_pieces
from stager.base.errors import Failure, IntegrityError
from stager.base.options import Verify
from stager.base.outcome import Pace, total
from stager.base.telemetry import Figures, Phase, about
from stager.rank.agree import RefusedError, StaleError, together
from stager.rank.file_transfer import OPENED, PUBLISHED, Transfer
from stager.rank.plan import joint_digest
from stager.rank.report import Delivered
from stager.wire.transfer import Transferred, broadcast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpi4py import MPI

    from stager.base.codec import Codec
    from stager.base.outcome import Counts
    from stager.base.telemetry import Stopwatch
    from stager.rank.agree import Context
    from stager.rank.file_transfer import Opened, Published
    from stager.rank.plan import Task, TransferPlan
    from stager.wire.layout import Layout

T = TypeVar("T")


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
    wrote: Figures
    bytes_read: int
    retries: int
    peak_memory: int


_VERDICT = row_of(_Verdict)


def deliver(
    context: Context,
    transfers: Sequence[Transfer],
    watch: Stopwatch,
    on_progress: Sequence[Callable[[int, int, int], None]],
) -> list[Delivered]:
    """Bring items to the receivers of their plans, of which each has at least one. Collective.

    Each step is taken for all of them before the next one, so that many small files cost no more
    exchanges than one. The first sender calls the item's ``on_progress`` with the bytes sent so far
    and all bytes to send, holes not counted, and the files of a folder that are sent. Raise
    RefusedError if a step fails on any rank, and publish none; StaleError if the source changed or
    a sender's copy is damaged.
    """
    watch.enter(Phase.OPEN)
    with ExitStack() as stack:
        for one in transfers:
            stack.push(one.sink.stack)
            stack.push(one.sender.stack)
        opened = _each(context, transfers, Transfer.open, OPENED)
        for one, of_item in zip(transfers, opened, strict=True):
            _refuse_stale(one, of_item)
            one.lay_out(of_item)
        _each(context, transfers, Transfer.start, NOTHING)
        watch.enter(Phase.BROADCAST)
        for one, tell in zip(transfers, on_progress, strict=True):
            one.result = _broadcast(context, one, tell)
        verdicts = _judge_together(context, transfers, watch)
        for one, of_each in zip(transfers, verdicts, strict=True):
            one.digest = _agreed_digest(one.task, of_each)
            if one.folder and not one.task.plan.is_sharded:
                digests, first = one.folder.digests.digests, one.task.plan.senders[0]
                memoryview(digests)[:] = context.channel.bcast_bytes(bytes(digests), first)
        _gather(context, [one for one in transfers if one.task.plan.is_shared])
        sealing = _each(context, transfers, _timed_seal, REAL)
        read_back = [one for one in transfers if one.task.item.options.verify is Verify.READBACK]
        if read_back:
            watch.enter(Phase.VERIFY)
            _each(context, read_back, lambda one: one.sink.verify(one.digest), NOTHING)
        watch.enter(Phase.PUBLISH)
        _each(context, transfers, _announce, NOTHING)
        published = _each(context, transfers, lambda one: one.sink.publish(one.digest), PUBLISHED)
        return list(map(_delivered, transfers, verdicts, sealing, published))


def _gather(context: Context, shared: Sequence[Transfer]) -> None:
    """Tell rank 0 what each rank has written of the copies that all see. Collective."""
    if not shared:
        return
    told: list[bytes] = []

    def flush() -> None:
        for one in shared:
            about(one.task.place)
            told.append(one.sink.flush())

    together(context, flush)
    for one, mine in zip(shared, told, strict=True):
        one.sink.merge(context.channel.allgather_bytes(mine))


def _announce(one: Transfer) -> None:
    """Take the last step before the new copy is published. Raise BusyError if it must not be."""
    one.task.check_unused()
    one.sink.announce(one.digest)


def _each(
    context: Context,
    transfers: Sequence[Transfer],
    step: Callable[[Transfer], T],
    answer: Codec[T],
) -> list[list[T]]:
    """Take one step for each item on all ranks together. Collective.

    Return of each item the answers of all ranks, in rank order.
    """

    def take() -> list[T]:
        found: list[T] = []
        for one in transfers:
            about(one.task.place)
            found.append(step(one))
        return found

    answers = together(context, take, list_of(answer))
    return [list(of_item) for of_item in zip(*answers, strict=True)]


def _delivered(
    transfer: Transfer,
    verdicts: Sequence[_Verdict],
    sealing: Sequence[float],
    published: Sequence[Published],
) -> Delivered:
    """Return what is told of an item, from what all ranks did in rank order."""
    plan = transfer.task.plan
    first = published[plan.receivers[0]]
    readers = tuple(rank for rank, one in enumerate(verdicts) if one.bytes_read)
    return Delivered(
        digest=joint_digest(one.digest for one in published) if plan.has_parts else first.digest,
        readers=readers or plan.senders[:1],
        source_bytes_read=sum(one.bytes_read for one in verdicts) if plan.from_source else 0,
        peak_memory=max(one.peak_memory for one in verdicts),
        tree=_counts(plan, [one.tree for one in published if one.tree]),
        note=first.note,
        retries=sum(one.retries for one in verdicts),
        # A disk may take at the end of writing what it only seemed to have written.
        paces=tuple(
            Pace(one.node, *one.wrote) + Pace(one.node, 0, seconds, seconds)
            for one, seconds in zip(verdicts, sealing, strict=True)
        ),
    )


def _timed_seal(one: Transfer) -> float:
    """Seal the new copy; return the seconds that it took."""
    begun = time.monotonic()
    one.sink.seal()
    return time.monotonic() - begun


def _counts(plan: TransferPlan, trees: Sequence[Counts]) -> Counts | None:
    """Return the counts of a folder from those of each receiver."""
    if plan.has_parts:
        return total(trees)
    # Only ``deleted`` differs: some nodes had another old version, or none.
    return max(trees, key=lambda one: one.deleted) if trees else None


def _refuse_stale(one: Transfer, answers: Sequence[Opened | _Verdict]) -> None:
    """Raise StaleError if a source or a sender's copy is not what was surveyed."""
    for answer in answers:
        if answer.stale:
            raise StaleError(answer.stale, damaged=not one.task.plan.from_source)


def _broadcast(
    context: Context, one: Transfer, on_progress: Callable[[int, int, int], None]
) -> Transferred:
    """Move the bytes among the plan's members; other ranks return at once. Collective."""
    task, plan, layout, reader = one.task, one.task.plan, one.layout, one.sender.reader
    keyed = KeyedDigest(context.channel.fresh_key())
    with _members(context.comm, plan) as group:
        if not group:
            return Transferred("", "", None, 0.0, 0.0, Figures(0, 0.0, 0.0))
        # Where each rank reads its own part, the first one's progress stands for that of all.
        is_first = task.rank == plan.senders[0]

        def tell(sent: int) -> None:
            if is_first and layout.data:
                read = reader.bytes_read if reader else 0
                so_far = _so_far(sent, read, layout) * one.size // layout.data
                on_progress(so_far, one.size, one.files)

        # One rank has to compute the digest: that the others have the same bytes is known by the
        # keyed digests.
        digest = one.digester if is_first or plan.is_sharded else None
        return broadcast(
            group, layout, plan.readers, task.settings, reader=reader, writer=one.sink.writer,
            progress=tell, digest=digest, keyed=keyed,
        )  # fmt: skip


def _so_far(sent: int, read: int, layout: Layout) -> int:
    """Return the bytes that progress counts: of the next chunk, those that were read. Pure.

    A chunk can have thousands of small objects, each of which a store takes its time for.
    """
    return max(sent, min(read, sent + layout.chunk - 1, layout.data - 1))


@contextmanager
def _members(comm: MPI.Intracomm, plan: TransferPlan) -> Iterator[MPI.Intracomm | None]:
    """Yield a communicator of the ranks that move bytes, the senders first; None on other ranks."""
    members = (comm.rank,) if plan.is_sharded else plan.members
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
    context: Context, transfers: Sequence[Transfer], watch: Stopwatch
) -> list[list[_Verdict]]:
    """Return of each item the verdicts of all ranks. Collective.

    Raise StaleError if a source or a sender's copy is not what was surveyed, else RefusedError if
    a transfer failed: of a source that changed, a receiver may get what it cannot unpack.
    """
    verdicts = _each(context, transfers, _judge, _VERDICT)
    reading = sum(max(one.reading for one in of_item) for of_item in verdicts)
    writing = sum(max(one.wrote.held for one in of_item) for of_item in verdicts)
    watch.enter(Phase.FSYNC, {Phase.READ: reading, Phase.WRITE: writing})
    for one, of_item in zip(transfers, verdicts, strict=True):
        _refuse_stale(one, of_item)
    if failures := [one.failure for of_item in verdicts for one in of_item if one.failure]:
        raise RefusedError(failures)
    return verdicts


def _judge(one: Transfer) -> _Verdict:
    """Return this rank's verdict."""
    node, reader, result = one.task.node.name, one.sender.reader, one.result
    return _Verdict(
        node=node,
        digest=result.digest,
        keyed_digest=result.keyed_digest,
        stale=one.sender.staleness(result),
        failure=Failure.of(result.error, node) if result.error else None,
        reading=result.reading,
        wrote=result.wrote,
        bytes_read=reader.bytes_read if reader else 0,
        retries=reader.retries if reader else 0,
        # getrusage(2) counts in KiB.
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _agreed_digest(task: Task, verdicts: Sequence[_Verdict]) -> str:
    """Return the digest of what was sent. Raise RefusedError if a member has other bytes.

    That is found by the keyed digests: others than the ranks can make two texts of equal xxh3-128.
    """
    first = verdicts[task.plan.senders[0]]
    if task.plan.is_sharded:  # each rank has other pieces of a file; a folder needs no digest
        return digest_of_pieces(bytes.fromhex("".join(one.digest for one in verdicts))).hex()
    members = [verdicts[rank] for rank in task.plan.members]
    wrong = [one.node for one in members if one.keyed_digest != first.keyed_digest]
    if wrong:
        text = f"{task.place}: the bytes received differ from those sent; submit again"
        raise RefusedError([Failure(IntegrityError.code, text, node) for node in wrong])
    return first.digest
