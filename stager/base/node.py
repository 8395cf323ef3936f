"""Tell which users and jobs root has made something for on this node."""

from __future__ import annotations

import os
import re
from contextlib import suppress

from stager.base import linux, paths
from stager.base.users import LARGEST_UID

#: A user's number as root writes it, not that of root itself.
_UID = re.compile(r"[1-9][0-9]{0,9}")
#: What the mark of a job begins with while its clean-up runs.
ENDING = "."


def users_of(root: str) -> list[int]:
    """Return the users who have a folder of records beneath ``root``, other than root itself.

    Entries whose name is no user's number are left out.
    """
    with suppress(OSError):
        names = linux.list_here(root or "/", paths.RECORDS_FOLDER)
        users = (int(name) for name in names if _UID.fullmatch(name))
        return sorted(uid for uid in users if uid <= LARGEST_UID)
    return []


def marked_jobs() -> list[tuple[int, int]]:
    """Return the jobs that root has marked, each with its user. Only root may ask."""
    return _jobs("")


def jobs_that_end() -> list[tuple[int, int]]:
    """Return the jobs whose clean-up has begun, each with its user. Only root may ask."""
    return _jobs(ENDING)


def _jobs(prefix: str) -> list[tuple[int, int]]:
    """Return the job and the user of each mark with ``prefix``."""
    with suppress(FileNotFoundError):  # no job was marked since the node started
        names = os.listdir(paths.JOBS_FOLDER)
        marks = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
        pairs = (mark.partition(".") for mark in marks)
        return [
            (int(job), int(uid)) for job, _, uid in pairs if job.isdecimal() and uid.isdecimal()
        ]
    return []
