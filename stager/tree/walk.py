"""A folder in, its Listing out: the one look that a stage takes at a source folder.

Each entry is statted once. A folder on shared storage answers slowly but many at once, so several
threads ask; where answers come from memory, one thread alone is faster.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from stager.base.errors import IntegrityError, SourceError
from stager.base.extents import SMALLEST_HOLE, rounded
from stager.disk.files import kind_of
from stager.disk.reader import BLOCK, FileReader
from stager.tree.listing import Kind, Listing, Row, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import ThreadPoolExecutor

    from stager.base.extents import Extent
    from stager.tree.patterns import Patterns

#: Threads that look into folders of slow storage, and the seconds for an entry that are slow: ten
#: times what a local disk takes.
THREADS, _SLOW = 32, 100e-6
_PERMISSIONS = 0o7777
#: Folders that one thread looks into between two looks at the clock.
_TRIAL = 16


class _Found(NamedTuple):
    """What is in one folder: its rows, the folders among them, and the files with several names."""

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
    """The listing of ``folder``, whose own ``facts`` may be known; links in it are not followed.

    What the ``patterns`` leave out is neither listed nor looked into. Files with holes are opened
    to see where these are, unless ``holes`` does not ask for them.

    Raises SourceError for what cannot be read or is no file, folder or link, and IntegrityError
    for what goes away meanwhile.
    """
    walker = _Walker(os.fsencode(folder), facts or os.stat(folder), holes, patterns)
    rows = _rows(walker)
    try:
        return Listing.of(patterns.pruned(rows) if patterns else rows)
    except OverflowError as error:
        (path,) = error.args
        where = text_of(os.fsencode(folder) + b"/" + path)
        raise SourceError(f"{where} has an impossible time; touch it") from None


def _rows(walker: _Walker) -> Iterator[Row]:
    linked: dict[tuple[int, int], list[Row]] = {}
    for found in walker.all():
        yield from found.rows
        for key, row in found.linked:
            linked.setdefault(key, []).append(row)
    for names in linked.values():
        first, *others = sorted(names)
        yield first
        for row in others:
            yield Row(row.path, Kind.HARD_LINK, target=first.path)


class _Walker:
    """Looks into all folders beneath ``root``, itself included."""

    def __init__(
        self, root: bytes, facts: os.stat_result, holes: bool, patterns: Patterns | None
    ) -> None:
        self._root = root
        self._facts = facts
        self._holes = holes
        self._patterns = patterns
        self._slow = False

    def all(self) -> Iterator[_Found]:
        """What is in each folder, from the top downwards."""
        from concurrent.futures import ThreadPoolExecutor  # which takes a while to import

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
                    if everything or not self._leaves_out(prefix, entry):
                        self._sort(prefix + entry.name, entry.stat(follow_symlinks=False), found)
        except OSError as error:
            where = text_of(os.fsencode(error.filename or above))
            if isinstance(error, FileNotFoundError):
                text = f"{where} went away while the folder was read; submit again once it rests"
                raise IntegrityError(text) from None
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
        # Most are plain files, of which there may be a million.
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
        raise SourceError(f"{text_of(whole)} is {what}; leave it out")

    def _extents(self, path: bytes, facts: os.stat_result) -> tuple[Extent, ...] | None:
        """Where a file has data, if it has holes that are worth it."""
        if not self._holes:
            return None
        size = facts.st_size
        with closing(FileReader(os.fsdecode(path))) as reader:
            return rounded(reader.extents(size), size)
