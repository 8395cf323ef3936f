"""A tree of files that is built beside its place, and put there in one step; all writing is here.

What `store` does for a single file. A tree under construction has a name among the partial files,
and a lock that tells `store.Cache.sweep` that its writer lives.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from array import array
from dataclasses import replace
from typing import TYPE_CHECKING

from stager.base import linux
from stager.disk.files import (
    make_movable,
    opened_beneath,
    read_back,
    remove_tree,
    stage_errors,
    sync_folder,
    write_all,
)
from stager.disk.permissions import file_mode, folder_mode, give_permissions
from stager.disk.record import CopyFacts
from stager.disk.unnamed import make_partial_folder
from stager.tree.listing import Kind, Listing
from stager.tree.walk import walk

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from stager.disk.cache import Cache

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: ioctl(2)'s request to have a file share another's blocks until one of them is written.
_FICLONE = 0x40049409
#: What a filesystem answers that cannot do one of these.
_CANNOT = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EXDEV, errno.EMLINK)


class PartialTree:
    """A tree being written beneath ``cache`` by ``listing``; nobody sees it until `publish`.

    Raises SpaceError or DestinationError.
    """

    def __init__(self, cache: Cache, listing: Listing) -> None:
        self._root = cache.root
        self._partial = f"{cache.folder}/partial"
        self._listing = listing
        self._lock = threading.Lock()
        #: Files of which a part has come: their descriptors, and the bytes that lack.
        self._open: dict[int, tuple[int, int]] = {}
        self._clones = True
        #: What became of each row's mode and inode.
        self._modes = array("Q", bytes(8 * len(listing)))
        self._inodes = array("Q", bytes(8 * len(listing)))
        self._groups = array("Q", bytes(8 * len(listing)))
        self._mtimes = array("q", bytes(8 * len(listing)))
        self._sizes = array("Q", bytes(8 * len(listing)))
        with stage_errors(self._partial):
            self.path, self._descriptor = make_partial_folder(self._partial)
            facts = os.fstat(self._descriptor)
        self._base = os.fsencode(self.path) + b"/"
        #: What is made here has this group by itself.
        self._group = facts.st_gid

    def lay_out(self) -> None:
        """Make the folders and links."""
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

    def take_over(self, row: int, path: bytes) -> bool:
        """Have the file be that at ``path``; whether it can be.

        It shares the other's blocks, or is the very same file where the disk cannot do that.
        """
        here = self._base + self._listing.paths[row]
        return self._clone(row, path, here) or self._link(row, path, here)

    def _clone(self, row: int, path: bytes, here: bytes) -> bool:
        if not self._clones:
            return False
        source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            descriptor = os.open(here, _CREATE, 0o600)
            try:
                fcntl.ioctl(descriptor, _FICLONE, source)
                self._finish(row, descriptor)
            except OSError as error:
                os.unlink(here)
                if error.errno not in _CANNOT:
                    raise
                self._clones = False
                return False
            finally:
                os.close(descriptor)
        finally:
            os.close(source)
        return True

    def _link(self, row: int, path: bytes, here: bytes) -> bool:
        try:
            os.link(path, here, follow_symlinks=False)
            self._note(row, os.lstat(here))
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            return False
        return True

    def writing(self) -> AbstractContextManager[None]:
        """In which files are written; what the disk has to say is raised at its end."""
        return stage_errors(self.path)

    def write(self, row: int, data: memoryview, offset: int) -> None:
        """Put ``data`` at ``offset`` bytes of the file."""
        whole = self._listing.data(row)
        if len(data) == whole:
            self.create(row, data, offset)
            return
        with self._lock:
            descriptor, _ = self._open.get(row) or (self._create(row), 0)
            self._open.setdefault(row, (descriptor, whole))
        write_all(descriptor, data, offset)
        with self._lock:
            left = self._open[row][1] - len(data)
            self._open[row] = descriptor, left
            if not left:
                del self._open[row]
        if not left:
            self._end(row, descriptor)

    def create(self, row: int, data: memoryview | bytes = b"", offset: int = 0) -> None:
        """Make the file, with ``data`` as all of its data at ``offset``."""
        descriptor = self._create(row)
        try:
            write_all(descriptor, data, offset)
        except OSError:
            os.close(descriptor)
            raise
        self._end(row, descriptor)

    def _create(self, row: int) -> int:
        return os.open(self._base + self._listing.paths[row], _CREATE, 0o600)

    def _end(self, row: int, descriptor: int) -> None:
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
        give_permissions(descriptor, mode, group, current_group=self._group)
        os.utime(descriptor, ns=(listing.mtimes[row], listing.mtimes[row]))
        self._note(row, os.fstat(descriptor))

    def _note(self, row: int, facts: os.stat_result) -> None:
        if self._listing.kinds[row] != Kind.LINK:
            self._modes[row] = stat.S_IMODE(facts.st_mode)
        self._groups[row] = facts.st_gid
        self._mtimes[row] = facts.st_mtime_ns  # the disk may not hold what it was told
        if self._listing.kinds[row] == Kind.FILE:
            self._inodes[row] = facts.st_ino
            self._sizes[row] = facts.st_size

    @property
    def copy(self) -> Listing:
        """The sealed tree, as `walk` would list it."""
        owner = os.getuid()
        owners = array(
            "Q", (0 if kind == Kind.HARD_LINK else owner for kind in self._listing.kinds)
        )
        return replace(
            self._listing, modes=self._modes, inodes=self._inodes, owners=owners,
            groups=self._groups, mtimes=self._mtimes, sizes=self._sizes, extents={},
        )  # fmt: skip

    def read(self, row: int, most: int) -> bytes:
        """The first ``most`` bytes of the file."""
        with stage_errors(self.path), open(self._base + self._listing.paths[row], "rb") as file:
            return file.read(most)

    def rewrite(self, row: int, data: bytes) -> None:
        """Have the file hold ``data`` instead."""
        path = self._base + self._listing.paths[row]
        with stage_errors(self.path):
            os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
            descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                write_all(descriptor, data, 0)
                self._finish(row, descriptor)
            finally:
                os.close(descriptor)

    def read_back(self, row: int) -> bytes:
        """The xxh3-128 of the file as it is on the disk, past the page cache."""
        with stage_errors(self.path):
            return bytes.fromhex(read_back(self._base + self._listing.paths[row]))

    def seal(self) -> None:
        """Make the further names of files, give the folders what they are to have, sync all."""
        listing = self._listing
        with stage_errors(self.path):
            for row in listing.rows(Kind.HARD_LINK):
                os.link(self._base + listing.targets[row], self._base + listing.paths[row])
            # A folder's time changes with what is put into it, and a mode may forbid that.
            for row in reversed(list(listing.rows(Kind.FOLDER))):
                descriptor = os.open(self._base + listing.paths[row], _FOLDER)
                try:
                    self._finish(row, descriptor)
                finally:
                    os.close(descriptor)
        self.sync()

    def sync(self) -> None:
        """Bring all that was written to the disk."""
        with stage_errors(self.path):
            linux.sync_filesystem(self._descriptor)

    def adopt(self) -> None:
        """Take what somebody else has put into the tree for all that it is to hold."""
        self._listing = listing = walk(self.path, holes=False)
        self._modes, self._inodes = listing.modes, listing.inodes
        self._groups, self._mtimes = listing.groups, listing.mtimes
        self._sizes = listing.sizes

    def facts(self) -> CopyFacts:
        """What the sealed tree is known by, before it is published and after."""
        with stage_errors(self.path):
            facts = os.fstat(self._descriptor)
        return CopyFacts(self._listing.size, facts.st_mtime_ns, facts.st_ino, facts.st_uid)

    def publish(self, path: str) -> None:
        """Put the sealed tree at ``path`` in one step, in place of what is there, which goes."""
        above, name = os.path.split(path)
        with stage_errors(path), opened_beneath(self._root, above) as folder:
            replaced = self._put(name, folder)
            sync_folder(folder)
        if replaced:
            remove_tree(self.path)

    def _put(self, name: str, folder: int) -> bool:
        """Rename the tree to ``name`` in ``folder``; whether something was replaced."""
        # To move a folder one must be allowed to write in it, whatever it is to have in the end.
        os.fchmod(self._descriptor, self._modes[0] | stat.S_IRWXU)
        replaced = False
        if not self._rename(name, folder, linux.Rename.NO_REPLACE):
            replaced = make_movable(name, folder)
            if replaced and not self._rename(name, folder, linux.Rename.EXCHANGE):
                # The filesystem cannot do it in one step: for a moment there is neither.
                os.rename(name, f"{self.path}.old", src_dir_fd=folder)
                try:
                    os.rename(self.path, name, dst_dir_fd=folder)
                except OSError:
                    os.rename(f"{self.path}.old", name, dst_dir_fd=folder)
                    raise
                self.path += ".old"
            elif not replaced:
                os.rename(self.path, name, dst_dir_fd=folder)
        os.fchmod(self._descriptor, self._modes[0])
        return replaced

    def _rename(self, name: str, folder: int, flag: linux.Rename) -> bool:
        """Rename as the ``flag`` says; False where something is in the way, or it cannot be."""
        try:
            linux.rename(self.path, name, flag, new_folder=folder)
        except OSError as error:
            if error.errno in (errno.EEXIST, *_CANNOT):
                return False
            raise
        return True

    def close(self) -> None:
        """Let go of the tree; unless it was published, all of it is gone."""
        for descriptor, _ in self._open.values():
            os.close(descriptor)
        self._open.clear()
        os.close(self._descriptor)
        remove_tree(self.path)
