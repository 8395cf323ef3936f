"""Mark a job and give its user a room beneath /run; take both away at the end, as root.

A room is a small filesystem of the user's own, so that nobody can fill /run. With the plugin,
prolog/spank/room.c mounts it, here only a site's prolog does. It goes with its user's last mark.
"""

from __future__ import annotations

import os
import syslog
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base import linux, paths
from stager.base.linux import MountFlag, UnmountFlag
from stager.base.mounts import mounts
from stager.base.users import ENDING, jobs_that_end, marked_jobs
from stager.node.folders import locked, made, opened

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

#: The limits of a room; stage.h has the same, with their reason.
_SIZE = "size=16m,nr_inodes=4096"
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
#: Seconds to wait for the lock, which others hold for a moment only.
_LOCK_LIMIT = 5
_UNMOUNT = UnmountFlag.DETACH | UnmountFlag.NOFOLLOW
#: Rounds in which mounts are removed that a user makes meanwhile.
_ROUNDS = 10
#: Seconds after which the clean-up of a job has ended, whatever became of it (`epilog`).
_LONGEST_ENDING = 60


def begin_job(job: int, uid: int, gid: int) -> None:
    """Mark the job and make its user's room. Raise OSError."""
    with opened(paths.RUN) as run, made(run, paths.RUN_NAME, 0o755) as parent, _locked():
        with made(parent, os.path.basename(paths.JOBS_FOLDER), 0o700) as jobs:
            os.fchmod(jobs, 0o700)  # marks would show who runs jobs here
            with opened(f"{job}.{uid}", jobs, flags=_CREATE):
                pass
        if uid not in _rooms():
            _make_room(uid, gid)


def end_job(job: int, uid: int) -> float:
    """Mark the job as one that ends, until `forget_job`: no copy is in use because of it any more.

    Return the seconds since it was marked, 0 if it was not.
    """
    path = f"{paths.JOBS_FOLDER}/{job}.{uid}"
    with suppress(FileNotFoundError):
        begun = os.lstat(path).st_mtime
        os.rename(path, _ending(job, uid))
        return max(0.0, time.time() - begun)
    return 0.0


def forget_job(job: int, uid: int) -> None:
    """Remove the mark of a job that ended, after its clean-up. Raise OSError."""
    with suppress(FileNotFoundError):
        os.unlink(_ending(job, uid))


def _ending(job: int, uid: int) -> str:
    return f"{paths.JOBS_FOLDER}/{ENDING}{job}.{uid}"


def _users_of_ending_jobs() -> set[int]:
    """Return the users whose rooms the clean-ups of other jobs need, which end now, too."""
    found = set()
    for job, uid in jobs_that_end():
        with suppress(FileNotFoundError):  # forgotten meanwhile
            ended = os.lstat(_ending(job, uid)).st_ctime
            if abs(time.time() - ended) < _LONGEST_ENDING:
                found.add(uid)
    return found


def remove_rooms() -> None:
    """Unmount the rooms of all users without a mark. Raise OSError."""
    with _locked():
        marked = {uid for _, uid in marked_jobs()} | _users_of_ending_jobs()
        for _ in range(_ROUNDS):
            left = [uid for uid in _rooms() if uid not in marked]
            for uid in left:  # once for each mount: the user may have mounted over it
                with suppress(OSError):  # unmounted meanwhile
                    linux.unmount(f"{paths.RUN_FOLDER}/{uid}", _UNMOUNT)
            if not left:
                break
            for uid in left:
                with suppress(OSError):
                    os.rmdir(f"{paths.RUN_FOLDER}/{uid}")


def _locked() -> AbstractContextManager[int]:
    return locked(f"{paths.RUN_FOLDER}/lock", _LOCK_LIMIT)


def _rooms() -> list[int]:
    """Return the users that have a room, as often as something is mounted there."""
    prefix = f"{paths.RUN_FOLDER}/"
    names = [one.point.removeprefix(prefix) for one in mounts() if one.point.startswith(prefix)]
    return [int(name) for name in names if name.isdecimal()]


def _make_room(uid: int, gid: int) -> None:
    """Mount the room, or make a plain folder where that fails. Raise OSError."""
    path = f"{paths.RUN_FOLDER}/{uid}"
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    # What is below is root's, so that nobody gets hold of it before the mount or after it.
    os.chown(path, 0, 0, follow_symlinks=False)
    flags = MountFlag.NOSUID | MountFlag.NODEV | MountFlag.NOEXEC
    try:
        linux.mount_tmpfs(path, flags, f"{_SIZE},mode=0700,uid={uid},gid={gid}")
    except OSError as error:
        os.chown(path, uid, gid, follow_symlinks=False)
        syslog.syslog(
            syslog.LOG_WARNING,
            f"no filesystem can be mounted at {path}: {error.strerror}; the user can fill /run",
        )
