"""Use the filesystem of the job's own disks: is it mounted on all nodes, and make folders there."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from stager.base.codec import NUMBER
from stager.base.errors import DestinationError
from stager.base.shared_note import SharedNote
from stager.rank.agree import together
from stager.rank.report import tell

if TYPE_CHECKING:
    from stager.rank.agree import Context

#: Seconds for which rank 0 waits for the disks of all nodes, and the share of them that is enough.
_DISKS_LIMIT, _DISKS_SHARE = 5.0, 0.9


def prepare_shared_mount(context: Context) -> None:
    """Check all nodes, make the request's empty folders, and tell what there is. Collective.

    Raise RefusedError for each node without the filesystem, and if a folder cannot be made.
    """
    request = context.request
    mount = request.shared_mount

    def look() -> int:
        note = SharedNote.read(request.job)
        check_note(note, mount)
        return _size_of(note.environment.get("STAGE_FOLDER", mount)) if note else 0

    def make_folders() -> None:
        if context.comm.rank:
            return
        _await_disks(mount, sum(sizes))
        for path in () if request.dry_run else request.scratch:
            os.makedirs(path, 0o700, exist_ok=True)
        disk = os.statvfs(mount)
        free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        tell("shared", mount=mount, nodes=request.nodes, free=free, size=size)

    if mount:
        sizes = together(context, look, NUMBER)
        together(context, make_folders)


def _size_of(path: str) -> int:
    """Return the bytes of the disk that ``path`` is on, 0 if it is not there."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return 0
    return disk.f_blocks * disk.f_frsize


def _await_disks(mount: str, size: int) -> None:
    """Wait until a filesystem made of disks of ``size`` bytes has them all, or for a limited time.

    Its servers are up by now, but do not know each other at once. What they need for themselves is
    not counted.
    """
    deadline = time.monotonic() + _DISKS_LIMIT
    while _size_of(mount) < _DISKS_SHARE * size and time.monotonic() < deadline:
        time.sleep(0.1)


def check_note(note: SharedNote | None, mount: str) -> None:
    """Raise DestinationError unless the job's filesystem is on this node, as its note says."""
    if note is None:
        raise DestinationError(
            f"{mount}: no filesystem of the job's disks was started; it is if an #SBATCH --stage "
            "option or a #STAGE line of a script file names shared:, and if the node's prolog runs "
            "slurm-stage"
        )
    if note.problem:
        raise DestinationError(
            f"{mount}: the filesystem of the job's disks did not start: {note.problem}; tell the "
            "administrator"
        )
    if not os.path.ismount(mount):
        raise DestinationError(
            f"{mount}: the driver of [shared_fs] has mounted nothing there; tell the administrator "
            "to look at it"
        )
