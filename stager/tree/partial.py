"""Build a tree of files out of sight, and publish it in one step.

`disk.partial` does the same for a single file. A tree under construction is a folder among the
partial files; a lock on it tells `Cache.sweep` that its writer is alive.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from array import array
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from stager.base import linux
from stager.base.errors import DestinationError
from stager.base.progress import count
from stager.disk.files import (
    READ_FILE,
    make_movable,
    opened,
    opened_beneath,
    read_back,
    remove_tree,
    stage_errors,
    sync_folder,
    write_all,
)
from stager.disk.permissions import file_mode, folder_mode, give_permissions, shared_mode
from stager.disk.record import CopyFacts
from stager.disk.replaced import replacing
from stager.disk.unnamed import make_partial_folder
from stager.tree.late import Before, is_late, remove_old
from stager.tree.listing import Kind, Listing
from stager.tree.walk import walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from typing import TypeGuard

    from stager.base.options import Share
    from stager.disk.cache import Cache
    from stager.disk.replaced import Replaced

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_REPLACE = os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Request of ioctl(2) that makes a file share the blocks of another.
_FICLONE = 0x40049409
#: Errors of a filesystem that cannot clone, link, or rename as asked.
_CANNOT = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EXDEV, errno.EMLINK)
#: Errors of a path at which its user has put something else, or that its user may not read.
_MOVED = (
    errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO,
)  # fmt: skip


class PartialTree:
    """A tree under construction in the folder of ``cache``, with the entries of ``listing``.

    First `lay_out`, then for each file one of `take_over`, `create` or `write`, then `seal`,
    `publish` and `close`. Several threads may write. `take_over`, `create` and `write` raise
    OSError, the other methods SpaceError or DestinationError.
    """

    def __init__(self, cache: Cache, listing: Listing) -> None:
        self._root = cache.root
        self._partial = cache.partial
        self._listing = listing
        self._lock = threading.Lock()
        #: Files that are written in parts: their descriptors, and the bytes that are still missing.
        self._open: dict[int, tuple[int, int]] = {}
        #: Files that are hard links to those of the old copy.
        self._linked: list[int] = []
        #: Whether the filesystem can clone, as far as is known.
        self._clones = True
        #: The listing of the tree, as `walk` would make it once the tree is sealed.
        self.copy = _without_facts(listing)
        with stage_errors(self._partial):
            self.path, self._descriptor = make_partial_folder(self._partial)
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

    def take_over(self, row: int, path: bytes, is_staged: Callable[[os.stat_result], bool]) -> bool:
        """Make the row's file from the one at ``path`` without writing. Return whether it worked.

        The file shares the other's blocks or, if the filesystem cannot clone, is a hard link to it.
        It is not taken unless it ``is_staged``: its user may have moved or changed it meanwhile.
        """
        here = self._base + self._listing.paths[row]
        try:
            return self._clone(row, path, here, is_staged) or self._link(row, path, here, is_staged)
        except OSError as error:
            if error.errno not in _MOVED:
                raise
            return False

    def _clone(
        self, row: int, path: bytes, here: bytes, is_staged: Callable[[os.stat_result], bool]
    ) -> bool:
        if not self._clones:
            return False
        with opened(path, READ_FILE) as source:
            if not is_staged(os.fstat(source)):
                return False
            with opened(here, _CREATE) as descriptor:
                try:
                    fcntl.ioctl(descriptor, _FICLONE, source)
                    self._finish(row, descriptor)
                except OSError as error:
                    os.unlink(here)
                    if error.errno not in _CANNOT:
                        raise
                    self._clones = False
                    return False
            if is_staged(os.fstat(source)):
                return True
        os.unlink(here)  # its user wrote to it just before it was cloned
        return False

    def _link(
        self, row: int, path: bytes, here: bytes, is_staged: Callable[[os.stat_result], bool]
    ) -> bool:
        try:
            os.link(path, here, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            return False
        facts = os.lstat(here)
        if not is_staged(facts):
            os.unlink(here)
            return False
        self._linked.append(row)
        self._note(row, facts)
        return True

    def drop_changed(self) -> list[int]:
        """Remove hard links to files that their user has written to since. Return their rows.

        Each of them has to be written anew.
        """
        changed: list[int] = []
        with stage_errors(self.path):
            for row in self._linked:
                path = self._base + self._listing.paths[row]
                there, then = os.lstat(path), (self.copy.sizes[row], self.copy.mtimes[row])
                if (there.st_size, there.st_mtime_ns) != then:
                    os.unlink(path)
                    changed.append(row)
        return changed

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

    def _create(self, row: int) -> int:
        # Mostly with its permissions, so that it needs none later. Its top folder is the owner's.
        listing = self._listing
        return os.open(self._base + listing.paths[row], _CREATE, file_mode(listing.modes[row]))

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
        rule = file_mode if listing.kinds[row] == Kind.FILE else folder_mode
        mode, group = rule(listing.modes[row]), listing.groups[row]
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

    def read(self, row: int, most: int) -> bytes:
        """Return the first ``most`` bytes of the row's file."""
        with stage_errors(self.path), open(self._base + self._listing.paths[row], "rb") as file:
            return file.read(most)

    def rewrite(self, row: int, data: bytes) -> None:
        """Replace the data of the row's file."""
        path = self._base + self._listing.paths[row]
        with stage_errors(self.path):
            os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
            with opened(path, _REPLACE) as descriptor:
                write_all(descriptor, data, 0)
                self._finish(row, descriptor)

    def read_back(self, row: int) -> bytes:
        """Return the xxh3-128 of the row's file, read from the disk and not from the page cache."""
        with stage_errors(self.path):
            return bytes.fromhex(read_back(self._base + self._listing.paths[row]))

    def seal(self) -> None:
        """Make the hard links, give the folders their permissions and times, and sync."""
        listing = self._listing
        with stage_errors(self.path):
            for row in listing.rows(Kind.HARD_LINK):
                os.link(self._base + listing.targets[row], self._base + listing.paths[row])
            # Only now: a new entry changes its folder's time, and the mode may forbid it.
            for row in reversed(list(listing.rows(Kind.FOLDER))):
                with opened(self._base + listing.paths[row], _FOLDER) as descriptor:
                    self._finish(row, descriptor)
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
    def allocated(self) -> int:
        """The bytes that the sealed tree takes on a disk, without holes."""
        return replace(self.copy, extents=self._listing.extents).allocated()

    def share(self, share: Share) -> None:
        """Open the adopted files and folders to others, as far as they may enter the top folder."""
        copy = self.copy
        with stage_errors(self.path):
            for row, kind in enumerate(copy.kinds):
                mode = shared_mode(copy.modes[row], share)
                if row and kind in (Kind.FILE, Kind.FOLDER) and mode != copy.modes[row]:
                    os.chmod(self._base + copy.paths[row], mode)
                    copy.modes[row] = mode

    def facts(self) -> CopyFacts:
        """Return what identifies the sealed tree, before and after it is published."""
        with stage_errors(self.path):
            facts = os.fstat(self._descriptor)
        return CopyFacts(self._listing.size, facts.st_mtime_ns, facts.st_ino, facts.st_uid)

    def publish(
        self, path: str, before: Before | None = None, note: Callable[[], object] = lambda: None
    ) -> list[str]:
        """Move the sealed tree to ``path`` in one step, ``note`` that, and remove what was there.

        What was not there ``before`` is kept: see `tree.late`. Files of this tree are ``shared``.
        Return the paths in the tree to which it was moved, and the path beside the tree of what is
        still left of what was there.
        """
        above, name = os.path.split(path)
        with stage_errors(path), opened_beneath(self._root, above) as folder:
            # Only a folder that its owner may write in can be moved.
            os.fchmod(self._descriptor, self.copy.modes[0] | stat.S_IRWXU)
            if _rename(self.path, name, folder, linux.Rename.NO_REPLACE):
                self._settle(folder, note)
            elif not make_movable(name, folder):
                os.rename(self.path, name, dst_dir_fd=folder)
                self._settle(folder, note)
            else:
                return self._replace(path, folder, before, note)
        return []

    def _settle(self, folder: int, note: Callable[[], object]) -> None:
        """Give the published tree its mode; write its name in the descriptor ``folder``."""
        note()
        os.fchmod(self._descriptor, self.copy.modes[0])
        sync_folder(folder)

    def _replace(
        self, path: str, folder: int, before: Before | None, note: Callable[[], object]
    ) -> list[str]:
        """Exchange the tree with what is at ``path``, in the descriptor ``folder``.

        Return as `publish` does.
        """
        inode = os.fstat(self._descriptor).st_ino
        with replacing(self._partial, path, self._root, inode) as kept:
            name = os.path.basename(path)
            seen = _lstat_or_none(name, folder)
            self._exchange(name, folder, kept)
            self._settle(folder, note)
            there, moved = os.lstat(kept.old), list[str]()
            if not stat.S_ISDIR(there.st_mode):
                if not before or (_is_same(seen, there) and not is_late(seen, before.since)):
                    os.unlink(kept.old)
            elif before:
                moved = self._remove_old(kept, path, before)
            else:
                remove_tree(kept.old)
            if os.path.lexists(kept.old):  # as of a program that fills it faster than it is emptied
                moved.append(kept.put_beside())
        return moved

    def _exchange(self, name: str, folder: int, kept: Replaced) -> None:
        """Rename the tree to ``name``, and what is there to its place in ``kept``."""
        os.rename(self.path, kept.new)
        try:
            exchanged = _rename(kept.new, name, folder, linux.Rename.EXCHANGE)
            if not exchanged:  # the filesystem cannot: for a moment there is neither
                os.rename(name, kept.old, src_dir_fd=folder)
                try:
                    os.rename(kept.new, name, dst_dir_fd=folder)
                except OSError:
                    os.rename(kept.old, name, dst_dir_fd=folder)
                    raise
        except OSError:
            os.rename(kept.new, self.path)
            raise
        if exchanged:
            os.rename(kept.new, kept.old)

    def _remove_old(self, kept: Replaced, path: str, before: Before) -> list[str]:
        """Remove the folder that was replaced at ``path``, but what was not there ``before``.

        Return as `publish` does.
        """
        shared = dict.fromkeys(self.copy.inodes, before.since)
        new = f"/proc/self/fd/{self._descriptor}/."  # whatever has the path now
        try:
            return remove_old(kept.old, new, replace(before, shared=shared))
        except OSError as error:
            raise DestinationError(
                f"{path} was staged, but not all of the old version could be removed, or moved "
                f"over ({error.strerror}); the rest is in {kept.put_beside()}"
            ) from None

    def close(self) -> None:
        """Close all files, and remove the tree unless it was published."""
        for descriptor, _ in self._open.values():
            os.close(descriptor)
        self._open.clear()
        os.close(self._descriptor)
        remove_tree(self.path)


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


def _lstat_or_none(name: str, folder: int) -> os.stat_result | None:
    with suppress(FileNotFoundError):
        return os.lstat(name, dir_fd=folder)
    return None


def _is_same(seen: os.stat_result | None, there: os.stat_result) -> TypeGuard[os.stat_result]:
    """Whether what is ``there`` is what was ``seen``, by what a rename does not change."""
    return seen is not None and _identity(seen) == _identity(there)


def _identity(facts: os.stat_result) -> tuple[int, int, int, int]:
    return facts.st_ino, facts.st_mode, facts.st_size, facts.st_mtime_ns


def _rename(path: str, name: str, folder: int, flag: linux.Rename) -> bool:
    """Rename ``path`` to ``name`` in the descriptor ``folder``. Raise OSError.

    Return False if ``name`` exists or the filesystem lacks the ``flag``.
    """
    try:
        linux.rename(path, name, flag, new_folder=folder)
    except OSError as error:
        if error.errno in (errno.EEXIST, *_CANNOT):
            return False
        raise
    return True
