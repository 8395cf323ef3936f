"""A folder as a Cargo: only the files that some receiver lacks travel, as one stream."""

from __future__ import annotations

import os
import zlib
from array import array
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import xxhash

from stager.base.errors import Failure, IntegrityError, StageError, UsageError
from stager.base.options import Relocate, Validate
from stager.base.outcome import Counts
from stager.disk.cache import check_inodes
from stager.disk.files import digest_of, made_parents
from stager.disk.record import TreeFacts
from stager.rank.cargo import Cargo, Opened, Published, Task
from stager.tree.listing import Kind
from stager.tree.partial import PartialTree
from stager.tree.stream import Stream, StreamDigest, StreamReader, StreamWriter, place
from stager.tree.table import Table, as_copy
from stager.tree.venv import (
    ACTIVATE,
    CONDA,
    CONFIG,
    LARGEST,
    LARGEST_PROGRAM,
    check_place,
    homes,
    is_program,
    led,
    may_name_its_folder,
    rehomed,
    relinked,
    relocated,  # fmt: skip
)
from stager.tree.walk import walk
from stager.wire.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stager.disk.record import Record
    from stager.tree.listing import Listing
    from stager.wire.transfer import Transferred


#: Bytes of a table's row besides the path: twelve numbers and a digest.
_TABLE_ROW = 13 * 8 + 16


@dataclass(frozen=True, slots=True)
class Reuse:
    """What of a new version is on this node already: for each row of its listing the row in the
    ``table`` of the old one, or -1.

    ``deleted`` counts the files of the old version that are in the new one no more; ``part``:
    that was a part of a folder that was spread.
    """

    rows: array[int]
    table: Table | None = None
    deleted: int = 0
    part: bool = False


def look_for_kept(task: Task, listing: Listing) -> Reuse:
    """What the node's copy has of the source that is listed; this reads no file of it.

    But for ``validate=checksum``.
    """
    rows = array("q", [-1]) * len(listing)
    if not task.receives:
        return Reuse(rows)
    record = task.cache.load(task.item.destination)
    table = Table.load(task.cache, record)
    how = task.item.options.relocate, task.source.interpreter_at
    same = record and record.tree and (record.tree.relocate, record.tree.interpreter) == how
    if table is None or not same or task.item.options.validate is Validate.ALWAYS:
        return Reuse(rows)
    try:
        copy = walk(task.path, holes=False)
    except (OSError, StageError):
        return Reuse(rows)
    for row, before in table.kept(listing, copy):
        checked = task.item.options.validate is Validate.CHECKSUM
        if not checked or _is(task, listing, row, table.digest(before)):
            rows[row] = before
    assert record is not None
    assert record.tree is not None
    part = bool(record.tree.split)
    # The list of all parts was made here.
    return Reuse(rows, table, table.gone(listing) - part, part)


def _is(task: Task, listing: Listing, row: int, digest: bytes) -> bool:
    with suppress(OSError):
        return bytes.fromhex(digest_of(f"{task.path}/{os.fsdecode(listing.paths[row])}")) == digest
    return False


class TreeCargo(Cargo):
    """Brings the files of one folder, as the source's ``listing`` has them."""

    def __init__(self, task: Task, listing: Listing, kept: Reuse) -> None:
        super().__init__(task)
        self._listing = listing
        self._kept = kept
        #: A byte for each row: whether this node lacks its file.
        self._needs = bytearray(len(listing))
        self._tree: PartialTree | None = None
        self._published: Record | None = None
        self._originals: dict[int, bytes] = {}
        #: The table of the copy that this rank sends.
        self._sent: Table | None = None
        #: Of a folder that is split, which split this is a part of.
        self._split = ""
        #: What travels, and how its files are told apart; known when all have opened theirs.
        self.stream: Stream | None = None
        self._digests: StreamDigest | None = None

    def need(self) -> int:
        rows = (row for row, before in enumerate(self._kept.rows) if before < 0)
        return self._listing.allocated(rows) + self._table_size if self.task.receives else 0

    def need_in_all(self) -> int:
        return self._listing.allocated() + self._table_size

    @property
    def _table_size(self) -> int:
        """Bytes of the tree's table, roughly."""
        return sum(map(len, self._listing.paths)) + _TABLE_ROW * len(self._listing)

    def open(self) -> Opened:
        task = self.task
        if not task.receives:
            return Opened()
        names = sum(before < 0 for before in self._kept.rows)
        check_inodes(task.cache, names)
        self.stack.enter_context(made_parents(task.path))
        self._tree = PartialTree(task.cache, self._as_placed())
        self.stack.callback(self._tree.close)
        self._tree.lay_out()
        for row in self._listing.rows(Kind.FILE):
            kept = self._kept.rows[row] >= 0 and self._take_over(self._tree, row)
            self._needs[row] = not kept
        return Opened(needs=zlib.compress(self._needs, 1))

    def _as_placed(self) -> Listing:
        """The listing with the links that it has on the node."""
        item, listing = self.task.item, self._listing
        if item.options.relocate is not Relocate.VENV:
            return listing
        targets = {
            row: led(target, item.source, item.destination)
            for row, target in listing.targets.items()
        }
        if interpreter := self.task.source.interpreter:
            targets = relinked(targets, listing.paths, interpreter)
        return replace(listing, targets=targets)

    def _take_over(self, tree: PartialTree, row: int) -> bool:
        path = os.fsencode(self.task.path) + b"/" + self._listing.paths[row]
        with suppress(FileNotFoundError, PermissionError):
            return tree.take_over(row, path)
        return False

    def layout(self, opened: Sequence[Opened]) -> Layout:
        # Most nodes need the same.
        answers = {one.needs for one in opened if one.needs}
        needed = 0
        for answer in answers:
            needed |= int.from_bytes(zlib.decompress(answer), "big")
        return self._layout_of(Stream(self._listing, needed.to_bytes(len(self._listing), "big")))

    def _layout_of(self, stream: Stream) -> Layout:
        self.stream = stream
        self.digester = self._digests = StreamDigest(stream)
        return Layout.dense(stream.size, self.task.settings.chunk)

    def allocate(self, layout: Layout) -> None:
        task, stream = self.task, self.stream
        assert stream is not None
        if self._tree:
            with self._tree.writing():
                for row in stream.without_data:
                    if self._needs[row]:
                        self._tree.create(row)
            self.writer = StreamWriter(self._tree, stream, self._needs)
        if task.sends:
            from_source = task.plan.from_source
            folder = task.item.source if from_source else task.path
            if not from_source:
                self._sent = Table.load(task.cache, task.cache.load(task.item.destination))
            # What the copy held before it was changed for its place.
            originals = self._sent.originals if self._sent else {}
            self.reader = reader = StreamReader(
                folder, stream, is_source=from_source, originals=originals
            )  # fmt: skip
            self.stack.callback(reader.close)

    def staleness(self, result: Transferred) -> Failure | None:
        task = self.task
        if not self.reader:
            return None
        if task.plan.from_source:
            changed = isinstance(result.error, IntegrityError)
            return Failure.of(result.error, task.here.name) if result.error and changed else None
        return task.damaged_copy() if result.error or not self._as_recorded() else None

    def _as_recorded(self) -> bool:
        """Whether what was sent from this node's copy is what its table says."""
        assert self.stream is not None
        assert self._digests is not None
        table = self._sent
        return table is not None and all(
            self._digest(row) == table.sent_digest(row) for row in self.stream.rows
        )

    def _digest(self, row: int) -> bytes:
        assert self._digests is not None
        return bytes(self._digests.digests[place(row)])

    def seal(self) -> None:
        if self._tree:
            if self.task.item.options.relocate is Relocate.VENV:
                self._relocate(self._tree)
            self._tree.seal()

    def _relocate(self, tree: PartialTree) -> None:
        assert self._digests is not None
        kept = self._kept.table.originals if self._kept.table else {}
        before = {
            row: kept[self._kept.rows[row]]
            for row in self._listing.rows(Kind.FILE)
            if not self._needs[row] and self._kept.rows[row] in kept
        }
        changed = relocate(self.task, tree, self._listing, self._needs, before)
        self._originals = before | {row: original for row, (original, _) in changed.items()}
        for row, (_, digest) in changed.items():
            self._digests.digests[place(row)] = digest

    def verify(self, digest: str) -> None:
        if self._tree and self.stream:
            fresh = (row for row in self.stream.rows if self._needs[row])
            expected = ((row, self._digest(row)) for row in fresh)
            read_back(self.task, self._tree, self._listing, expected)

    def announce(self) -> None:
        if self._tree:
            self._published = announce_tree(
                self.task, self._tree, self._listing, bytes(self._all_digests()),
                self._originals, self._split,
            )  # fmt: skip

    def publish(self, digest: str) -> Published:
        if not self._tree or not self.stream or not self._published:
            return Published()
        return publish_tree(self.task, self._tree, self._published, self._counts())

    def _counts(self) -> Counts:
        assert self.stream is not None
        moved = len(self.stream.rows), self.stream.size
        return Counts(self._listing.files, *moved, self._kept.deleted)

    def _all_digests(self) -> bytearray:
        assert self._digests is not None
        digests = bytearray(self._digests.digests)
        if self._kept.table:
            for row in self._listing.rows(Kind.FILE):
                before = self._kept.rows[row]
                if before >= 0 and not self._needs[row]:
                    digests[place(row)] = self._kept.table.digest(before)
        return digests


def read_back(
    task: Task, tree: PartialTree, listing: Listing, expected: Iterable[tuple[int, bytes]]
) -> None:
    """Compare files on the disk with the digests that are ``expected``, by their rows.

    Raises IntegrityError.
    """
    for row, digest in expected:
        if tree.read_back(row) != digest:
            raise task.unlike(f"/{os.fsdecode(listing.paths[row])}")


def relocate(
    task: Task,
    tree: PartialTree,
    listing: Listing,
    fresh: bytes | bytearray,
    kept: Mapping[int, bytes],
) -> dict[int, tuple[bytes, bytes]]:
    """Have the ``fresh`` files of an environment name the place where it will be.

    Returns of each that is another now what it held, and the xxh3-128 of what it holds. The files
    that were ``kept`` are changed already; what they held comes with them.
    """
    check_place(task.item.destination)
    rows = _rows_to_relocate(listing)
    if CONFIG not in rows:
        source, destination = task.item.source, task.item.destination
        if CONDA in listing.paths:
            raise UsageError(
                f"{source} is a conda environment, whose own tool has to make it for its place: "
                f"conda-pack -p {source} --dest-prefix {destination} -o FILE.tar.gz; stage FILE by "
                "extract, without relocate"
            )
        what = "has no pyvenv.cfg at its top, and is no virtual environment to be relocated"
        raise UsageError(f"{source} {what}")
    activate = rows.get(ACTIVATE)
    script = b""
    if activate is not None:
        script = kept.get(activate) or tree.read(activate, LARGEST)
    before = homes(task.item.source, script)
    changed: dict[int, tuple[bytes, bytes]] = {}
    for row in dict.fromkeys(rows.values()):
        if fresh[row] and (original := _relocatable(tree, row, listing.sizes[row])):
            data = relocated(original, before, os.fsencode(task.item.destination))
            if row == rows[CONFIG] and task.source.interpreter_at:
                data = rehomed(data, task.source.interpreter_at)
            if data != original:
                tree.rewrite(row, data)
                changed[row] = original, xxhash.xxh3_128_digest(data)
    return changed


def _rows_to_relocate(listing: Listing) -> dict[bytes, int]:
    """The files that may name their folder, by the paths that say so; a path may be one of many."""
    named = {path: row for row, path in enumerate(listing.paths) if may_name_its_folder(path)}
    twins = {
        row: listing.targets[row] for row in named.values() if listing.kinds[row] == Kind.HARD_LINK
    }
    first = set(twins.values())
    rows = {path: row for row, path in enumerate(listing.paths) if path in first}
    found = {path: rows[twins[row]] if row in twins else row for path, row in named.items()}
    return {path: row for path, row in found.items() if listing.kinds[row] == Kind.FILE}


def _relocatable(tree: PartialTree, row: int, size: int) -> bytes:
    """What a file holds that may have to change, or nothing."""
    if size > LARGEST and not (size <= LARGEST_PROGRAM and is_program(tree.read(row, 2))):
        return b""
    return tree.read(row, size)


def announce_tree(
    task: Task,
    tree: PartialTree,
    source: Listing,
    digests: bytes,
    originals: dict[int, bytes],
    split: str = "",
) -> Record:
    """Record a sealed tree before it is published, with what it will take the place of.

    ``split`` is that of which the tree is a part.

    Whatever ends this process between the one and the other, the tree at the destination is known
    for one that was staged.
    """
    copy = tree.copy
    table = Table.of(source, copy, digests, originals).to_bytes()
    there = _lstat(task.path)
    facts = TreeFacts(
        files=copy.files - bool(split),  # the list of all parts is none of the source's
        allocated=copy.allocated(),
        source_digest=task.source.listing or source.digest(),
        copy_digest=as_copy(copy).digest(),
        table_digest=task.cache.save_table(task.item.destination, table),
        before=there.st_ino if there else 0,
        relocate=task.item.options.relocate,
        interpreter=task.source.interpreter_at,
        split=split,
        files_in_all=task.source.files if split else 0,
        by=task.item.options.by,
    )
    record = task.record(tree.facts(), xxhash.xxh3_128_hexdigest(digests), facts)
    task.cache.save(record)
    return record


def _lstat(path: str) -> os.stat_result | None:
    with suppress(FileNotFoundError):
        return os.lstat(path)
    return None


def publish_tree(task: Task, tree: PartialTree, record: Record, counts: Counts) -> Published:
    """Publish a tree that was announced."""
    assert record.tree is not None
    tree.publish(task.path)
    task.cache.save(replace(record, tree=replace(record.tree, before=0)))
    return Published(record.digest, counts)
