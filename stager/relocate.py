"""A file of a Python environment and where that lay in, the file for where it lies now out. Pure.

An environment names its own folder in few of its files: the programs in ``bin``, by their first
lines; the scripts that activate it; ``pyvenv.cfg``; and the ``.pth`` files of what is installed in
place. All of them are texts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

#: The script that says where the environment lay when it was made, and how it does.
ACTIVATE = b"bin/activate"
#: What every virtual environment has.
CONFIG = b"pyvenv.cfg"
_HOME = re.compile(rb"""^\s*(?:export\s+)?VIRTUAL_ENV=["']?(/[^"'\n]+?)["']?\s*$""", re.MULTILINE)
#: Bytes of the largest file that is looked at: scripts are smaller, and programs are not texts.
LARGEST = 1 << 20
#: What may stand behind a folder's name where it is not the beginning of another's.
_END = rb"""(?=[/\s"':;,)\]}]|$)"""
_NAMES = re.compile(rb"bin/[^/]+|pyvenv\.cfg|lib(?:64)?/python[0-9.]+/site-packages/[^/]+\.pth")


def may_name_its_folder(path: bytes) -> bool:
    """Whether a file at that path of an environment may have to change with its place."""
    return bool(_NAMES.fullmatch(path))


def homes(source: str, activate: bytes) -> tuple[bytes, ...]:
    """The folders by whose names the environment may know itself, the longest first.

    Where it was found, and where it was made as its script ``activate`` says.
    """
    found = {source.rstrip("/").encode(errors="surrogateescape"), *_HOME.findall(activate)}
    return tuple(sorted((home.rstrip(b"/") for home in found), key=len, reverse=True))


def relocated(data: bytes, before: Iterable[bytes], now: bytes) -> bytes:
    """The file's ``data`` with the folders ``before`` replaced by ``now``, where it is a text."""
    if b"\0" in data:
        return data
    names = b"|".join(re.escape(home) for home in before if home)
    return re.sub(b"(?:" + names + b")" + _END, lambda _: now, data) if names else data
