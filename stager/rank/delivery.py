"""Deliver items: take the steps of their Cargos on all ranks together.

Open, broadcast, compare digests, seal, verify, announce, publish. Nothing gets its final name
before every receiver has every byte on its disk.
"""

from __future__ import annotations

import resource
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, TypeVar

from stager.base.codec import NUMBER, REAL, TEXT, list_of, optional, record_of
from stager.base.digest import Digest, KeyedDigest
from stager.base.errors import Failure, IntegrityError
from stager.base.options import Verify
from stager.base.outcome import Pace, total
from stager.base.telemetry import Phase, about
from stager.rank.agree import FAILURE, RefusedError, StaleError, together
from stager.rank.cargo import OPENED, PUBLISHED
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
    from stager.rank.cargo import Cargo, Published
    from stager.rank.plan import TransferPlan
    from stager.rank.task import Task
    from stager.wire.layout import Layout
    from stager.wire.ring import Digester

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
    cargos: Sequence[Cargo],
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
        for cargo in cargos:
            stack.enter_context(closing(cargo))
        layouts = _open(context, cargos)
        watch.enter(Phase.BROADCAST)
        results = [
            _broadcast(context, cargo, layout, tell)
            for cargo, layout, tell in zip(cargos, layouts, on_progress, strict=True)
        ]
        delivered = _judge_together(context, cargos, results, watch)
        for cargo in cargos:
            if cargo.file_digests is not None:
                first = cargo.task.plan.senders[0]
                sent = context.channel.bcast_bytes(bytes(cargo.file_digests), first)
                memoryview(cargo.file_digests)[:] = sent
        each = [(cargo, one.digest) for cargo, one in zip(cargos, delivered, strict=True)]
        sealing = _answers(context, cargos, [partial(_timed, cargo.seal) for cargo in cargos], REAL)
        read_back = [one.task.item.options.verify is Verify.READBACK for one in cargos]
        if any(read_back):
            watch.enter(Phase.VERIFY)
            chosen = list(compress(each, read_back))
            verifying = [partial(cargo.verify, digest) for cargo, digest in chosen]
            _all(context, [cargo for cargo, _ in chosen], verifying)
        watch.enter(Phase.PUBLISH)
        _all(context, cargos, [partial(_announce, cargo, digest) for cargo, digest in each])
        publishing = [partial(cargo.publish, digest) for cargo, digest in each]
        published = _answers(context, cargos, publishing, PUBLISHED)
        return list(map(_completed, cargos, delivered, sealing, published))


def _announce(cargo: Cargo, digest: str) -> None:
    """Take the last step before the new copy is published. Raise BusyError if it must not be."""
    cargo.task.check_unused()
    cargo.announce(digest)


def _all(context: Context, cargos: Sequence[Cargo], steps: Sequence[Callable[[], None]]) -> None:
    """Take one step for each item on all ranks together. Collective."""

    def take() -> None:
        for cargo, step in zip(cargos, steps, strict=True):
            about(cargo.task.item.destination)
            step()

    together(context, take)


def _answers(
    context: Context, cargos: Sequence[Cargo], steps: Sequence[Callable[[], T]], answer: Codec[T]
) -> list[list[T]]:
    """Do the same; return of each item the answers of all ranks, in rank order. Collective."""

    def take() -> list[T]:
        found: list[T] = []
        for cargo, step in zip(cargos, steps, strict=True):
            about(cargo.task.item.destination)
            found.append(step())
        return found

    return [
        list(of_item) for of_item in zip(*together(context, take, list_of(answer)), strict=True)
    ]


def _completed(
    cargo: Cargo, delivered: Delivered, sealing: Sequence[float], published: Sequence[Published]
) -> Delivered:
    """Return what is told of an item, with how it was sealed and published on each rank."""
    plan = cargo.task.plan
    first = published[plan.receivers[0]]
    joint = joint_digest(one.digest for one in published) if plan.apart else first.digest
    return replace(
        delivered,
        digest=joint,
        tree=_counts(plan, [one.tree for one in published if one.tree]),
        note=first.note,
        paces=tuple(map(_with_seal, delivered.paces, sealing)),
    )


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


def _open(context: Context, cargos: Sequence[Cargo]) -> list[Layout]:
    """Open and allocate on all ranks; return what is sent of each item. Collective."""
    opened = _answers(context, cargos, [cargo.open for cargo in cargos], OPENED)
    for cargo, of_item in zip(cargos, opened, strict=True):
        for one in of_item:
            if one.stale:
                raise StaleError(one.stale, damaged=not cargo.task.plan.from_source)
    layouts = [cargo.layout(of_item) for cargo, of_item in zip(cargos, opened, strict=True)]
    pairs = zip(cargos, layouts, strict=True)
    _all(context, cargos, [partial(cargo.allocate, layout) for cargo, layout in pairs])
    return layouts


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
    context: Context, cargos: Sequence[Cargo], results: Sequence[Transferred], watch: Stopwatch
) -> list[Delivered]:
    """Find out whether all members have the bytes that were to be sent. Collective.

    Raise StaleError if a source or a sender's copy is not what was surveyed, else RefusedError if
    a transfer failed: of a source that changed, a receiver may get what it cannot unpack.
    """
    judging = [partial(_judge, *one) for one in zip(cargos, results, strict=True)]
    verdicts = _answers(context, cargos, judging, _VERDICT)
    reading = sum(max(one.reading for one in of_item) for of_item in verdicts)
    writing = sum(max(one.writing for one in of_item) for of_item in verdicts)
    watch.enter(Phase.FSYNC, {Phase.READ: reading, Phase.WRITE: writing})
    every = list(zip(cargos, verdicts, strict=True))
    for cargo, of_item in every:
        for verdict in of_item:
            if verdict.stale:
                raise StaleError(verdict.stale, damaged=not cargo.task.plan.from_source)
    if failures := [one.failure for of_item in verdicts for one in of_item if one.failure]:
        raise RefusedError(failures)
    return [_delivered(cargo.task, of_item) for cargo, of_item in every]


def _delivered(task: Task, verdicts: Sequence[_Verdict]) -> Delivered:
    """Return what is told of an item by the verdicts of all ranks. Raise RefusedError."""
    readers = tuple(rank for rank, verdict in enumerate(verdicts) if verdict.bytes_read)
    read = sum(verdict.bytes_read for verdict in verdicts)
    return Delivered(
        digest=_agreed_digest(task, verdicts),
        readers=readers or task.plan.senders[:1],
        source_bytes_read=read if task.plan.from_source else 0,
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
