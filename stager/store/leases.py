"""Note what each job of this node uses, so that it is not evicted, and what its stages did.

A job's list is in its user's room beneath /run, so that it can be written when the disk is full,
and a reboot removes it. Root's clean-up has it removed with the job's other files when the job has
ended, and removes the room after the user's last job. Of what all nodes see, there is a second list
in the folder of the copy's cache (`note_shared_uses`), for the jobs of other nodes.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from contextlib import suppress
from itertools import islice, zip_longest
from typing import TYPE_CHECKING

from stager.base import paths
from stager.base.errors import UsageError
from stager.base.mounts import mounts
from stager.base.telemetry import count
from stager.base.users import marked_jobs
from stager.fs.files import (
    APPEND,
    READ_FILE,
    append_whole,
    as_room_error,
    as_stage_error,
    opened,
    stage_errors,
)
from stager.fs.reader import BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The suffix of a list's name after the job's id, and the largest list in bytes.
_USES, _USES_LIMIT = ".uses", 1 << 20
#: The id of a job in a list's name: 32 bits (slurm.h).
_JOB = re.compile("[1-9][0-9]{0,9}")
#: The lists that are read of another user, who may have made any number, and the destinations that
#: are taken from them.
_MOST_LISTS, _MOST_FOREIGN = 16, 1000
#: The suffix of the name of a job's figures, which root collects at the job's end, and the bytes
#: of them that are read.
_FIGURES, _FIGURES_LIMIT = ".figures", 64 * 1024
#: Seconds in which another user's process answers to root.
_OWNER_LIMIT = 2
#: The entries of an access control list (acl(5)), and where one names no user: the owner, the
#: group, the mask, others.
_OWNER, _USER, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20
_NO_ID = 0xFFFFFFFF


def linked(entry: str) -> str:
    """Return what is noted of an entry to which a job's destination is a link.

    It must not be replaced then; what else is made of it lasts without it.
    """
    return f"{entry}/."


def note_uses(uid: int, job: int, destinations: Sequence[str], reader: int = 0) -> None:
    """Keep the ``destinations`` on this node as long as the user's job runs.

    The account ``reader`` may read the list, if that is not 0: the one that stages for all users
    must know which of its copies are in use. Do nothing if neither the plugin nor a prolog has made
    the user's folder.
    Raise UsageError if the list becomes too long, SpaceError or DestinationError if it cannot be
    written.
    """
    folder = room_of(uid)
    path = _list_path(folder, job)
    try:
        _append(folder, job, destinations)
        if reader:
            _open_to(reader, folder, 7, 5)
            _open_to(reader, path, 6, 4)
    except FileNotFoundError:
        return
    except OSError as error:
        raise as_room_error(error, path) or as_stage_error(error, path) from None


def note_shared_uses(folder: str, job: int, destinations: Sequence[str]) -> None:
    """Keep the ``destinations``, which all nodes see, in a cache's ``folder`` as long as it runs.

    Raise as `note_uses` does.
    """
    with stage_errors(_list_path(folder, job)):
        _append(folder, job, destinations)
    with suppress(OSError), opened(_mark(job), APPEND):
        pass


def _append(folder: str, job: int, destinations: Sequence[str]) -> None:
    """Add what is new to a job's list. Raise UsageError or OSError."""
    known = uses_in(folder, job)
    text = b"".join(os.fsencode(one) + b"\0" for one in destinations if one not in known)
    with opened(_list_path(folder, job), APPEND) as file:
        if os.fstat(file).st_size + len(text) > _USES_LIMIT:
            raise UsageError(f"job {job} stages too many paths; stage a folder instead")
        append_whole(file, text)


def room_of(uid: int | str) -> str:
    """Return the folder of a user's room on this node."""
    return f"{paths.RUN_FOLDER}/{uid}"


def _list_path(folder: str, job: int | str) -> str:
    return f"{folder}/{job}{_USES}"


def _open_to(reader: int, file: str | int, owner_bits: int, bits: int) -> None:
    """Let one more user have the ``bits`` of a file's permissions, and its group none."""
    entries = (
        (_OWNER, owner_bits, _NO_ID), (_USER, bits, reader), (_GROUP, 0, _NO_ID),
        (_MASK, bits, _NO_ID), (_OTHERS, 0, _NO_ID),
    )  # fmt: skip
    packed = b"".join(struct.pack("<HHI", *entry) for entry in entries)
    with suppress(OSError):  # the filesystem has no such lists: then its copies may be evicted
        os.setxattr(file, "system.posix_acl_access", struct.pack("<I", 2) + packed)


def jobs_are_known() -> bool:
    """Return whether root marks the jobs of this node. If not, any copy may be in use."""
    return os.path.exists(paths.JOBS_FOLDER)


def jobs_using(uid: int | None, root: str = "") -> dict[str, list[int]]:
    """Return the ids of the jobs that use each destination, of one user or of all.

    Only root may ask for all users, or for another one. It reads nothing of theirs itself: users
    who do not answer in time use nothing. Another account that asks for all users learns from the
    lists that it may read, see `note_uses`, and of them what is beneath ``root``.
    """
    if uid is None and os.getuid():
        return _readable_jobs(root)
    uids = sorted({owner for _, owner in marked_jobs()}) if uid is None else [uid]
    found: dict[str, list[int]] = {}
    for owner in uids:
        for destination, jobs in _jobs_of(owner).items():
            found.setdefault(destination, []).extend(jobs)
    return found


def uses_of(uid: int | str, job: int | str) -> frozenset[str]:
    """Return the destinations in one job's list in its user's room, whether it runs or not."""
    return uses_in(room_of(uid), job)


def uses_in(folder: str, job: int | str) -> frozenset[str]:
    """Return the destinations in one job's list in a room or a cache, whether it runs or not."""
    return frozenset(os.fsdecode(_list_in(folder, job)).split("\0")[:-1])


def _list_in(folder: str, job: int | str) -> bytes:
    with suppress(OSError), opened(_list_path(folder, job), READ_FILE) as file:
        facts = os.fstat(file)
        # Another user's list with holes is forged: it would take no room, and much time. Of one's
        # own, a filesystem with servers may not yet know the blocks.
        is_whole = facts.st_uid == os.geteuid() or facts.st_blocks * BLOCK >= facts.st_size
        if stat.S_ISREG(facts.st_mode) and is_whole:
            return os.read(file, _USES_LIMIT)
    return b""


def _jobs_of(uid: int) -> dict[str, list[int]]:
    if uid == os.getuid():
        return jobs_in(room_of(uid))
    from stager.base.child import NO_GROUP, answer_as  # not needed by a rank

    def tell(output: int) -> None:
        lines = (
            b"%d %s\0" % (job, os.fsencode(destination))
            for destination, jobs in jobs_in(room_of(uid)).items()
            for job in jobs
        )
        with open(output, "wb") as file:
            file.writelines(lines)

    running = {job for job, owner in marked_jobs() if owner == uid}
    found: dict[str, list[int]] = {}
    with suppress(OSError):
        for line in answer_as(uid, NO_GROUP, [], tell, _OWNER_LIMIT).split(b"\0")[:-1]:
            job, _, destination = line.partition(b" ")
            if job.isdigit() and int(job) in running:
                found.setdefault(os.fsdecode(destination), []).append(int(job))
    return found


def _readable_jobs(root: str) -> dict[str, list[int]]:
    """Return what the lists say that this account may read; of each user, a limited number."""
    found: dict[str, list[int]] = {}
    beneath = re.compile(rb"(?<![^\0])" + re.escape(os.fsencode(f"{root}/")) + rb"[^\0]*(?=\0)")
    foreign = [mount.point for mount in mounts() if mount.kind != "tmpfs"]
    with suppress(FileNotFoundError):
        for name in sorted(os.listdir(paths.RUN_FOLDER)):
            room = room_of(name)
            # A user's filesystem may never answer. Whoever mounts one there is not protected.
            if name.isdecimal() and not any(f"{one}/".startswith(f"{room}/") for one in foreign):
                count()
                every = (
                    (destination[0], job)
                    for job in lists_in(room)[:_MOST_LISTS]
                    for destination in beneath.finditer(_list_in(room, job))
                )
                for destination, job in dict.fromkeys(islice(every, _MOST_FOREIGN)):
                    found.setdefault(os.fsdecode(destination), []).append(int(job))
    return found


def jobs_in(folder: str) -> dict[str, list[int]]:
    """Return the jobs that use each destination, by the lists in a room or a cache."""
    found: dict[str, list[int]] = {}
    for job in lists_in(folder):
        for destination in uses_in(folder, job):
            found.setdefault(destination, []).append(int(job))
    return found


def lists_in(folder: str) -> list[str]:
    """Return the jobs that have a list in a room or a cache."""
    with suppress(FileNotFoundError, PermissionError):  # root has just removed the room
        names = sorted(os.listdir(folder))
        jobs = (name.removesuffix(_USES) for name in names if name.endswith(_USES))
        return [job for job in jobs if _JOB.fullmatch(job)]
    return []


def _mark(job: int) -> str:
    """Return the file that tells that a job's lists in caches were made from this node."""
    return f"{room_of(os.getuid())}/{job}.lists"


def has_made_lists(job: int) -> bool:
    """Return whether this user's job has its lists in caches from this node.

    Another node may leave the job before that ends.
    """
    return os.path.exists(_mark(job))


def remove_list(folder: str, job: int | str) -> None:
    """Remove the list of a job that has ended from a cache, if it is there."""
    with suppress(OSError):
        os.unlink(_list_path(folder, job))


def figures_of(uid: int, job: int) -> list[float]:
    """Return the sums of a job's figures. Ignore lines that are none."""
    sums: list[float] = []
    with suppress(OSError), opened(f"{paths.RUN_FOLDER}/{uid}/{job}{_FIGURES}", READ_FILE) as file:
        if stat.S_ISREG(os.fstat(file).st_mode):
            for line in os.read(file, _FIGURES_LIMIT).splitlines():
                with suppress(ValueError):
                    figures = [float(word) for word in line.split()]
                    sums = [sum(pair) for pair in zip_longest(sums, figures, fillvalue=0.0)]
    return sums


def remove_files(uid: int, job: int) -> None:
    """Remove all files of a job that has ended from its user's room."""
    folder = room_of(uid)
    with suppress(OSError):
        for name in os.listdir(folder):
            if name.partition(".")[0] == str(job):
                with suppress(OSError):  # a folder that the user made there may stay
                    os.unlink(f"{folder}/{name}")


def note_figures(uid: int, job: int, figures: Sequence[float]) -> None:
    """Append one line of figures to the job's file. Ignore errors: they cost only the figures."""
    with suppress(OSError), opened(f"{paths.RUN_FOLDER}/{uid}/{job}{_FIGURES}", APPEND) as file:
        os.write(file, (" ".join(f"{figure:g}" for figure in figures) + "\n").encode())
