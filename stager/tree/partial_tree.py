"""Build a tree of files out of sight, and publish it in one step.

`fs.partial_file` does the same for a single file. A tree under construction is a folder among the
partial files; a lock on it tells `Cache.sweep` that its writer is alive.
"""

from __future__ import annotations

import os
import stat
import threading
from array import array
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from stager.base import linux
from stager.base.telemetry import count
from stager.fs import clone
from stager.fs.clone import Way
from stager.fs.files import (
    READ_FILE,
    WRITABLE,
    CopyFacts,
    give_permissions,
    opened,
    opened_beneath,
    read_back,
    remove_tree,
    stage_errors,
    sync_folder,
    write_all,
)
from stager.fs.partial_file import make_partial_folder
from stager.tree.listing import Kind, Listing
from stager.tree.walk import walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from stager.base.options import Share
    from stager.fs.partial_file import UnnamedFile
    from stager.store.cache import Cache
    from stager.tree.table import Table

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PartialTree:
    """A tree under construction in the folder of ``cache``, with the entries of ``listing``.

    First `lay_out`, then for each file one of `keep`, `create` or `write`, then `seal`, `publish`
    or `hand_over`, and `close`. Several threads may write. `create` and `write` raise OSError, the
    other methods SpaceError or DestinationError. What ``is_read_only`` can be written by nobody
    once it is finished. One at ``path`` is another process's, which makes all but some files.
    """

    def __init__(
        self, cache: Cache, listing: Listing, *, is_read_only: bool = False, path: str = ""
    ) -> None:
        self._root = cache.root
        self._partial = cache.partial
        self._listing = listing
        self._refused = WRITABLE if is_read_only else 0
        self._lock = threading.Lock()
        #: Files that are written in parts: their descriptors, and the bytes that are still missing.
        self._open: dict[int, tuple[int, int]] = {}
        #: Where the files that are kept are, by row.
        self._kept: dict[int, bytes] = {}
        #: The listing of the tree, as `walk` would make it once the tree is sealed.
        self.copy = _without_facts(listing)
        #: The lock of a tree that is this process's own.
        self._held: UnnamedFile | None = None
        with stage_errors(self._partial):
            self.path, self._held = (path, None) if path else make_partial_folder(self._partial)
            self._descriptor = os.open(self.path, _FOLDER)
        self._base = os.fsencode(self.path) + b"/"

    def lay_out(self) -> None:
        """Make the folders and symbolic links."""
        listing = self._listing
        with stage_errors(self.path):
            for row, kind in enumerate(listing.kinds):
                path = self._base + listing.paths[row]
                if kind == Kind.FOLDER and row:
                    os.mkdir(path, 0o700)
                elif kind == Kind.LINK:
                    os.symlink(listing.targets[row], path)
                    os.utime(path, ns=(0, listing.mtimes[row]), follow_symlinks=False)
                    self._note(row, os.lstat(path))

    def keep(self, row: int, path: bytes, table: Table, before: int) -> None:
        """Leave the row's file where it is, at ``path``, as row ``before`` of a ``table`` says."""
        self._kept[row] = path
        copy = self.copy
        copy.modes[row], copy.inodes[row] = table.modes[before], table.inodes[before]
        copy.sizes[row], copy.mtimes[row] = table.sizes[before], table.mtimes[before]

    def writing(self) -> AbstractContextManager[None]:
        """Return a context for `create` and `write`, in which an OSError becomes a StageError."""
        return stage_errors(self.path)

    def write(self, row: int, data: memoryview, offset: int) -> None:
        """Write ``data`` at ``offset`` of the row's file."""
        size = self._listing.data(row)
        if len(data) == size:
            self.create(row, data, offset)
            return
        with self._lock:
            descriptor, _ = self._open.get(row) or (self._create(row), 0)
            self._open.setdefault(row, (descriptor, size))
        write_all(descriptor, data, offset)
        with self._lock:
            missing = self._open[row][1] - len(data)
            self._open[row] = descriptor, missing
            if not missing:
                del self._open[row]
        if not missing:
            self._complete(row, descriptor)

    def create(self, row: int, data: memoryview | bytes = b"", offset: int = 0) -> None:
        """Make the row's file; ``data`` at ``offset`` is all the data that it has."""
        descriptor = self._create(row)
        try:
            write_all(descriptor, data, offset)
        except OSError:
            os.close(descriptor)
            raise
        self._complete(row, descriptor)

    @contextmanager
    def filling(self, row: int) -> Iterator[int]:
        """Make the row's file for a program that fills it. Yield its descriptor."""
        descriptor = self._create(row)
        try:
            yield descriptor
        except BaseException:
            os.close(descriptor)
            raise
        self._complete(row, descriptor)

    def clone(self, row: int, path: bytes, way: Way) -> None:
        """Make the row's file of that at ``path``, which has all its data. Raise OSError."""
        name = self._base + self._listing.paths[row]
        if way is Way.HARD_LINK and clone.link(path, name):
            self._note(row, os.lstat(name))
            return
        source = os.open(path, READ_FILE)
        try:
            with self.filling(row) as target:
                clone.fill(way, source, target)
        finally:
            os.close(source)

    def _create(self, row: int) -> int:
        # Mostly with its permissions, so that it needs none later. Its top folder is the owner's.
        listing = self._listing
        mode = listing.modes[row] & ~self._refused
        return os.open(self._base + listing.paths[row], _CREATE, mode)

    def _complete(self, row: int, descriptor: int) -> None:
        """Close a file that has all its data."""
        try:
            if row in self._listing.extents:
                os.ftruncate(descriptor, self._listing.sizes[row])
            self._finish(row, descriptor)
        finally:
            os.close(descriptor)

    def _finish(self, row: int, descriptor: int) -> None:
        """Give a file or folder its group, permissions and time."""
        listing = self._listing
        mode, group = listing.modes[row] & ~self._refused, listing.groups[row]
        os.utime(descriptor, ns=(listing.mtimes[row], listing.mtimes[row]))
        facts = os.fstat(descriptor)
        if (stat.S_IMODE(facts.st_mode), facts.st_gid) != (mode, group):
            give_permissions(descriptor, mode, group, current_group=facts.st_gid)
            facts = os.fstat(descriptor)
        self._note(row, facts)

    def _note(self, row: int, facts: os.stat_result) -> None:
        """Enter the stat of a finished entry in the listing of the tree."""
        count()
        copy, kind = self.copy, self._listing.kinds[row]
        if kind != Kind.LINK:
            copy.modes[row] = stat.S_IMODE(facts.st_mode)
        copy.groups[row] = facts.st_gid
        copy.mtimes[row] = facts.st_mtime_ns  # the filesystem may round it
        if kind == Kind.FILE:
            copy.inodes[row] = facts.st_ino
            copy.sizes[row] = facts.st_size

    def facts_of(self, rows: Sequence[int]) -> list[bytes]:
        """Return what `enter` takes of the finished files of these ``rows``."""
        return [array("q", (one[row] for row in rows)).tobytes() for one in self._columns()]

    def enter(self, rows: Sequence[int], columns: Sequence[memoryview]) -> None:
        """Enter files that another process has made, by its `facts_of`. Raise ValueError."""
        for own, column in zip(self._columns(), columns, strict=True):
            for row, value in zip(rows, column.cast("q"), strict=True):
                own[row] = value

    def _columns(self) -> tuple[array[int], ...]:
        copy = self.copy
        return copy.modes, copy.groups, copy.mtimes, copy.inodes, copy.sizes

    def read(self, row: int, most: int) -> bytes:
        """Return the first ``most`` bytes of the row's file."""
        path = self._kept.get(row) or self._base + self._listing.paths[row]
        with stage_errors(self.path), open(path, "rb") as file:
            return file.read(most)

    def rewrite(self, row: int, data: bytes) -> None:
        """Replace the data of the row's file."""
        with stage_errors(self.path):
            os.unlink(self._base + self._listing.paths[row])  # it may be that of another tree, too
            descriptor = self._create(row)
            try:
                write_all(descriptor, data, 0)
                self._finish(row, descriptor)
            finally:
                os.close(descriptor)

    def read_back(self, row: int) -> bytes:
        """Return the digest of the row's file, read from the disk and not from the page cache."""
        with stage_errors(self.path):
            return bytes.fromhex(read_back(self._base + self._listing.paths[row]))

    def seal(self, *, durable: bool = True) -> None:
        """Make the hard links, give the folders their permissions and times, and sync.

        What is not ``durable`` may be lost in a power failure.
        """
        listing = self._listing
        with stage_errors(self.path):
            for row in listing.rows(Kind.HARD_LINK):
                if listing.file_of(row) not in self._kept:
                    os.link(self._base + listing.targets[row], self._base + listing.paths[row])
            # Only now: a new entry changes its folder's time, and the mode may forbid it.
            for row in reversed(list(listing.rows(Kind.FOLDER))):
                with opened(self._base + listing.paths[row], _FOLDER) as descriptor:
                    self._finish(row, descriptor)
        if durable:
            self.sync()

    def sync(self) -> None:
        """Write all data from the page cache to the disk."""
        with stage_errors(self.path):
            linux.sync_filesystem(self._descriptor)

    def adopt(self) -> None:
        """List what is in the folder instead: others have filled it, as the unpackers do."""
        self._listing = walk(self.path)
        self.copy = replace(self._listing, extents={})

    @property
    def modes(self) -> array[int]:
        """The permissions of the entries, as they are without ``is_read_only``."""
        return self._listing.modes

    @property
    def allocated(self) -> int:
        """The bytes that the sealed tree takes on a disk, without holes."""
        return replace(self.copy, extents=self._listing.extents).allocated()

    def share(self, share: Share, group: int) -> None:
        """Give the adopted files and folders the permissions and the ``group`` of copies."""
        before, self._listing = self.copy, self._listing.as_copied(share, group)
        modes = array("Q", (mode & ~self._refused for mode in self._listing.modes))
        self.copy = replace(self._listing, modes=modes, extents={})
        with stage_errors(self.path):
            for row, path in enumerate(before.paths):
                if before.groups[row] != self.copy.groups[row]:
                    os.chown(self._base + path, -1, group)
                if before.modes[row] != self.copy.modes[row]:
                    os.chmod(self._base + path, self.copy.modes[row])

    def facts(self) -> CopyFacts:
        """Return what identifies the sealed tree, before and after it is published."""
        with stage_errors(self.path):
            facts = os.fstat(self._descriptor)
        return CopyFacts(self._listing.size, facts.st_mtime_ns, facts.st_ino, facts.st_uid)

    def publish(self, path: str, note: Callable[[], object] = lambda: None) -> None:
        """Move the sealed tree to ``path`` in one step, and ``note`` that.

        An empty folder there is replaced, and what is no folder is removed before.
        """
        above, name = os.path.split(path)
        with stage_errors(path), opened_beneath(self._root, above) as folder:
            # Only a folder that its owner may write in can be moved.
            os.fchmod(self._descriptor, self.copy.modes[0] | stat.S_IRWXU)
            with suppress(FileNotFoundError):
                if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
                    os.unlink(name, dir_fd=folder)
            os.rename(self.path, name, dst_dir_fd=folder)
            note()
            os.fchmod(self._descriptor, self.copy.modes[0])
            sync_folder(folder)

    def hand_over(self, path: str) -> None:
        """Move the sealed tree to ``path``, where it stays also if this process dies."""
        with stage_errors(path):
            os.fchmod(self._descriptor, stat.S_IRWXU)
            os.rename(self.path, path)
            with opened(os.path.dirname(path), _FOLDER) as folder:
                sync_folder(folder)

    def close(self) -> None:
        """Close all files, and remove the tree unless it was published."""
        for descriptor, _ in self._open.values():
            os.close(descriptor)
        self._open.clear()
        os.close(self._descriptor)
        if self._held:
            remove_tree(self.path)
            self._held.close()


def _without_facts(listing: Listing) -> Listing:
    """Return the listing of a new tree with the entries of ``listing``, none finished yet."""

    def zeros(code: str) -> array[int]:
        return array(code, bytes(8 * len(listing)))

    uid = os.getuid()
    owners = array("Q", (0 if kind == Kind.HARD_LINK else uid for kind in listing.kinds))
    # What a file was decompressed from cannot be seen of the copy.
    targets = {row: one for row, one in listing.targets.items() if not listing.is_decompressed(row)}
    return replace(
        listing, modes=zeros("Q"), inodes=zeros("Q"), owners=owners, groups=zeros("Q"),
        mtimes=zeros("q"), sizes=zeros("Q"), targets=targets, extents={},
    )  # fmt: skip
