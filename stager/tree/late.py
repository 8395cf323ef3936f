"""Keep what is written into a folder while it is replaced or evicted.

The survey and the eviction refuse to delete what is the user's own; this is about what comes later.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from stager.base import linux
from stager.base.paths import COMPILED_FOLDER
from stager.base.progress import count
from stager.disk.aside import free_name, rename_to_free
from stager.disk.files import CREATE, OPEN_FOLDER, READ_FILE, opened, writable

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping

#: How often a folder is emptied that a program fills while it is removed. Few, because a program
#: that is faster than the removal has filled it with more files each time.
_TRIES = 3
#: Bytes that are copied at a time.
_PIECE = 1 << 26
#: Raised for a folder that its user may not read, where nobody has written then, and for one that
#: was moved meanwhile.
_UNSEEN = (PermissionError, FileNotFoundError)


class OthersFilesError(PermissionError):
    """What another user has in a folder keeps it from being removed."""


class _Closed(NamedTuple):
    """A folder that was closed to other users, and the mode that it had."""

    mode: int
    inode: int


@dataclass(frozen=True, slots=True)
class Before:
    """Tells what was in a folder at a time from what was written or moved there later.

    ``since`` is that time, in nanoseconds since 1970. ``shared`` has the inodes of files that have
    another hard link, as in the folder's new version: that link changes the file's time. What was
    made after the time that it has for the inode is another file, which got the number of a deleted
    one. What has none of the ``names``, which are paths in the folder, is another name for such a
    file; with None, any was there. ``folders`` has by inode the path that each folder had: one that
    has another path now, or was not there, is late with all that is in it, however old that is.
    A path that ends in a slash is that of a folder which could not be read: all folders in it count
    as there before. With None, each folder does.
    """

    since: int
    shared: Mapping[int, int] = field(default_factory=dict)
    names: Container[bytes] | None = None
    folders: Mapping[int, bytes] | None = None
    _unread: frozenset[bytes] = field(init=False)

    def __post_init__(self) -> None:
        """Collect the folders that could not be read: there may be a million others."""
        paths = (self.folders or {}).values()
        unread = frozenset(path.rstrip(b"/") for path in paths if path.endswith(b"/"))
        object.__setattr__(self, "_unread", unread)

    def has_folder(self, path: str, inode: int) -> bool:
        """Return whether a folder was there. What programs compile is nobody's own."""
        if self.folders is None or os.path.basename(path) == COMPILED_FOLDER:
            return True
        name, known = os.fsencode(path), self.folders.get(inode)
        if known is not None and known.rstrip(b"/") == name:
            return True
        while self._unread and name:
            name = name.rpartition(b"/")[0]
            if name in self._unread:
                return True
        return False

    def has_file(self, path: str, there: os.stat_result) -> bool:
        """Return whether a file or link was there, by what lstat(2) says of it."""
        if there.st_ino in self.shared:
            return self.names is None or os.fsencode(path) in self.names
        return there.st_ctime_ns < self.since


def remove_old(old: str, new: str, before: Before) -> list[str]:
    """Remove the folder ``old``, but move what was not there ``before`` to the same places in
    ``new``; beside what is there already.

    A program whose working folder is in it can write there until it is gone. A subfolder that it
    fills faster than it can be emptied is moved to ``new`` with what is in it; ``old`` itself
    stays then. A file that is another name of one in ``new`` gets bytes of its own. Return the
    paths in ``new`` to which something was moved. Raise OSError if files cannot be moved.
    """
    moves = _Moves(old, new, before.shared)
    with _closed(old, before) as folders:
        for path in list(late(old, before, folders)):
            # A program in that folder moved it meanwhile, or it is a folder of another user.
            with suppress(*_UNSEEN):
                moves.move(path)
        _Removal(old, folders, moves, before).finish()
    return moves.made


def remove_but_late(old: str, new: str, before: Before) -> None:
    """Remove the folder ``old`` as `remove_old` does, where it was looked through before.

    What is late gets to ``new``, which is made if need be. Raise OSError if that is not possible.
    """
    with _closed(old, before) as folders:
        _Removal(old, folders, _Moves(old, new, {}), before).finish()
    if os.path.lexists(old):
        above, name = os.path.split(new)
        with opened(above, OPEN_FOLDER) as folder:
            rename_to_free(old, name, folder)


def was_touched(folder: str, since: int) -> bool:
    """Return whether a folder in ``folder`` was made, moved or changed since then."""
    for inner in _folders(folder, Before(since)):
        with suppress(FileNotFoundError):
            if inner and os.lstat(f"{folder}/{inner}").st_ctime_ns >= since:
                return True
    return False


def late(old: str, before: Before, folders: Iterable[str] | None = None) -> Iterator[str]:
    """Yield the paths of the entries of ``old`` that were not there ``before``.

    If ``old`` itself was not, these are all. Look into these ``folders`` of it alone, if given.
    """
    is_new = _is_new(old, before)
    for folder in _folders(old, before) if folders is None else folders:
        if COMPILED_FOLDER in folder.split("/"):
            continue
        with suppress(*_UNSEEN):
            for name, there in _entries(f"{old}/{folder}"):
                if stat.S_ISDIR(there.st_mode):
                    if not before.has_folder(f"{folder}{name}", there.st_ino):
                        yield f"{folder}{name}"
                elif (is_new and not folder) or not before.has_file(f"{folder}{name}", there):
                    yield f"{folder}{name}"


class _Moves:
    """Moves what is late from its places in ``old`` to the same ones in ``new``.

    Files with the ``shared`` inodes are in ``new`` under another name.
    """

    def __init__(self, old: str, new: str, shared: Container[int]) -> None:
        self._old, self._new, self._shared = old, new, shared
        #: Where what is in a folder of ``old`` gets, by the folder's path.
        self._places: dict[str, str] = {}
        #: The paths in ``new`` that something got.
        self.made: list[str] = []

    def move(self, path: str) -> None:
        """Move what is at ``path``. If both are folders, move what is in the one into the other."""
        source, target = f"{self._old}/{path}", self._target(path)
        closed = _close(source) if _is_folder(target) else None
        if closed is None:
            self._rename(source, target)
            return
        try:
            for inner in os.listdir(source):
                with suppress(*_UNSEEN):
                    self.move(f"{path}/{inner}")
            with suppress(OSError):  # more may have been written
                os.rmdir(source)
        finally:
            _open_again(source, closed)

    def move_whole(self, path: str, source: str = "") -> None:
        """Move what is at ``path``, a folder with all that is in it, by the name ``source``."""
        self._rename(source or f"{self._old}/{path}", self._target(path))

    def _target(self, path: str) -> str:
        above, _, name = path.rpartition("/")
        return f"{self._place(above)}/{name}"

    def _place(self, folder: str) -> str:
        """Return the folder for what is in a ``folder`` of the old one, and make it if need be.

        It is one beside, where the new version has something else in its place, as a link that
        leads elsewhere.
        """
        with suppress(FileExistsError):  # after an eviction it may be missing
            os.mkdir(self._new)
        if not _is_folder(self._new):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self._new)
        path, place = "", self._new
        for name in folder.split("/") if folder else ():
            path, above = f"{path}/{name}", place
            place = self._places.get(path) or f"{above}/{name}"
            if path not in self._places and not _is_folder(place):
                place = free_name(place) if os.path.lexists(place) else place
                with self._opened(above) as within:
                    os.mkdir(os.path.basename(place), dir_fd=within)
            self._places[path] = place
        return place

    def _rename(self, source: str, target: str) -> None:
        above, name = os.path.split(target)
        with self._opened(above) as folder:
            name = rename_to_free(source, name, folder)
            self._separate(f"{above}/{name}")
        self.made.append(f"{above}/{name}".removeprefix(self._new).lstrip("/"))

    @contextmanager
    def _opened(self, place: str) -> Iterator[int]:
        """Open a folder in ``new`` to write in it. Raise OSError if another user has put it there,
        or a link.
        """
        inner = os.fsencode(place.removeprefix(self._new).lstrip("/"))
        with opened(self._new, OPEN_FOLDER | os.O_NOFOLLOW) as new, ExitStack() as stack:
            folder = linux.open_beneath(new, inner, linux.PASS_FOLDER)
            stack.callback(os.close, folder)
            if {os.fstat(new).st_uid, os.fstat(folder).st_uid} != {os.getuid()}:
                raise NotADirectoryError(errno.ENOTDIR, "not a folder of this user's", place)
            stack.enter_context(writable(folder))
            yield folder

    def _separate(self, path: str) -> None:
        """Give files that are in ``new`` under another name bytes of their own, if there is room.

        Who writes to one of them would change a staged file, too.
        """
        for folder, name in _files(path) if self._shared else ():
            with suppress(OSError):
                there = os.lstat(f"{folder}/{name}")
                is_shared = there.st_nlink > 1 and there.st_ino in self._shared
                if is_shared and stat.S_ISREG(there.st_mode):
                    _copy(folder, name, there)


def _files(path: str) -> Iterator[tuple[str, str]]:
    """Yield folder and name of each file at ``path`` or beneath it."""
    if not _is_folder(path):
        yield os.path.split(path)
        return
    for folder, _, names in os.walk(path):
        yield from ((folder, name) for name in names)


def _copy(folder: str, name: str, facts: os.stat_result) -> None:
    """Replace a file by a copy of it with the same permissions and time. Raise OSError."""
    fresh = f"{folder}/{os.urandom(8).hex()}"
    with opened(f"{folder}/{name}", READ_FILE) as source:
        try:
            with opened(fresh, CREATE) as copy:
                while os.copy_file_range(source, copy, _PIECE):
                    count()
                os.fchmod(copy, stat.S_IMODE(facts.st_mode))
                os.utime(copy, ns=(facts.st_atime_ns, facts.st_mtime_ns))
            os.rename(fresh, f"{folder}/{name}")
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(fresh)
            raise


class _Removal:
    """The removal of a folder from which the late files were moved; see `remove_old`."""

    def __init__(
        self, old: str, folders: dict[str, _Closed], moves: _Moves, before: Before
    ) -> None:
        self._old, self._folders, self._moves = old, folders, moves
        self._shared = dict(before.shared)
        self._before = replace(before, shared=self._shared)  # that grows
        self._is_new = _is_new(old, before)
        #: Whether this user may not remove or move something, and whether it is another user's.
        self._is_denied = False
        self._is_others = "" not in folders

    def finish(self) -> None:
        """Remove the folders, inner ones first, and move what is later still.

        Raise OSError if that is not possible.
        """
        for folder in reversed(self._folders):
            with suppress(FileNotFoundError):
                try:
                    self._finish_folder(folder)
                except PermissionError:
                    self._is_denied = True
        if (self._is_denied or self._is_others) and os.path.lexists(self._old):
            kind = PermissionError if self._is_denied else OthersFilesError
            raise kind(errno.EACCES, os.strerror(errno.EACCES), self._old)

    def _finish_folder(self, folder: str) -> None:
        if self._remove(folder) or not folder:
            return
        if not (self._is_denied or self._is_others):
            _open_again(f"{self._old}/{folder}", self._folders[folder])
            self._moves.move_whole(folder.removesuffix("/"))

    def _remove(self, folder: str) -> bool:
        """Remove a folder. Return False if a program fills it faster than it can be emptied."""
        for _ in range(_TRIES):
            self._clear(folder)
            try:
                os.rmdir(f"{self._old}/{folder}")
            except OSError as error:
                if error.errno == errno.ENOTDIR:
                    raise _moved(folder) from None
                if error.errno != errno.ENOTEMPTY:
                    raise
            else:
                return True
        return False

    def _clear(self, folder: str) -> None:
        """Move late files, and folders that were not there before; remove the others.

        Raise FileNotFoundError if its user has moved the folder.
        """
        is_compiled = COMPILED_FOLDER in folder.split("/")
        with self._opened(folder) as entry:
            for name in os.listdir(entry):
                count()
                with suppress(FileNotFoundError):
                    try:
                        self._clear_entry(entry, f"{folder}{name}", is_compiled=is_compiled)
                    except PermissionError:  # as for a folder of another user
                        self._is_denied = True

    @contextmanager
    def _opened(self, folder: str) -> Iterator[int]:
        """Open a ``folder``. Raise FileNotFoundError if its user has put something in its place."""
        path = f"{self._old}/{folder}".rstrip("/")  # else a link would be followed
        with ExitStack() as stack:
            try:
                entry = stack.enter_context(opened(path, OPEN_FOLDER | os.O_NOFOLLOW))
            except NotADirectoryError:
                raise _moved(path) from None
            if os.fstat(entry).st_ino != self._folders[folder].inode:
                raise _moved(path)
            yield entry

    def _clear_entry(self, folder: int, path: str, *, is_compiled: bool) -> None:
        name = os.path.basename(path)
        source = f"/proc/self/fd/{folder}/{name}"
        there = os.lstat(source)  # just before it may go
        if stat.S_ISDIR(there.st_mode):
            known = self._folders.get(f"{path}/")
            if known is None or known.inode != there.st_ino:
                self._clear_folder(source, path, there)
            return
        if not is_compiled and self._is_late(there, source, path):
            self._moves.move_whole(path, source)
            return
        if there.st_nlink > 1:  # this changes the time of its other links
            self._shared.setdefault(there.st_ino, self._before.since)
        os.unlink(source)
        if there.st_nlink == 1:  # a new file may get the number
            self._shared.pop(there.st_ino, None)

    def _clear_folder(self, source: str, path: str, there: os.stat_result) -> None:
        """Move a folder that was not there before; remove another user's, if it is empty."""
        is_own = there.st_uid == os.getuid()
        if is_own or not self._before.has_folder(path, there.st_ino):
            try:
                self._moves.move_whole(path, source)
            except PermissionError:
                if is_own:
                    raise
                self._is_others = True
            return
        try:
            os.rmdir(source)
        except OSError:
            self._is_others = True

    def _is_late(self, there: os.stat_result, source: str, path: str) -> bool:
        if not self._before.has_file(path, there) or (self._is_new and "/" not in path):
            return True
        # Whoever replaces or deletes a shared file elsewhere frees its number for a new one here.
        is_touched = there.st_ctime_ns >= self._before.since
        made_by = self._shared.get(there.st_ino) if is_touched else None
        return made_by is not None and linux.born_at(source) > made_by


@contextmanager
def _closed(old: str, before: Before) -> Iterator[dict[str, _Closed]]:
    """Close the folders in the old one to other users, and yield them by path, top first.

    Else others, who may be allowed to write there, could put a link in the place of a folder, and
    what is beyond it would be taken for what is in the copy. Folders of other users are left out
    with all that is in them, and so are those that were not there ``before``. Folders that are
    still there at the end get their modes back.
    """
    folders = [""]
    closed: dict[str, _Closed] = {}
    try:
        for folder in folders:  # grows while it is read
            if one := _close(f"{old}/{folder}"):
                closed[folder] = one
                folders += _inner(old, folder, before)
        yield closed
    finally:
        if os.path.lexists(old):
            for folder, one in reversed(closed.items()):
                _open_again(f"{old}/{folder}", one)


def _close(folder: str) -> _Closed | None:
    """Let this user alone enter a ``folder``. Return None if it is not theirs."""
    with suppress(OSError), opened(folder.rstrip("/"), linux.PASS_FOLDER) as entry:
        there = os.fstat(entry)
        if there.st_uid == os.getuid():
            os.chmod(f"/proc/self/fd/{entry}", stat.S_IRWXU)
            return _Closed(stat.S_IMODE(there.st_mode), there.st_ino)
    return None


def _open_again(folder: str, closed: _Closed) -> None:
    """Give a ``folder`` the mode back that it had, if it is still there."""
    with suppress(OSError), opened(folder.rstrip("/"), linux.PASS_FOLDER) as entry:
        if os.fstat(entry).st_ino == closed.inode:
            os.chmod(f"/proc/self/fd/{entry}", closed.mode)


def _moved(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


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
        folders += _inner(old, folder, before)


def _inner(old: str, folder: str, before: Before) -> list[str]:
    """Return the paths of the folders in a ``folder`` that were there ``before``."""
    with suppress(*_UNSEEN), os.scandir(f"{old}/{folder}") as entries:
        return [
            f"{folder}{one.name}/"
            for one in entries
            if one.is_dir(follow_symlinks=False)
            and before.has_folder(f"{folder}{one.name}", one.inode())
        ]
    return []


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


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)
