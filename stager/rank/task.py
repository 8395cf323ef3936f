"""Describe one item that is being staged, as one rank sees it, and write its record."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stager.base.errors import BusyError, Failure, IntegrityError, StageError
from stager.store.record import VERSION, Record, TreeFacts

if TYPE_CHECKING:
    from stager.fs.files import CopyFacts
    from stager.rank.agree import Node
    from stager.rank.plan import TransferPlan
    from stager.request.items import Space, StageItem
    from stager.source.endpoints import RemoteSettings
    from stager.source.facts import Source
    from stager.store.cache import Cache
    from stager.store.tree_validity import Standing
    from stager.wire.layout import Settings


@dataclass(frozen=True, slots=True)
class Task:
    """One planned item. All ranks have equal tasks, except for ``cache``, ``node``, ``rank``,
    ``since`` and ``standing``.

    ``item.destination`` is the final path: a file's name is appended where the user named a folder.
    ``job`` is Slurm's job id, 0 outside of Slurm. ``since`` is when this rank began to look at what
    is on the node, in nanoseconds since 1970. ``settings`` are those of this item's transfer.
    ``standing`` is how the copy of a folder was then, None if there was none.
    """

    item: StageItem
    source: Source
    plan: TransferPlan
    settings: Settings
    remote: RemoteSettings
    space: Space
    job: int
    cache: Cache
    node: Node
    rank: int
    since: int
    standing: Standing | None = None

    @property
    def path(self) -> str:
        """Where the copy is on this node's disk."""
        return self.node.path(self.item.destination)

    @property
    def is_tree(self) -> bool:
        """Whether the copy is a folder."""
        return self.source.is_tree or self.item.options.extract

    @property
    def needs_differ(self) -> bool:
        """Whether the nodes may need more or less room for the copy than each other."""
        return self.is_tree or self.need_is_estimate

    @property
    def need_is_estimate(self) -> bool:
        """Whether the size of the copy is not known before it is there."""
        return self.item.options.is_unpacked or self.item.scheme.is_made

    @property
    def receives(self) -> bool:
        """Whether this rank gets a new copy."""
        return self.rank in self.plan.receivers

    @property
    def sends(self) -> bool:
        """Whether this rank reads what is sent."""
        return self.rank in self.plan.senders

    def record(self, copy: CopyFacts, digest: str, tree: TreeFacts | None = None) -> Record:
        """Return the record of a new copy. A pin of the old one is kept."""
        now = int(time.time())
        before = self.cache.load(self.item.destination)
        return Record(
            version=VERSION,
            source=self.item.source,
            destination=self.item.destination,
            source_facts=self.source.facts,
            copy_facts=copy,
            digest=digest,
            staged_at=now,
            used_at=now,
            used_by_job=self.job,
            lifetime=self.item.options.lifetime,
            pinned=bool(before and before.pinned),
            decompressed=bool(self.item.options.decompress),
            share=self.item.options.share,
            tree=tree,
        )

    def note_use(self) -> None:
        """Write into this node's record that this job uses the copy now.

        A user cannot write the records of what another account staged for all.
        """
        record = self.cache.load(self.item.destination)
        if record is None or self.cache.uid != self.node.uid:
            return
        used = replace(
            record,
            used_at=int(time.time()),
            used_by_job=self.job,
            lifetime=self.item.options.lifetime,
        )
        with suppress(StageError):  # the copy is current whether its use is recorded or not
            self.cache.note_use(used)

    def check_unused(self) -> None:
        """Raise BusyError if a job has begun to use the copy that is to be replaced.

        Only what is for all users can be used by one who does not wait for its lock.
        """
        if self.receives and self.cache.shared:
            jobs = sorted({*self.cache.jobs_using(self.item.destination)} - {self.job})
            if jobs:
                several = len(jobs) > 1
                raise BusyError(
                    f"{self.item.destination} was not replaced, as meanwhile "
                    f"job{'s' * several} {','.join(map(str, jobs))} began to use it; submit again "
                    f"when {'they have' if several else 'it has'} ended"
                )

    def readback_error(self, name: str = "") -> IntegrityError:
        """Return the error for bytes that the disk returns otherwise than they were written.

        ``name`` is the file's path in a tree, with a slash before it.
        """
        text = "the bytes read back from the disk differ from those written; use another node"
        return IntegrityError(f"{self.path}{name}: {text}")

    def mark_damaged(self) -> Failure:
        """Record that this node's copy is damaged, so that no survey finds it current again.

        Return the failure to report if no other node and no source can replace it.
        """
        record = self.cache.load(self.item.destination)
        if record:  # without its record, nobody would know that it was staged
            self.cache.save(record.as_damaged())
        text = "this copy is damaged; submit again: the next stage replaces it"
        return Failure(IntegrityError.code, f"{self.item.destination}: {text}", self.node.name)
