"""TODO."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from stager.base.errors import DestinationError, SpaceError
from stager.base.paths import RECORDS_FOLDER
from stager.disk.files import (
    OPEN_FOLDER,
    READ_ONLY,
    existing_folder_above,
    make_movable,
    opened,
    remove_tree,
    stage_errors,
    write_all,
)
from stager.disk.jobs import uses
from stager.disk.record import Record
from stager.disk.unnamed import UnnamedFile, fresh_name

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A record is some 600 bytes and two paths; more than this is not ours.
_RECORD_LIMIT = 64 * 1024
#: Bytes of a table: a million files take some 200 MiB.
_TABLE_LIMIT = 1 << 32


@dataclass(frozen=True, slots=True)
class Cache:
    """One user's folder beneath one cache root of this node.

    ``shared``: the folder is root's, and its records are for all to read.
    """

    folder: str
    shared: bool = False

    @property
    def root(self) -> str:
        """The cache root that it lies beneath."""
        return os.path.dirname(os.path.dirname(self.folder))

    @property
    def uid(self) -> int:
        """Whose it is."""
        return int(os.path.basename(self.folder))

    def in_use(self) -> frozenset[str]:
        """The destinations that jobs which run on this node use."""
        return uses(None if self.shared else self.uid)

    def record_path(self, destination: str) -> str:
        """The file of the record for ``destination``."""
        return f"{self.folder}/records/{_key(destination)}.json"

    def load(self, destination: str) -> Record | None:
        """The record for ``destination``; None where there is none that can be trusted."""
        with suppress(OSError, ValueError):
            return self.read(self.record_path(destination))
        return None

    def read(self, path: str) -> Record:
        """The record in the file ``path`` of this cache.

        Raises OSError, or ValueError that says why it cannot be trusted.
        """
        record = Record.from_json(_read_trusted(path))
        if self.record_path(record.destination) != path:
            raise ValueError(f"it is of {record.destination}, which has another file")
        return record

    def record_paths(self) -> list[str]:
        """The files in which there may be records. Raises OSError."""
        folder = f"{self.folder}/records"
        try:
            return [f"{folder}/{name}" for name in os.listdir(folder)]
        except FileNotFoundError:  # nothing was ever staged here
            return []

    def records(self) -> Iterator[Record]:
        """Every record that can be trusted, in no order."""
        for path in self.record_paths():
            with suppress(OSError, ValueError):
                yield self.read(path)

    def save(self, record: Record) -> None:
        """Replace the destination's record in one step. Raises SpaceError or DestinationError."""
        self._replace(self.record_path(record.destination), record.to_json().encode())

    def _replace(self, path: str, text: bytes) -> None:
        folder = f"{self.folder}/partial"
        with stage_errors(folder), closing(UnnamedFile(folder)) as fresh:
            write_all(fresh.descriptor, text, 0)
            if self.shared:
                os.fchmod(fresh.descriptor, 0o644)
            fresh.rename(path)

    def forget(self, destination: str) -> None:
        """Remove the destination's record, if there is one, and its table."""
        for path in (self.record_path(destination), self.table_path(destination)):
            with suppress(FileNotFoundError):
                os.unlink(path)

    def table_path(self, destination: str) -> str:
        """The file of the `table` of the tree at ``destination``."""
        return f"{self.folder}/tables/{_key(destination)}"

    def load_table(self, record: Record) -> bytes | None:
        """The text of the table that belongs to the record of a tree, if it is there."""
        with suppress(OSError, ValueError):
            text = _read_trusted(self.table_path(record.destination), limit=_TABLE_LIMIT)
            if record.tree and xxhash.xxh3_128_hexdigest(text) == record.tree.table_digest:
                return text
        return None

    def save_table(self, destination: str, text: bytes) -> str:
        """Replace the destination's table in one step; its digest. Raises as `save` does."""
        self._replace(self.table_path(destination), text)
        return xxhash.xxh3_128_hexdigest(text)

    def discard(self, name: str, folder: int) -> None:
        """Remove the tree ``name`` in ``folder``: in one step for all who look. Raises OSError."""
        partial = f"{self.folder}/partial"
        with fresh_name(partial) as path:
            make_movable(name, folder)
            os.rename(name, path, src_dir_fd=folder)
        remove_tree(path)

    def sweep(self) -> None:
        """Remove partial files and trees whose writer is gone; a living one holds a lock."""
        folder = f"{self.folder}/partial"
        with opened(folder, OPEN_FOLDER) as parent, suppress(BlockingIOError):
            # Not while another process is between the making of a file and its locking.
            fcntl.flock(parent, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in os.listdir(folder):
                with suppress(OSError), opened(f"{folder}/{name}", READ_ONLY) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_tree(f"{folder}/{name}")


def look_for_cache(root: str, uid: int, *, shared: bool = False) -> Cache:
    """The user's folder beneath ``root``, as it is; root's, if it is ``shared``.

    Raises DestinationError where it is missing, or where somebody else could write in it.
    """
    if shared:
        uid = 0
        _check_folder(root, (0,))
    _check_folder(_parent(root), (0, uid))
    _check_folder(_folder(root, uid), (uid,))
    return Cache(_folder(root, uid), shared)


def open_cache(root: str, uid: int, *, shared: bool = False) -> Cache:
    """`look_for_cache`, ready to be written: inner folders made, dead partial files swept.

    For any user but root a ``shared`` cache is only looked for.
    """
    if shared and uid != 0:
        empty = not os.path.lexists(_parent(root))
        return Cache(_folder(root, 0), True) if empty else look_for_cache(root, 0, shared=True)
    mode = 0o755 if shared else 0o700
    try:
        owner = os.stat(root or "/").st_uid
    except OSError as error:
        raise DestinationError(f"the cache root {root} is not there: {error.strerror}") from None
    if owner == uid:
        # Nobody else could have prepared it. Root's own root serves its users too: they pass
        # through the first folder to theirs.
        _make_folder(_parent(root), 0o755)
        _check_folder(_parent(root), (0, uid))
        _make_folder(_folder(root, uid), mode)
    cache = look_for_cache(root, uid, shared=shared)
    inner = [f"{cache.folder}/{name}" for name in ("records", "tables")]
    for folder in inner:
        _make_folder(folder, mode)
    if shared:  # it may have been root's own alone before
        for folder in (cache.folder, *inner):
            os.chmod(folder, mode)
    _make_folder(f"{cache.folder}/partial", 0o700)
    with stage_errors(cache.folder):
        cache.sweep()
    return cache


def plan_cache(root: str, uid: int, *, shared: bool = False) -> Cache:
    """The folder that `open_cache` would open or make; nothing is made. Raises DestinationError."""
    try:
        return look_for_cache(root, uid, shared=shared)
    except DestinationError:
        above = existing_folder_above(_parent(root))
        if os.path.lexists(_parent(root)) or os.stat(above).st_uid != uid:
            raise
        return Cache(_folder(root, uid), shared)


def _parent(root: str) -> str:
    return f"{root}/{RECORDS_FOLDER}"


def _folder(root: str, uid: int) -> str:
    return f"{root}/{RECORDS_FOLDER}/{uid}"


def _make_folder(path: str, mode: int) -> None:
    with stage_errors(path), suppress(FileExistsError):
        os.mkdir(path, mode)
        os.chmod(path, mode)  # whatever the user's mask


def _check_folder(path: str, owners: tuple[int, ...]) -> None:
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        _check_room(os.path.dirname(path))
        raise DestinationError(
            f"{path} is missing: the site's prolog or plugin makes it; tell the administrator"
        ) from None
    except OSError as error:
        raise DestinationError(f"{path}: {error.strerror}") from None
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid not in owners or facts.st_mode & 0o022:
        raise DestinationError(
            f"{path} is not a folder of {' or '.join(f'uid {uid}' for uid in owners)} alone; "
            "tell the administrator"
        )


def _check_room(folder: str) -> None:
    """Root could make nothing on a full disk; say that, where it is so."""
    with suppress(OSError):
        room = os.statvfs(folder if os.path.exists(folder) else os.path.dirname(folder))
        if not room.f_bavail or not room.f_favail:
            raise SpaceError(f"{folder}: the disk is full; make room and submit again")


def check_names(cache: Cache, count: int) -> None:
    """Raise SpaceError where the disk has no room for so many more files and folders."""
    with stage_errors(cache.folder):
        room = os.statvfs(cache.folder)
    if room.f_files > 0 and room.f_favail < count:  # some filesystems have no limit
        raise SpaceError(
            f"{cache.root}: {count} files and folders are needed, and there is room for "
            f"{room.f_favail} more, whatever their size; make room, or stage an archive as it is"
        )


def _key(destination: str) -> str:
    return xxhash.xxh3_128_hexdigest(os.fsencode(destination))


def _read_trusted(path: str, limit: int = _RECORD_LIMIT) -> bytes:
    with opened(path, READ_ONLY) as descriptor:
        facts = os.fstat(descriptor)
        ours = facts.st_uid in (0, os.getuid()) and not facts.st_mode & 0o022
        if not (stat.S_ISREG(facts.st_mode) and ours and facts.st_nlink == 1):
            raise ValueError("it is not a plain file that this user alone can write")
        if facts.st_size > limit:
            raise ValueError("it is longer than a record can be")
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            return file.read()
