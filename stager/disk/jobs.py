"""TODO."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base import paths
from stager.base.errors import UsageError
from stager.disk.files import APPEND, READ_ONLY, as_stage_error, opened, write_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
    path = f"{paths.RUN_FOLDER}/{uid}/{job}{_USES}"
    known = uses_of(uid, job)
    text = b"".join(os.fsencode(one) + b"\0" for one in destinations if one not in known)
    try:
        with opened(path, APPEND) as file:
            if os.fstat(file).st_size + len(text) > _USES_LIMIT:
                raise UsageError(f"job {job} uses too many files; stage an archive instead")
            write_all(file, text, 0)
    except FileNotFoundError:
        return
    except OSError as error:
        raise as_stage_error(error, path) from None


def jobs_are_known() -> bool:
    """Whether root marks this node's jobs at all; otherwise any copy may be in use."""
    return os.path.exists(paths.JOBS_FOLDER)


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
    with suppress(OSError), opened(f"{paths.RUN_FOLDER}/{uid}/{job}{_USES}", READ_ONLY) as file:
        if stat.S_ISREG(os.fstat(file).st_mode):
            text = os.read(file, _USES_LIMIT)
            return frozenset(os.fsdecode(text).split("\0")[:-1])
    return frozenset()


def _live_jobs() -> Iterator[tuple[str, str]]:
    with suppress(FileNotFoundError):
        for mark in os.listdir(paths.JOBS_FOLDER):
            job, _, uid = mark.partition(".")
            yield job, uid


def _live_jobs_of(uid: int) -> Iterator[tuple[str, str]]:
    # Users may not list the marks: whose jobs run here is not for all to know.
    with suppress(FileNotFoundError):
        for name in os.listdir(f"{paths.RUN_FOLDER}/{uid}"):
            job = name.removesuffix(_USES)
            if job != name and os.path.exists(f"{paths.JOBS_FOLDER}/{job}.{uid}"):
                yield job, str(uid)


# Figures of a job's stages, for root to gather when it has ended.

#: The end of the name of a job's figures.
_FIGURES = ".figures"


def note_figures(uid: int, job: int, figures: Sequence[float]) -> None:
    """Append one line of figures to the job's own; what cannot be noted is not counted."""
    with suppress(OSError), opened(f"{paths.RUN_FOLDER}/{uid}/{job}{_FIGURES}", APPEND) as file:
        os.write(file, (" ".join(f"{figure:g}" for figure in figures) + "\n").encode())
