"""Stage to a job's folder with a store behind it, and be killed at some call of the kernel.

``python -m tests.support.kills FOLDER MOMENT`` stages a file and a folder in their second version.
Before the MOMENT-th call that changes a disk, it kills itself. Without MOMENT, it prints how many
such calls there are.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from tests.support.store_world import StoreWorld

if TYPE_CHECKING:
    from types import FrameType

#: The functions of Python's that change a disk.
CHANGES = (
    "chmod", "fchmod", "fsync", "fdatasync", "ftruncate", "ioctl", "link", "mkdir", "open",
    "pwrite", "rename", "rmdir", "sendfile", "symlink", "unlink", "utime", "write",
)  # fmt: skip


class Node(StoreWorld):
    """One node, and a source that is there already."""

    def make_source(self) -> None:
        """Make nothing."""


def change(source: Path, version: int) -> None:
    """Make a version of the source."""
    (source / "sub").mkdir(parents=True, exist_ok=True)
    for name in ("a", "sub/b", "sub/c"):
        (source / name).write_text(f"{name} of {version if name != 'a' else 0}\n")


def main() -> None:
    """Stage, and be killed meanwhile."""
    folder, moment = Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 0
    made = 0

    def count(_frame: FrameType, kind: str, function: Any) -> None:
        nonlocal made
        if kind == "c_call" and function.__name__ in CHANGES:
            made += 1
            if made == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    node = Node(MPI.COMM_SELF, folder)
    threading.setprofile(count)
    sys.setprofile(count)
    node.into("/job1")
    sys.setprofile(None)
    print(made)


if __name__ == "__main__":
    main()
