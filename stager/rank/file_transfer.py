"""What sends an item, and what a node makes of its bytes: the sides of a transfer on one rank.

`delivery` takes each step on all ranks together. A `Sender` and a `Sink` do the step's work on
their own node and know no MPI. Here are those of single files; `rank.tree_transfer` has folders.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from stager.base.codec import row_of
from stager.base.digest import Digest
from stager.base.errors import (
    LARGER_DISKS,
    DestinationError,
    Failure,
    IntegrityError,
    SourceError,
    SpaceError,
    StageError,
)
from stager.base.extents import Extent, rounded
from stager.base.options import Share
from stager.base.outcome import Counts  # noqa: TC001 - `row_of` reads it
from stager.fs.files import TICK, existing_folder_above, remove_tree, stage_errors
from stager.fs.partial_file import Partial, make_partial_folder
from stager.fs.reader import FileReader
from stager.rank.plan import Form
from stager.rank.report import tell
from stager.source.access import open_file
from stager.source.posix import data_size
from stager.store.parents import made_parents
from stager.store.record import is_ours
from stager.store.space import free_space
from stager.store.validity import check_contents, own_lstat
from stager.wire.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stager.rank.decoder import Piped
    from stager.rank.plan import Task
    from stager.rank.tree_transfer import Folder
    from stager.source.access import SourceReader, TreeReader
    from stager.store.record import Record
    from stager.wire.ring import Digester, Writer
    from stager.wire.transfer import Transferred

#: Bytes that an image takes while it is made into a file, for each byte of its compressed layers:
#: what is in them takes two to three times as much, and the layers or the file lie beside it.
_WHILE_MADE = 4
#: Seconds between two signs that an image is still being made into a file.
_PERIOD = 2.0


@dataclass(frozen=True, slots=True)
class Opened:
    """What a rank reports after `Transfer.open`; each field is empty where it does not apply.

    ``size`` and ``extents`` are of the first sender's file, whose data is in the extents. ``stale``
    is why a sender's copy, or the source, cannot be sent. ``needs`` has for each row of a folder's
    listing a byte, 1 if this receiver lacks the file; compressed by zlib.
    """

    size: int = 0
    extents: tuple[Extent, ...] = ()
    stale: Failure | None = None
    needs: bytes = b""
    #: Where the partial copy is, if all ranks write to it.
    place: str = ""


OPENED = row_of(Opened)


@dataclass(frozen=True, slots=True)
class Published:
    """The digest in a new copy's record; for a tree its file counts. ``note`` is for the user."""

    digest: str = ""
    tree: Counts | None = None
    note: str = ""


PUBLISHED = row_of(Published)


class _Side:
    """One side of a transfer. The ``stack`` closes what is open, and removes what is partial."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.stack = ExitStack()


class Sender(_Side):
    """Reads what is sent; this one, of a rank that sends nothing, does nothing.

    The methods are steps, in the order in which they are taken. They may raise StageError or
    OSError, which ends the stage on all ranks before anything is published.
    """

    #: Set by `open` or `start`.
    reader: TreeReader | None = None

    def open(self) -> Opened:
        """Open what is read, once there is room.

        A copy that cannot be read is reported in ``stale``, and so is another file at the source; a
        source that cannot be read raises SourceError.
        """
        return Opened()

    def start(self) -> None:
        """Open what can be opened only when it is known what is sent."""

    def staleness(self, _: Transferred) -> Failure | None:
        """Return, after the transfer, why other bytes than planned were sent.

        That is a source that changed, or a damaged copy, which is marked as such.
        """
        return None


class Sink(_Side):
    """Makes a new copy of what is received; this one, of a rank that gets none, does nothing.

    The methods are steps as those of a `Sender`.
    """

    #: Set by `open` or `allocate`.
    writer: Writer | None = None

    def need(self) -> tuple[int, int]:
        """Return the bytes to write on this node's disk, and those of the whole new copy.

        These are with the files that are reused from the old one, for the user's limit; 0 means no
        more than are written. First step, also of a dry run.
        """
        return 0, 0

    def open(self) -> bytes:
        """Make the partial copy. Return the `Opened.needs` of a folder."""
        return b""

    @property
    def place(self) -> str:
        """Where the partial copy is, if other ranks write to it, too."""
        return ""

    def join(self, opened: Sequence[Opened]) -> bytes:
        """Note what rank 0 has made, by its `Opened`. Return, of a folder, what is sent to here."""
        return opened[self.task.rank].needs

    def flush(self) -> bytes:
        """Write to the disk what this rank wrote of a shared copy. Return what is known of it."""
        return b""

    def merge(self, parts: Sequence[memoryview]) -> None:
        """Take what each rank has told by `flush`."""

    def part(self, whole: Layout) -> tuple[Layout, Digester]:
        """Return what of a single file passes this rank, and what digests that."""
        return whole, Digest()

    def allocate(self, layout: Layout) -> None:
        """Prepare for the transfer. Raise SpaceError if the disk has no room for the new copy."""

    def seal(self) -> None:
        """Complete the partial copy and sync it to the disk. Raise SpaceError, DestinationError."""

    def verify(self, digest: str) -> None:
        """Read the partial copy again, past the page cache; only with verify=readback.

        ``digest`` is that of all bytes sent. Raise IntegrityError if the disk returns others.
        """

    def announce(self, digest: str) -> None:
        """Record a tree before it is published, or check what a file is to replace.

        If this process dies in between, the tree at the destination is still known to be staged.
        """

    def publish(self, _: str) -> Published:
        """Move the partial copy to the destination and record it, once all ranks have announced."""
        return Published()


class Transfer:
    """One item on one rank. All ranks have its ``folder``, if it is one."""

    #: What passes this rank, after `lay_out`, and what digests it: each file of a folder has a
    #: digest. ``size`` are the bytes of all that is sent of a file, holes not counted.
    layout: Layout
    digester: Digester
    size: int
    #: What became of it on this rank, after the transfer.
    result: Transferred
    #: That of all that was sent, once all ranks have agreed on it.
    digest = ""

    def __init__(
        self, task: Task, sender: Sender, sink: Sink, folder: Folder | None = None
    ) -> None:
        self.task = task
        self.sender = sender
        self.sink = sink
        self.folder = folder

    def open(self) -> Opened:
        """Open both sides."""
        needs = self.sink.open()
        return replace(self.sender.open(), needs=needs, place=self.sink.place)

    def lay_out(self, opened: Sequence[Opened]) -> None:
        """Decide what is sent, by the answers of all ranks in rank order."""
        plan, chunk = self.task.plan, self.task.settings.chunk
        if self.folder:
            answers = {one.needs for one in opened if one.needs}
            if plan.is_sharded:
                answers = {self.sink.join(opened)}
            self.size = self.folder.choose(answers)
            self.layout = Layout.dense(self.size, chunk)
            self.digester = self.folder.digests
        else:
            if plan.is_shared:
                self.sink.join(opened)
            first = opened[plan.senders[0]]
            whole = Layout(first.size, chunk, first.extents)
            self.size = whole.data
            self.layout, self.digester = self.sink.part(whole)

    def start(self) -> None:
        """Prepare both sides for the transfer."""
        self.sink.allocate(self.layout)
        self.sender.start()

    @property
    def files(self) -> int:
        """The number of files of a folder that are sent."""
        return len(self.folder.stream.rows) if self.folder else 0


class FileSender(Sender):
    """Reads a single file: the source, or this node's copy."""

    _source: SourceReader | None = None

    def open(self) -> Opened:
        """Tell, as the first sender, where the file has data."""
        task, plan = self.task, self.task.plan
        try:
            reader = self._open_source() if plan.from_source else FileReader(task.path)
            self.reader = reader
            self.stack.callback(reader.close)
            if task.rank == plan.senders[0]:
                size = self._size(reader)
                # What is unpacked while it is received has to come whole.
                is_dense = task.item.options.is_unpacked
                extents = Layout.dense(size, 1).extents if is_dense else reader.extents(size)
                return Opened(size, tuple(rounded(extents, size)))
        except IntegrityError as error:
            return Opened(stale=Failure.of(error, task.node.name))
        except SourceError:
            if plan.from_source:
                raise
            return Opened(stale=task.mark_damaged())
        return Opened()

    def _size(self, _: SourceReader | FileReader) -> int:
        return self.task.plan.size

    def _open_source(self) -> SourceReader | FileReader:
        """Open the source. Raise IntegrityError if it is not the one surveyed.

        Raise SourceError if it may not become a copy for all users: the site's account reads for
        them, and may be able to read more.
        """
        item = self.task.item
        for_all = item.shared and item.options.share is Share.NONE
        self._source = open_file(item.source, self.task.source, self.task.remote, for_all=for_all)
        return self._source

    def staleness(self, result: Transferred) -> Failure | None:
        """Look at the source again; compare what was read of a copy with its record."""
        task = self.task
        if self._source:
            try:
                self._source.check()
            except IntegrityError as error:
                return Failure.of(error, task.node.name)
        if task.plan.from_source or (not result.error and result.digest == task.plan.digest):
            return None
        return task.mark_damaged()


class ImageSender(FileSender):
    """Makes a squashfs file of a container image on this node, or reads this node's copy of it.

    Its size is not known before that.
    """

    _begun = _told = 0.0

    def _size(self, reader: SourceReader | FileReader) -> int:
        assert isinstance(reader, FileReader)
        return os.fstat(reader.descriptor).st_size

    def _open_source(self) -> FileReader:
        """Return the open file, which has no name any more."""
        from stager.source.registry import import_image  # only the node that reads needs it

        task = self.task
        with stage_errors(task.cache.partial), _partial_folder(task.cache.partial) as folder:
            digest = task.source.facts.revision
            self._begun = self._told = time.monotonic()
            made = import_image(task.item.source, digest, folder, task.remote, self._go_on)
            reader = FileReader(made.path)
            reader.retries = made.retries
            return reader

    def _go_on(self) -> None:
        """Tell now and then that it goes on. Raise SpaceError if no more may be written here."""
        task, now = self.task, time.monotonic()
        if now - self._told >= _PERIOD:
            self._told = now
            destination, seconds = task.place, now - self._begun
            tell("making", destination=destination, node=task.node.name, seconds=seconds)
        if free_space(task.cache.folder, task.space).usable <= 0:
            raise SpaceError(
                f"{task.item.source}: it takes more than you may write on this disk while a file "
                f"is made of it; free space there (stagectl evict), or {LARGER_DISKS}"
            )


@contextmanager
def _partial_folder(parent: str) -> Iterator[str]:
    """Make a folder in ``parent``, and remove it after the block with all that is in it."""
    path, lock = make_partial_folder(parent)
    try:
        yield path
    finally:
        remove_tree(path)
        lock.close()


class FileSink(Sink):
    """Writes one file as it comes."""

    _partial: Partial
    #: Whether other ranks find the partial file by a name.
    _is_named = False
    #: The digest of the copy, once it is sealed, if it is not of the bytes that were sent.
    _digest = ""

    def need(self) -> tuple[int, int]:
        """Return the bytes of the file without its holes."""
        task = self.task
        if task.plan.from_source:
            return data_size(task.item.source, task.source), 0
        return task.source.allocated, 0

    def _before(self) -> Record | None:
        return self.task.cache.load(self.task.item.destination)

    def open(self) -> bytes:
        """Make the partial file."""
        task = self.task
        self.stack.enter_context(made_parents(task.cache, task.path))
        self.writer = self._partial = Partial(
            task.cache, direct=task.settings.direct, is_named=self._is_named
        )
        self.stack.callback(self._partial.close)
        return b""

    def allocate(self, layout: Layout) -> None:
        """Reserve the disk space."""
        self._partial.allocate(layout.size, layout.extents)

    def seal(self) -> None:
        """Give the file its permissions and time, and sync it."""
        self._seal(self.task.source.facts.mtime_ns)

    def _seal(self, mtime_ns: int) -> None:
        self._partial.seal(self.task.source.mode, self.task.source.group, mtime_ns)

    def verify(self, digest: str) -> None:
        """Compare the digest of the file."""
        if self._partial.read_back() != (self._digest or digest):
            raise self.task.readback_error()

    def announce(self, digest: str) -> None:
        """Check what is at the destination; `publish` announces the file."""
        task = self.task
        own_lstat(task.path)  # another user may have staged there meanwhile
        if not task.item.options.replace:
            check_contents(task.path, task.source.facts, self._before(), self._digest or digest)

    def publish(self, digest: str) -> Published:
        """Rename the file to its destination, and record it."""
        task, cache, before = self.task, self.task.cache, self._before()
        check_unwritten(task, before)
        record = task.record(self._partial.facts(), self._digest or digest)
        if not before:  # if this process dies here, nobody takes the file for the user's own
            cache.save(record.as_damaged())
        try:
            self._partial.publish(task.path)
        except StageError:
            if not before:
                cache.forget(task.item.destination)
            raise
        cache.save(record)
        return Published(record.digest)


class ImageSink(FileSink):
    """Writes the file that was made of an image.

    It has the time at which it was staged: a registry knows none.
    """

    def need(self) -> tuple[int, int]:
        """Return an estimate; on the node that makes the file, with what is there for a moment."""
        task, before = self.task, self._before()
        is_same = before and before.source == task.item.source
        copy = before.copy_facts.size if before and is_same else task.source.allocated
        if not (task.sends and task.plan.from_source):
            return copy, copy
        # What is there for a moment only shall not exceed the user's limit.
        disk = free_space(existing_folder_above(f"{task.cache.folder}/"), task.space).size
        most = task.space.limit_in(task.item.root, disk) or inf
        return int(max(copy, min(copy + _WHILE_MADE * task.source.allocated, most))), copy

    def seal(self) -> None:
        """Give the file its permissions and the time now, and sync it."""
        self._seal(time.time_ns())


class DecompressSink(FileSink):
    """Decompresses one file while it comes. Its size is not known before all of it is there.

    It always comes from the source: a copy has other bytes.
    """

    _decoder: Piped[str]

    def need(self) -> tuple[int, int]:
        """Estimate by the copy before, unless it was smaller than the source."""
        before = self._before()
        estimate = before.copy_facts.size if before and before.made else 0
        return (max(estimate, self.task.source.allocated),) * 2

    def open(self) -> bytes:
        """Make the partial file, and start to decompress."""
        from stager.archive.unpack import decompress
        from stager.rank.decoder import Piped, limits_of  # not needed for other files

        super().open()
        name, folder = self.task.item.source, self.task.cache.partial
        limits = limits_of(self.task)
        take = partial(decompress, name=name, partial=self._partial, limits=limits)
        self.writer = self._decoder = Piped(take, name=name, folder=folder, verb="decompress")
        self.stack.callback(self._decoder.close)
        return b""

    def allocate(self, _: Layout) -> None:
        """Do nothing: how much room it takes is not known. `Limits` ends it when there is none."""

    def seal(self) -> None:
        """Decompress the rest, and seal the file."""
        self._digest = self._decoder.finish()
        super().seal()


#: What sends and receives an item that is no folder.
SIDES: dict[Form, tuple[type[Sender], type[Sink]]] = {
    Form.FILE: (FileSender, FileSink),
    Form.IMAGE: (ImageSender, ImageSink),
    Form.DECOMPRESSED: (FileSender, DecompressSink),
}


def check_unwritten(task: Task, before: Record | None) -> None:
    """Raise DestinationError if the user has written to the destination since the survey.

    Not even the option ``replace`` overwrites that. ``before`` is the record of what was there.
    """
    if there := own_lstat(task.path):
        is_staged = before is not None and is_ours(there, before)
        is_late = there.st_ctime_ns >= task.since - TICK
        if is_late and not is_staged:
            remedy = "choose another destination, or add the option replace"
            if stat.S_ISDIR(there.st_mode):  # which is never replaced
                remedy = "or choose another destination"
            elif task.item.options.replace:
                remedy = "or submit again when nothing is written there"
            raise DestinationError(
                f"{task.path} was written while it was staged; it is kept: move "
                f"it, delete it, {remedy}"
            )
