"""Send an archive, or receive and unpack it: it is sent like a file and unpacked on every node."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stager.base.errors import Failure, IntegrityError
from stager.base.formats import is_zip
from stager.base.options import Relocate
from stager.base.outcome import Counts
from stager.fs.files import stage_errors
from stager.fs.partial_file import Partial
from stager.rank.cargo import Cargo, Opened, Published
from stager.rank.file_cargo import open_source, staleness_of
from stager.rank.publication import announce_tree, publish_tree, verify_tree
from stager.rank.unpacker import SpoolUnpacker, StreamUnpacker, Unpacking, limits_of
from stager.store.parents import made_parents
from stager.tree.environments import Relocation, find_environments, not_plain, relocate
from stager.tree.listing import Kind, Listing, Row
from stager.tree.partial_tree import PartialTree
from stager.tree.stream import DIGEST_SIZE, place
from stager.wire.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stager.rank.publication import Announced
    from stager.rank.unpacker import Unpacker
    from stager.source.access import SourceReader
    from stager.wire.transfer import Transferred


class ArchiveCargo(Cargo):
    """One archive. Its listing and its size are not known before it is unpacked.

    So a receiver always reads the source, and reuses nothing of an old copy.
    """

    _source: SourceReader | None = None
    _tree: PartialTree | None = None
    _announced: Announced | None = None
    _unpacker: Unpacker | None = None
    _note = ""

    def need(self) -> int:
        if not self.task.receives:
            return 0
        if is_zip(self.task.item.source):  # on the disk beside what is unpacked from it
            return self._size_before + self.task.source.allocated
        return self.need_in_all()

    def need_in_all(self) -> int:
        if not self.task.receives:
            return 0
        return max(self._size_before, self.task.source.allocated)

    @property
    def _size_before(self) -> int:
        """Bytes of the copy that was unpacked before, as an estimate; 0 if there is none."""
        before = self.task.cache.load(self.task.item.destination)
        return before.tree.allocated if before and before.tree else 0

    def open(self) -> Opened:
        task = self.task
        if task.receives:
            self.stack.enter_context(made_parents(task.cache, task.path))
            self._tree = PartialTree(task.cache, Listing.of([Row(b"", Kind.FOLDER)]))
            self.stack.callback(self._tree.close)
            self.writer = self._unpacker = self._make_unpacker(self._tree.path)
            self.stack.callback(self._unpacker.close)
        if task.sends:
            try:
                self.reader = self._source = open_source(task)
            except IntegrityError as error:
                return Opened(stale=Failure.of(error, task.node.name))
            self.stack.callback(self._source.close)
        return Opened()

    def _make_unpacker(self, folder: str) -> Unpacker:
        task = self.task
        is_spooled = is_zip(task.item.source)
        with stage_errors(folder):
            limits = limits_of(task, task.plan.size if is_spooled else 0)
        unpacking = Unpacking(task.item.source, folder, limits)
        if is_spooled:
            return SpoolUnpacker(unpacking, Partial(task.cache, direct=task.settings.direct))
        return StreamUnpacker(unpacking)

    def layout(self, opened: Sequence[Opened]) -> Layout:
        return Layout.dense(self.task.plan.size, self.task.settings.chunk)

    def allocate(self, layout: Layout) -> None:
        """Do nothing: how much room it takes is not known. `Limits` ends it when there is none."""

    def staleness(self, result: Transferred) -> Failure | None:
        return staleness_of(self._source, self.task.node.name) if self._source else None

    def seal(self) -> None:
        if self._tree and self._unpacker:
            self._unpacker.finish()
            self._tree.adopt()
            self._tree.share(self.task.item.options.share, self.task.source.group)
            if self.task.item.options.relocate is Relocate.AUTO:
                self._relocate(self._tree, self._unpacker.digests)
            self._tree.sync()

    def _relocate(self, tree: PartialTree, digests: dict[bytes, bytes]) -> None:
        item, listing = self.task.item, tree.copy
        environments, self._note = find_environments(tree.path, listing, item.source)
        if environments and (note := not_plain(item.source, item.destination)):
            environments, self._note = (), note
        relocation = Relocation(item.source, item.destination, environments)
        all_rows = b"\1" * len(listing)
        changed = relocate(tree, listing, relocation, fresh=all_rows, originals={})
        for row, (_, digest) in changed.items():
            digests[listing.paths[row]] = digest

    def verify(self, digest: str) -> None:
        if self._tree:
            listing = self._tree.copy
            verify_tree(self.task, self._tree, listing, self._file_digests(listing))

    def _file_digests(self, listing: Listing) -> Iterator[tuple[int, bytes]]:
        """Yield the row and digest of each unpacked file."""
        assert self._unpacker is not None
        for row in listing.rows(Kind.FILE):
            yield row, self._unpacker.digests[listing.paths[row]]

    def announce(self, digest: str) -> None:
        if self._tree:
            listing = self._tree.copy
            digests = bytearray(DIGEST_SIZE * len(listing))
            for row, found in self._file_digests(listing):
                digests[place(row)] = found
            self._announced = announce_tree(
                self.task, self._tree, listing, bytes(digests), originals={}, note=self._note
            )

    def publish(self, digest: str) -> Published:
        if not self._tree or not self._announced:
            return Published()
        files = self._tree.copy.files
        counts = Counts(files, files, self.task.plan.size)
        published = publish_tree(self.task, self._tree, self._announced, counts)
        return replace(published, note=self._note)
