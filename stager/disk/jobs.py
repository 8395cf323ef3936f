"""Note what each job of this node uses, so that it is not evicted, and what its stages did.

A job's list is in its user's folder beneath /run, so that it can be written when the disk is full,
and a reboot removes it. It counts as long as the mark of the job, which root makes, exists.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base import paths
from stager.base.errors import UsageError
from stager.disk.files import APPEND, READ_FILE, as_stage_error, opened, write_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: The suffix of a list's name after the job's id, and the largest list in bytes.
_USES, _USES_LIMIT = ".uses", 16 << 20
#: Lets those read the list to whom an access control list of the folder, which root made, opens it.
_USES_MODE = 0o640
#: The suffix of the name of a job's figures, which root collects at the job's end.
_FIGURES = ".figures"


def note_uses(uid: int, job: int, destinations: Sequence[str]) -> None:
    """Keep the ``destinations`` on this node as long as the user's job runs.

    Do nothing if neither the plugin nor a prolog has made the user's folder. Raise UsageError if
    the list becomes too long, SpaceError or DestinationError if it cannot be written.
    """
    path = f"{paths.RUN_FOLDER}/{uid}/{job}{_USES}"
    known = uses_of(uid, job)
    text = b"".join(os.fsencode(one) + b"\0" for one in destinations if one not in known)
    try:
        with opened(path, APPEND) as file:
            os.fchmod(file, _USES_MODE)
            if os.fstat(file).st_size + len(text) > _USES_LIMIT:
                raise UsageError(f"job {job} stages too many paths; stage a folder instead")
            write_all(file, text, 0)
    except FileNotFoundError:
        return
    except OSError as error:
        raise as_stage_error(error, path) from None


def jobs_are_known() -> bool:
    """Return whether root marks the jobs of this node. If not, any copy may be in use."""
    return os.path.exists(paths.JOBS_FOLDER)


def uses(uid: int | None) -> frozenset[str]:
    """Return what the running jobs of a user use; of all users if None."""
    return frozenset(jobs_using(uid))


def jobs_using(uid: int | None) -> dict[str, list[int]]:
    """Return the ids of the running jobs that use each destination, of one user or of all.

    Only root, and the account that stages for all users, can read the lists of other users.
    """
    found: dict[str, list[int]] = {}
    for job, owner in sorted(_live_jobs() if uid is None else _live_jobs_of(uid)):
        for destination in uses_of(owner, job):
            found.setdefault(destination, []).append(int(job))
    return found


def uses_of(uid: int | str, job: int | str) -> frozenset[str]:
    """Return the destinations in the list of one job, whether it still runs or not."""
    with suppress(OSError), opened(f"{paths.RUN_FOLDER}/{uid}/{job}{_USES}", READ_FILE) as file:
        if stat.S_ISREG(os.fstat(file).st_mode):
            text = os.read(file, _USES_LIMIT)
            return frozenset(os.fsdecode(text).split("\0")[:-1])
    return frozenset()


def _live_jobs() -> Iterator[tuple[str, str]]:
    with suppress(FileNotFoundError):
        for name in os.listdir(paths.RUN_FOLDER):
            if name.isdecimal():
                with suppress(OSError):  # whoever hides the list does without its protection
                    yield from _live_jobs_of(int(name))


def _live_jobs_of(uid: int) -> Iterator[tuple[str, str]]:
    # Users may not list the marks, since that would show whose jobs run here.
    with suppress(FileNotFoundError):
        for name in os.listdir(f"{paths.RUN_FOLDER}/{uid}"):
            job = name.removesuffix(_USES)
            if job != name and _may_run(job, uid):
                yield job, str(uid)


def _may_run(job: str, uid: int) -> bool:
    """Return whether root's mark says that the job runs, or only root can see the mark."""
    try:
        os.stat(f"{paths.JOBS_FOLDER}/{job}.{uid}")
    except PermissionError:
        return True  # at the job's end, root removes its list too
    except OSError:
        return False
    return True


def note_figures(uid: int, job: int, figures: Sequence[float]) -> None:
    """Append one line of figures to the job's file. Ignore errors: they cost only the figures."""
    with suppress(OSError), opened(f"{paths.RUN_FOLDER}/{uid}/{job}{_FIGURES}", APPEND) as file:
        os.write(file, (" ".join(f"{figure:g}" for figure in figures) + "\n").encode())
