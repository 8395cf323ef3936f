"""Look up users by their number, and those for whom root has made something on this node."""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress

from stager.base import linux, paths

#: The largest user id; the next one stands for none.
LARGEST_UID = (1 << 32) - 2


def name_or_uid(uid: int) -> str:
    """Return the user's name, or the number where the user has none: what ``--user`` takes."""
    return user_name(uid) or str(uid)


def user_name(uid: int) -> str:
    """Return the name of a user, empty if this machine does not know the number."""
    import pwd  # not needed where all is well

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


def is_private_group(gid: int, uid: int) -> bool:
    """Return whether the user is the only member of a group, which has the user's name then.

    Many systems give each user such a group, and let it write what the user makes.
    """
    import grp

    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return gid == uid
    return group.gr_name == user_name(uid) and set(group.gr_mem) <= {group.gr_name}


def group_name(gid: int) -> str:
    """Return the name of a group, or its number as messages name it if it has none."""
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"gid {gid}"


#: A user's number as root writes it, not that of root itself.
_UID = re.compile(r"[1-9][0-9]{0,9}")
#: What the mark of a job begins with while its clean-up runs.
ENDING = "."


def users_of(root: str) -> list[int]:
    """Return the users who have a folder of records beneath ``root``, other than root itself.

    Each owns the one that has their number. Who made the parent, where it is not root's, could have
    put any numbers there, and counts alone.
    """
    try:
        parent = linux.open_folder_here(root or "/", paths.RECORDS_FOLDER)
    except OSError:
        return []
    try:
        facts = os.fstat(parent)
        if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return []
        names = [name for name in os.listdir(parent) if _UID.fullmatch(name)]
        known = [uid for uid in map(int, names) if uid <= LARGEST_UID]
        return sorted(uid for uid in known if facts.st_uid in (0, uid) and _owns(uid, parent))
    finally:
        os.close(parent)


def _owns(uid: int, parent: int) -> bool:
    """Whether the user owns the folder of that number, or has mounted something there."""
    try:
        folder = linux.open_beneath(parent, b"%d" % uid, os.O_PATH, same_mount=True)
    except OSError as error:
        return error.errno == errno.EXDEV
    try:
        return os.fstat(folder).st_uid == uid
    finally:
        os.close(folder)


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
