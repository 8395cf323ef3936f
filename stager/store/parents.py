"""Make the folders above a copy, and remove them again with the last copy in them.

Each folder that a stage makes is noted in ``made`` among the user's records, in a file by the name
of its path's digest. That has what tells it from a folder of the user's own, and a lock of each
process that stages into the folder, which may be empty until then.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

import xxhash

from stager.base.errors import StageError
from stager.fs.files import (
    OPEN_FOLDER,
    READ_FILE,
    as_stage_error,
    facts_beneath,
    opened,
    opened_beneath,
    write_all,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from stager.store.cache import Cache

_WRITE_NOTE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
#: Errors of a folder that is not there, or could not be made.
_GONE = (errno.ENOENT, errno.ENAMETOOLONG)
#: Bytes of a note: three numbers.
_MOST = 100


@contextmanager
def made_parents(cache: Cache, path: str) -> Iterator[None]:
    """Make the missing folders above ``path``, which stay for the body even if they are empty.

    If the body fails, remove those that a stage has made and that are empty. Raise SpaceError or
    DestinationError if they cannot be made.
    """
    above = os.path.dirname(path)
    if above == (cache.root or "/"):
        yield
        return
    try:
        with ExitStack() as stack:
            try:
                with suppress(FileExistsError):
                    os.mkdir(_notes(cache), 0o700)
                with _turn(cache):
                    _make(cache, above)
                    with suppress(FileNotFoundError):  # no stage has made it
                        note = stack.enter_context(opened(_note_of(cache, above), READ_FILE))
                        fcntl.flock(note, fcntl.LOCK_SH)
            except OSError as error:
                raise as_stage_error(error) from None
            yield
    except BaseException:
        remove_parents(cache, path)
        raise


def remove_parents(cache: Cache, path: str, in_use: Collection[str] = ()) -> None:
    """Remove the folders above ``path`` that stages have made and that are empty. Raise nothing.

    Those above what is ``in_use`` stay, and so do those whose permissions the user has changed.
    """
    folder = os.path.dirname(path)
    used = [one for one in in_use if one != path]
    with suppress(OSError, StageError), _turn(cache):
        while folder.startswith(f"{cache.root}/") and folder != "/":
            if any(one.startswith(f"{folder}/") for one in used):
                return
            _remove(cache, folder)
            folder = os.path.dirname(folder)


@contextmanager
def _turn(cache: Cache) -> Iterator[None]:
    """Let no other process of this user make or remove such folders in the body. Raise OSError."""
    with opened(_notes(cache), OPEN_FOLDER) as notes:
        fcntl.flock(notes, fcntl.LOCK_EX)
        yield


def _make(cache: Cache, above: str) -> None:
    missing: list[str] = []
    folder = above
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for folder in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(folder, 0o755)  # nothing is staged where others may write
            try:
                with opened(_note_of(cache, folder), _WRITE_NOTE) as note:
                    write_all(note, _identity(os.lstat(folder)), 0)
            except OSError as error:
                known = as_stage_error(error)  # before there is room again
                os.rmdir(folder)
                raise known from None


def _remove(cache: Cache, folder: str) -> None:
    """Remove a ``folder`` and its note; that alone, if the folder is gone.

    Raise OSError or DestinationError if it is not empty, no stage has made it, or one is to publish
    something there.
    """
    note = _note_of(cache, folder)
    try:
        there = facts_beneath(cache.root, folder)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        with suppress(FileNotFoundError):
            os.unlink(note)
        return
    with opened(note, READ_FILE) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if there.st_uid != os.getuid() or os.read(descriptor, _MOST) != _identity(there):
            raise FileNotFoundError(folder)  # another one has its name
        above, name = os.path.split(folder)
        with opened_beneath(cache.root, above) as parent:
            os.rmdir(name, dir_fd=parent)
        os.unlink(note)


def _notes(cache: Cache) -> str:
    return f"{cache.folder}/made"


def _note_of(cache: Cache, folder: str) -> str:
    return f"{_notes(cache)}/{xxhash.xxh3_128_hexdigest(os.fsencode(folder))}"


def _identity(there: os.stat_result) -> bytes:
    """Return what a folder keeps as long as it is the same and its user has not taken it over."""
    return f"{there.st_ino} {there.st_gid} {there.st_mode:o}".encode()
