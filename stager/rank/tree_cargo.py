"""Send or receive a folder: only the files that some receiver lacks are sent, as one stream."""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from stager.base.errors import DestinationError, Failure, IntegrityError
from stager.base.options import FolderLayout, Links, Relocate
from stager.base.outcome import Counts
from stager.disk.cache import check_inodes
from stager.disk.files import READ_FILE, READ_SIZE, opened, write_all
from stager.disk.parents import made_parents
from stager.rank.cargo import Cargo, Opened, Published
from stager.rank.publication import announce_tree, publish_tree, verify_tree
from stager.rank.reuse import Reuse, lost_files, read_marks
from stager.source.access import open_tree
from stager.tree.listing import Kind
from stager.tree.partial import PartialTree
from stager.tree.stream import Stream, StreamDigest, StreamReader, StreamWriter, place
from stager.tree.table import Table
from stager.tree.venv import Relocation, relocate, with_moved_links
from stager.wire.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from stager.disk.record import Record
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


def _blocks(path: str) -> Iterator[bytes]:
    """Yield what is in a file, up to an error."""
    with suppress(OSError), opened(path, READ_FILE) as source:
        while block := os.read(source, READ_SIZE):
            yield block


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
        self._announced: Record | None = None
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
        self._tree = PartialTree(task.cache, self._relocated_listing())
        self.stack.callback(self._tree.close)
        self._tree.lay_out()
        for row in self._listing.rows(Kind.FILE):
            reused = self._reuse.has(row) and self._take_over(self._tree, row)
            self._lacks[row] = not reused
        return Opened(needs=zlib.compress(self._lacks, 1))

    def _relocated_listing(self) -> Listing:
        """Return the listing with its symbolic links as the copy must have them."""
        if self.task.item.options.relocate is not Relocate.VENV:
            return self._listing
        return with_moved_links(self._listing, self._relocation, self.task.source.interpreter)

    @property
    def _relocation(self) -> Relocation:
        task = self.task
        return Relocation(task.item.source, task.item.destination, task.source.interpreter_at)

    def _take_over(self, tree: PartialTree, row: int) -> bool:
        assert self._reuse.table is not None
        path = os.fsencode(self.task.path) + b"/" + self._listing.paths[row]
        is_staged = partial(self._reuse.table.has_stat, self._reuse.rows[row])
        return tree.take_over(row, path, is_staged)

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
            for row in self._tree.drop_changed():
                self._read_again(self._tree, row)
            if self.task.item.options.relocate is Relocate.VENV:
                self._relocate(self._tree)
            self._tree.seal()

    def _read_again(self, tree: PartialTree, row: int) -> None:
        """Read a file from the source that was taken from the old copy, but changed there since.

        Raise SpaceError, or DestinationError, also if the file cannot be read: the source may be no
        folder here, or compressed.
        """
        assert self._reuse.table is not None
        assert self._digests is not None
        name = os.fsdecode(self._listing.paths[row])
        digest, at = xxhash.xxh3_128(), 0
        with tree.writing(), tree.filling(row) as copy:
            for block in _blocks(f"{self.task.item.source}/{name}"):
                write_all(copy, block, at)
                digest.update(block)
                at += len(block)
        if digest.digest() != self._reuse.table.sent_digest(self._reuse.rows[row]):
            may_replace = self.task.item.options.replace
            remedy = "submit again" if may_replace else "move it, or add the option replace"
            path = f"{self.task.path}/{name}"
            raise DestinationError(
                f"{path} was written to while its folder was staged again: {remedy}"
            )
        self._lacks[row] = True
        self._digests.digests[place(row)] = digest.digest()

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
        names = None if self._reuse.names is None else frozenset(self._reuse.names)
        lost = lost_files(self.task, self._reuse.own)
        return publish_tree(self.task, self._tree, self._announced, self._counts(), lost, names)

    def _counts(self) -> Counts:
        assert self.stream is not None
        sent = len(self.stream.rows), self.stream.size
        return Counts(self._listing.files, *sent, self._reuse.deleted)
