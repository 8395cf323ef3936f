"""Lock destinations against other jobs on this node, from the survey to the publication."""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

import xxhash

from stager.base.errors import StageError
from stager.fs.files import stage_errors

if TYPE_CHECKING:
    from stager.store.cache import Cache

#: What of the names of variables that number a job, its array and its place in that.
_JOB_NAMES = ("JOB", "ARRAY_JOB", "ARRAY_TASK")


class Locks:
    """The locks of the destinations of one cache: one byte each in one file, which stays.

    The kernel releases them when their process ends, however it ends. A process may have only one
    of these open for a cache, because closing the file releases all its locks. All methods raise
    SpaceError or DestinationError, for example if the kernel has no room for a lock.
    """

    #: The kernel's struct flock: type, whence, start, length, pid.
    _FLOCK = struct.Struct("hhqqi")

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._held: set[str] = set()
        self._path = f"{cache.folder}/lock"
        self._secret = _secret_of(cache)
        with stage_errors(self._path):
            self._descriptor = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )

    def take(self, destination: str, *, shared: bool = False) -> bool:
        """Take the destination's lock. Return False if another process has it.

        A ``shared`` one is for who only reads what is there: several processes may have it. With
        another one, what a process announced, and did not publish before it died, is removed.
        """
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        with stage_errors(self._path):
            try:
                offset = self._offset(destination)
                fcntl.lockf(self._descriptor, kind | fcntl.LOCK_NB, 1, offset)
            except (BlockingIOError, PermissionError):
                return False
        if not shared:
            self._held.add(destination)
            self._cache.settle(destination)
        return True

    def release(self, destination: str) -> None:
        """Release the destination's lock. What was announced and not published is removed."""
        if destination in self._held:
            self._held.remove(destination)
            self._cache.settle(destination)
        with stage_errors(self._path):
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self._offset(destination))

    def _offset(self, destination: str) -> int:
        """Return the offset of the destination's byte, which has 63 bits.

        All users see it in /proc/locks, and without the secret could confirm a guess of the path.
        """
        return xxhash.xxh3_64_intdigest(self._secret + os.fsencode(destination)) >> 1

    def is_held(self, destination: str) -> bool:
        """Return whether another process has the destination's lock."""
        return self._look(destination)[0] != fcntl.F_UNLCK

    def _look(self, destination: str) -> tuple[int, ...]:
        """Return the fields of the struct flock that tells who has the destination's lock."""
        request = self._FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self._offset(destination), 1, 0)
        with stage_errors(self._path):
            return self._FLOCK.unpack(fcntl.fcntl(self._descriptor, fcntl.F_GETLK, request))

    def holder(self, destination: str) -> str:
        """Return who has the destination's lock, as messages name it: ``job 17``.

        A job of an array has its other name, too, as squeue shows it: ``job 17 (16_1)``.
        """
        pid = self._look(destination)[-1]
        # One that has just released it has closed the file, too.
        if not pid or (self._is_elsewhere(pid) and self._look(destination)[-1] == pid):
            return "another job"
        # The process belongs to this user, who may read its environment.
        with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            text = file.read().decode("ascii", "replace")
            variables = dict(one.partition("=")[::2] for one in text.split("\0"))
            job, array, task = (variables.get(f"SLURM_{name}_ID") for name in _JOB_NAMES)
            if job:
                return f"job {job} ({array}_{task})" if array and task else f"job {job}"
        return f"process {pid}"

    def _is_elsewhere(self, pid: int) -> bool:
        """Return whether the process of this number here has not opened the file of the locks.

        On a filesystem that several nodes see, the number is that of a process on any of them.
        """
        end = f"/{self._cache.uid}/{os.path.basename(self._path)}"
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except PermissionError:
            return False
        except OSError:
            return True
        for name in names:
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{name}").endswith(end):
                    return False
        return True

    def close(self) -> None:
        """Release all locks. What was announced and not published is removed, if possible."""
        for destination in self._held:
            with suppress(StageError):
                self._cache.settle(destination)
        os.close(self._descriptor)


def _secret_of(cache: Cache) -> bytes:
    """Return the secret of a cache, as its user alone reads it; make it first if there is none.

    Raise SpaceError or DestinationError. It is where a link leads, which is made in one step, and
    on a disk without room, too.
    """
    path = cache.secret
    with stage_errors(path):
        with suppress(FileExistsError):
            os.symlink(os.urandom(16).hex(), path)
        return os.fsencode(os.readlink(path))
