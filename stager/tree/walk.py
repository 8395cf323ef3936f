"""How is a folder listed: the only time that a stage looks at a source folder's entries?

Each entry is statted once. Shared storage answers slowly, but answers many requests at once, so
several threads ask. When the answers come from memory, a single thread is faster. Links that lead
out of the folder are found in its listing: what is there is not in the copy.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from stager.base.errors import IntegrityError, SourceError
from stager.base.extents import SMALLEST_HOLE, rounded
from stager.base.linux import IS_LINK, open_at, open_beneath
from stager.base.mounts import is_on_fuse
from stager.base.telemetry import count
from stager.fs.files import OPEN_FOLDER, kind_of, opened
from stager.fs.reader import BLOCK, OPEN_FILE, FileReader, check_mounter
from stager.tree.listing import Kind, Listing, Row, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from stager.base.extents import Extent
    from stager.tree.patterns import Patterns

T = TypeVar("T")
Folder = TypeVar("Folder")
#: Threads that read from slow storage.
THREADS = 32
#: Seconds for an entry from which storage counts as slow: ten times what a local disk takes.
_SLOW = 100e-6
_PERMISSIONS = 0o7777
#: How names become bytes: as os.fsencode does it, in a third of its time, for each entry.
_NAMES = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
#: Folders that one thread lists before the time is checked again.
_TRIAL = 16


class _Found(NamedTuple):
    """What is in one folder: rows, the paths of its subfolders, and the files with hard links.

    ``device`` is that of the folder itself, which is the first row. Of the files with hard links,
    each has its device and inode, and is not among the ``rows``.
    """

    rows: list[Row]
    folders: list[bytes]
    linked: list[tuple[tuple[int, int], Row]]
    device: int


def walk(
    folder: str,
    facts: os.stat_result | None = None,
    patterns: Patterns | None = None,
    *,
    holes: bool = True,
    remedy: str = "leave it out with exclude=",
    follow: bool = False,
) -> Listing:
    """Return the listing of ``folder``; ``facts`` is the stat that it must have, if that is known.

    Symbolic links in it are not followed, also if one is put in the place of a folder meanwhile.
    With ``follow``, each is listed as what it leads to. What the ``patterns`` leave out is not
    listed, and folders among that are not read. With ``holes``, files with holes are opened to find
    these. ``remedy`` ends the message about an entry that is no file, folder or link.

    Raise SourceError if an entry cannot be read or is no file, folder or link, or if one to be
    followed leads to nothing or in a circle; IntegrityError if one is removed or replaced
    meanwhile, and OSError if the folder itself cannot be opened.
    """
    with opened(folder, OPEN_FOLDER) as root:
        if facts and not os.path.samestat(os.fstat(root), facts):
            raise _changed(os.fsencode(folder))
        walker = _Walker(
            os.fsencode(folder), root, patterns, holes=holes, remedy=remedy, follow=follow
        )
        rows = _rows(walker)
        return Listing.of(patterns.pruned(rows) if patterns else rows)


def _changed(path: bytes, what: str = "replaced") -> IntegrityError:
    text = f"{text_of(path)} was {what} while its folder was listed"
    return IntegrityError(f"{text}; submit again when nothing changes the folder")


def _rows(walker: _Walker) -> Iterator[Row]:
    """Yield all rows. The first path of a file with hard links is the file, as sorted."""
    linked: dict[tuple[int, int], list[Row]] = {}
    for found in walker.all():
        yield from found.rows
        for key, row in found.linked:
            linked.setdefault(key, []).append(row)
    for names in linked.values():
        first, *others = sorted(names)  # by path
        yield first
        for row in others:
            yield Row(row.path, Kind.HARD_LINK, target=first.path)


def _size(found: _Found) -> int:
    return len(found.rows) + len(found.folders) + len(found.linked)


class Workers:
    """Calls a function for many folders: by one thread, or by many if the storage is slow.

    A process that may start no threads goes on with the one it has.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._slow = False
        self._is_alone = False

    def each(
        self, look: Callable[[Folder], T], folders: Sequence[Folder], size: Callable[[T], int]
    ) -> Iterator[T]:
        """Yield what ``look`` returns for each folder. ``size`` tells how many entries that are."""
        at = 0
        while at < len(folders):
            batch = folders[at:] if self._slow else folders[at : at + _TRIAL]
            at += len(batch)
            begun = time.monotonic()
            answers = self._all(look, batch)
            entries = sum(map(size, answers))
            self._slow = self._slow or time.monotonic() - begun > entries * _SLOW
            yield from answers

    def _all(self, look: Callable[[Folder], T], folders: Sequence[Folder]) -> list[T]:
        if self._slow and not self._is_alone:
            try:
                return list(self._threads().map(look, folders))
            except RuntimeError:  # no thread can be started: RLIMIT_NPROC
                self._is_alone = True
        return list(map(look, folders))

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor  # slow to import

            self._pool = ThreadPoolExecutor(THREADS)
        return self._pool

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _leads_to_folder(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):  # it is told of where it is not left out
        return entry.is_dir()
    return False


class _Walker:
    """Lists the folder that is open as ``root``, and all folders beneath it.

    ``folder`` is its path, for messages. Each folder is opened from the root, and what is listed of
    it is read by its descriptor: no name is resolved twice. ``remedy`` is for an entry that is no
    file, folder or link. With ``follow``, links are followed.
    """

    def __init__(
        self,
        folder: bytes,
        root: int,
        patterns: Patterns | None,
        *,
        holes: bool,
        remedy: str,
        follow: bool,
    ) -> None:
        self._folder = folder
        self._root = root
        self._device = os.fstat(root).st_dev
        self._holes = holes
        self._remedy = remedy
        self._patterns = patterns
        self._follow = follow
        #: The paths of links to folders; and which folder is at each path, if links are followed.
        self._links = set[bytes]()
        self._entered: dict[bytes, tuple[int, int]] = {}

    def all(self) -> Iterator[_Found]:
        """Yield the contents of each folder, level by level from the top."""
        level = [b""]
        with closing(Workers()) as workers:
            while level:
                below: list[bytes] = []
                for found in workers.each(self._look, level, _size):
                    below += found.folders
                    yield found
                level = below

    def _path(self, path: bytes, name: bytes = b"") -> bytes:
        """Return a path beneath the folder as messages name it."""
        return b"/".join(part for part in (self._folder, path, name) if part)

    def _look(self, path: bytes) -> _Found:
        """List the folder at ``path``."""
        name = b""
        try:
            folder = open_at(self._root, path, OPEN_FOLDER, follow=self._follow)
            try:
                facts = os.fstat(folder)
                if self._follow:
                    self._check_circle(path, facts)
                self._check_mount(folder, path, facts)
                found = _Found([_folder_row(path, facts)], [], [], facts.st_dev)
                prefix = path + b"/" if path else b""
                with os.scandir(folder) as entries:
                    for entry in entries:
                        count()
                        name = entry.name.encode(*_NAMES)
                        self._sort(folder, prefix, name, entry, found)
            finally:
                os.close(folder)
        except OSError as error:
            where = self._path(path, name)
            if isinstance(error, FileNotFoundError):
                raise _changed(where, "removed") from None
            if error.errno in IS_LINK:
                raise _changed(where) from None
            raise SourceError(f"{text_of(where)}: {error.strerror}") from None
        return found

    def _check_circle(self, path: bytes, facts: os.stat_result) -> None:
        """Raise SourceError if the folder at ``path`` is one of those above it."""
        self._entered[path] = folder = facts.st_dev, facts.st_ino
        above = path
        while above:
            above = above.rpartition(b"/")[0]
            if self._entered.get(above) == folder:
                where = text_of(self._path(path))
                raise SourceError(
                    f"{where}: links lead in a circle here; leave it out with exclude="
                )

    def _check_mount(self, descriptor: int, path: bytes, facts: os.stat_result) -> None:
        """Raise SourceError if what is open is on another filesystem, which a stranger mounted."""
        if facts.st_dev != self._device:
            check_mounter(descriptor, text_of(self._path(path)))

    def _sort(
        self, folder: int, prefix: bytes, name: bytes, entry: os.DirEntry[str], found: _Found
    ) -> None:
        """Add an entry of the open ``folder`` to what was found there."""
        path = prefix + name
        is_link = self._follow and entry.is_symlink()
        is_folder = entry.is_dir(follow_symlinks=False) or (is_link and _leads_to_folder(entry))
        if self._patterns and self._patterns.leaves_out(path, is_folder=is_folder):
            return
        if is_folder:
            found.folders.append(path)  # and it is a row of its own when it is opened
            return
        facts = self._behind(folder, path, name) if is_link else entry.stat(follow_symlinks=False)
        row = self._row(folder, path, name, facts)
        if not is_link and facts.st_dev != found.device and row.kind is Kind.FILE:
            self._check_mounted_file(folder, path, facts)
        if facts.st_nlink > 1 and row.kind is Kind.FILE:
            found.linked.append(((facts.st_dev, facts.st_ino), row))
        else:
            found.rows.append(row)

    def _behind(self, folder: int, path: bytes, name: bytes) -> os.stat_result:
        """Return the stat of the file that a link leads to."""
        where = text_of(self._path(path))
        try:
            with opened(name, os.O_PATH | os.O_CLOEXEC, folder) as descriptor:
                check_mounter(descriptor, where)
                return os.fstat(descriptor)
        except OSError as error:
            what = f"is a link that cannot be followed ({error.strerror})"
            raise SourceError(f"{where} {what}; leave it out with exclude=") from None

    def _check_mounted_file(self, folder: int, path: bytes, facts: os.stat_result) -> None:
        """Check the same of a file: a filesystem can be mounted at a file's place, too."""
        name = path.rpartition(b"/")[2]
        with closing(FileReader(text_of(path), open_beneath(folder, name, os.O_PATH))) as file:
            self._check_mount(file.descriptor, path, facts)

    def _row(self, folder: int, path: bytes, name: bytes, facts: os.stat_result) -> Row:
        mode = facts.st_mode
        # Most entries are files without holes, and there may be a million: no keyword arguments.
        if stat.S_ISREG(mode) and facts.st_size - facts.st_blocks * BLOCK < SMALLEST_HOLE:
            return Row._make(
                (path, Kind.FILE, mode & _PERMISSIONS, facts.st_size, facts.st_mtime_ns,
                 facts.st_ctime_ns, facts.st_ino, facts.st_uid, facts.st_gid, b"", None)
            )  # fmt: skip
        who = facts.st_uid, facts.st_gid
        if stat.S_ISREG(mode):
            return Row(
                path, Kind.FILE, mode & _PERMISSIONS, facts.st_size, facts.st_mtime_ns,
                facts.st_ctime_ns, facts.st_ino, *who,
                extents=self._extents(folder, path, name, facts),
            )  # fmt: skip
        if stat.S_ISDIR(mode):
            raise _changed(self._path(path))
        if stat.S_ISLNK(mode):
            target = os.readlink(name, dir_fd=folder)
            return Row(path, Kind.LINK, 0, 0, facts.st_mtime_ns, 0, 0, *who, target)
        what = f"{kind_of(mode)}, which cannot be staged"
        raise SourceError(f"{text_of(self._path(path))} is {what}; {self._remedy}")

    def _extents(
        self, folder: int, path: bytes, name: bytes, facts: os.stat_result
    ) -> tuple[Extent, ...] | None:
        """Return where a file has data, or None if its holes are not asked for."""
        if not self._holes:
            return None
        size = facts.st_size
        whole = self._path(path)
        with closing(
            FileReader(text_of(whole), open_at(folder, name, OPEN_FILE, follow=self._follow))
        ) as reader:
            there = os.fstat(reader.descriptor)
            if not os.path.samestat(there, facts) and not is_on_fuse(reader.descriptor):
                raise _changed(whole)
            return rounded(reader.extents(size), size)


def _folder_row(path: bytes, facts: os.stat_result) -> Row:
    mode, who = facts.st_mode & _PERMISSIONS, (facts.st_uid, facts.st_gid)
    # Its ctime tells of a list of who may enter it, which its mode may not show.
    return Row(path, Kind.FOLDER, mode, 0, facts.st_mtime_ns, facts.st_ctime_ns, 0, *who)


def count_leaving(folder: str, listing: Listing, known: Container[bytes] = ()) -> int:
    """Return the number of links that lead out of the ``folder``, without the ``known``. Pure.

    Raise SourceError if nothing else is in it: the copy would have no file.
    """
    places = list(_places(listing, known))
    if places and len(places) == len(listing) - listing.kinds.count(Kind.FOLDER):
        where = text_of(places[0])
        raise SourceError(
            f"{folder} has no files: all links in it lead out of it, as to {where}; take the files "
            "that they lead to by links=follow"
        )
    return len(places)


def _places(listing: Listing, known: Container[bytes]) -> Iterator[bytes]:
    """Yield where links lead that leave the folder: relative to it, or absolute."""
    for row in listing.rows(Kind.LINK):
        target = listing.targets[row]
        if (target.startswith(b"/") or b".." in target) and listing.paths[row] not in known:
            place = os.path.normpath(os.path.join(os.path.dirname(listing.paths[row]), target))
            if place.startswith(b"/") or place.split(b"/")[0] == b"..":
                yield place
