"""Lock destinations against other jobs on this node, from the survey to the publication."""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

import xxhash

from stager.disk.files import stage_errors

if TYPE_CHECKING:
    from stager.disk.cache import Cache


class Locks:
    """The locks of the destinations of one cache: one byte each in one file, which stays.

    The kernel releases them when their process ends, however it ends. A process may have only one
    of these open for a cache, because closing the file releases all its locks. All methods raise
    SpaceError or DestinationError, for example if the kernel has no room for a lock.
    """

    #: The kernel's struct flock: type, whence, start, length, pid.
    _FLOCK = struct.Struct("hhqqi")

    def __init__(self, cache: Cache) -> None:
        self._path = f"{cache.folder}/lock"
        with stage_errors(self._path):
            self._descriptor = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )

    def take(self, destination: str) -> bool:
        """Take the destination's lock. Return False if another process has it."""
        with stage_errors(self._path):
            try:
                fcntl.lockf(
                    self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _lock_offset(destination)
                )
            except (BlockingIOError, PermissionError):
                return False
        return True

    def release(self, destination: str) -> None:
        """Release the destination's lock."""
        with stage_errors(self._path):
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _lock_offset(destination))

    def holder(self, destination: str) -> str:
        """Return who has the destination's lock, as messages name it: ``job 17``."""
        request = self._FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _lock_offset(destination), 1, 0)
        with stage_errors(self._path):
            answer = fcntl.fcntl(self._descriptor, fcntl.F_GETLK, request)
        pid = self._FLOCK.unpack(answer)[-1]
        # The process belongs to this user, who may read its environment.
        with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            for variable in file.read().split(b"\0"):
                if variable.startswith(b"SLURM_JOB_ID="):
                    return f"job {variable.partition(b'=')[2].decode('ascii', 'replace')}"
        return f"process {pid}" if pid else "another job"

    def close(self) -> None:
        """Release all locks."""
        os.close(self._descriptor)


def _lock_offset(destination: str) -> int:
    # A file offset has 63 bits.
    return xxhash.xxh3_64_intdigest(os.fsencode(destination)) >> 1
