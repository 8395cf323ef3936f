"""List a folder: the only time that a stage looks at a source folder's entries.

Each entry is statted once. Shared storage answers slowly, but answers many requests at once, so
several threads ask. When the answers come from memory, a single thread is faster.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from stager.base.errors import IntegrityError, SourceError
from stager.base.extents import SMALLEST_HOLE, rounded
from stager.base.progress import count
from stager.disk.files import kind_of
from stager.disk.reader import BLOCK, FileReader
from stager.tree.listing import Kind, Listing, Row, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import ThreadPoolExecutor

    from stager.base.extents import Extent
    from stager.tree.patterns import Patterns

#: Threads that read from slow storage.
THREADS = 32
#: Seconds for an entry from which storage counts as slow: ten times what a local disk takes.
_SLOW = 100e-6
_PERMISSIONS = 0o7777
#: Folders that one thread lists before the time is checked again.
_TRIAL = 16


class _Found(NamedTuple):
    """What is in one folder: rows, the paths of its subfolders, and the files with hard links.

    Of those, each has its device and inode, and is not among the ``rows``.
    """

    rows: list[Row]
    folders: list[bytes]
    linked: list[tuple[tuple[int, int], Row]]


def walk(
    folder: str,
    facts: os.stat_result | None = None,
    patterns: Patterns | None = None,
    *,
    holes: bool = True,
) -> Listing:
    """Return the listing of ``folder``; ``facts`` is its stat, if that is known.

    Symbolic links in it are not followed. What the ``patterns`` leave out is not listed, and
    folders among that are not read. With ``holes``, files with holes are opened to find these.

    Raise SourceError if an entry cannot be read or is no file, folder or link, IntegrityError if
    one is removed meanwhile.
    """
    walker = _Walker(os.fsencode(folder), facts or os.stat(folder), holes, patterns)
    rows = _rows(walker)
    try:
        return Listing.of(patterns.pruned(rows) if patterns else rows)
    except OverflowError as error:
        (path,) = error.args
        where = text_of(os.fsencode(folder) + b"/" + path)
        text = f"{where} has a time before 1678 or after 2262; correct it with touch"
        raise SourceError(text) from None


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


class _Walker:
    """Lists the folder ``root`` and all folders beneath it."""

    def __init__(
        self, root: bytes, facts: os.stat_result, holes: bool, patterns: Patterns | None
    ) -> None:
        self._root = root
        self._facts = facts
        self._holes = holes
        self._patterns = patterns
        self._slow = False

    def all(self) -> Iterator[_Found]:
        """Yield the contents of each folder, level by level from the top."""
        from concurrent.futures import ThreadPoolExecutor  # slow to import

        yield _Found([self._row(b"", self._facts)], [], [])
        level = [b""]
        with ThreadPoolExecutor(THREADS) as pool:
            while level:
                below: list[bytes] = []
                for found in self._look_into(level, pool):
                    below += found.folders
                    yield found
                level = below

    def _look_into(self, level: list[bytes], pool: ThreadPoolExecutor) -> Iterator[_Found]:
        """Yield the contents of the folders of one level, by one thread or by many."""
        at = 0
        while at < len(level):
            batch = level[at:] if self._slow else level[at : at + _TRIAL]
            at += len(batch)
            begun = time.monotonic()
            answers = list((pool.map if self._slow else map)(self._look, batch))
            entries = sum(1 + len(found.rows) + len(found.linked) for found in answers)
            self._slow = self._slow or time.monotonic() - begun > entries * _SLOW
            yield from answers

    def _look(self, path: bytes) -> _Found:
        found = _Found([], [], [])
        above = self._root + b"/" + path if path else self._root
        prefix = path + b"/" if path else b""
        everything = self._patterns is None
        try:
            with os.scandir(above) as entries:
                for entry in entries:
                    count()
                    if everything or not self._leaves_out(prefix, entry):
                        self._sort(prefix + entry.name, entry.stat(follow_symlinks=False), found)
        except OSError as error:
            where = text_of(os.fsencode(error.filename or above))
            if isinstance(error, FileNotFoundError):
                text = f"{where} was removed while its folder was listed"
                remedy = "submit again when nothing changes the folder"
                raise IntegrityError(f"{text}; {remedy}") from None
            raise SourceError(f"{where}: {error.strerror}") from None
        return found

    def _leaves_out(self, prefix: bytes, entry: os.DirEntry[bytes]) -> bool:
        return self._patterns is not None and self._patterns.leaves_out(
            prefix + entry.name, is_folder=entry.is_dir(follow_symlinks=False)
        )

    def _sort(self, path: bytes, facts: os.stat_result, found: _Found) -> None:
        row = self._row(path, facts)
        if facts.st_nlink > 1 and row.kind is Kind.FILE:
            found.linked.append(((facts.st_dev, facts.st_ino), row))
            return
        found.rows.append(row)
        if row.kind is Kind.FOLDER:
            found.folders.append(path)

    def _row(self, path: bytes, facts: os.stat_result) -> Row:
        mode = facts.st_mode
        # Most entries are files without holes, and there may be a million: no keyword arguments.
        if stat.S_ISREG(mode) and facts.st_size - facts.st_blocks * BLOCK < SMALLEST_HOLE:
            return Row._make(
                (path, Kind.FILE, mode & _PERMISSIONS, facts.st_size, facts.st_mtime_ns,
                 facts.st_ctime_ns, facts.st_ino, facts.st_uid, facts.st_gid, b"", None)
            )  # fmt: skip
        whole = self._root + b"/" + path
        who = facts.st_uid, facts.st_gid
        if stat.S_ISREG(mode):
            return Row(
                path, Kind.FILE, mode & _PERMISSIONS, facts.st_size, facts.st_mtime_ns,
                facts.st_ctime_ns, facts.st_ino, *who, extents=self._extents(whole, facts),
            )  # fmt: skip
        if stat.S_ISDIR(mode):
            return Row(path, Kind.FOLDER, mode & _PERMISSIONS, 0, facts.st_mtime_ns, 0, 0, *who)
        if stat.S_ISLNK(mode):
            target = os.readlink(whole)
            return Row(path, Kind.LINK, 0, 0, facts.st_mtime_ns, 0, 0, *who, target)
        what = f"{kind_of(mode)}, which cannot be staged"
        raise SourceError(f"{text_of(whole)} is {what}; leave it out with exclude=")

    def _extents(self, path: bytes, facts: os.stat_result) -> tuple[Extent, ...] | None:
        """Return where a file has data, or None if its holes are not asked for."""
        if not self._holes:
            return None
        size = facts.st_size
        with closing(FileReader(os.fsdecode(path))) as reader:
            return rounded(reader.extents(size), size)
