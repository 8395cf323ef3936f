"""Relocate Python environments: find them in a folder, rewrite the paths in their files.

An environment names its own folder in few files: in the first lines of its programs, in its
activate scripts, in ``pyvenv.cfg`` and in the ``.pth`` files of editable installs.

Its ``bin/python`` is a link to the interpreter that made it. Every node has the system's own on its
disk. One on shared storage comes along, with its standard library, as a folder of the environment.
"""

from __future__ import annotations

import os
import re
import stat
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from glob import escape, glob
from itertools import chain
from typing import TYPE_CHECKING

import xxhash

from stager.base.digest import digest_of_data
from stager.base.mounts import is_network, mounts
from stager.base.paths import VENV_CONFIG
from stager.base.text import printable
from stager.fs.files import READ_FILE, opened
from stager.tree.listing import Kind, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from stager.tree.listing import Listing, Row
    from stager.tree.partial_tree import PartialTree

#: A folder that every conda environment has.
CONDA = b"conda-meta"
#: The script that names the folder in which the environment was made.
ACTIVATE = b"bin/activate"
#: The folder of an environment in which its interpreter comes along.
_BASE = b".python"
#: What comes along: the interpreter, its libraries, and headers for packages that are compiled.
HOME_PARTS = ("/bin/python*", "/lib/", "/lib64/", "/include/")
#: What is left out of that: packages that the environment does not see.
HOME_PACKAGES = ("/lib*/python*/site-packages/",)
_VARIABLE = b"VIRTUAL_ENV="
_HOME_LINE = re.compile(rb"^home[ \t]*=[ \t]*(.*?)[ \t\r]*$", re.MULTILINE)
_VERSION_LINE = re.compile(rb"^version(?:_info)?[ \t]*=[ \t]*(\d+\.\d+)", re.MULTILINE)
_SEES_PACKAGES = re.compile(rb"^include-system-site-packages[ \t]*=[ \t]*true", re.MULTILINE)
#: The files of an environment that lead to packages elsewhere, and all that may name its folder.
_LEADING = rb"lib(?:64)?/python[0-9.]+/site-packages/(?:[^/]+\.pth|__editable__[^/]+\.py)"
_LEADING_FILES = re.compile(_LEADING)
_NAMING_FILES = re.compile(rb"bin/[^/]+|pyvenv\.cfg|" + _LEADING)
#: The absolute paths in a file that leads elsewhere.
_PLACES = re.compile(rb"""^/.+$|(?<=['"])/[^'"\n]+(?=['"])""", re.MULTILINE)
#: The files of an interpreter that may need libraries beside it, and these.
_BINARIES = re.compile(rb"bin/python[^/]*|lib(?:64)?/(?:python[0-9.]+/lib-dynload/)?[^/]+\.so[^/]*")
#: The copy of an interpreter in an environment, in place of a link.
_COPY = re.compile(rb"bin/python[^/]*")
_LIBRARIES = re.compile(rb"lib(?:64)?/([^/]+\.so[^/]*)")
#: How a binary begins, and a program that names its interpreter.
_ELF, _PROGRAM = b"\x7fELF", b"#!"
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

#: The names in ``bin`` by which an environment's interpreter is found.
_PYTHON_NAMES = ("python", "python3")
_VERSION = re.compile(r"python(\d+\.\d+)")
#: What helps if the nodes lack that interpreter.
_REMEDY = "make it with a Python that they have, or with one on shared storage"
#: Folders on the system's own filesystems, which are not shared even on diskless nodes.
_SYSTEM = ("/", "/usr")


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment in a staged folder, at ``path`` there; empty if it is all of that.

    ``links`` are the paths of its links whose own targets lead to its ``interpreter``, a path
    without links. ``homes`` are the names of the folder in which that is installed, the first one
    without links. In the copy this is at ``base``; if that is empty, it is where it was.
    ``comes_along``: it is not in the source folder. ``sees_packages``: so are its packages needed.
    """

    path: bytes
    links: tuple[bytes, ...] = ()
    interpreter: bytes = b""
    homes: tuple[bytes, ...] = ()
    base: bytes = b""
    comes_along: bool = False
    sees_packages: bool = False

    def interpreter_at(self, destination: str) -> bytes:
        """Return where the interpreter of the copy is."""
        if not self.base:
            return self.interpreter
        return beneath(os.fsencode(destination), self.base) + self.interpreter[len(self.homes[0]) :]


@dataclass(frozen=True, slots=True)
class Relocation:
    """From where to where ``environments`` move with the folder that they are in."""

    source: str
    destination: str
    environments: Sequence[Environment]


def beneath(folder: bytes, path: bytes) -> bytes:
    """Return a ``path`` in a ``folder``; either may be empty."""
    return b"/".join(part for part in (folder, path) if part)


def not_plain(source: str, destination: str) -> str:
    """Return a note if ``destination`` cannot stand unquoted in a script or behind ``#!``. Pure."""
    if _PLAIN.fullmatch(destination):
        return ""
    return (
        f"note: the Python environment in {printable(source)} cannot work at "
        f"{printable(destination)}; choose a DST of letters, digits and . _ - + @ % = , : ~ only"
    )


def relocation_digest(environments: Iterable[Environment]) -> str:
    """Return the xxh3-128 of how ``environments`` are relocated, in hexadecimal. Pure."""
    return xxhash.xxh3_128_hexdigest(repr([(one.path, one.base) for one in environments]).encode())


def environments_in(listing: Listing, mark: bytes = VENV_CONFIG) -> list[bytes]:
    """Return the paths of the folders in a listing that have programs and a ``mark``. Pure."""
    ends = b"/" + mark
    top = [b""] if listing.has(mark) else []
    marked = (path[: -len(ends)] for path in listing.paths if path.endswith(ends))
    return [path for path in (*top, *marked) if listing.has(beneath(path, b"bin"))]


def _rows_in(listing: Listing, folder: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the paths in a ``folder`` of a listing, relative to it, with their rows."""
    paths = listing.paths
    begin = bisect_left(paths, folder + b"/") if folder else 0
    end = bisect_left(paths, folder + b"0") if folder else len(paths)  # "0" comes after "/"
    skipped = len(folder) + bool(folder)
    return ((paths[row][skipped:], row) for row in range(begin, end))


def relocate(
    tree: PartialTree,
    listing: Listing,
    relocation: Relocation,
    *,
    fresh: bytes | bytearray,
    originals: Mapping[int, bytes],
) -> dict[int, tuple[bytes, bytes]]:
    """Rewrite the paths in those files of the ``tree`` whose rows are marked in ``fresh``.

    Return the rows of the files that changed, each with the file's data before and the digest of
    its data now. An earlier stage rewrote the files that are not fresh; ``originals`` has their
    data before that. Raise SpaceError or DestinationError.
    """
    changed: dict[int, tuple[bytes, bytes]] = {}
    for one in relocation.environments:
        for row, rewrite in _changes(tree, listing, relocation, one, originals):
            # A file may have several names.
            if row >= 0 and fresh[row] and row not in changed:
                original = _rewritable(tree, row, listing.sizes[row])
                if (data := rewrite(original)) != original:
                    tree.rewrite(row, data)
                    changed[row] = original, digest_of_data(data)
    return changed


def _changes(
    tree: PartialTree,
    listing: Listing,
    relocation: Relocation,
    environment: Environment,
    originals: Mapping[int, bytes],
) -> Iterator[tuple[int, Callable[[bytes], bytes]]]:
    """Yield the rows of the files that may name paths, or -1, and how each is rewritten."""
    rows = {
        path: listing.file_of(row)  # that of a hard link may be anywhere in the tree
        for path, row in _rows_in(listing, environment.path)
        if _NAMING_FILES.fullmatch(path)
    }
    activate = rows.get(ACTIVATE, -1)
    script = originals.get(activate) or (tree.read(activate, LARGEST) if activate >= 0 else b"")
    names = new_names(relocation, environment.path, script)
    if environment.base:
        home = os.path.dirname(environment.interpreter_at(relocation.destination))
        yield rows.pop(VENV_CONFIG), lambda data: with_home(rewritten(data, names), home)
        yield from _changed_binaries(listing, environment)
    for row in rows.values():
        yield row, lambda data: rewritten(data, names)


def _changed_binaries(
    listing: Listing, environment: Environment
) -> Iterator[tuple[int, Callable[[bytes], bytes]]]:
    found = dict(_rows_in(listing, environment.base))
    libraries = {match[1] for match in map(_LIBRARIES.fullmatch, found) if match}
    programs = (row for path, row in _rows_in(listing, environment.path) if _COPY.fullmatch(path))
    for row in (*programs, *(found[path] for path in filter(_BINARIES.fullmatch, found))):
        path = listing.paths[row]
        others = libraries - {os.path.basename(path)}
        change = partial(with_libraries, path=path, environment=environment, libraries=others)
        yield listing.file_of(row), change


def _rewritable(tree: PartialTree, row: int, size: int) -> bytes:
    """Return the file's data, or nothing if it is too large to be rewritten."""
    if size > LARGEST and (
        size > LARGEST_PROGRAM or not tree.read(row, len(_ELF)).startswith((_PROGRAM, _ELF))
    ):
        return b""
    return tree.read(row, size)


def new_names(relocation: Relocation, path: bytes, activate: bytes) -> dict[bytes, bytes]:
    """Return what the files of the environment at ``path`` may name, each with its new name. Pure.

    That is the staged folder where it is now, and the environment where it was made, as its script
    ``activate`` says, with the folder that it was in then.
    """
    source, destination = map(os.fsencode, (relocation.source, relocation.destination))
    names = {source.rstrip(b"/"): destination}
    for line in activate.split(b"\n"):
        if len(names) > _MOST_FOLDERS:
            break
        if len(line) <= _LONGEST_LINE and _VARIABLE in line and (made := _assigned(line)):
            names.setdefault(made, beneath(destination, path))
            if path and made.endswith(b"/" + path):
                names.setdefault(made[: -len(path) - 1], destination)
    names.pop(b"", None)
    return names


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
    return value.rstrip(b"/") if value.startswith(b"/") and not set(value) & set(b"\"'") else b""


def rewritten(data: bytes, names: Mapping[bytes, bytes]) -> bytes:
    """Return a file's ``data`` with the paths that are keys of ``names`` replaced. Pure.

    Of data that is binary, or larger than LARGEST, only the first line of a program is rewritten.
    That line is filled up with blanks to its old length, if it is shorter: an archive may follow
    that knows its own offset, and the kernel ignores the blanks.
    """
    if not names:
        return data
    longest_first = b"|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    replaced = partial(
        re.compile(_BEGIN + b"(" + longest_first + b")" + _END).sub, lambda found: names[found[1]]
    )
    if b"\0" not in data and len(data) <= LARGEST:
        return replaced(data)
    line, newline, rest = data.partition(b"\n")
    if not line.startswith(_PROGRAM) or b"\0" in line or len(line) > _LONGEST_LINE:
        return data
    return replaced(line).ljust(len(line)) + newline + rest


def with_libraries(
    data: bytes, *, path: bytes, environment: Environment, libraries: Iterable[bytes]
) -> bytes:
    """Return the ``data`` of the file at ``path`` that finds an interpreter's ``libraries``. Pure.

    An ELF file has the folders in which the linker looks in one text with a null byte behind it,
    which may become shorter. Nothing changes if it needs none of the libraries.
    """
    if not data.startswith(_ELF) or not any(b"\0" + name + b"\0" in data for name in libraries):
        return data

    def beside(found: re.Match[bytes]) -> bytes:
        there = os.path.relpath(beneath(environment.base, found[1]), os.path.dirname(path))
        folders = b"$ORIGIN/" + there + found[2]
        return folders.ljust(len(found[0]), b"\0") if len(folders) <= len(found[0]) else found[0]

    folders = b"(?:" + b"|".join(map(re.escape, environment.homes)) + rb")/(lib(?:64)?)"
    return re.sub(rb"(?<=[\0:])" + folders + rb"((?::[^\0]*)?)(?=\0)", beside, data)


def with_home(config: bytes, home: bytes) -> bytes:
    """Return the text of a ``pyvenv.cfg`` with the folder ``home`` of its interpreter. Pure."""
    return _HOME_LINE.sub(lambda _: b"home = " + home, config)


def with_moved_links(listing: Listing, relocation: Relocation) -> Listing:
    """Return the ``listing`` of a folder with its links as they must be at the destination. Pure.

    A link into the folder leads to its new place; a link to an interpreter leads to where that is
    on the nodes, for a relative target would lead elsewhere.
    """
    source, there = relocation.source, relocation.destination
    known = {
        link: one.interpreter_at(there) for one in relocation.environments for link in one.links
    }
    targets = {
        row: known.get(listing.paths[row]) or moved_target(target, source, there)
        for row, target in listing.targets.items()
    }
    return replace(listing, targets=targets)


def moved_target(target: bytes, source: str, destination: str) -> bytes:
    """Return a link's ``target``, beneath ``destination`` if it was beneath ``source``. Pure."""
    folder = os.fsencode(source).rstrip(b"/")
    is_inside = target == folder or target.startswith(folder + b"/")
    return os.fsencode(destination) + target[len(folder) :] if is_inside else target


def with_homes(listing: Listing, homes: Mapping[bytes, Listing]) -> Listing:
    """Return the ``listing`` of a folder with those of interpreters' homes, by their paths. Pure.

    The folders above a home may be closed to others, so that is the owner's alone in the copy.
    """
    return listing.part(range(len(listing)), *chain.from_iterable(map(_moved, homes.items())))


def _moved(home: tuple[bytes, Listing]) -> Iterator[Row]:
    base, listing = home
    for row in map(listing.row, range(len(listing))):
        mode = row.mode if row.path else row.mode & stat.S_IRWXU
        target = beneath(base, row.target) if row.kind is Kind.HARD_LINK else row.target
        yield row._replace(path=beneath(base, row.path), mode=mode, target=target)


def find_environments(
    folder: str, listing: Listing, archive: str = ""
) -> tuple[tuple[Environment, ...], str]:
    """Return the virtual environments in a ``folder``, and a note if one cannot work in the copy.

    An interpreter is shared if it is on a network filesystem, or on the same as the folder, or as
    the ``archive`` that this is unpacked from. With an archive none comes along.
    """
    notes: list[str] = []
    found: list[Environment] = []
    for path in environments_in(listing):
        look = _Look(folder, listing, path, archive)
        found.append(look.environment(found))
        notes.append(look.note or look.where_it_leads())
    if not archive:
        notes += [_conda_note(folder, path) for path in environments_in(listing, CONDA)]
    return tuple(found), next(filter(None, notes), "")


class _Look:
    """Looks at one environment; ``note`` is what its user must know."""

    def __init__(self, folder: str, listing: Listing, path: bytes, archive: str) -> None:
        self._folder = folder
        self._listing = listing
        self._path = path
        self._archive = archive
        self._where = os.path.realpath(_join(folder, path))
        self._shown = printable(_join(archive or folder, path))
        self._base = beneath(path, _BASE)
        self.note = ""

    def environment(self, others: Iterable[Environment]) -> Environment:
        """Return it; it has the interpreter's copy of one of the ``others`` if that is the same."""
        config = _head(_join(self._where, VENV_CONFIG))
        home_line = _HOME_LINE.search(config)
        named = os.fsdecode(home_line[1]) if home_line else ""
        program = self._interpreter(named)
        self.note = self._note_on(program, config)
        home, source = os.path.dirname(os.path.dirname(program)), os.path.realpath(self._folder)
        if home == source or not os.path.exists(program):  # its paths are as all others
            return Environment(self._path)
        one = Environment(
            self._path, tuple(sorted(self._links_to(program))), os.fsencode(program),
            tuple(dict.fromkeys(map(os.fsencode, (home, os.path.dirname(named) or home)))),
            sees_packages=bool(_SEES_PACKAGES.search(config)),
        )  # fmt: skip
        if home.startswith(f"{source}/"):
            return replace(one, base=os.fsencode(os.path.relpath(home, source)))
        if not self._is_shared(program):
            return one
        known = {other.homes[0]: other.base for other in others if other.comes_along}
        base = known.get(one.homes[0]) or (self._may_come_along(home) and self._base)
        if base:
            return replace(one, base=base, comes_along=True)
        self.note = (
            f"note: the interpreter of {self._shown}, {printable(program)}, is still read from "
            "shared storage"
        )
        return one

    def _note_on(self, program: str, config: bytes) -> str:
        """Return the note on an interpreter which is not that with which the environment works."""
        shown = printable(program)  # another user may have made the link to it
        if program and not os.path.exists(program):
            return (
                f"note: the interpreter of {self._shown}, {shown}, is not on the nodes; {_REMEDY}"
            )
        made, here = _VERSION_LINE.search(config), _VERSION.fullmatch(os.path.basename(program))
        if not made or not here or made[1] == os.fsencode(here[1]):
            return ""
        return (
            f"note: {self._shown} was made with Python {os.fsdecode(made[1])}, but on the nodes "
            f"its interpreter is {shown}; {_REMEDY}"
        )

    def _interpreter(self, home: str) -> str:
        """Return the path without links of the interpreter; empty if it has one of its own.

        If ``bin/python`` is a copy, that is in the folder ``home``, as the library is.
        """
        for above in filter(None, (f"{self._where}/bin", home)):
            there = filter(os.path.lexists, (f"{above}/{name}" for name in _PYTHON_NAMES))
            outside = [
                path
                for path in map(os.path.realpath, there)
                if not path.startswith(f"{self._where}/")
            ]
            if outside:
                return next(filter(os.path.exists, outside), outside[0])
        return f"{home}/{_PYTHON_NAMES[0]}" if home and not os.path.lexists(home) else ""

    def _links_to(self, interpreter: str) -> Iterator[bytes]:
        """Yield the links in ``bin`` that lead directly to the interpreter.

        A link to another link in the environment stays as it is.
        """
        # A folder of data may have a file of that name.
        with suppress(OSError), os.scandir(f"{self._where}/bin") as entries:
            for entry in entries:
                if entry.is_symlink() and os.path.realpath(entry.path) == interpreter:
                    target = os.path.join(f"{self._where}/bin", os.readlink(entry.path))
                    if not os.path.normpath(target).startswith(f"{self._where}/"):
                        yield beneath(self._path, b"bin/" + os.fsencode(entry.name))

    def _may_come_along(self, home: str) -> bool:
        """Whether ``home`` is an installation that may be copied.

        A stranger's environment must not lead this user to copy, for others to read, what the
        stranger cannot read.
        """
        if self._archive or os.path.lexists(_join(self._folder, self._base)):
            return False
        owners = (0, os.getuid(), os.stat(home).st_uid)
        return os.stat(self._where).st_uid in owners and bool(
            glob(f"{escape(home)}/lib*/python3*/os.py")
        )

    def where_it_leads(self) -> str:
        """Return the note on packages that it takes from a folder on shared storage."""
        files = (path for path, _ in _rows_in(self._listing, self._path))
        for path in filter(_LEADING_FILES.fullmatch, files):
            for place in _PLACES.findall(_head(_join(self._where, path))):
                if self._is_shared(os.fsdecode(place)) and not self._is_own(place):
                    file = text_of(beneath(os.fsencode(self._shown), path))
                    return f"note: {file} leads to {text_of(place)}, on shared storage"
        return ""

    def _is_own(self, place: bytes) -> bool:
        """Whether ``place`` is in the staged folder, and so is rewritten."""
        script = _head(_join(self._where, ACTIVATE))
        names = new_names(Relocation(self._folder, "/", ()), self._path, script)
        return any((place + b"/").startswith(folder + b"/") for folder in names)

    def _is_shared(self, path: str) -> bool:
        with suppress(OSError, ValueError):
            device = os.stat(path).st_dev
            return _is_shared(device, os.stat(self._archive or self._folder).st_dev)
        return False


def _conda_note(folder: str, path: bytes) -> str:
    """Return the note on a conda environment whose programs name the folder that it is in.

    If conda-pack made it, they name another one, or none.
    """
    where = _join(folder, path)
    head = b"".join(_head(f"{where}/bin/pip").split(b"\n")[:2])
    if head and not any(os.fsencode(name) in head for name in (where, os.path.realpath(where))):
        return ""
    return (
        f"note: {printable(where)} is a conda environment, whose files name that folder; pack it "
        f"by conda-pack -p {printable(where)} --dest-prefix DST -o FILE.tar.gz, and stage "
        "FILE.tar.gz:DST,extract"
    )


def _join(folder: str, path: bytes) -> str:
    return f"{folder}/{os.fsdecode(path)}" if path else folder


def _head(path: str) -> bytes:
    """Return the first LARGEST bytes of a file, or nothing if it cannot be read."""
    with suppress(OSError), opened(path, READ_FILE) as file:
        return os.read(file, LARGEST)
    return b""


def _is_shared(device: int, source: int) -> bool:
    if device in [os.stat(folder).st_dev for folder in _SYSTEM]:
        return False
    kind = _filesystem(device)
    return is_network(kind) or device == source


def _filesystem(device: int) -> str:
    """Return the type of the filesystem with the number ``device``, or nothing."""
    number = f"{os.major(device)}:{os.minor(device)}"
    return next((mount.kind for mount in mounts() if mount.device == number), "")
