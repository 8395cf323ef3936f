"""A file of a Python environment and where that lay in, the file for where it lies now out. Pure.

An environment names its own folder in few of its files: the programs in ``bin``, by their first
lines; the scripts that activate it; ``pyvenv.cfg``; and the ``.pth`` files of what is installed in
place. All of them are texts, but for programs that have something else behind their first line.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from stager.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

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
_NAMES = re.compile(rb"bin/[^/]+|pyvenv\.cfg|lib(?:64)?/python[0-9.]+/site-packages/[^/]+\.pth")


def may_name_its_folder(path: bytes) -> bool:
    """Whether a file at that path of an environment may have to change with its place."""
    return bool(_NAMES.fullmatch(path))


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
