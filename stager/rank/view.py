"""Make what a job sees at its own destination of an entry in the node's store.

Each file shares the blocks of the entry's file, or is another name of it, or is a copy. What is
made is recorded, protected and brought to a new version as any copy. It needs no other node.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from stager.base.errors import DestinationError, SpaceError
from stager.base.options import Relocate, Share, Verify, Via
from stager.base.outcome import Counts
from stager.base.telemetry import about
from stager.fs import clone
from stager.fs.clone import Way
from stager.fs.files import (
    READ_FILE,
    existing_folder_above,
    kind_of,
    opened,
    opened_beneath,
    stage_errors,
)
from stager.fs.partial_file import Named, Partial, fresh_name
from stager.rank.agree import together
from stager.rank.file_transfer import FileSink, Published, Sink
from stager.rank.plan import Form
from stager.rank.tree_transfer import TreeSink, relocated, unpacked_relocation
from stager.store.cache import check_inodes
from stager.store.parents import made_parents
from stager.store.validity import Reason, Survey, own_lstat
from stager.tree.environments import Relocation, with_moved_links
from stager.tree.listing import Kind
from stager.tree.stream import place
from stager.tree.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stager.rank.agree import Context
    from stager.rank.plan import Task
    from stager.request.items import StageItem
    from stager.source.description import Source
    from stager.store.cache import Cache
    from stager.store.record import Record

#: Names of an entry, after which its views are copies: ext4 has 65,000, and some leave late.
_MOST_NAMES = 60_000
#: Threads that make files, and the files that one makes in turn: neighbours are mostly in one
#: folder, which has one lock.
_THREADS, _AT_ONCE = 4, 64


def way_of(item: StageItem, store: Cache, cache: Cache) -> tuple[Way, str]:
    """Return how a file of the ``store`` becomes one of ``item``, in its ``cache``, and why so.

    That is empty for a reflink, and where the item's options say it. Raise DestinationError or
    SpaceError.
    """
    if item.options.via is Via.LINK and takes_link(cache.path_of(item.destination)):
        return Way.LINK, ""
    if item.options.via is Via.COPY:
        return Way.COPY, ""
    folders = [existing_folder_above(f"{one.partial}/") for one in (store, cache)]
    try:
        with stage_errors(folders[1]):
            way, why = clone.way_between(*folders)
    except SpaceError:  # room is made later
        return Way.COPY, "the disk is full"
    if way is Way.HARD_LINK and item.options.share is not Share.NONE:
        return Way.COPY, "another name has the same permissions"
    return way, why


def takes_link(path: str) -> bool:
    """Return whether a link may be put at ``path``: not where a copy is.

    That was made when the store had no room for an entry.
    """
    return os.path.islink(path) or not os.path.lexists(path)


def survey_link(
    item: StageItem, path: str, _source: Source, _cache: Cache, node: str, *, entry: str
) -> Survey:
    """Return whether the link to the ``entry`` is at ``path``.

    Raise DestinationError if something else is there that is no link into a store.
    """
    if (there := own_lstat(path)) is not None:
        raise DestinationError(
            f"{path} is {kind_of(there.st_mode)}; it is kept: move it, delete it, or choose "
            "another destination"
        )
    if not os.path.lexists(path):
        return Survey(node, Reason.ABSENT, "")
    return Survey(node, None if os.readlink(path) == entry else Reason.OTHER_SOURCE, "")


def make_views(context: Context, views: Sequence[tuple[Task, Task]]) -> None:
    """Make each view whose task this rank receives; its entry's task comes with it. Collective.

    Nothing is published before all nodes have made theirs. Raise RefusedError if one fails.
    """
    made = [_view_of(view, entry) for view, entry in views if view.receives]

    def make() -> None:
        for one in made:
            about(one.task.place)
            one.open()
            one.seal()
            if one.task.item.options.verify is Verify.READBACK and one.task.way == Way.COPY:
                one.verify("")
            one.announce("")

    def publish() -> None:
        for one in made:
            one.publish("")

    with ExitStack() as stack:
        for one in made:
            stack.push(one.stack)
        together(context, make)
        together(context, publish)


def _view_of(view: Task, entry: Task) -> Sink:
    if view.way == Way.LINK:
        return LinkView(view, entry)
    is_folder = entry.form in (Form.FOLDER, Form.UNPACKED)
    return (TreeView if is_folder else FileView)(view, entry)


class LinkView(Sink):
    """A symbolic link to the entry. It has no record: what it leads to says that it was staged."""

    def __init__(self, task: Task, entry: Task) -> None:
        super().__init__(task)
        self._entry = entry

    def open(self) -> bytes:
        """Make the folders above."""
        self.stack.enter_context(made_parents(self.task.cache, self.task.path))
        return b""

    def publish(self, _: str) -> Published:
        """Make the link, in place of another one."""
        cache, path = self.task.cache, self.task.path
        above, name = os.path.split(path)
        with (
            stage_errors(path),
            fresh_name(cache.partial) as fresh,
            opened_beneath(cache.root, above) as folder,
        ):
            os.symlink(self._entry.path, fresh)
            os.rename(fresh, name, dst_dir_fd=folder)
        return Published()


class FileView(FileSink):
    """A single file."""

    _mtime = 0

    def __init__(self, task: Task, entry: Task) -> None:
        super().__init__(task)
        self._entry = entry

    def open(self) -> bytes:
        """Make the file, out of sight."""
        task, entry = self.task, self._entry
        self._digest = _record_of(entry).digest
        self.stack.enter_context(made_parents(task.cache, task.path))
        with stage_errors(task.path), opened(entry.path, READ_FILE) as source:
            facts = os.fstat(source)
            self._mtime = facts.st_mtime_ns
            if task.way == Way.HARD_LINK and facts.st_nlink < _MOST_NAMES:
                self._partial = Named(task.cache, entry.path)
            else:
                self._partial = Partial(task.cache, direct=False)
                clone.fill(Way(task.way), source, self._partial.descriptor)
        self.stack.callback(self._partial.close)
        return b""

    def seal(self) -> None:
        """Give the file its permissions and the entry's time. The job would not outlive a crash."""
        source = self.task.source
        self._partial.seal(source.mode, source.group, self._mtime, durable=False)


class TreeView(TreeSink):
    """A folder, with environments that work where it is."""

    def __init__(self, task: Task, entry: Task) -> None:
        super().__init__(task)
        self._entry = entry
        self._originals = {}

    def open(self) -> bytes:
        """Make the folder, out of sight."""
        task, record = self.task, _record_of(self._entry)
        table = Table.load(self._entry.cache, record)
        if table is None or record.tree is None:
            raise _gone(self._entry)
        listing = table.source.as_copied(task.item.options.share, task.source.group)
        relocation = Relocation(task.item.source, task.item.destination, task.source.environments)
        if task.source.environments:
            listing = with_moved_links(listing, relocation)
        check_inodes(task.cache, len(listing))
        self._listing, self._digests = listing, bytearray(table.digests)
        self._written = listing.rows(Kind.FILE)
        self._split, self._note = record.tree.split, record.tree.note
        self._counts = Counts(listing.files)
        self._begin(listing).lay_out()
        self._fill()
        if task.source.relocation == Relocate.AUTO:  # of an archive
            relocation, self._note = unpacked_relocation(self._tree, self._listing, task.item)
        if relocation.environments:
            self._relocate(relocation)
        return b""

    def _fill(self) -> None:
        """Make the files, by several threads: each waits for the kernel."""
        from concurrent.futures import ThreadPoolExecutor  # slow to import

        way, tree, rows = Way(self.task.way), self._tree, list(self._listing.rows(Kind.FILE))
        paths, above = self._listing.paths, os.fsencode(self._entry.path) + b"/"

        def fill(begin: int) -> None:
            for row in rows[begin : begin + _AT_ONCE]:
                tree.clone(row, above + paths[row], way)

        with tree.writing(), ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(fill, range(0, len(rows), _AT_ONCE)):
                pass

    def _relocate(self, relocation: Relocation) -> None:
        for row, digest in relocated(self._tree, self._listing, relocation).items():
            self._digests[place(row)] = digest

    def seal(self) -> None:
        """Complete the folder."""
        self._tree.seal(durable=False)


def _record_of(entry: Task) -> Record:
    """Return the record of an entry that is there. Raise DestinationError if it is not."""
    record = entry.cache.load(entry.item.destination)
    if record is None:
        raise _gone(entry)
    return record


def _gone(entry: Task) -> DestinationError:
    return DestinationError(
        f"{entry.path}, of which {entry.place} was to be made, was removed meanwhile; submit again"
    )
