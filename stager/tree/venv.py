"""Relocate a virtual environment: rewrite its absolute paths, and find its interpreter.

An environment names its own folder in few files: in the first lines of its programs, in its
activate scripts, in ``pyvenv.cfg`` and in the ``.pth`` files of editable installs.

Its ``bin/python`` is a link to the interpreter that made it. Every node has the system's own on its
disk. Another one, in a home directory say, is read from shared storage by every node at every
start, with its whole standard library, unless the same job stages it too.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import xxhash

from stager.base.errors import UsageError
from stager.base.mounts import mounts
from stager.base.paths import VENV_CONFIG
from stager.base.text import printable
from stager.tree.listing import Kind, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from stager.tree.listing import Listing
    from stager.tree.partial import PartialTree

#: A folder that every conda environment has.
CONDA = b"conda-meta"
#: The script that names the folder in which the environment was made.
ACTIVATE = b"bin/activate"
_VARIABLE = b"VIRTUAL_ENV="
_HOME_LINE = re.compile(rb"^home[ \t]*=.*$", re.MULTILINE)
#: The files that may name the environment's folder.
_NAMING_FILES = re.compile(
    rb"bin/[^/]+|pyvenv\.cfg|lib(?:64)?/python[0-9.]+/site-packages/[^/]+\.pth"
)
#: The most bytes of a file that is rewritten throughout; scripts are smaller.
LARGEST = 1 << 20
#: The most bytes of a program of which the first line is rewritten. Some programs are archives.
#: Its original data is kept in the tree's table, so there is a limit.
LARGEST_PROGRAM = 16 << 20
#: The most folders that are taken from the activate script, and the most bytes of a line there.
_MOST_FOLDERS, _LONGEST_LINE = 4, 4096
#: A folder's path is replaced only where it is neither the end of a longer path nor the beginning
#: of another name.
_BEGIN, _END = rb"(?<![\w./+@%~\x80-\xff-])", rb"""(?=[/\s"':;,)\]}]|$)"""
#: Destinations that need no quoting in a shell, in a search path or behind "#!".
_PLAIN = re.compile(r"[\w./+@%=,:~-]+")

#: Network filesystems, as the kernel names them.
_NETWORK = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "fuse", "glusterfs", "gpfs", "lustre", "nfs", "nfs4",
        "orangefs", "panfs", "pvfs2", "smb3", "virtiofs", "wekafs",
    }
)  # fmt: skip
#: Filesystems with this prefix may be network filesystems too, but for mounted images.
_FUSE = "fuse."
_IMAGES = frozenset({"fuse.squashfuse", "fuse.squashfuse_ll", "fuse.erofsfuse"})
#: The names in ``bin`` by which an environment's interpreter is found.
_PYTHON_NAMES = ("python", "python3")
#: Folders on the system's own filesystems, which are not shared even on diskless nodes.
_SYSTEM = ("/", "/usr")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The interpreter of an environment, which is not in the environment; ``path`` has no links.

    ``links`` are the paths of the environment's links whose own targets lead to it. ``at`` is its
    path on the nodes if the same job stages it, or empty.
    """

    path: str
    links: frozenset[bytes]
    is_shared: bool
    at: str = ""


@dataclass(frozen=True, slots=True)
class Relocation:
    """From where to where an environment moves; ``interpreter`` is an `Interpreter.at`."""

    source: str
    destination: str
    interpreter: str = ""


def check_place(destination: str) -> None:
    """Raise UsageError if ``destination`` cannot stand unquoted in a script or behind ``#!``."""
    if not _PLAIN.fullmatch(destination):
        raise UsageError(
            f"{destination} has a character that the path of a relocated Python environment "
            "cannot have; choose a DST of letters, digits and . _ - + @ % = , : ~ only"
        )


def relocate(
    tree: PartialTree,
    listing: Listing,
    relocation: Relocation,
    *,
    fresh: bytes | bytearray,
    originals: Mapping[int, bytes],
) -> dict[int, tuple[bytes, bytes]]:
    """Rewrite the paths in those files of the ``tree`` whose rows are marked in ``fresh``.

    Return the rows of the files that changed, each with the file's data before and the xxh3-128 of
    its data now. An earlier stage rewrote the files that are not fresh; ``originals`` has their
    data before that. Raise UsageError if the tree is no virtual environment.
    """
    check_place(relocation.destination)
    rows = _rows_to_rewrite(listing)
    if VENV_CONFIG not in rows:
        raise _not_relocatable(listing, relocation)
    script = b""
    if (activate := rows.get(ACTIVATE)) is not None:
        script = originals.get(activate) or tree.read(activate, LARGEST)
    folders = own_folders(relocation.source, script)
    changed: dict[int, tuple[bytes, bytes]] = {}
    for row in dict.fromkeys(rows.values()):
        if fresh[row] and (original := _rewritable(tree, row, listing.sizes[row])):
            data = rewritten(original, folders, os.fsencode(relocation.destination))
            if row == rows[VENV_CONFIG] and relocation.interpreter:
                data = with_home(data, relocation.interpreter)
            if data != original:
                tree.rewrite(row, data)
                changed[row] = original, xxhash.xxh3_128_digest(data)
    return changed


def _not_relocatable(listing: Listing, relocation: Relocation) -> UsageError:
    source, destination = relocation.source, relocation.destination
    if CONDA in listing.paths:
        return UsageError(
            f"{source} is a conda environment, which relocate cannot change; pack it for its "
            f"destination with conda-pack -p {source} --dest-prefix {destination} -o FILE.tar.gz, "
            "and stage FILE.tar.gz with extract and without relocate"
        )
    why = f"{source} has no pyvenv.cfg at its top"
    beneath = [path for path in listing.paths if path.endswith(b"/" + VENV_CONFIG)]
    if beneath:
        folder = text_of(os.path.dirname(min(beneath, key=len)))
        return UsageError(
            f"{why}, but its folder {folder} has one; stage that folder itself, or an archive that "
            "stagectl pack makes of it"
        )
    return UsageError(f"{why}, so it is not a virtual environment; stage it without relocate")


def _rows_to_rewrite(listing: Listing) -> dict[bytes, int]:
    """Return the paths that may name the environment's folder, each with the row of its file.

    The file of a hard link is in the row of its first path, which may be anywhere in the tree.
    """
    named = {path: row for row, path in enumerate(listing.paths) if may_name_its_folder(path)}
    links = {
        row: listing.targets[row] for row in named.values() if listing.kinds[row] == Kind.HARD_LINK
    }
    first = set(links.values())
    rows = {path: row for row, path in enumerate(listing.paths) if path in first}
    found = {path: rows[links[row]] if row in links else row for path, row in named.items()}
    return {path: row for path, row in found.items() if listing.kinds[row] == Kind.FILE}


def _rewritable(tree: PartialTree, row: int, size: int) -> bytes:
    """Return the file's data, or nothing if it is too large to be rewritten."""
    if size > LARGEST and not (size <= LARGEST_PROGRAM and is_program(tree.read(row, 2))):
        return b""
    return tree.read(row, size)


def may_name_its_folder(path: bytes) -> bool:
    """Whether the file at this path of an environment may name the environment's folder."""
    return bool(_NAMING_FILES.fullmatch(path))


def own_folders(source: str, activate: bytes) -> tuple[bytes, ...]:
    """Return the folders that an environment's files may name as its own, the longest first.

    They are ``source``, where it is now, and the folders in which its script ``activate`` says that
    it was made.
    """
    found = {_stripped(os.fsencode(source)): None}
    for line in activate.split(b"\n"):
        if len(found) > _MOST_FOLDERS:
            break
        if len(line) <= _LONGEST_LINE and _VARIABLE in line and (folder := _assigned(line)):
            found[_stripped(folder)] = None
    return tuple(sorted(found, key=len, reverse=True))


def _stripped(path: bytes) -> bytes:
    return path.rstrip(b"/")


def _assigned(line: bytes) -> bytes:
    """Return the absolute path that a line of a shell script assigns to VIRTUAL_ENV, or nothing."""
    text = line.strip()
    if text.startswith((b"export ", b"export\t")):
        text = text[len(b"export") :].lstrip()
    if not text.startswith(_VARIABLE):
        return b""
    value = text.removeprefix(_VARIABLE)
    for quote in (b"'", b'"'):
        if len(value) > 1 and value.startswith(quote) and value.endswith(quote):
            value = value[1:-1]
            break
    return value if value.startswith(b"/") and not set(value) & set(b"\"'") else b""


def rewritten(data: bytes, folders: Iterable[bytes], destination: bytes) -> bytes:
    """Return a file's ``data`` with each of the ``folders`` replaced by ``destination``.

    Of data that is binary, or larger than LARGEST, only the first line of a program is rewritten.
    That line is filled up with blanks to its old length, if it is shorter: an archive may follow
    that knows its own offset, and the kernel ignores the blanks.
    """
    names = b"|".join(re.escape(folder) for folder in folders if folder)
    if not names:
        return data
    pattern = re.compile(_BEGIN + b"(?:" + names + b")" + _END)
    if b"\0" not in data and len(data) <= LARGEST:
        return pattern.sub(lambda _: destination, data)
    line, newline, rest = data.partition(b"\n")
    if not is_program(line) or b"\0" in line or len(line) > _LONGEST_LINE:
        return data
    return pattern.sub(lambda _: destination, line).ljust(len(line)) + newline + rest


def is_program(head: bytes) -> bool:
    """Whether a file that begins with ``head`` names its interpreter in its first line."""
    return head.startswith(b"#!")


def with_home(config: bytes, interpreter: str) -> bytes:
    """Return the text of a ``pyvenv.cfg`` with the folder of the ``interpreter`` as its home."""
    home = b"home = " + os.fsencode(os.path.dirname(interpreter))
    return _HOME_LINE.sub(lambda _: home, config)


def with_moved_links(
    listing: Listing, relocation: Relocation, interpreter: Interpreter | None
) -> Listing:
    """Return the ``listing`` of an environment with its links as they must be at the destination.

    A link into the environment leads to its new place; a link to the interpreter leads to where
    that is on the nodes, for a relative target would lead elsewhere.
    """
    targets = {
        row: moved_target(target, relocation.source, relocation.destination)
        for row, target in listing.targets.items()
    }
    if interpreter:
        found = os.fsencode(interpreter.at or interpreter.path)
        links = interpreter.links
        targets |= {row: found for row in targets if listing.paths[row] in links}
    return replace(listing, targets=targets)


def moved_target(target: bytes, source: str, destination: str) -> bytes:
    """Return a link's ``target``, beneath ``destination`` if it was beneath ``source``."""
    folder = _stripped(os.fsencode(source))
    is_inside = target == folder or target.startswith(folder + b"/")
    return os.fsencode(destination) + target[len(folder) :] if is_inside else target


def find_interpreter(environment: str, source: str) -> Interpreter | None:
    """Return the interpreter of the ``environment``; None if it has none or one of its own.

    It is shared if it is on a network filesystem, or on the same as ``source``: the environment
    itself, or the archive that it was unpacked from.
    """
    folder = os.path.realpath(environment)
    for name in _PYTHON_NAMES:
        with suppress(OSError):
            path = os.path.realpath(f"{folder}/bin/{name}", strict=True)
            if path.startswith(f"{folder}/"):
                return None
            is_shared = _is_shared(os.stat(path).st_dev, os.stat(source).st_dev)
            return Interpreter(path, frozenset(_links_to(folder, path)), is_shared)
    return None


def _links_to(folder: str, interpreter: str) -> Iterator[bytes]:
    """Yield the links in the environment's ``bin`` that lead directly to the interpreter.

    A link to another link in the environment stays as it is.
    """
    with os.scandir(f"{folder}/bin") as entries:
        for entry in entries:
            if entry.is_symlink() and os.path.realpath(entry.path) == interpreter:
                target = os.path.join(f"{folder}/bin", os.readlink(entry.path))
                if not os.path.normpath(target).startswith(f"{folder}/"):
                    yield b"bin/" + os.fsencode(entry.name)


def _is_shared(device: int, source: int) -> bool:
    if device in [os.stat(folder).st_dev for folder in _SYSTEM]:
        return False
    kind = _filesystem(device)
    is_network = kind in _NETWORK or (kind.startswith(_FUSE) and kind not in _IMAGES)
    return is_network or device == source


def _filesystem(device: int) -> str:
    """Return the type of the filesystem with the number ``device``, or nothing."""
    number = f"{os.major(device)}:{os.minor(device)}"
    return next((mount.kind for mount in mounts() if mount.device == number), "")


def staged_at(interpreter: str, places: Iterable[tuple[str, str]]) -> str:
    """Return the path of the ``interpreter`` on the nodes, or nothing if the job does not stage it.

    ``places`` are the sources and destinations of the folders that the job stages unchanged.
    """
    for source, destination in places:
        real = os.path.realpath(source)
        if interpreter.startswith(f"{real}/"):
            return destination + interpreter[len(real) :]
    return ""


def note(interpreter: str, *, may_be_staged: bool) -> str:
    """Return the note to a user whose environment has its ``interpreter`` on shared storage."""
    shown = printable(interpreter)  # another user may have made the link to it
    text = f"note: the environment's interpreter {shown} is still read from shared storage"
    if not may_be_staged:
        return text
    installation = os.path.dirname(os.path.dirname(shown))
    return f"{text}; to avoid that, the same job must also stage {installation}"
