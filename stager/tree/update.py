"""Bring a staged folder to its new version in place, or remove what was staged of it.

What the old and the new table name is changed step by step; all else in the folder is its user's.
Each `Step` can be taken twice: after a crash all are taken again, from the same two tables.
"""

from __future__ import annotations

import errno
import os
import stat
from bisect import bisect_left
from contextlib import ExitStack, contextmanager, suppress
from enum import IntEnum
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from stager.base import linux
from stager.base.errors import DestinationError
from stager.base.telemetry import count
from stager.fs.files import remove_tree
from stager.tree.listing import Kind, text_of
from stager.tree.table import common

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from stager.tree.table import Table

#: Errors of a path on whose way there is nothing, or something else than folders.
_NO_WAY = (errno.ENOENT, *linux.IS_LINK)


class State(IntEnum):
    """What is at the path of a table's row."""

    SAME = 0
    GONE = 1
    #: The same, but for its permissions.
    MODE = 2
    #: Something else: its user changed or replaced it.
    CHANGED = 3


def look(path: str, table: Table) -> bytes:
    """Return the `State` of each row of a ``table`` in the folder at ``path``.

    Only what the table names is looked at, by its stat. Raise OSError.
    """
    above, kinds = os.fsencode(path) + b"/", table.source.kinds
    states = bytearray(len(kinds))
    for row, name in enumerate(table.source.paths):
        count()
        try:
            there = os.lstat(above + name)
            states[row] = _state(table, row, there, above + name)
        except (FileNotFoundError, NotADirectoryError):
            states[row] = State.GONE
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.ELOOP):
                raise
            states[row] = State.CHANGED  # its user closed a folder above it, or made it a link
    return bytes(states)


def _state(
    table: Table, row: int, there: os.stat_result, path: bytes, folder: int | None = None
) -> State:
    """Return the state of a row by the stat of what is ``there``, at ``path`` in ``folder``."""
    kind, mode = table.source.kinds[row], there.st_mode
    if kind == Kind.LINK:
        is_link = stat.S_ISLNK(mode)
        target = os.readlink(path, dir_fd=folder) if is_link else None
        return State.SAME if target == table.source.targets[row] else State.CHANGED
    if kind == Kind.FOLDER:
        is_staged = stat.S_ISDIR(mode)
    else:
        row = table.source.file_of(row)
        is_staged = stat.S_ISREG(mode) and row >= 0 and table.has_stat(row, there)
    if not is_staged:
        return State.CHANGED
    # The permissions of a hard link are those of its file.
    is_same = kind == Kind.HARD_LINK or stat.S_IMODE(mode) == table.modes[row]
    return State.SAME if is_same else State.MODE


def in_the_way(destination: str, names: list[str]) -> DestinationError:
    """Return the error for files of the user's own where those of a staged folder have to be."""
    from stager.base.text import entries_text, listed  # only for this message

    was, they, them = ("was", "it is", "it") if len(names) == 1 else ("were", "they are", "them")
    return DestinationError(
        f"{destination} holds {entries_text(len(names), names)} that {was} added or changed after "
        f"staging: {listed(names)}; {they} kept: move {them} elsewhere, choose another "
        "destination, or add the option replace"
    )


class Do(IntEnum):
    """What a step does; in this order."""

    #: Of the old version: remove a file or link, or a folder in which nothing is left.
    REMOVE = 0
    #: Of the new version: make a folder, move a file or link to its place, make a hard link.
    MAKE = 1
    MOVE = 2
    LINK = 3
    #: Give a folder its group, permissions and time.
    FINISH = 4


class Step(NamedTuple):
    """What to do with a row, of the old table if it is removed, else of the new one."""

    do: Do
    row: int


def steps(old: Table, new: Table, arrived: Collection[bytes]) -> Iterator[Step]:
    """Yield the steps from one version to another, of which files at some paths ``arrived``. Pure.

    A crash between any two of them leaves files that `steps` brings to the new version.
    """
    before, after = old.source, new.source
    if (before.paths, before.kinds) != (after.paths, after.kinds):
        stays = bytearray(len(before))
        for row, at in common(after, before):
            # A file or link is replaced by a rename, which a folder cannot be.
            stays[at] = (after.kinds[row] == Kind.FOLDER) == (before.kinds[at] == Kind.FOLDER)
        yield from (Step(Do.REMOVE, at) for at in range(len(before) - 1, 0, -1) if not stays[at])
    folders = list(after.rows(Kind.FOLDER))
    yield from (Step(Do.MAKE, row) for row in folders[1:])
    for row in sorted(_row_of(new, path) for path in arrived):
        if row >= 0 and after.kinds[row] in (Kind.FILE, Kind.LINK):
            yield Step(Do.MOVE, row)
    yield from (Step(Do.LINK, row) for row in after.rows(Kind.HARD_LINK))
    # Only now: a new entry changes its folder's time, and the mode may forbid it.
    yield from (Step(Do.FINISH, row) for row in reversed(folders))


class Update:
    """The change of the folder ``destination``, open as ``top``, from the table ``old`` to ``new``.

    What is new lies in the folder at ``hidden``, as `tree.partial_tree` leaves it, on the same
    filesystem. What is at a path and in neither version is the user's own: with ``force`` it makes
    way for what is new.
    """

    def __init__(
        self,
        destination: str,
        top: int,
        old: Table,
        new: Table,
        hidden: str = "",
        *,
        force: bool = False,
    ) -> None:
        self._destination, self._top, self._old, self._new = destination, top, old, new
        self._hidden, self._force = os.fsencode(hidden), force
        self._folders = _Folders(top)

    def obstacles(self, arrived: Collection[bytes] | None = None) -> list[str]:
        """Return the paths of what is the user's own and in the way, without changing anything.

        Files at these paths have ``arrived``, or will; by default, those that are hidden. Raise
        OSError.
        """
        found: list[str] = []
        arrived = self._arrived() if arrived is None else arrived
        with ExitStack() as stack:
            stack.callback(self._folders.close)
            for step in steps(self._old, self._new, arrived):
                if step.do is Do.FINISH:
                    continue
                with suppress(FileNotFoundError, NotADirectoryError), self._place(step) as place:
                    found += self._obstacles(step, place)
        return [*dict.fromkeys(found)]

    def steps(self) -> Iterator[Step]:
        """Yield the steps that are left."""
        return steps(self._old, self._new, self._arrived())

    def _arrived(self) -> set[bytes]:
        found: set[bytes] = set()
        start = len(self._hidden) + 1
        for folder, folders, files in os.walk(self._hidden) if self._hidden else ():
            links = (name for name in folders if os.path.islink(folder + b"/" + name))
            found.update((folder + b"/" + name)[start:] for name in chain(files, links))
        return found

    def remove_old(self) -> None:
        """Remove what the old version has and the new one lacks. Raise OSError."""
        with ExitStack() as stack:
            stack.callback(self._folders.close)
            _open_wide(self._top)
            for step in self.steps():
                if step.do is Do.REMOVE:
                    self.take(step)

    def apply(self) -> None:
        """Take all steps. Raise DestinationError if something of the user's own is in the way.

        That is what came since `obstacles`. Raise OSError.
        """
        with ExitStack() as stack:
            stack.callback(self._folders.close)
            _open_wide(self._top)
            for step in self.steps():
                self.take(step)

    def take(self, step: Step) -> None:
        """Take a step, unless it was taken before. Raise as `apply` does."""
        count()
        if step.do is Do.REMOVE:
            with suppress(FileNotFoundError, NotADirectoryError), self._place(step) as place:
                self._remove(step.row, place)
            return
        if step.do is Do.FINISH:
            self._finish(step.row)
            return
        with self._place(step) as place:
            if names := self._obstacles(step, place):
                if not self._force:
                    raise in_the_way(self._destination, names)
                place.clear()
            if step.do is Do.MAKE:
                if place.there is None or not stat.S_ISDIR(place.there.st_mode):
                    place.clear()
                    os.mkdir(place.name, 0o700, dir_fd=place.folder)
            elif step.do is Do.LINK:
                self._link(step.row, place)
            elif not self._is_new(step.row, place):
                self._move(step.row, place)

    @contextmanager
    def _place(self, step: Step) -> Iterator[_Place]:
        table = self._old if step.do is Do.REMOVE else self._new
        path = table.source.paths[step.row]
        above, _, name = path.rpartition(b"/")
        yield _Place(self._folders.opened(above), name, path)

    def _obstacles(self, step: Step, place: _Place) -> list[str]:
        """Return the paths of what is at a ``place`` or in it, and is the user's own."""
        there = place.there
        if there is None:
            return []
        tables = (self._old,) if step.do is Do.REMOVE else (self._new, self._old)
        for table in tables:
            row = _row_of(table, place.path)
            if row >= 0 and _state(table, row, there, place.name, place.folder) < State.CHANGED:
                break
        else:
            if step.do is Do.MAKE and stat.S_ISDIR(there.st_mode):
                return []
            return [text_of(place.path)]
        if step.do in (Do.MOVE, Do.LINK) and stat.S_ISDIR(there.st_mode):
            return [*self._own_in(place)]
        return []

    def _own_in(self, place: _Place) -> Iterator[str]:
        """Yield the paths in a staged folder that make room for a file, and are not as staged."""
        folders = [place.path]
        for path in folders:  # grows while it is read
            entry = linux.open_beneath(self._top, path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                with os.scandir(entry) as entries:
                    for one in entries:
                        name = os.fsencode(one.name)
                        inner, there = path + b"/" + name, os.lstat(name, dir_fd=entry)
                        row = _row_of(self._old, inner)
                        if row < 0 or _state(self._old, row, there, name, entry) is State.CHANGED:
                            yield text_of(inner)
                        elif one.is_dir(follow_symlinks=False):
                            folders.append(inner)
            finally:
                os.close(entry)

    def _remove(self, row: int, place: _Place) -> None:
        there, is_folder = place.there, self._old.source.kinds[row] == Kind.FOLDER
        if there is None or stat.S_ISDIR(there.st_mode) != is_folder:
            return
        if is_folder:
            with suppress(OSError):  # it holds the user's own
                os.rmdir(place.name, dir_fd=place.folder)
        elif self._force or _state(self._old, row, there, place.name, place.folder) < State.CHANGED:
            os.unlink(place.name, dir_fd=place.folder)

    def _is_new(self, row: int, place: _Place) -> bool:
        """Whether a link is there already."""
        there, is_link = place.there, self._new.source.kinds[row] == Kind.LINK
        return bool(
            there
            and is_link
            and _state(self._new, row, there, place.name, place.folder) is State.SAME
        )

    def _move(self, row: int, place: _Place) -> None:
        if place.there and stat.S_ISDIR(place.there.st_mode):
            place.clear()
        hidden = self._hidden + b"/" + self._new.source.paths[row]
        _make_movable(os.path.dirname(hidden))
        os.rename(hidden, place.name, dst_dir_fd=place.folder)

    def _link(self, row: int, place: _Place) -> None:
        """Make a hard link: first a hidden one, which then replaces what is there."""
        source = self._new.source
        try:
            first = linux.open_beneath(self._top, source.targets[row], os.O_PATH)
        except OSError as error:
            if error.errno not in _NO_WAY:
                raise
            return  # its user removed the file: the next `look` finds that both are gone
        try:
            if place.there and os.path.samestat(os.fstat(first), place.there):
                return
        finally:
            os.close(first)
        if place.there and stat.S_ISDIR(place.there.st_mode):
            place.clear()
        hidden = self._hidden + b"/" + source.paths[row]
        _make_movable(os.path.dirname(hidden))
        with suppress(FileNotFoundError):
            os.unlink(hidden)
        above, _, name = source.targets[row].rpartition(b"/")
        folder = _opened(self._top, above)
        try:
            os.link(name, hidden, src_dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(folder)
        os.rename(hidden, place.name, dst_dir_fd=place.folder)

    def _finish(self, row: int) -> None:
        self._folders.close()
        path, mode, mtime = self._new.source.paths[row], self._new.modes[row], self._new.mtimes[row]
        group = os.lstat(self._hidden + b"/" + path).st_gid
        folder = _opened(self._top, path)
        try:
            there, name = os.fstat(folder), f"/proc/self/fd/{folder}"
            if there.st_gid != group:
                os.chown(name, -1, group)
            if stat.S_IMODE(there.st_mode) != mode or there.st_gid != group:
                os.chmod(name, mode)
            if there.st_mtime_ns != mtime:
                os.utime(name, ns=(mtime, mtime))
        finally:
            os.close(folder)


class _Place:
    """The ``path`` in a folder of one step: a ``name`` in the descriptor ``folder``.

    What was ``there`` is a stat, None for nothing.
    """

    def __init__(self, folder: int, name: bytes, path: bytes) -> None:
        self.folder, self.name, self.path = folder, name, path
        self.there: os.stat_result | None = None
        with suppress(FileNotFoundError):
            self.there = os.lstat(name, dir_fd=folder)

    def clear(self) -> None:
        """Remove what is there."""
        if self.there is None:
            return
        if stat.S_ISDIR(self.there.st_mode):
            remove_tree(f"/proc/self/fd/{self.folder}/{os.fsdecode(self.name)}")
        else:
            os.unlink(self.name, dir_fd=self.folder)
        self.there = None


class _Folders:
    """Opens the folders beneath ``top`` in which entries change, one at a time.

    One that its user may not write in can be written in as long as it is open.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._path: bytes | None = None
        self._folder, self._mode = -1, stat.S_IRWXU

    def opened(self, path: bytes) -> int:
        """Return a descriptor for the folder at ``path``. Raise OSError; NotADirectoryError if a
        link is in the way.
        """
        if path == self._path:
            return self._folder
        self.close()
        try:
            folder = _opened(self._top, path)
        except OSError as error:
            if error.errno in _NO_WAY:
                raise NotADirectoryError(errno.ENOTDIR, "not a folder", path) from None
            raise
        self._path, self._folder, self._mode = path, folder, _open_wide(folder)
        return folder

    def close(self) -> None:
        """Close the folder that is open."""
        if self._path is None:
            return
        self._path = None
        try:
            if self._mode & stat.S_IRWXU != stat.S_IRWXU:
                with suppress(FileNotFoundError):  # it was removed
                    os.chmod(f"/proc/self/fd/{self._folder}", self._mode)
        finally:
            os.close(self._folder)


def _open_wide(folder: int) -> int:
    """Let the owner do anything in a folder, a descriptor. Return the mode that it had."""
    mode = stat.S_IMODE(os.fstat(folder).st_mode)
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(f"/proc/self/fd/{folder}", mode | stat.S_IRWXU)
    return mode


def _opened(top: int, path: bytes) -> int:
    """Open the folder at ``path`` beneath ``top``, which is that of an empty path, however closed.

    Raise OSError.
    """
    return linux.open_beneath(top, path, linux.PASS_FOLDER) if path else os.dup(top)


def _make_movable(folder: bytes) -> None:
    """Let entries be moved out of a hidden ``folder``, which has its mode already."""
    mode = os.lstat(folder).st_mode
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(folder, 0o700)


def _row_of(table: Table, path: bytes) -> int:
    paths = table.source.paths
    row = bisect_left(paths, path)
    return row if row < len(paths) and paths[row] == path else -1
