"""A virtual environment in, what it needs of an interpreter that is on shared storage out.

An environment's ``bin/python`` is a link to the interpreter that made it. One of the system's own
is on every node's disk; one in a home directory, where tools that manage interpreters put them, is
read from shared storage by every node at every start, with its whole standard library.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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

#: By which of its names an environment's interpreter is found.
_NAMES = ("python", "python3")
#: What is on every node's own disk, or is to its system what that would be.
_SYSTEM = ("/", "/usr")

_HOME = re.compile(rb"^home[ \t]*=.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """What an environment needs that is not in it: the real ``path`` of its interpreter.

    ``links`` are the paths in the environment whose own targets lead there. ``at`` is where on the
    nodes it is staged by the same job, or nothing.
    """

    path: str
    links: frozenset[bytes]
    is_shared: bool
    at: str = ""


def find_interpreter(environment: str, source: str) -> Interpreter | None:
    """The interpreter of the ``environment``, unless it has one of its own, or none.

    It is shared where it is on a network's filesystem, or on that of the environment's ``source``.
    """
    home = os.path.realpath(environment)
    for name in _NAMES:
        with suppress(OSError):
            path = os.path.realpath(f"{home}/bin/{name}", strict=True)
            if path.startswith(f"{home}/"):
                return None
            shared = _is_shared(os.stat(path).st_dev, os.stat(source).st_dev)
            return Interpreter(path, frozenset(_links_to(home, path)), shared)
    return None


def _links_to(home: str, interpreter: str) -> Iterator[bytes]:
    """The links in the environment's ``bin`` that lead out of it, to the interpreter."""
    with os.scandir(f"{home}/bin") as entries:
        for entry in entries:
            if entry.is_symlink() and os.path.realpath(entry.path) == interpreter:
                target = os.path.join(f"{home}/bin", os.readlink(entry.path))
                if not os.path.normpath(target).startswith(f"{home}/"):
                    yield b"bin/" + os.fsencode(entry.name)


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


def relinked(
    targets: dict[int, bytes], paths: list[bytes], interpreter: Interpreter
) -> dict[int, bytes]:
    """The ``targets`` of an environment's links, those to its interpreter led to where it is now.

    A relative one would lead elsewhere from another place. Pure, as is `rehomed`.
    """
    target = os.fsencode(interpreter.at or interpreter.path)
    return {row: target if paths[row] in interpreter.links else was for row, was in targets.items()}


def rehomed(config: bytes, interpreter: str) -> bytes:
    """The text of a ``pyvenv.cfg`` for an interpreter that is there."""
    home = b"home = " + os.fsencode(os.path.dirname(interpreter))
    return _HOME.sub(lambda _: home, config)
