"""TODO."""

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
        with stage_errors(path):
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
