"""Send and receive folders, as one stream of the files that some receiver lacks; unpack archives.

Both make a partial tree, which is verified, recorded with a table of its files, and published.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from stager.base.digest import DIGEST_SIZE, digest_of_data
from stager.base.errors import Failure, IntegrityError
from stager.base.formats import is_zip
from stager.base.options import Relocate
from stager.base.outcome import Counts
from stager.fs.files import stage_errors
from stager.fs.partial_file import Partial
from stager.rank.file_transfer import Published, Sender, Sink
from stager.rank.reuse import read_marks
from stager.source.access import open_tree
from stager.store.cache import check_inodes
from stager.store.entries import is_entry
from stager.store.parents import made_parents
from stager.store.record import TreeFacts
from stager.store.removal import updating
from stager.store.tree_validity import check_place
from stager.store.validity import own_lstat
from stager.tree.environments import (
    Relocation,
    find_environments,
    not_plain,
    relocate,
    with_moved_links,
)
from stager.tree.listing import Kind, Listing, Row, text_of
from stager.tree.partial_tree import PartialTree
from stager.tree.stream import Stream, StreamDigest, StreamReader, StreamWriter, place
from stager.tree.table import Table
from stager.tree.update import in_the_way

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from stager.archive.target import Target
    from stager.rank.decoder import DecompressingTree, Piped, Spooled
    from stager.rank.plan import Task
    from stager.rank.reuse import Reuse
    from stager.request.items import StageItem
    from stager.source.access import TreeReader
    from stager.store.record import Record
    from stager.wire.layout import Layout
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


class Folder:
    """What is sent of a folder, whose files are numbered by the rows of its ``listing``.

    That is the source's, and equal on all ranks; or the part of it that this rank gets, with the
    files ``made`` here, by row, which are not at the source.
    """

    #: The files that are sent, and their digests, after `choose`.
    stream: Stream
    digests: StreamDigest

    def __init__(self, listing: Listing, made: dict[int, bytes] | None = None) -> None:
        self.listing = listing
        self.made = made or {}

    def choose(self, answers: Collection[bytes]) -> int:
        """Choose the files that any of the `Opened.needs` marks. Return their bytes.

        Most nodes lack the same files: each of the different ``answers`` is decompressed once.
        """
        self.stream = Stream(self.listing, needed_by_any(answers, len(self.listing)))
        self.digests = StreamDigest(self.stream)
        return self.stream.size


class TreeSender(Sender):
    """Reads the stream of a folder from the source, or from this node's copy."""

    #: The table of the copy.
    _sent: Table | None = None

    def __init__(self, task: Task, folder: Folder) -> None:
        super().__init__(task)
        self._folder = folder

    def start(self) -> None:
        """Open the folder."""
        self.reader = reader = self._open()
        self.stack.callback(reader.close)

    def _open(self) -> TreeReader:
        task, stream = self.task, self._folder.stream
        if task.plan.from_source:
            item, plan = task.item, task.plan
            return open_tree(
                item.source, task.source, stream, task.remote, item.selection,
                is_only=plan.is_sharded or len(plan.senders) == 1,
            )  # fmt: skip
        self._sent = Table.load(task.cache, task.cache.load(task.item.destination))
        # The files of a copy are sent as they were at the source, before they were relocated.
        originals = self._sent.originals if self._sent else {}
        return StreamReader(task.path, stream, originals=originals)

    def staleness(self, result: Transferred) -> Failure | None:
        """Compare what was read of a copy with its table; the reader has compared a source."""
        task = self.task
        if not task.plan.from_source:
            return task.mark_damaged() if result.error or not self._sent_as_recorded() else None
        if isinstance(result.error, IntegrityError):
            return Failure.of(result.error, task.node.name)
        return None

    def _sent_as_recorded(self) -> bool:
        table, digests = self._sent, self._folder.digests.digests
        return table is not None and all(
            digests[place(row)] == table.sent_digest(row) for row in self._folder.stream.rows
        )


class TreeSink(Sink):
    """Makes a folder of what comes. Set by `seal`: all that its record has to say."""

    _tree: PartialTree
    #: The listing that identifies the source, and the digest of each of its rows.
    _listing: Listing
    _digests: bytearray
    #: The rows of what was written here.
    _written: Iterable[int]
    #: What relocated files held before, by row; and the name of the split that this is a part of.
    _originals: dict[int, bytes]
    _split = ""
    _note = ""
    _counts: Counts
    _announced: tuple[Record, Table]

    def _begin(self, listing: Listing) -> PartialTree:
        task = self.task
        self.stack.enter_context(made_parents(task.cache, task.path))
        self._tree = PartialTree(task.cache, listing, is_read_only=is_entry(task.item.destination))
        self.stack.callback(self._tree.close)
        return self._tree

    def verify(self, _: str) -> None:
        """Compare the digest of each file that was written."""
        for row in self._written:
            if self._tree.read_back(row) != self._digests[place(row)]:
                raise self.task.readback_error(f"/{text_of(self._listing.paths[row])}")

    def announce(self, _: str) -> None:
        """Write the record and the table that count if this process dies during `publish`.

        Raise DestinationError if something of the user's own is in the way.
        """
        task, cache = self.task, self.task.cache
        there, old = own_lstat(task.path), task.standing  # another user may have staged there
        tree, source, digests = self._tree, self._listing, bytes(self._digests)
        table = Table.of(source, tree.copy, digests, dict(self._originals))
        if old is None:
            check_place(task.item, task.path, there, cache)
        else:
            self._check_obstacles(table)
        facts = TreeFacts(
            files=tree.copy.files - bool(self._split),  # the list of all parts is not at the source
            allocated=tree.allocated,
            source_digest=task.source.listing or source.digest(),
            table_digest=cache.announce_table(
                task.item.destination, table.to_bytes(), update=old is not None
            ),
            relocation=task.source.relocation,
            note=self._note,
            split=self._split,
            by=task.item.options.by,
        )
        facts_of_copy = tree.facts()
        if old is not None:
            with stage_errors(task.path):
                facts_of_copy = replace(facts_of_copy, inode=os.lstat(task.path).st_ino)
        record = task.record(facts_of_copy, xxhash.xxh3_128_hexdigest(digests), facts)
        cache.announce(record, update=old is not None)
        self._announced = record, table

    def _check_obstacles(self, new: Table, arrived: Collection[bytes] | None = None) -> None:
        """Raise DestinationError if something of the user's own is in the way of a new version.

        What is new of it lies in the partial tree, or will: then ``arrived`` has the paths.
        """
        task = self.task
        if task.standing is None or task.item.options.replace:
            return
        old, destination = task.standing.table, task.item.destination
        with updating(
            task.cache, destination, old, new, hidden=self._tree.path, force=False
        ) as update:
            obstacles = update.obstacles(arrived)
        if obstacles:
            raise in_the_way(destination, obstacles)

    def publish(self, _: str) -> Published:
        """Move the tree to its destination, or change the copy there in place.

        If this process dies meanwhile, `store.removal` finishes that. Raise DestinationError.
        """
        task, cache, destination = self.task, self.task.cache, self.task.item.destination
        record, table = self._announced
        if task.standing is None:
            self._tree.publish(task.path, lambda: cache.promote(destination))
        else:
            hidden = cache.update_path(destination)
            self._tree.hand_over(hidden)
            with updating(
                cache, destination, task.standing.table, table,
                hidden=hidden, force=task.item.options.replace,
            ) as update:  # fmt: skip
                update.apply()
            cache.finish_update(destination)
        return Published(record.digest, self._counts, self._note)


class FolderSink(TreeSink):
    """Receives the files of a ``folder`` that this node lacks; has others by ``reuse``."""

    _decompressing: DecompressingTree | None = None

    def __init__(self, task: Task, folder: Folder, reuse: Reuse, split: str = "") -> None:
        super().__init__(task)
        self._folder = folder
        self._reuse = reuse
        self._split = split
        self._listing = folder.listing
        if task.source.relocation:  # its symbolic links are as the copy must have them
            self._listing = with_moved_links(folder.listing, self._relocation)
        #: A byte for each row: 1 if this rank receives its file.
        self._lacks = bytearray(len(folder.listing))

    def need(self) -> tuple[int, int]:
        """Return the bytes of the files that this node lacks, and of all; with the table."""
        listing = self._folder.listing
        rows = (row for row in range(len(listing)) if not self._reuse.has(row))
        table = table_size(listing)
        return listing.allocated(rows) + table, listing.allocated() + table

    def open(self) -> bytes:
        """Lay out the tree. Return which files this node lacks."""
        task, reuse, rows = self.task, self._reuse, self._folder.listing.rows(Kind.FILE)
        check_inodes(task.cache, sum(not reuse.has(row) for row in range(len(self._listing))))
        tree = self._begin(self._listing)
        tree.lay_out()
        for row in rows:
            if reuse.table and reuse.has(row):
                path = os.fsencode(task.path) + b"/" + self._listing.paths[row]
                tree.keep(row, path, reuse.table, reuse.rows[row])
            else:
                self._lacks[row] = row not in self._folder.made
        self._check_before(tree)
        return zlib.compress(self._lacks, 1)

    def _check_before(self, tree: PartialTree) -> None:
        """Raise DestinationError before anything is received that would have no place."""
        listing, made = self._listing, self._folder.made
        arrived = {
            path
            for row, path in enumerate(listing.paths)
            if self._lacks[row] or row in made or listing.kinds[row] == Kind.LINK
        }
        table = Table.of(listing, tree.copy, bytes(DIGEST_SIZE * len(listing)), {})
        self._check_obstacles(table, arrived)

    @property
    def _relocation(self) -> Relocation:
        task = self.task
        return Relocation(task.item.source, task.item.destination, task.source.environments)

    def allocate(self, _: Layout) -> None:
        """Make the files without data, and the writer of the others."""
        stream = self._folder.stream
        target: PartialTree | DecompressingTree = self._tree
        if self.task.item.options.decompress:
            from stager.rank.decoder import DecompressingTree, limits_of  # not for others

            target = self._decompressing = DecompressingTree(
                self._tree, self._folder.listing, self.task.item.source, limits_of(self.task)
            )
            self.stack.callback(target.close)
        with target.writing():
            for row in stream.without_data:
                if self._lacks[row]:
                    target.create(row)
        self.writer = StreamWriter(target, stream, self._lacks)

    def seal(self) -> None:
        """Relocate environments, and complete the tree."""
        listing, stream, made = self._folder.listing, self._folder.stream, self._folder.made
        received = self._folder.digests.digests
        digests = self._decompressing.digests if self._decompressing else {}
        with self._tree.writing():
            for row, data in made.items():
                self._tree.create(row, data)
                digests[row] = digest_of_data(data)
        self._originals = {}
        if self.task.source.relocation:
            known = self._reuse.table.originals if self._reuse.table else {}
            self._originals = {
                row: known[self._reuse.rows[row]]
                for row in listing.rows(Kind.FILE)
                if not self._lacks[row] and self._reuse.rows[row] in known
            }
            changed = relocate(
                self._tree, listing, self._relocation,
                fresh=self._lacks, originals=dict(self._originals),
            )  # fmt: skip
            for row, (original, digest) in changed.items():
                self._originals[row], digests[row] = original, digest
        for row, digest in digests.items():
            received[place(row)] = digest
        self._tree.seal()
        self._digests = digests_of_all_files(listing, received, self._lacks, self._reuse)
        self._written = (row for row in stream.rows if self._lacks[row])
        size = listing.size - sum(map(len, made.values()))
        self._counts = Counts(
            listing.files - len(made), len(stream.rows), stream.size, self._reuse.deleted,
            (size,) if self.task.plan.is_sharded else (),
        )  # fmt: skip


class UnpackSink(TreeSink):
    """Unpacks an archive. Its listing and its size are not known before that.

    So it always comes from the source, as a file does, and nothing of an old copy is reused.
    """

    _target: Target
    _unpacker: Piped[None] | Spooled[None]

    def need(self) -> tuple[int, int]:
        """Estimate by the archive, or by the copy that was unpacked before if it was larger."""
        task = self.task
        record = task.cache.load(task.item.destination)
        before = record.tree.allocated if record and record.tree else 0
        copy = max(before, task.source.allocated)
        # A zip archive is on the disk beside what is unpacked from it.
        return before + task.source.allocated if is_zip(task.item.source) else copy, copy

    def open(self) -> bytes:
        """Make an empty folder, and start to unpack."""
        self._begin(Listing.of([Row(b"", Kind.FOLDER)]))
        self._unpack()
        return b""

    def _unpack(self, ranks: int = 1) -> None:
        """Unpack what comes, or what this one of several ``ranks`` makes of it."""
        from stager.archive.target import Target
        from stager.archive.unpack import unpack
        from stager.rank.decoder import Piped, Spooled, limits_of  # not needed for folders

        task, name, folder = self.task, self.task.item.source, self._tree.path
        is_spooled = is_zip(name)
        limits = limits_of(task, task.plan.size if is_spooled else 0)
        rank = task.rank if ranks > 1 else 0
        self._target = Target(os.fsencode(folder), limits, name, rank, ranks)
        take = partial(unpack, target=self._target)
        if is_spooled:
            spool = Partial(task.cache, direct=task.settings.direct)
            self._unpacker = Spooled(take, folder=folder, partial=spool)
        else:
            self._unpacker = Piped(take, name=name, folder=folder, verb="unpack")
        self.writer = self._unpacker
        self.stack.callback(self._unpacker.close)

    def seal(self) -> None:
        """Unpack the rest, relocate environments, and complete the tree."""
        task, tree, options = self.task, self._tree, self.task.item.options
        self._unpacker.finish()
        with tree.writing():
            self._target.finish()
        digests = self._target.digests
        tree.adopt()
        tree.share(options.share, task.source.group)
        self._listing = listing = replace(tree.copy, modes=tree.modes)
        if task.source.relocation == Relocate.AUTO:
            self._relocate(digests)
        tree.sync()
        self._digests = bytearray(DIGEST_SIZE * len(listing))
        self._written = list(listing.rows(Kind.FILE))
        for row in self._written:
            self._digests[place(row)] = digests[listing.paths[row]]
        self._originals = {}
        self._counts = Counts(listing.files, listing.files, task.plan.size)

    def _relocate(self, digests: dict[bytes, bytes]) -> None:
        tree, listing = self._tree, self._listing
        relocation, self._note = unpacked_relocation(tree, listing, self.task.item)
        for row, digest in relocated(tree, listing, relocation).items():
            digests[listing.paths[row]] = digest


def unpacked_relocation(
    tree: PartialTree, listing: Listing, item: StageItem
) -> tuple[Relocation, str]:
    """Return how the environments in an unpacked ``tree`` move, and what their user must know."""
    environments, note = find_environments(tree.path, listing, item.source)
    if environments and (refusal := not_plain(item.source, item.destination)):
        environments, note = (), refusal
    return Relocation(item.source, item.destination, environments), note


def relocated(tree: PartialTree, listing: Listing, relocation: Relocation) -> dict[int, bytes]:
    """Relocate all files of a new ``tree``. Return the digest of those that changed, by row."""
    rows = b"\1" * len(listing)
    changed = relocate(tree, listing, relocation, fresh=rows, originals={})
    return {row: digest for row, (_, digest) in changed.items()}
