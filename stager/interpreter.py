"""A virtual environment in, what it needs of an interpreter that is on shared storage out.

An environment's ``bin/python`` is a link to the interpreter that made it. One of the system's own
is on every node's disk; one in a home directory, where tools that manage interpreters put them, is
read from shared storage by every node at every start, with its whole standard library.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Filesystems that are other machines', as the kernel names them in /proc/self/mountinfo.
_NETWORK = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "fuse", "glusterfs", "gpfs", "lustre", "nfs", "nfs4",
        "orangefs", "panfs", "pvfs2", "smb3", "virtiofs", "wekafs",
    }
)  # fmt: skip
_FUSE = "fuse."
#: Those of them that show an image, which may well be on the node.
_IMAGES = frozenset({"fuse.squashfuse", "fuse.squashfuse_ll", "fuse.erofsfuse"})

#: What is on every node's own disk, or is to its system what that would be.
_SYSTEM = ("/", "/usr")

_PYTHON = re.compile(rb"bin/python[0-9.]*")
_HOME = re.compile(rb"^home[ \t]*=.*$", re.MULTILINE)


def shared_interpreter(environment: str, source: str) -> str:
    """The real path of the ``environment``'s interpreter, if that is on shared storage, or nothing.

    Such is a network's filesystem, and the one that the ``source`` of the environment is on.
    """
    with suppress(OSError):
        path = os.path.realpath(f"{environment}/bin/python", strict=True)
        inside = path.startswith(f"{os.path.realpath(environment)}/")
        if not inside and _is_shared(os.stat(path).st_dev, os.stat(source).st_dev):
            return path
    return ""


def _is_shared(device: int, source: int) -> bool:
    if device in [os.stat(folder).st_dev for folder in _SYSTEM]:
        return False
    kind = _filesystem(device)
    is_network = kind in _NETWORK or (kind.startswith(_FUSE) and kind not in _IMAGES)
    return is_network or device == source


def _filesystem(device: int) -> str:
    """The kind of filesystem that has the number ``device``, or nothing."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            fields, _, kind = line.partition(" - ")
            if fields.split()[2] == number:
                return kind.split()[0]
    return ""


def staged_at(interpreter: str, places: Iterable[tuple[str, str]]) -> str:
    """Where on the nodes the ``interpreter`` comes to lie by what else the job stages, or nothing.

    ``places`` are the folders that are staged as they are: sources and destinations.
    """
    for source, destination in places:
        real = os.path.realpath(source)
        if interpreter.startswith(f"{real}/"):
            return destination + interpreter[len(real) :]
    return ""


def note(interpreter: str, *, may_be_staged: bool) -> str:
    """What the user is told whose environment reads from shared storage still."""
    text = f"its interpreter {interpreter} is read from shared storage"
    installation = os.path.dirname(os.path.dirname(interpreter))
    return f"{text}; add --stage={installation}:DST" if may_be_staged else text


def relinked(targets: dict[int, bytes], paths: list[bytes], interpreter: str) -> dict[int, bytes]:
    """The ``targets`` of an environment's links, those to its interpreter led to where it is now.

    Pure, as is `rehomed`.
    """
    return {
        row: os.fsencode(interpreter)
        if target.startswith(b"/") and _PYTHON.fullmatch(paths[row])
        else target
        for row, target in targets.items()
    }


def rehomed(config: bytes, interpreter: str) -> bytes:
    """The text of a ``pyvenv.cfg`` for an interpreter that is there."""
    home = b"home = " + os.fsencode(os.path.dirname(interpreter))
    return _HOME.sub(lambda _: home, config)
