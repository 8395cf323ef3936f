"""TODO."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base import paths
from stager.base.errors import LaunchError
from stager.disk.files import APPEND, opened, write_all

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Seconds for which words are kept: longer than jobs run. A job that is older looks once more.
_KEPT = 30 * 24 * 3600
_APPEND_READ = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


# The word to the job's other steps on this node.


class StepStatus:
    """What the ranks leave on their node for the tasks of their job, in a folder of the user's.

    ``JOB.RESTART.STEP`` holds the exit code for the tasks that wait in one step; while a rank has
    it locked, they wait. ``JOB.RESTART`` has a line of directives for every stage of the job that
    was well; tasks of later steps that find their own there need not wait. ``JOB.RESTART.shards``
    has the paths that become the job's STAGE_SHARDS, one a line. The folder is on a filesystem that
    a reboot empties.
    """

    def __init__(self, uid: int) -> None:
        self._folder = f"{paths.RUN_FOLDER}/{uid}"
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
            with opened(f"{self._folder}/{self._job}", APPEND) as done:
                os.write(done, os.fsencode(f"{directives}\n"))
        write_all(self._descriptor, f"{code}\n".encode(), 0)

    def _name_lists(self, paths: Sequence[str]) -> None:
        """Have the job's tasks find these lists, and those of its earlier stages."""
        if not paths:
            return
        path = f"{self._folder}/{self._job}.shards"
        with opened(path, _APPEND_READ) as lists, open(lists, "a+b", closefd=False) as file:
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
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _KEPT:
                    os.unlink(entry.path)
