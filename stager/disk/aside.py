"""Give another name to a file or folder that is in the way, and replace nothing by that."""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress
from enum import StrEnum

from stager.base import linux
from stager.disk.files import opened, writable

#: The longest name that stays whole with a suffix and a number, in bytes, as a name has at most
#: 255; and how many characters, of up to 4 bytes, stay of a longer one.
_MOST_BYTES, _MOST_CHARACTERS = 230, 50
#: Errors of a filesystem that cannot rename as asked.
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class Aside(StrEnum):
    """What is added to the name of a file or folder that is put aside, and when."""

    #: A staged one gets its place.
    STAGING = ".before-staging"
    #: It is looked through before it is removed.
    EVICTION = ".before-eviction"

    def name_of(self, name: str, number: int = 0) -> str:
        """Return what a file of that ``name`` is called. The first has the ``number`` 0."""
        name = _SUFFIX.sub("", name)
        if len(os.fsencode(name)) > _MOST_BYTES:
            name = name[:_MOST_CHARACTERS]
        return f"{name}{self}-{number}" if number else f"{name}{self}"


_SUFFIX = re.compile(rf"({'|'.join(map(re.escape, Aside))})(-\d+)?\Z")


def rename_to_free(path: str, name: str, folder: int, suffix: Aside = Aside.STAGING) -> str:
    """Rename ``path`` to ``name`` in the descriptor ``folder``; with ``suffix`` if that is taken.

    A folder that forbids its owner to write can be renamed, too. Return the name. Raise OSError.
    """
    try:
        return _rename(path, name, folder, suffix)
    except PermissionError:
        mode = os.lstat(path).st_mode
        if not stat.S_ISDIR(mode) or mode & stat.S_IWUSR:
            raise
    # The kernel rewrites the '..' of a folder that gets to another one.
    with opened(path, linux.PASS_FOLDER) as entry, writable(entry):
        return _rename(path, name, folder, suffix)


def _rename(path: str, name: str, folder: int, suffix: Aside) -> str:
    free, number = name, 0
    while not rename_if_free(path, free, folder):
        free, number = suffix.name_of(name, number), number + 1
    return free


def rest_of(path: str) -> str:
    """Return the name of a folder of this user with the rest of an old version, beside ``path``.

    A stage has left it that was killed as it replaced the folder at ``path``. Return an empty text
    if there is none.
    """
    above, name = os.path.split(path)
    first = Aside.STAGING.name_of(name)
    with suppress(OSError):
        names = () if _SUFFIX.search(name) else os.listdir(above)  # there may be very many
        for one in sorted(one for one in names if one == first or one.startswith(f"{first}-")):
            there = os.lstat(f"{above}/{one}")
            if stat.S_ISDIR(there.st_mode) and there.st_uid == os.getuid():
                return one
    return ""


def free_name(path: str) -> str:
    """Return a path beside ``path`` at which nothing is."""
    above, name = os.path.split(path)
    number = 0
    while os.path.lexists(free := f"{above}/{Aside.STAGING.name_of(name, number)}"):
        number += 1
    return free


def rename_if_free(path: str, name: str, folder: int) -> bool:
    """Rename ``path`` to ``name`` in the descriptor ``folder``, or return False if that is taken.

    Raise OSError.
    """
    try:
        linux.rename(path, name, linux.Rename.NO_REPLACE, new_folder=folder)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        # The filesystem cannot refuse to replace what is there.
        with suppress(FileNotFoundError):
            os.lstat(name, dir_fd=folder)
            return False
        os.rename(path, name, dst_dir_fd=folder)
    return True
