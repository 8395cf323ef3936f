"""Define the steps by which one rank sends or receives one item: a file, a tree, an archive.

`delivery` takes each step on all ranks together. A Cargo does the step's work on its own node and
knows no MPI.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from stager.base.codec import BYTES, NUMBER, TEXT, optional, record_of, tuple_of
from stager.base.extents import Extent
from stager.base.outcome import Counts
from stager.rank.agree import FAILURE
from stager.wire.ring import Reader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stager.base.errors import Failure
    from stager.rank.task import Task
    from stager.wire.layout import Layout
    from stager.wire.ring import Digester, Writer
    from stager.wire.transfer import Transferred


class CountingReader(Reader, Protocol):
    """A Reader that counts the bytes that it has read, and the requests that it has repeated."""

    bytes_read: int
    retries: int


@dataclass(frozen=True, slots=True)
class Opened:
    """What a rank reports after `Cargo.open`; each field is empty where it does not apply.

    ``extents``: where the first sender's file has data. ``stale``: why a sender's copy, or the
    source, cannot be sent. ``needs``: for each row of a tree's listing a byte, 1 if this receiver
    lacks the file; compressed by zlib.
    """

    extents: tuple[Extent, ...] = ()
    stale: Failure | None = None
    needs: bytes = b""


OPENED = record_of(
    Opened,
    extents=tuple_of(record_of(Extent, offset=NUMBER, length=NUMBER)),
    stale=optional(FAILURE),
    needs=BYTES,
)


@dataclass(frozen=True, slots=True)
class Published:
    """The digest in a new copy's record; for a tree its file counts. ``note`` is for the user."""

    digest: str = ""
    tree: Counts | None = None
    note: str = ""


PUBLISHED = record_of(
    Published,
    digest=TEXT,
    tree=optional(
        record_of(
            Counts,
            files=NUMBER,
            moved=NUMBER,
            moved_size=NUMBER,
            deleted=NUMBER,
            parts=tuple_of(NUMBER),
        )
    ),
    note=TEXT,
)


class Cargo(ABC):
    """One item on one rank. The methods are the steps, in the order in which they are taken.

    Each step is taken on all ranks, also on those that neither send nor receive: there it does
    nothing. All but `layout` and `close` may raise StageError or OSError, which ends the stage on
    all ranks before anything is published.
    """

    #: Set by `open` or `allocate` on a sender, and on a receiver.
    reader: CountingReader | None = None
    writer: Writer | None = None
    #: Set by `layout` for a tree, whose files have a digest each.
    digester: Digester | None = None
    #: These digests, one after the other, which the receivers take from the first sender.
    file_digests: bytearray | None = None

    def __init__(self, task: Task) -> None:
        self.task = task
        #: What `close` closes.
        self.stack = ExitStack()

    @property
    def files(self) -> int:
        """The number of files of a folder that are sent, known after `layout`."""
        return 0

    @abstractmethod
    def need(self) -> int:
        """Return the bytes to write on this node's disk.

        First step, also of a dry run: `room` evicts copies if the disk has less room. For a file
        only rank 0 is asked: the answer is the same everywhere, and may need a look at the source.
        """

    @abstractmethod
    def need_in_all(self) -> int:
        """Return the bytes of the whole new copy, with the files that are reused from the old one.

        Taken with `need`, for the user's limit. 0 means: no more than `need`.
        """

    @abstractmethod
    def open(self) -> Opened:
        """Open what this rank reads and writes, once there is room.

        A sender whose own copy cannot be read reports that in ``stale``, and so does one that finds
        another file at the source; a source that cannot be read raises SourceError. A receiver
        makes the partial copy that `close` removes.
        """

    @abstractmethod
    def layout(self, opened: Sequence[Opened]) -> Layout:
        """Return what is sent, computed from the answers of all ranks in rank order."""

    @abstractmethod
    def allocate(self, layout: Layout) -> None:
        """Prepare for the transfer. Raise SpaceError if the disk has no room for the new copy."""

    @abstractmethod
    def staleness(self, result: Transferred) -> Failure | None:
        """Return, after the transfer, why a sender sent other bytes than planned.

        That is a source that changed, or a damaged copy, which is marked as such.
        """

    @abstractmethod
    def seal(self) -> None:
        """Complete the partial copy and sync it to the disk. Raise SpaceError, DestinationError."""

    @abstractmethod
    def verify(self, digest: str) -> None:
        """Read the partial copy again, past the page cache; only with verify=readback.

        ``digest`` is that of all bytes sent. Raise IntegrityError if the disk returns others.
        """

    @abstractmethod
    def announce(self, digest: str) -> None:
        """Record a tree before it is published, or check what a file is to replace.

        If this process dies in between, the tree at the destination is still known to be staged.
        """

    @abstractmethod
    def publish(self, digest: str) -> Published:
        """Move the partial copy to the destination and record it, once all ranks have announced."""

    def close(self) -> None:
        """Close all files and remove what was not published. Last step, also after an error."""
        self.stack.close()
