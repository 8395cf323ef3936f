"""Make one copy that all nodes see: each rank writes a part of it, and rank 0 the rest.

Rank 0 makes the partial copy, and tells the others where it is. Each writes some of a file's
pieces, or some of a folder's files, and tells rank 0 what its record has to say of them.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from stager.base.digest import DIGEST_SIZE, PIECE, Digest
from stager.base.errors import IntegrityError, LaunchError
from stager.fs.partial_file import Joined
from stager.rank.file_transfer import FileSink, Published, Sink
from stager.rank.reuse import read_marks
from stager.rank.tree_transfer import FolderSink, UnpackSink
from stager.tree.listing import Listing, pack, text_of, unpack
from stager.tree.partial_tree import PartialTree
from stager.tree.shard import balanced
from stager.tree.stream import Stream, place

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from stager.rank.file_transfer import Opened
    from stager.wire.layout import Layout
    from stager.wire.ring import Digester


class _Pieces(Digest):
    """Digests the pieces of a file from ``begin`` to ``end``."""

    def __init__(self, begin: int, end: int) -> None:
        super().__init__(begin)
        self._end = end

    def hexdigest(self, _: int) -> str:
        """Return the digests of the pieces, in hexadecimal."""
        return self.pieces(self._end).hex()


def shares(whole: Layout, ranks: int) -> list[tuple[int, int]]:
    """Return from where to where in a file each rank reads: as much data, by whole pieces. Pure.

    A rank has nothing to read where that begins behind its end.
    """
    whole = replace(whole, chunk=min(whole.chunk, PIECE))
    chunks = (whole.count * rank // ranks for rank in range(1, ranks))
    firsts = (next(whole.pieces(index), None) for index in chunks)
    begins = [0, *(-(-first.offset // PIECE) * PIECE if first else 0 for first in firsts)]
    return [(at, min(to, whole.size)) for at, to in pairwise([*begins, whole.size])]


class _SharedFile(FileSink):
    def part(self, whole: Layout) -> tuple[Layout, Digester]:
        """Return the pieces that this rank reads and writes."""
        begin, end = shares(whole, len(self.task.plan.receivers))[self.task.rank]
        return whole.part(begin, end), _Pieces(begin, end)


class FileMakerSink(_SharedFile):
    """Makes a file of which other ranks write some pieces."""

    _is_named = True

    @property
    def place(self) -> str:
        """The name of the partial file."""
        return self._partial.name


class _PartSink(Sink):
    """Writes a part of a copy that rank 0 makes, and leaves the other steps to rank 0."""

    #: Where the partial copy is.
    _place = ""

    def need(self) -> tuple[int, int]:
        """Return nothing: rank 0 asks for all."""
        return 0, 0

    def open(self) -> bytes:
        """Do nothing before rank 0 has made the partial copy."""
        return b""

    def join(self, opened: Sequence[Opened]) -> bytes:
        """Note where it is."""
        self._place = opened[0].place
        return super().join(opened)

    def seal(self) -> None:
        """Leave that to rank 0."""

    def announce(self, _: str) -> None:
        """Leave that to rank 0."""

    def publish(self, _: str) -> Published:
        """Leave that to rank 0."""
        return Published()


class FilePartSink(_PartSink, _SharedFile):
    """Writes some pieces of a file that rank 0 makes."""

    def allocate(self, layout: Layout) -> None:
        """Open the file, and reserve the disk space of these pieces."""
        task = self.task
        self.writer = self._partial = Joined(task.cache, self._place, direct=task.settings.direct)
        self.stack.callback(self._partial.close)
        super().allocate(layout)

    def flush(self) -> bytes:
        """Sync the file."""
        self._partial.sync()
        return b""

    def verify(self, _: str) -> None:
        """Leave that to rank 0."""


class _SharedFolder(FolderSink):
    #: The rank that writes each row, and a byte for each row, 1 if any writes it.
    _owners: array[int]
    _all: bytes

    def join(self, opened: Sequence[Opened]) -> bytes:
        """Deal the files that rank 0 lacks to all ranks; return which are this one's."""
        listing, rank = self._folder.listing, self.task.rank
        self._all = read_marks(opened[0].needs, len(listing))
        rows = [row for row, lacks in enumerate(self._all) if lacks]
        self._owners = balanced(listing, [bytes(len(listing))] * len(opened), rows)
        self._lacks = bytearray(owner == rank for owner in self._owners)
        return zlib.compress(self._lacks, 1)

    def _rows_of(self, rank: int) -> list[int]:
        return [row for row, owner in enumerate(self._owners) if owner == rank]


class FolderMakerSink(_SharedFolder):
    """Makes a folder of which other ranks write some files."""

    @property
    def place(self) -> str:
        """The partial folder."""
        return self._tree.path

    def merge(self, parts: Sequence[memoryview]) -> None:
        """Enter what the others have written. Raise LaunchError if one tells what cannot be."""
        digests = self._folder.digests.digests
        for rank, part in enumerate(parts):
            if rank == self.task.rank:
                continue
            rows = self._rows_of(rank)
            try:
                digests_of_rank, *columns = unpack(part, 6)
                if len(digests_of_rank) != DIGEST_SIZE * len(rows):
                    raise ValueError("digests are missing")
                for at, row in enumerate(rows):
                    found = digests_of_rank[DIGEST_SIZE * at :][:DIGEST_SIZE]
                    digests[place(row)] = bytes(found)
                self._tree.enter(rows, columns)
            except ValueError:
                raise LaunchError(
                    "what a node tells of its part of a shared copy cannot be read; tell the "
                    "administrator to check that all nodes have the same version of slurm-stage"
                ) from None
        self._lacks = bytearray(self._all)

    def seal(self) -> None:
        """Complete the folder."""
        super().seal()
        sent = Stream(self._folder.listing, self._all)
        self._counts = replace(self._counts, moved=len(sent.rows), moved_size=sent.size, parts=())


class FolderPartSink(_PartSink, _SharedFolder):
    """Writes some files of a folder that rank 0 makes."""

    def allocate(self, layout: Layout) -> None:
        """Open the folder, and make the files without data."""
        self._tree = PartialTree(self.task.cache, self._listing, path=self._place)
        self.stack.callback(self._tree.close)
        super().allocate(layout)

    def flush(self) -> bytes:
        """Sync the files, and return their digests and stats."""
        self._tree.sync()
        digests = self._folder.digests.digests
        for row, digest in (self._decompressing.digests if self._decompressing else {}).items():
            digests[place(row)] = digest
        rows = self._rows_of(self.task.rank)
        self._digests = digests
        self._written = [row for row in self._folder.stream.rows if self._lacks[row]]
        return pack(b"".join(digests[place(row)] for row in rows), *self._tree.facts_of(rows))


class _SharedUnpack(UnpackSink):
    def _unpack(self, _: int = 1) -> None:
        super()._unpack(len(self.task.plan.receivers))

    def flush(self) -> bytes:
        """Unpack the rest of this rank's part, and sync it."""
        self._unpacker.finish()
        self._tree.sync()
        return b""


class UnpackMakerSink(_SharedUnpack):
    """Makes a folder of which other ranks unpack some files."""

    @property
    def place(self) -> str:
        """The partial folder."""
        return self._tree.path

    def seal(self) -> None:
        """Complete the folder. Raise IntegrityError if this node does not see a file there."""
        super().seal()
        if unseen := self._target.digests.keys() - set(self._listing.paths):
            raise IntegrityError(
                f"{self.task.place}/{text_of(min(unseen))}: another node has written it, but this "
                "one does not see it; tell the administrator"
            )


class UnpackPartSink(_PartSink, _SharedUnpack):
    """Unpacks some files into a folder that rank 0 makes."""

    def allocate(self, _: Layout) -> None:
        """Open the folder, and start to unpack."""
        self._tree = PartialTree(self.task.cache, Listing.of([]), path=self._place)
        self.stack.callback(self._tree.close)
        self._unpack()

    def verify(self, _: str) -> None:
        """Leave that to rank 0."""
