"""Tell how the filesystem of a job's disks stands on this node, for `stagectl status`."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base.child import LateAnswerError, answer, answer_as
from stager.node.as_user import groups_of
from stager.store.states import SharedRoom

if TYPE_CHECKING:
    from stager.base.shared_note import SharedNote

#: Seconds for the driver, and for the filesystem to tell its size.
_LIMIT = 2.0
#: Lines of the driver's that are told, and characters of one.
_LINES, _TEXT = 20, 300


def shared_room(note: SharedNote) -> SharedRoom | None:
    """Return how it stands by its note, None if it is another user's.

    The driver is asked as the job's user alone: root starts nothing that could stay as a user's
    process outside of a job.
    """
    if os.getuid() not in (0, int(note.environment["STAGE_UID"])):
        return None
    mount = note.environment.get("STAGE_MOUNT", "")
    nodes = len(note.environment.get("STAGE_NODES", "").split())
    if note.problem:
        return SharedRoom(mount, nodes, 0, 0, note.problem, [])
    free, size, problem = 0, 0, ""
    try:
        free, size = _room(mount, int(note.environment["STAGE_UID"]))
    except (OSError, ValueError):
        problem = f"{mount} does not answer"
    lines = [] if os.getuid() == 0 else _ask(note)
    return SharedRoom(mount, nodes, free, size, problem, lines)


def _room(mount: str, uid: int) -> tuple[int, int]:
    """Return the free bytes and the size. Raise OSError or ValueError."""

    def tell(output: int) -> None:
        disk = os.statvfs(mount)
        sizes = [disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize]
        os.write(output, json.dumps(sizes).encode())

    if os.getuid() == uid:
        told = answer(tell, _LIMIT)
    else:
        told = answer_as(uid, *groups_of(uid), tell, _LIMIT)
    free, size = map(int, json.loads(told))
    return free, size


def _ask(note: SharedNote) -> list[str]:
    """Return the lines that the driver's ``status`` prints, and why there are no more of them."""

    def act(output: int) -> None:
        os.dup2(output, 2)
        with suppress(OSError):
            note.become_driver("status")
        os.write(output, f"{note.driver} cannot be run".encode())

    late = []
    try:
        told = answer(act, _LIMIT)
    except LateAnswerError as error:
        told, late = error.so_far, [f"{note.driver} status takes longer than {_LIMIT:.0f} s"]
    lines = told.decode(errors="replace").splitlines()
    return [line[:_TEXT] for line in lines[:_LINES]] + late
