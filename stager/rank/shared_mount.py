"""Use the filesystem of the job's own disks: is it mounted on all nodes, and make folders there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stager.base.errors import DestinationError
from stager.base.shared_note import SharedNote
from stager.rank.agree import together
from stager.rank.report import tell

if TYPE_CHECKING:
    from stager.rank.agree import Context


def prepare_shared_mount(context: Context) -> None:
    """Check all nodes, make the request's empty folders, and tell what there is. Collective.

    Raise RefusedError for each node without the filesystem, and if a folder cannot be made.
    """
    request = context.request
    mount = request.shared_mount

    def make_folders() -> None:
        if context.comm.rank:
            return
        for path in () if request.dry_run else request.scratch:
            os.makedirs(path, 0o700, exist_ok=True)
        disk = os.statvfs(mount)
        free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        tell("shared", mount=mount, nodes=request.nodes, free=free, size=size)

    if mount:
        together(context, lambda: check_note(SharedNote.read(request.job), mount))
        together(context, make_folders)


def check_note(note: SharedNote | None, mount: str) -> None:
    """Raise DestinationError unless the job's filesystem is mounted on this node, by its note."""
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
