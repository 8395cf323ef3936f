"""A user's folder on one node's disk: records, locks and partial files; all writing is here.

Beneath each cache root lies ``.slurm-stage``, owned by root, and in it one folder a user, mode
0700. The helper acts as that user from first to last, so whatever lies in the folder was written
by this user or by root. It is on the same filesystem as the data: a wiped disk has no records,
and publishing is one rename.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

import xxhash

from stager.errors import DestinationError, LaunchError, SpaceError, UsageError
from stager.layout import ALIGNMENT
from stager.manifest import RECORDS_FOLDER, CopyFacts, Record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stager.layout import Layout

#: Where the ranks tell the other steps of a job how its stage ended: one folder a user beneath.
WORDS = "/run/slurm-stage"

#: Where root marks the jobs that stage on this node, each by a file ``JOB.UID``, until they have
#: ended here. A reboot empties it: then no job runs.
LIVE_JOBS = f"{WORDS}/jobs"

#: Seconds for which words are kept: longer than jobs run. A job that is older looks once more.
_WORDS_KEPT = 30 * 24 * 3600

#: A record is some 600 bytes and two paths; more than this is not ours.
_RECORD_LIMIT = 64 * 1024
#: Bytes of a table: a million files take some 200 MiB.
_TABLE_LIMIT = 1 << 32
# Not to wait for the other end of a named pipe, should somebody have put one there.
_READ_ONLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# To pass through a folder, one need not be allowed to read it.
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND_READ = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT)


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
        with raising(folder), closing(_Nameless(folder)) as fresh:
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
        with _making(partial) as path:
            make_movable(name, folder)
            os.rename(name, path, src_dir_fd=folder)
        remove_tree(path)

    def sweep(self) -> None:
        """Remove partial files and trees whose writer is gone; a living one holds a lock."""
        folder = f"{self.folder}/partial"
        with _opened(folder, _FOLDER) as parent, suppress(BlockingIOError):
            # Not while another process is between the making of a file and its locking.
            fcntl.flock(parent, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in os.listdir(folder):
                with suppress(OSError), _opened(f"{folder}/{name}", _READ_ONLY) as file:
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
    with raising(cache.folder):
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


def existing_folder_above(path: str) -> str:
    """The nearest of the folders above ``path`` that is there."""
    folder = os.path.dirname(path)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return folder


def _parent(root: str) -> str:
    return f"{root}/{RECORDS_FOLDER}"


def _folder(root: str, uid: int) -> str:
    return f"{root}/{RECORDS_FOLDER}/{uid}"


def _make_folder(path: str, mode: int) -> None:
    with raising(path), suppress(FileExistsError):
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
    with raising(cache.folder):
        room = os.statvfs(cache.folder)
    if room.f_files > 0 and room.f_favail < count:  # some filesystems have no limit
        raise SpaceError(
            f"{cache.root}: {count} files and folders are needed, and there is room for "
            f"{room.f_favail} more, whatever their size; make room, or stage an archive as it is"
        )


@contextmanager
def _opened(path: str | bytes, flags: int, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o600, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def raising(path: str) -> Iterator[None]:
    """Turn the disk's errors into those of a stage."""
    try:
        yield
    except OSError as error:
        raise as_stage_error(error, path) from None


def _key(destination: str) -> str:
    return xxhash.xxh3_128_hexdigest(os.fsencode(destination))


def _read_trusted(path: str, limit: int = _RECORD_LIMIT) -> bytes:
    with _opened(path, _READ_ONLY) as descriptor:
        facts = os.fstat(descriptor)
        ours = facts.st_uid in (0, os.getuid()) and not facts.st_mode & 0o022
        if not (stat.S_ISREG(facts.st_mode) and ours and facts.st_nlink == 1):
            raise ValueError("it is not a plain file that this user alone can write")
        if facts.st_size > limit:
            raise ValueError("it is longer than a record can be")
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            return file.read()


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Put all of ``data`` at ``offset`` bytes. Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written


# Locks: one a destination, held from the survey to the publication.


class Locks:
    """The locks of destinations beneath one cache: ranges of one byte in one file that stays.

    The kernel lets go of them when their process ends, however it ends, and nothing is left.
    A process has at most one of these open for a cache: to close a file drops all its locks.
    """

    #: The kernel's struct flock: type, whence, start, length, pid.
    _FLOCK = struct.Struct("hhqqi")

    def __init__(self, cache: Cache) -> None:
        path = f"{cache.folder}/lock"
        self._descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )

    def take(self, destination: str) -> bool:
        """Take the destination's lock, unless another process has it."""
        try:
            fcntl.lockf(
                self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _lock_offset(destination)
            )
        except (BlockingIOError, PermissionError):
            return False
        return True

    def release(self, destination: str) -> None:
        """Let go of the destination's lock."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _lock_offset(destination))

    def holder(self, destination: str) -> str:
        """Who has the destination's lock, in words: ``job 17``."""
        wish = self._FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _lock_offset(destination), 1, 0)
        answer = fcntl.fcntl(self._descriptor, fcntl.F_GETLK, wish)
        pid = self._FLOCK.unpack(answer)[-1]
        # A user may look into the environment of his own processes, and this is one.
        with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            for variable in file.read().split(b"\0"):
                if variable.startswith(b"SLURM_JOB_ID="):
                    return f"job {variable.partition(b'=')[2].decode('ascii', 'replace')}"
        return f"process {pid}" if pid else "another job"

    def close(self) -> None:
        """Let go of all locks."""
        os.close(self._descriptor)


def _lock_offset(destination: str) -> int:
    # A file's offsets are signed: 63 bits.
    return xxhash.xxh3_64_intdigest(os.fsencode(destination)) >> 1


# Partial files: without a name until every byte is in place.

#: Bytes read at a time where a file is read back.
_READ_SIZE = 4 << 20


class _Nameless:
    """A new file for writing in ``folder``, without a name where the filesystem allows that.

    So not even a kill leaves a part of it. It is locked, which tells `Cache.sweep` that it lives.
    Raises OSError.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._name = ""
        try:
            self.descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            self._open_named()

    def _open_named(self) -> None:
        with _making(self._folder) as name:
            self.descriptor = os.open(name, _CREATE, 0o600)
            self._name = name
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)

    def rename(self, path: str, folder: int | None = None) -> None:
        """Put the file at ``path``, seen from ``folder``, in one step in place of what is there."""
        if not self._name:
            name = _fresh_name(self._folder)
            _give_name(self.descriptor, name)
            self._name = name
        os.rename(self._name, path, dst_dir_fd=folder)
        self._name = ""

    def close(self) -> None:
        """Let go of the file; unless it was renamed, its bytes are gone."""
        if self._name:
            with suppress(FileNotFoundError):
                os.unlink(self._name)
        os.close(self.descriptor)


def _fresh_name(folder: str) -> str:
    return f"{folder}/{os.urandom(8).hex()}"


@contextmanager
def _making(folder: str) -> Iterator[str]:
    """A fresh name in ``folder``, where nothing is swept while it is made and locked."""
    with _opened(folder, _FOLDER) as parent:
        fcntl.flock(parent, fcntl.LOCK_SH)
        yield _fresh_name(folder)


def make_partial_folder(folder: str) -> tuple[str, int]:
    """A new folder in ``folder``, locked as partial files are; its descriptor. Raises OSError."""
    with _making(folder) as name:
        os.mkdir(name, 0o700)
        descriptor = os.open(name, _FOLDER)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return name, descriptor


def make_movable(name: str, folder: int) -> bool:
    """Have the user be allowed to move what is at ``name``; whether there is anything."""
    try:
        there = os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(there.st_mode) and there.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        # Its own '..' is written. What has no right to be opened cannot be moved either.
        with suppress(PermissionError), _opened(name, _FOLDER | os.O_NOFOLLOW, folder) as opened:
            os.fchmod(opened, stat.S_IMODE(there.st_mode) | stat.S_IRWXU)
    return True


def give_group(descriptor: int, group: int, mode: int) -> int:
    """Give a file or folder its ``group``; of the ``mode`` that it is to have what is right then.

    A group that its user is not in cannot be given, and another may do no more than all others.
    Raises OSError.
    """
    try:
        if os.fstat(descriptor).st_gid != group:
            os.fchown(descriptor, -1, group)
    except PermissionError:
        return mode & (~(stat.S_IRWXG | stat.S_ISGID) | (mode & stat.S_IRWXO) << 3)
    return mode


def remove_tree(path: str) -> None:
    """Remove what is at ``path`` and all that is in it, as far as that can be removed."""
    folders = [path]
    for folder in folders:  # which grows
        with suppress(OSError):
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                os.unlink(folder)
                continue
            os.chmod(folder, 0o700)  # one may have staged what one may not change
            with os.scandir(folder) as entries:
                inside = list(entries)
            for entry in inside:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                with suppress(OSError):
                    os.unlink(entry.path)
    for folder in reversed(folders):
        with suppress(OSError):
            os.rmdir(folder)


def _give_name(descriptor: int, path: str) -> None:
    """Link an unnamed file to ``path``, which an unprivileged process can do by way of /proc."""
    # A folder descriptor makes os.link() call linkat(2), which can follow /proc's symlink.
    with _opened("/proc/self/fd", _FOLDER) as descriptors:
        os.link(str(descriptor), path, src_dir_fd=descriptors, follow_symlinks=True)


def read_back(path: str | bytes, flags: int = os.O_NOFOLLOW) -> str:
    """The xxh3-128 of what is on the disk, in hexadecimal, past the page cache. Raises OSError."""
    digest = xxhash.xxh3_128()
    flags |= os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    with ExitStack() as stack:
        descriptor = stack.enter_context(_opened(path, flags))
        size = os.fstat(descriptor).st_size
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no plain file")
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        with suppress(OSError):  # not on this filesystem
            descriptor = stack.enter_context(_opened(path, flags | os.O_DIRECT))
        buffer = stack.enter_context(closing(mmap.mmap(-1, _READ_SIZE)))
        with memoryview(buffer) as view:
            at = 0
            while at < size and (count := os.preadv(descriptor, [buffer], at)):
                digest.update(view[:count])
                at += count
    return digest.hexdigest()


class Partial:
    """A copy being written beneath ``cache``; nobody sees it until `publish`.

    Where ``direct``, data goes past the page cache if the filesystem lets it: at the disk's own
    rate, without a copy, and with nothing left for fsync. Raises SpaceError or DestinationError.
    """

    def __init__(self, cache: Cache, *, direct: bool) -> None:
        self._root = cache.root
        self._folder = f"{cache.folder}/partial"
        self._direct: int | None = None
        with raising(self._folder):
            self._file = _Nameless(self._folder)
        if direct:
            with suppress(OSError):  # not on this filesystem
                self._direct = self._open_again(os.O_WRONLY | os.O_DIRECT)
        self._is_direct = self._direct is not None

    def allocate(self, layout: Layout) -> None:
        """Give the file its size, and its data their place on the disk."""
        with raising(self._folder):
            os.ftruncate(self._file.descriptor, layout.size)
            for offset, length in layout.extents:
                # Which reads the file where the filesystem has no such call of its own.
                os.posix_fallocate(self._file.descriptor, offset, length)

    def write(self, data: memoryview, offset: int) -> None:
        """Put ``data`` at ``offset`` bytes."""
        with raising(self._folder):
            done = self._write_direct(data, offset)
            write_all(self._file.descriptor, data[done:], offset + done)

    def _write_direct(self, data: memoryview, offset: int) -> int:
        """Write what is aligned, and tell how many bytes that was."""
        length = len(data) // ALIGNMENT * ALIGNMENT
        if self._direct is None or not self._is_direct or offset % ALIGNMENT:
            return 0
        try:
            write_all(self._direct, data[:length], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._is_direct = False  # this disk wants another alignment
            return 0
        return length

    def _open_again(self, flags: int) -> int:
        return os.open(f"/proc/self/fd/{self._file.descriptor}", flags | os.O_CLOEXEC)

    def read_back(self) -> str:
        """The xxh3-128 of what is on the disk, in hexadecimal, past the page cache."""
        with raising(self._folder):
            return read_back(f"/proc/self/fd/{self._file.descriptor}", 0)  # a link of the kernel's

    def opened(self) -> IO[bytes]:
        """What was written so far, for reading from its beginning."""
        return open(self._open_again(os.O_RDONLY), "rb")

    def seal(self, mode: int, group: int, mtime_ns: int) -> None:
        """Give the file its permissions and time, and bring all of it to the disk.

        Its owner may always read it, whoever might read the source by another right; nobody else
        may write it; and a group that is not the source's own may do no more than all others.
        """
        with raising(self._folder):
            mode = give_group(self._file.descriptor, group, mode & 0o755 | stat.S_IRUSR)
            os.fchmod(self._file.descriptor, mode)
            os.utime(self._file.descriptor, ns=(mtime_ns, mtime_ns))
            os.fsync(self._file.descriptor)

    def publish(self, path: str) -> CopyFacts:
        """Put the sealed file at ``path`` in one step, in place of what is there."""
        above, name = os.path.split(path)
        with raising(path), opened_way(self._root, above) as folder:
            self._file.rename(name, folder)
            sync_folder(folder)
            facts = os.fstat(self._file.descriptor)
        return CopyFacts(facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_uid)

    def close(self) -> None:
        """Let go of the file; unless it was published, its bytes are gone."""
        if self._direct is not None:
            os.close(self._direct)
        self._file.close()


def sync_folder(folder: int) -> None:
    """Bring the names in ``folder`` to the disk. Raises OSError."""
    # One may write in a folder and not read it; then its own time has to bring it to the disk.
    with suppress(PermissionError), _opened(".", _FOLDER, folder) as descriptor:
        os.fsync(descriptor)


@contextmanager
def opened_way(root: str, folder: str) -> Iterator[int]:
    """A folder beneath ``root``, opened step by step, so that nobody can lead it elsewhere.

    Each folder on the way is the user's own or root's, and no link. Raises DestinationError, or
    FileNotFoundError.
    """
    with ExitStack() as stack:
        way = root
        at = stack.enter_context(_opened(root or "/", _STEP & ~os.O_NOFOLLOW))
        for name in folder[len(root) :].split("/"):
            if name:
                way = f"{way}/{name}"
                at = stack.enter_context(_step(way, name, at))
        yield at


@contextmanager
def _step(way: str, name: str, at: int) -> Iterator[int]:
    try:
        descriptor = os.open(name, _STEP, dir_fd=at)
    except NotADirectoryError:
        kind = kind_of(os.lstat(name, dir_fd=at).st_mode)
        raise DestinationError(f"{way} is {kind}, not a folder") from None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise as_stage_error(error, way) from None
    try:
        owner = os.fstat(descriptor).st_uid
        if owner not in (0, os.getuid()):
            raise DestinationError(
                f"{way} belongs to uid {owner}, who could replace what is staged there; "
                "choose another destination"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def kind_of(mode: int) -> str:
    """What a file of this mode is, in words."""
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
        stat.S_IFLNK: "a symbolic link",
    }
    return kinds.get(stat.S_IFMT(mode), "a plain file")


def as_stage_error(error: OSError, path: str = "") -> SpaceError | DestinationError:
    """An error of this node's disk in a stage's words; ``path`` is named instead of its own."""
    path = path or str(error.filename or "input/output")
    if error.errno in _SPACE_ERRORS:
        kind = "quota" if error.errno == errno.EDQUOT else "disk"
        return SpaceError(f"{path}: the {kind} is full; make room and submit again")
    return DestinationError(f"{path}: {error.strerror or error}")


@contextmanager
def made_parents(path: str) -> Iterator[None]:
    """Make the folders above ``path`` that lack; take the empty ones away again on a failure.

    Raises DestinationError.
    """
    missing: list[str] = []
    folder = os.path.dirname(path)
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    try:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        except OSError as error:
            raise as_stage_error(error) from None
        yield
    except BaseException:
        for made in missing:
            with suppress(OSError):
                os.rmdir(made)
        raise


# What the jobs of this node use: what is in use never goes to make room.
#
# A job's own list lies beside its word, in a folder of its user's that a reboot empties, so that
# it is written however full the disk is. It counts as long as root's mark of the job is there.

#: The end of a list's name behind the job's id, and the most bytes of a list that are read.
_USES, _USES_LIMIT = ".uses", 16 << 20


def note_uses(uid: int, job: int, destinations: Sequence[str]) -> None:
    """Have the ``destinations`` stay on this node as long as the user's job. Raises StageError.

    Without root's part on the node, a prolog or the plugin, there is nothing to note it in.
    """
    path = f"{WORDS}/{uid}/{job}{_USES}"
    known = uses_of(uid, job)
    text = b"".join(os.fsencode(one) + b"\0" for one in destinations if one not in known)
    try:
        with _opened(path, _APPEND) as file:
            if os.fstat(file).st_size + len(text) > _USES_LIMIT:
                raise UsageError(f"job {job} uses too many files; stage an archive instead")
            write_all(file, text, 0)
    except FileNotFoundError:
        return
    except OSError as error:
        raise as_stage_error(error, path) from None


def jobs_are_known() -> bool:
    """Whether root marks this node's jobs at all; otherwise any copy may be in use."""
    return os.path.exists(LIVE_JOBS)


def uses(uid: int | None) -> frozenset[str]:
    """What the running jobs of one user say that they use; of all users, which root may ask."""
    return frozenset(jobs_using(uid))


def jobs_using(uid: int | None) -> dict[str, list[int]]:
    """The jobs behind `uses`, by each destination that they use.

    Of the jobs of others nobody but root learns anything.
    """
    found: dict[str, list[int]] = {}
    for job, owner in sorted(_live_jobs() if uid is None else _live_jobs_of(uid)):
        for destination in uses_of(owner, job):
            found.setdefault(destination, []).append(int(job))
    return found


def uses_of(uid: int | str, job: int | str) -> frozenset[str]:
    """What one job has noted that it uses, whether it runs or not."""
    with suppress(OSError), _opened(f"{WORDS}/{uid}/{job}{_USES}", _READ_ONLY) as file:
        if stat.S_ISREG(os.fstat(file).st_mode):
            text = os.read(file, _USES_LIMIT)
            return frozenset(os.fsdecode(text).split("\0")[:-1])
    return frozenset()


def _live_jobs() -> Iterator[tuple[str, str]]:
    with suppress(FileNotFoundError):
        for mark in os.listdir(LIVE_JOBS):
            job, _, uid = mark.partition(".")
            yield job, uid


def _live_jobs_of(uid: int) -> Iterator[tuple[str, str]]:
    # Users may not list the marks: whose jobs run here is not for all to know.
    with suppress(FileNotFoundError):
        for name in os.listdir(f"{WORDS}/{uid}"):
            job = name.removesuffix(_USES)
            if job != name and os.path.exists(f"{LIVE_JOBS}/{job}.{uid}"):
                yield job, str(uid)


# Figures of a job's stages, for root to gather when it has ended.

#: The end of the name of a job's figures.
_FIGURES = ".figures"


def note_figures(uid: int, job: int, figures: Sequence[float]) -> None:
    """Append one line of figures to the job's own; what cannot be noted is not counted."""
    with suppress(OSError), _opened(f"{WORDS}/{uid}/{job}{_FIGURES}", _APPEND) as file:
        os.write(file, (" ".join(f"{figure:g}" for figure in figures) + "\n").encode())


# The word to the job's other steps on this node.


class Words:
    """What the ranks leave on their node for the tasks of their job, in a folder of the user's.

    ``JOB.RESTART.STEP`` holds the exit code for the tasks that wait in one step; while a rank has
    it locked, they wait. ``JOB.RESTART`` has a line of directives for every stage of the job that
    was well; tasks of later steps that find their own there need not wait. ``JOB.RESTART.shards``
    has the paths that become the job's STAGE_SHARDS, one a line. The folder is on a filesystem that
    a reboot empties.
    """

    def __init__(self, uid: int) -> None:
        self._folder = f"{WORDS}/{uid}"
        self._job = ""
        self._descriptor: int | None = None

    def hold(self, job: str, step: str) -> None:
        """Take the step's file. Raises LaunchError where root did not make its folder."""
        self._job = job
        path = f"{self._folder}/{job}.{step}"
        try:
            self._sweep()
            self._descriptor = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            # No other rank of this step is on this node, so this waits for nobody.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            os.ftruncate(self._descriptor, 0)
        except OSError as error:
            raise LaunchError(
                f"{path}: {error.strerror}: the plugin prepares its folder; tell the administrator"
            ) from None

    def say(self, code: int, directives: str, shard_lists: Sequence[str] = ()) -> None:
        """Write the code that waiting tasks act on, and what is done if all was well."""
        assert self._descriptor is not None
        if code == 0:
            self._name_lists(shard_lists)
            with _opened(f"{self._folder}/{self._job}", _APPEND) as done:
                os.write(done, os.fsencode(f"{directives}\n"))
        write_all(self._descriptor, f"{code}\n".encode(), 0)

    def _name_lists(self, paths: Sequence[str]) -> None:
        """Have the job's tasks find these lists, and those of its earlier stages."""
        if not paths:
            return
        path = f"{self._folder}/{self._job}.shards"
        with _opened(path, _APPEND_READ) as lists, open(lists, "a+b", closefd=False) as file:
            file.seek(0)
            known = file.read().split(b"\n")
            file.writelines(b"%s\n" % path for path in map(os.fsencode, paths) if path not in known)

    def close(self) -> None:
        """Let go: waiting tasks read the code, or find that there is none."""
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _sweep(self) -> None:
        """Remove what no running job can still ask for."""
        for entry in os.scandir(self._folder):
            with suppress(FileNotFoundError):  # root's clean-up after another job may be at work
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _WORDS_KEPT:
                    os.unlink(entry.path)
