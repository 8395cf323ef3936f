"""Send or receive a folder: only the files that some receiver lacks are sent, as one stream."""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING

from stager.base.errors import Failure, IntegrityError
from stager.base.options import FolderLayout, Links
from stager.base.outcome import Counts
from stager.rank.cargo import Cargo, Opened, Published
from stager.rank.publication import (
    Reuse,
    announce_tree,
    check_obstacles,
    publish_tree,
    read_marks,
    verify_tree,
)
from stager.source.access import open_tree
from stager.store.cache import check_inodes
from stager.store.parents import made_parents
from stager.tree.environments import Relocation, relocate, with_moved_links
from stager.tree.listing import Kind
from stager.tree.partial_tree import PartialTree
from stager.tree.stream import DIGEST_SIZE, Stream, StreamDigest, StreamReader, StreamWriter, place
from stager.tree.table import Table
from stager.wire.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from stager.rank.publication import Announced
    from stager.rank.task import Task
    from stager.source.access import TreeReader
    from stager.tree.listing import Listing
    from stager.tree.stream import NewTree
    from stager.wire.transfer import Transferred

#: Bytes of a table's row besides the path: thirteen columns of numbers and a digest.
_TABLE_ROW = 13 * 8 + 16


def table_size(listing: Listing) -> int:
    """Estimate the bytes of the table that is saved with a tree's record. Pure."""
    return sum(map(len, listing.paths)) + _TABLE_ROW * len(listing)


def needed_by_any(answers: Collection[bytes], rows: int) -> bytes:
    """Return a byte for each row, 1 if any of the `Opened.needs` has a 1 there. Pure.

    Raise LaunchError if one of them is not of so many rows.
    """
    needed = 0
    for answer in answers:
        needed |= int.from_bytes(read_marks(answer, rows), "big")
    return needed.to_bytes(rows, "big")


def digests_of_all_files(
    listing: Listing, received: bytes | bytearray, lacked: bytes | bytearray, reuse: Reuse
) -> bytearray:
    """Return the digests of a tree's files: those ``received``, and those of reused files. Pure.

    ``received`` has a digest for each row; ``lacked`` marks the rows whose file was received.
    """
    digests = bytearray(received)
    if reuse.table:
        for row in listing.rows(Kind.FILE):
            if reuse.has(row) and not lacked[row]:
                digests[place(row)] = reuse.table.digest(reuse.rows[row])
    return digests


class TreeCargo(Cargo):
    """One folder, whose files are numbered by the rows of the source's ``listing``.

    Every rank has the same listing; each has its own ``reuse``.
    """

    def __init__(self, task: Task, listing: Listing, reuse: Reuse) -> None:
        super().__init__(task)
        self._listing = listing
        self._reuse = reuse
        #: A byte for each row: 1 if this rank receives its file.
        self._lacks = bytearray(len(listing))
        self._tree: PartialTree | None = None
        self._announced: Announced | None = None
        #: What relocated files held before, by row.
        self._originals: dict[int, bytes] = {}
        #: The table of the copy that this rank sends.
        self._sent: Table | None = None
        #: The name of the split that the folder is a part of; see `shard_cargo`.
        self._split = ""
        #: What is sent, and the digests of its files; both are known after `layout`.
        self.stream: Stream | None = None
        self._digests: StreamDigest | None = None

    @property
    def files(self) -> int:
        return len(self.stream.rows) if self.stream else 0

    def need(self) -> int:
        if not self.task.receives:
            return 0
        rows = (row for row in range(len(self._listing)) if not self._reuse.has(row))
        return self._listing.allocated(rows) + table_size(self._listing)

    def need_in_all(self) -> int:
        return self._listing.allocated() + table_size(self._listing)

    def open(self) -> Opened:
        task = self.task
        if not task.receives:
            return Opened()
        names = sum(not self._reuse.has(row) for row in range(len(self._listing)))
        check_inodes(task.cache, names)
        self.stack.enter_context(made_parents(task.cache, task.path))
        listing = self._relocated_listing()
        self._tree = PartialTree(task.cache, listing)
        self.stack.callback(self._tree.close)
        self._tree.lay_out()
        above, table = os.fsencode(task.path) + b"/", self._reuse.table
        for row in self._listing.rows(Kind.FILE):
            if table and self._reuse.has(row):
                path = above + self._listing.paths[row]
                self._tree.keep(row, path, table, self._reuse.rows[row])
            else:
                self._lacks[row] = True
        self._check_obstacles(self._tree, listing)
        return Opened(needs=zlib.compress(self._lacks, 1))

    def _check_obstacles(self, tree: PartialTree, listing: Listing) -> None:
        """Raise DestinationError before anything is received that would have no place."""
        arrived = {
            path
            for path, kind, lacks in zip(listing.paths, listing.kinds, self._lacks, strict=True)
            if lacks or kind == Kind.LINK
        }
        table = Table.of(listing, tree.copy, bytes(DIGEST_SIZE * len(listing)), {})
        check_obstacles(self.task, table, tree.path, arrived)

    def _relocated_listing(self) -> Listing:
        """Return the listing with its symbolic links as the copy must have them."""
        if not self.task.source.environments:
            return self._listing
        return with_moved_links(self._listing, self._relocation)

    @property
    def _relocation(self) -> Relocation:
        task = self.task
        return Relocation(task.item.source, task.item.destination, task.source.environments)

    def layout(self, opened: Sequence[Opened]) -> Layout:
        # Most nodes lack the same files: each answer is decompressed once.
        answers = {one.needs for one in opened if one.needs}
        return self._layout_of(needed_by_any(answers, len(self._listing)))

    def _layout_of(self, needed: bytes | bytearray) -> Layout:
        self.stream = Stream(self._listing, needed)
        self.digester = self._digests = StreamDigest(self.stream)
        self.file_digests = None if self.task.plan.apart else self._digests.digests
        return Layout.dense(self.stream.size, self.task.settings.chunk)

    def allocate(self, layout: Layout) -> None:
        task, stream = self.task, self.stream
        assert stream is not None
        if self._tree:
            target = self._open_target(self._tree)
            with target.writing():
                for row in stream.without_data:
                    if self._lacks[row]:
                        target.create(row)
            self.writer = StreamWriter(target, stream, self._lacks)
        if task.sends:
            self.reader = reader = self._open_stream(stream)
            self.stack.callback(reader.close)

    def _open_target(self, tree: PartialTree) -> NewTree:
        """Return what the received files are written to."""
        return tree

    def _open_stream(self, stream: Stream) -> TreeReader:
        task = self.task
        if task.plan.from_source:
            options = task.item.options
            return open_tree(
                task.item.source, task.source, stream, task.remote,
                as_cache=options.layout is FolderLayout.HUB,
                follow=options.links is Links.FOLLOW,
            )  # fmt: skip
        self._sent = Table.load(task.cache, task.cache.load(task.item.destination))
        # The files of a copy are sent as they were at the source, before they were relocated.
        originals = self._sent.originals if self._sent else {}
        return StreamReader(task.path, stream, originals=originals)

    def staleness(self, result: Transferred) -> Failure | None:
        task = self.task
        if not self.reader:
            return None
        if not task.plan.from_source:
            return task.mark_damaged() if result.error or not self._sent_as_recorded() else None
        # The reader compares each file with the listing: IntegrityError means a change.
        if isinstance(result.error, IntegrityError):
            return Failure.of(result.error, task.node.name)
        return None

    def _sent_as_recorded(self) -> bool:
        """Whether what was sent from this node's copy has the digests of its table."""
        assert self.stream is not None
        table = self._sent
        return table is not None and all(
            self._digest(row) == table.sent_digest(row) for row in self.stream.rows
        )

    def _digest(self, row: int) -> bytes:
        assert self._digests is not None
        return bytes(self._digests.digests[place(row)])

    def seal(self) -> None:
        if self._tree:
            if self.task.source.environments:
                self._relocate(self._tree)
            self._tree.seal()

    def _relocate(self, tree: PartialTree) -> None:
        assert self._digests is not None
        known = self._reuse.table.originals if self._reuse.table else {}
        before = {
            row: known[self._reuse.rows[row]]
            for row in self._listing.rows(Kind.FILE)
            if not self._lacks[row] and self._reuse.rows[row] in known
        }
        changed = relocate(
            tree, self._listing, self._relocation, fresh=self._lacks, originals=before
        )
        self._originals = before | {row: original for row, (original, _) in changed.items()}
        for row, (_, digest) in changed.items():
            self._digests.digests[place(row)] = digest

    def verify(self, digest: str) -> None:
        if self._tree and self.stream:
            received = (row for row in self.stream.rows if self._lacks[row])
            expected = ((row, self._digest(row)) for row in received)
            verify_tree(self.task, self._tree, self._listing, expected)

    def announce(self, digest: str) -> None:
        if self._tree:
            self._announced = announce_tree(
                self.task,
                self._tree,
                self._relocated_listing(),
                bytes(self._all_digests()),
                originals=self._originals,
                split=self._split,
            )

    def _all_digests(self) -> bytearray:
        assert self._digests is not None
        received = self._digests.digests
        return digests_of_all_files(self._listing, received, self._lacks, self._reuse)

    def publish(self, digest: str) -> Published:
        if not self._tree or not self._announced:
            return Published()
        return publish_tree(self.task, self._tree, self._announced, self._counts())

    def _counts(self) -> Counts:
        assert self.stream is not None
        sent = len(self.stream.rows), self.stream.size
        return Counts(self._listing.files, *sent, self._reuse.deleted)
