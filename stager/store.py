"""A user's folder on one node's disk: records, locks and partial files; all writing is here.

Beneath each cache root lies ``.slurm-stage``, owned by root, and in it one folder a user, mode
0700. The helper acts as that user from first to last, so whatever lies in the folder was written
by this user or by root. It is on the same filesystem as the data: a wiped disk has no records,
and publishing is one rename.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from stager.errors import DestinationError, LaunchError, SpaceError
from stager.manifest import CopyFacts, Record

if TYPE_CHECKING:
    from collections.abc import Iterator


#: Name of the folder of this project beneath each cache root.
FOLDER = ".slurm-stage"
#: Where the ranks tell the other steps of a job how its stage ended: one folder a user beneath.
WORDS = "/run/slurm-stage"

#: A record is some 600 bytes and two paths; more than this is not ours.
_RECORD_LIMIT = 64 * 1024
_READ_ONLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Cache:
    """One user's folder beneath one cache root of this node."""

    folder: str

    def record_path(self, destination: str) -> str:
        """The file of the record for ``destination``."""
        return f"{self.folder}/records/{_key(destination)}.json"

    def load(self, destination: str) -> Record | None:
        """The record for ``destination``; None where there is none that can be trusted."""
        with suppress(OSError, ValueError):
            record = Record.from_json(_read_trusted(self.record_path(destination)))
            if record.destination == destination:
                return record
        return None

    def records(self) -> Iterator[Record]:
        """Every record that can be trusted, in no order."""
        for name in os.listdir(f"{self.folder}/records"):
            with suppress(OSError, ValueError):
                yield Record.from_json(_read_trusted(f"{self.folder}/records/{name}"))

    def save(self, record: Record) -> None:
        """Replace the destination's record in one step."""
        path = self.record_path(record.destination)
        fresh = _fresh_name(f"{self.folder}/partial")
        descriptor = os.open(fresh, _CREATE, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            _write_all(descriptor, record.to_json().encode(), 0)
            os.rename(fresh, path)
        except OSError:
            os.unlink(fresh)
            raise
        finally:
            os.close(descriptor)

    def forget(self, destination: str) -> None:
        """Remove the destination's record, if there is one."""
        with suppress(FileNotFoundError):
            os.unlink(self.record_path(destination))

    def sweep(self) -> None:
        """Remove partial files whose writer is gone; a living one holds a lock on its own."""
        for name in os.listdir(f"{self.folder}/partial"):
            path = f"{self.folder}/partial/{name}"
            with suppress(OSError):
                descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
                finally:
                    os.close(descriptor)


def open_cache(root: str, uid: int) -> Cache:
    """The user's folder beneath ``root``, inner folders made, dead partial files swept.

    Raises DestinationError where root did not prepare the folder, or a stranger owns it.
    """
    try:
        home = os.stat(root or "/")
    except OSError as error:
        raise DestinationError(f"the cache root {root} is not there: {error.strerror}") from None
    parent = f"{root}/{FOLDER}"
    folder = f"{parent}/{uid}"
    if home.st_uid == uid:
        # The whole root is this user's own: nobody else could have prepared it.
        for path in (parent, folder):
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
    _check_owner(parent, (0, uid))
    _check_owner(folder, (uid,))
    for name in ("records", "partial"):
        with suppress(FileExistsError):
            os.mkdir(f"{folder}/{name}", 0o700)
    cache = Cache(folder)
    cache.sweep()
    return cache


def _check_owner(path: str, owners: tuple[int, ...]) -> None:
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        raise DestinationError(
            f"{path} is missing: the site's prolog or plugin makes it; tell the administrator"
        ) from None
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid not in owners or facts.st_mode & 0o022:
        raise DestinationError(
            f"{path} is not a folder of {' or '.join(f'uid {uid}' for uid in owners)} alone; "
            "tell the administrator"
        )


def _key(destination: str) -> str:
    return xxhash.xxh3_128_hexdigest(os.fsencode(destination))


def _read_trusted(path: str) -> bytes:
    descriptor = os.open(path, _READ_ONLY)
    try:
        facts = os.fstat(descriptor)
        ours = facts.st_uid in (0, os.getuid()) and not facts.st_mode & 0o022
        if not (stat.S_ISREG(facts.st_mode) and ours and facts.st_nlink == 1):
            raise ValueError(f"{path} is not a plain file of this user")
        return os.read(descriptor, _RECORD_LIMIT)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
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


class Partial:
    """A file being written beneath ``cache``, ``size`` bytes long; nobody sees it until `publish`.

    It has no name where the filesystem allows that, so that not even a kill leaves a part of it.
    """

    def __init__(self, cache: Cache, size: int) -> None:
        self._folder = f"{cache.folder}/partial"
        self._name = ""
        self.descriptor = self._open()
        try:
            # For `Cache.sweep`: this file, once it has a name, belongs to a living process.
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
            if size:
                os.posix_fallocate(self.descriptor, 0, size)
        except OSError as error:
            self.close()
            raise _as_stage_error(error, self._folder) from None

    def _open(self) -> int:
        try:
            return os.open(self._folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise _as_stage_error(error, self._folder) from None
        self._name = _fresh_name(self._folder)
        return os.open(self._name, _CREATE, 0o600)

    def write(self, data: memoryview, offset: int) -> None:
        """Put ``data`` at ``offset`` bytes. Raises SpaceError or DestinationError."""
        try:
            _write_all(self.descriptor, data, offset)
        except OSError as error:
            raise _as_stage_error(error, self._folder) from None

    def seal(self, mode: int, mtime_ns: int) -> None:
        """Give the file its permissions and time, and bring all of it to the disk."""
        try:
            os.fchmod(self.descriptor, mode & 0o777)
            os.utime(self.descriptor, ns=(mtime_ns, mtime_ns))
            os.fsync(self.descriptor)
        except OSError as error:
            raise _as_stage_error(error, self._folder) from None

    def publish(self, path: str) -> CopyFacts:
        """Put the sealed file at ``path`` in one step, in place of what is there."""
        try:
            if not self._name:
                self._name = _fresh_name(self._folder)
                _give_name(self.descriptor, self._name)
            os.rename(self._name, path)
        except OSError as error:
            raise _as_stage_error(error, path) from None
        self._name = ""
        _sync_folder(os.path.dirname(path))
        facts = os.fstat(self.descriptor)
        return CopyFacts(facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_uid)

    def close(self) -> None:
        """Let go of the file; unless it was published, its bytes are gone."""
        if self._name:
            with suppress(FileNotFoundError):
                os.unlink(self._name)
        os.close(self.descriptor)


def _fresh_name(folder: str) -> str:
    return f"{folder}/{os.urandom(8).hex()}"


def _give_name(descriptor: int, path: str) -> None:
    """Link an unnamed file to ``path``, which an unprivileged process can do by way of /proc."""
    # A folder descriptor makes os.link() call linkat(2), which can follow /proc's symlink.
    descriptors = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(str(descriptor), path, src_dir_fd=descriptors, follow_symlinks=True)
    finally:
        os.close(descriptors)


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _as_stage_error(error: OSError, path: str) -> SpaceError | DestinationError:
    if error.errno in _SPACE_ERRORS:
        kind = "quota" if error.errno == errno.EDQUOT else "disk"
        return SpaceError(f"{path}: the {kind} is full; make room and submit again")
    return DestinationError(f"{path}: {error.strerror}")


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
        os.makedirs(os.path.dirname(path), exist_ok=True)
    except OSError as error:
        raise DestinationError(f"{error.filename}: {error.strerror}") from None
    try:
        yield
    except BaseException:
        for made in missing:
            with suppress(OSError):
                os.rmdir(made)
        raise


# The word to the job's other steps on this node.


class Words:
    """The file by which the ranks tell their node's waiting tasks how the stage ended.

    While it is held the tasks wait. It is on a filesystem that a reboot empties.
    """

    def __init__(self, uid: int) -> None:
        self._folder = f"{WORDS}/{uid}"
        self._descriptor: int | None = None

    def hold(self, name: str) -> None:
        """Take the file. Raises LaunchError where root did not make its folder."""
        path = f"{self._folder}/{name}"
        try:
            self._descriptor = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise LaunchError(
                f"{path}: {error.strerror}: the plugin prepares its folder; tell the administrator"
            ) from None
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        os.ftruncate(self._descriptor, 0)

    def say(self, text: str) -> None:
        """Write the word that waiting tasks act on."""
        assert self._descriptor is not None
        _write_all(self._descriptor, f"{text}\n".encode(), 0)

    def close(self) -> None:
        """Let go: waiting tasks read the word, or find that there is none."""
        if self._descriptor is not None:
            os.close(self._descriptor)
