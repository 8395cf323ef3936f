"""Rewrite a virtual environment for the place where it is staged, and find its interpreter.

An environment names its own folder in few of its files: the programs in ``bin``, by their first
lines; the scripts that activate it; ``pyvenv.cfg``; and the ``.pth`` files of what is installed in
place. All of them are texts, but for programs that have something else behind their first line.

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

from stager.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: The script that says where the environment lay when it was made, and how it does.
ACTIVATE = b"bin/activate"
#: What every virtual environment has.
CONFIG = b"pyvenv.cfg"
#: What every conda environment has, which also names its folder in its programs.
CONDA = b"conda-meta"
_HOME = b"VIRTUAL_ENV="
#: Folders by which an environment may know itself besides where it was found, and bytes of a line
#: that names one.
_MOST_HOMES, _LONGEST_LINE = 4, 4096
#: Bytes of the largest file that is changed throughout: scripts are smaller.
LARGEST = 1 << 20
#: Of the largest one whose first line is, for it is kept as it was: programs that are archives.
LARGEST_PROGRAM = 16 << 20
#: What may not stand before a folder's name, which would be the end of another's; and what may
#: stand behind it, where it is not the beginning of another's.
_BEGIN, _END = rb"(?<![\w./+@%~\x80-\xff-])", rb"""(?=[/\s"':;,)\]}]|$)"""
#: Destinations that mean themselves in a shell, in a search path and behind "#!".
_PLAIN = re.compile(r"[\w./+@%=,:~-]+")
_NAMING_FILES = re.compile(
    rb"bin/[^/]+|pyvenv\.cfg|lib(?:64)?/python[0-9.]+/site-packages/[^/]+\.pth"
)


def may_name_its_folder(path: bytes) -> bool:
    """Whether a file at that path of an environment may have to change with its place."""
    return bool(_NAMING_FILES.fullmatch(path))


def homes(source: str, activate: bytes) -> tuple[bytes, ...]:
    """The folders by whose names the environment may know itself, the longest first.

    Where it was found, and where it was made as its script ``activate`` says.
    """
    found = {_as_home(os.fsencode(source)): None}
    for line in activate.split(b"\n"):
        if len(found) > _MOST_HOMES:
            break
        if len(line) <= _LONGEST_LINE and _HOME in line and (home := _home(line)):
            found[_as_home(home)] = None
    return tuple(sorted(found, key=len, reverse=True))


def _as_home(path: bytes) -> bytes:
    return path.rstrip(b"/")


def _home(line: bytes) -> bytes:
    """The folder that a line of a shell script has VIRTUAL_ENV be, or nothing."""
    text = line.strip()
    if text.startswith((b"export ", b"export\t")):
        text = text[len(b"export") :].lstrip()
    if not text.startswith(_HOME):
        return b""
    value = text.removeprefix(_HOME)
    for quote in (b"'", b'"'):
        if len(value) > 1 and value.startswith(quote) and value.endswith(quote):
            value = value[1:-1]
            break
    return value if value.startswith(b"/") and not set(value) & set(b"\"'") else b""


def check_place(destination: str) -> None:
    """Raise UsageError for a place whose name a shell, or the kernel, would not take as it is."""
    if not _PLAIN.fullmatch(destination):
        raise UsageError(
            f"{destination} has a character in it that Python environments cannot be staged to by "
            "relocate; choose a DST of letters, digits and . _ - + @ % = , : ~ only"
        )


def led(target: bytes, source: str, destination: str) -> bytes:
    """A link's ``target``, beneath the ``destination`` where it was one beneath the ``source``."""
    home = _as_home(os.fsencode(source))
    inside = target == home or target.startswith(home + b"/")
    return os.fsencode(destination) + target[len(home) :] if inside else target


def relocated(data: bytes, before: Iterable[bytes], now: bytes) -> bytes:
    """The file's ``data`` with the folders ``before`` replaced by ``now``.

    Of what is no text, and of what is too large for one, that is done in the first line of a
    program only. That keeps its length where it can, for an archive may be behind it that knows
    how far it is from the beginning; the kernel takes no notice of blanks at the line's end.
    """
    names = b"|".join(re.escape(home) for home in before if home)
    if not names:
        return data
    pattern = re.compile(_BEGIN + b"(?:" + names + b")" + _END)
    if b"\0" not in data and len(data) <= LARGEST:
        return pattern.sub(lambda _: now, data)
    line, newline, rest = data.partition(b"\n")
    if not is_program(line) or b"\0" in line or len(line) > _LONGEST_LINE:
        return data
    return pattern.sub(lambda _: now, line).ljust(len(line)) + newline + rest


def is_program(head: bytes) -> bool:
    """Whether a file that begins with ``head`` names its interpreter in its first line."""
    return head.startswith(b"#!")


# The interpreter.

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
_PYTHON_NAMES = ("python", "python3")
#: What is on every node's own disk, or is to its system what that would be.
_SYSTEM = ("/", "/usr")

_HOME_LINE = re.compile(rb"^home[ \t]*=.*$", re.MULTILINE)


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
    for name in _PYTHON_NAMES:
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
    return _HOME_LINE.sub(lambda _: home, config)
