"""Keep what is written into a folder while it is replaced or evicted.

The survey and the eviction refuse to delete what is the user's own; this is about what comes later.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from stager.base import linux
from stager.base.errors import DestinationError
from stager.base.paths import COMPILED_FOLDER
from stager.base.progress import count

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

#: How often a folder is emptied that a program fills while it is removed. Few, because a program
#: that is faster than the removal has filled it with more files each time.
_TRIES = 3
#: Raised for a folder that its user may not read, where nobody has written then, and for one that
#: was moved meanwhile.
_UNSEEN = (PermissionError, FileNotFoundError)
#: What the name of a file gets that is in the way of a staged one.
_ASIDE = ".before-staging"
#: The longest name that stays whole with that and a number, in bytes, as a name has at most 255;
#: and how many characters, of up to 4 bytes, stay of a longer one.
_MOST_BYTES, _MOST_CHARACTERS = 230, 50


@dataclass(frozen=True, slots=True)
class Before:
    """Tells what was in a folder at a time from what was written or moved there later.

    ``since`` is that time, in nanoseconds since 1970. ``shared`` has the inodes of files that have
    another hard link, as in the folder's new version: that link changes the file's time. What was
    made after the time that it has for the inode is another file, which got the number of a deleted
    one. What has none of the ``names``, which are paths in the folder, is another name for such a
    file; with None, any was there. ``folders`` has by inode the path that each folder had: one that
    has another path now, or was not there, is late with all that is in it, however old that is.
    With None, each folder was there before.
    """

    since: int
    shared: Mapping[int, int] = field(default_factory=dict)
    names: Container[bytes] | None = None
    folders: Mapping[int, bytes] | None = None

    def has_folder(self, path: str, inode: int) -> bool:
        """Return whether a folder was there. What programs compile is nobody's own."""
        return (
            self.folders is None
            or os.path.basename(path) == COMPILED_FOLDER
            or self.folders.get(inode) == os.fsencode(path)
        )

    def has_file(self, path: str, there: os.stat_result) -> bool:
        """Return whether a file or link was there, by what lstat(2) says of it."""
        if there.st_ino in self.shared:
            return self.names is None or os.fsencode(path) in self.names
        return there.st_ctime_ns < self.since


def remove_old(aside: str, old: str, new: str, before: Before) -> None:
    """Remove the folder ``aside``, but move what was not there ``before`` to the same places in
    ``new``; beside a file that is there already.

    The rest is moved to ``old`` then, to be removed there. A program whose working folder is in it
    can write there until it is gone. A folder that it fills faster than it can be emptied is moved
    to ``new`` with what is in it. Raise DestinationError if files cannot be moved; then the rest
    stays beside ``new``.
    """
    try:
        for path in list(late(aside, before)):
            with suppress(FileNotFoundError):  # its user moved it meanwhile
                _merge(f"{aside}/{path}", f"{new}/{path}")
        os.rename(aside, old)
        _Removal(old, new, before).finish()
    except OSError as error:
        if os.path.lexists(old):
            aside = free_name(new)
            os.rename(old, aside)
        elif not os.path.lexists(aside):
            return  # its user moved all of it meanwhile
        raise DestinationError(
            f"{new} was staged, but files that were written into it meanwhile could not be moved "
            f"over ({error.strerror}); they are in {aside}, with the rest of the old folder"
        ) from None


def remove_but_late(old: str, new: str, before: Before) -> None:
    """Remove the folder ``old`` as `remove_old` does, where it was looked through before.

    What is late gets to ``new``, which is made if need be. Raise OSError if that is not possible.
    """
    _Removal(old, new, before).finish()


def was_touched(folder: str, since: int) -> bool:
    """Return whether a folder in ``folder`` was made, moved or changed since then."""
    for inner in _folders(folder, Before(since)):
        with suppress(FileNotFoundError):
            if inner and os.lstat(f"{folder}/{inner}").st_ctime_ns >= since:
                return True
    return False


def late(old: str, before: Before) -> Iterator[str]:
    """Yield the paths of the entries of ``old`` that were not there ``before``.

    If ``old`` itself was not, these are all.
    """
    is_new = _is_new(old, before)
    for folder in _folders(old, before):
        if COMPILED_FOLDER in folder.split("/"):
            continue
        with suppress(*_UNSEEN):
            for name, there in _entries(f"{old}/{folder}"):
                if stat.S_ISDIR(there.st_mode):
                    if not before.has_folder(f"{folder}{name}", there.st_ino):
                        yield f"{folder}{name}"
                elif (is_new and not folder) or not before.has_file(f"{folder}{name}", there):
                    yield f"{folder}{name}"


def free_name(path: str) -> str:
    """Return a name beside ``path`` that nothing has."""
    above, name = os.path.split(path)
    if len(os.fsencode(name)) > _MOST_BYTES:
        name = name[:_MOST_CHARACTERS]
    aside, number = f"{above}/{name}{_ASIDE}", 1
    free = aside
    while os.path.lexists(free):
        free, number = f"{aside}-{number}", number + 1
    return free


class _Removal:
    """The removal of a folder from which the late files were moved; see `remove_old`."""

    def __init__(self, old: str, new: str, before: Before) -> None:
        self._old, self._new = old, new
        self._shared = dict(before.shared)
        self._before = replace(before, shared=self._shared)  # that grows
        self._is_new = _is_new(old, before)
        self._folders = dict.fromkeys(_folders(old, before))

    def finish(self) -> None:
        """Remove the folders, inner ones first, and move what is later still.

        Raise OSError if that is not possible.
        """
        for folder in reversed(self._folders):
            path = f"{self._old}/{folder}"
            with suppress(FileNotFoundError, PermissionError):
                os.chmod(path, 0o700)  # a copied folder may forbid its owner to write
                self._remove(folder)
        if os.path.lexists(self._old):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), self._old)

    def _remove(self, folder: str) -> None:
        for _ in range(_TRIES):
            self._clear(folder)
            try:
                os.rmdir(f"{self._old}/{folder}")
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
            else:
                return
        _move(f"{self._old}/{folder}".rstrip("/"), f"{self._new}/{folder}".rstrip("/"))

    def _clear(self, folder: str) -> None:
        """Move late files, and folders that were not there before; remove the others."""
        is_compiled = COMPILED_FOLDER in folder.split("/")
        for name in os.listdir(f"{self._old}/{folder}"):
            count()
            with suppress(FileNotFoundError):
                self._clear_entry(f"{folder}{name}", is_compiled=is_compiled)

    def _clear_entry(self, path: str, *, is_compiled: bool) -> None:
        there = os.lstat(f"{self._old}/{path}")  # just before it may go
        if stat.S_ISDIR(there.st_mode):
            if f"{path}/" not in self._folders:
                _move(f"{self._old}/{path}", f"{self._new}/{path}")
            return
        if not is_compiled and self._is_late(there, path):
            _move(f"{self._old}/{path}", f"{self._new}/{path}")
            return
        if there.st_nlink > 1:  # this changes the time of its other links
            self._shared.setdefault(there.st_ino, self._before.since)
        os.unlink(f"{self._old}/{path}")
        if there.st_nlink == 1:  # a new file may get the number
            self._shared.pop(there.st_ino, None)

    def _is_late(self, there: os.stat_result, path: str) -> bool:
        if not self._before.has_file(path, there) or (self._is_new and "/" not in path):
            return True
        # Whoever replaces or deletes a shared file elsewhere frees its number for a new one here.
        is_touched = there.st_ctime_ns >= self._before.since
        made_by = self._shared.get(there.st_ino) if is_touched else None
        return made_by is not None and linux.born_at(f"{self._old}/{path}") > made_by


def _is_new(old: str, before: Before) -> bool:
    """Return whether the folder ``old`` itself was put there later."""
    return not before.has_folder("", os.lstat(old).st_ino)


def _folders(old: str, before: Before) -> Iterator[str]:
    """Yield the paths of the folders in the old one, those above first; its own is empty.

    Those that were not there ``before`` are left out, with all that is in them.
    """
    folders = [""]
    for folder in folders:  # grows while it is read
        yield folder
        with suppress(*_UNSEEN), os.scandir(f"{old}/{folder}") as entries:
            folders += [
                f"{folder}{one.name}/"
                for one in entries
                if one.is_dir(follow_symlinks=False)
                and before.has_folder(f"{folder}{one.name}", one.inode())
            ]


def _entries(folder: str) -> list[tuple[str, os.stat_result]]:
    """Return what is in a folder: names, and what lstat(2) says of them."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                found.append((entry.name, entry.stat(follow_symlinks=False)))
    return found


def is_late(there: os.stat_result, since: int) -> bool:
    """Return whether what is ``there`` was written since then. Pure."""
    return there.st_ctime_ns >= since


def _merge(path: str, target: str) -> None:
    """Move what is at ``path``. If both are folders, move what is in the one into the other."""
    if not all(os.path.isdir(one) and not os.path.islink(one) for one in (path, target)):
        _move(path, target)
        return
    for name in os.listdir(path):
        _merge(f"{path}/{name}", f"{target}/{name}")
    with _writable(os.path.dirname(path)), suppress(OSError):  # more may have been written there
        os.rmdir(path)


def _move(path: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    target = free_name(target) if os.path.lexists(target) else target
    with _writable(os.path.dirname(path)), _writable(os.path.dirname(target)):
        mode = os.lstat(path).st_mode
        is_closed = stat.S_ISDIR(mode) and not mode & stat.S_IWUSR
        if is_closed:  # the kernel rewrites its '..'
            os.chmod(path, stat.S_IMODE(mode) | stat.S_IWUSR)
        os.rename(path, target)
        if is_closed:
            os.chmod(target, stat.S_IMODE(mode))


@contextmanager
def _writable(folder: str) -> Iterator[None]:
    """Let the user write in a ``folder``, which its copy may forbid.

    It may be named by the link of a descriptor in /proc.
    """
    mode = stat.S_IMODE(os.stat(folder).st_mode)
    if mode & stat.S_IWUSR:
        yield
        return
    os.chmod(folder, mode | stat.S_IWUSR)
    try:
        yield
    finally:
        os.chmod(folder, mode)
