"""Tell which users and jobs root has made something for on this node."""

from __future__ import annotations

import os
from contextlib import suppress

from stager.base import linux, paths


def users_of(root: str) -> list[int]:
    """Return the users who have a folder of records beneath ``root``, other than root itself."""
    with suppress(OSError):
        names = linux.list_here(root or "/", paths.RECORDS_FOLDER)
        return sorted(int(name) for name in names if name.isdecimal() and int(name))
    return []


def marked_jobs() -> list[tuple[int, int]]:
    """Return the jobs that root has marked, each with its user. Only root may ask."""
    with suppress(FileNotFoundError):
        pairs = (name.partition(".") for name in os.listdir(paths.JOBS_FOLDER))
        return [
            (int(job), int(uid)) for job, _, uid in pairs if job.isdecimal() and uid.isdecimal()
        ]
    return []
