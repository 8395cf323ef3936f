"""Look at sources on mounted filesystems: files and folders.

Rank 0 alone looks, and sends what it found to the other ranks.
"""

from __future__ import annotations

import os
import stat
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stager.base.errors import SourceError, UsageError
from stager.base.extents import rounded
from stager.disk.files import kind_of, opened
from stager.disk.reader import BLOCK, OPEN_FILE, FileReader, check_mounter
from stager.disk.record import SourceFacts
from stager.source.way import READ, reach

if TYPE_CHECKING:
    from stager.tree.listing import Listing
    from stager.tree.venv import Interpreter


@dataclass(frozen=True, slots=True)
class Source:
    """A file or folder to be staged, as it was when rank 0 looked at it.

    ``facts`` identify this version of it; in a folder's, the size is that of all files together.
    """

    facts: SourceFacts
    #: The permission bits that the copy may have at most, and the gid.
    mode: int
    group: int
    #: Bytes on the source's disk, without holes.
    allocated: int
    #: The number of files in a folder, and the digest of its listing, which identifies this version
    #: of all that is in it. A file has none.
    files: int = 0
    listing: str = ""
    #: The interpreter of a virtual environment that is to be relocated.
    interpreter: Interpreter | None = None
    #: The path of the folder, or of the access control list, that closes the copy to some who could
    #: read the source by its own mode; empty if there is none.
    closed_by: str = ""

    @property
    def interpreter_at(self) -> str:
        """The interpreter's path on the nodes if the same job stages it, or empty."""
        return self.interpreter.at if self.interpreter else ""

    @property
    def is_tree(self) -> bool:
        """Whether the source is a folder."""
        return bool(self.listing)


class Listings:
    """The listings of source folders, by path and patterns. Each folder is listed once.

    They stay apart from Source because a listing is large: it is sent only if some node needs it.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, tuple[str, ...], tuple[str, ...]], Listing] = {}

    def get(self, path: str, include: tuple[str, ...], exclude: tuple[str, ...]) -> Listing | None:
        """Return the listing of the folder, or None if there is none yet."""
        return self._found.get((path, include, exclude))

    def list_once(
        self,
        path: str,
        facts: os.stat_result,
        include: tuple[str, ...],
        exclude: tuple[str, ...],
    ) -> Listing:
        """Return the listing of the folder with the stat ``facts``; list it if there is none yet.

        Raise SourceError or IntegrityError as `walk` does.
        """
        key = path, include, exclude
        if key not in self._found:
            self._found[key] = _list(path, facts, include, exclude)
        return self._found[key]

    def clear(self) -> None:
        """Forget all listings: the folders may have changed."""
        self._found.clear()


def look_at_source(
    path: str,
    include: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    listings: Listings | None = None,
    *,
    to_be_read: bool = False,
) -> Source:
    """Look at the source, following links; list it if it is a folder and not in ``listings`` yet.

    With ``to_be_read``, check that this user may read it. Raise SourceError if the source is
    missing, unreadable, or neither a plain file nor a folder; UsageError if a file has patterns.
    """
    try:
        with opened(path, os.O_PATH | os.O_CLOEXEC) as descriptor:
            check_mounter(descriptor, path)
            facts, (mode, closed_by) = os.fstat(descriptor), reach(descriptor)
        if to_be_read:
            os.close(os.open(path, OPEN_FILE))
    except OSError as error:
        hint = "; check the path, and that the compute nodes mount this filesystem"
        missing = isinstance(error, FileNotFoundError)
        raise SourceError(f"{path}: {error.strerror}{hint if missing else ''}") from None
    if stat.S_ISDIR(facts.st_mode):
        listings = Listings() if listings is None else listings
        listing = listings.list_once(path, facts, include, exclude)
        identity = replace(facts_of(facts), size=listing.size)
        return Source(
            identity, mode, facts.st_gid, listing.allocated(), listing.files, listing.digest(),
            closed_by=closed_by,
        )  # fmt: skip
    if include or exclude:
        raise UsageError(
            f"{path} is not a folder; remove include and exclude, which are for folders"
        )
    if not stat.S_ISREG(facts.st_mode):
        what = "only a plain file or a folder can be staged"
        raise SourceError(f"{path} is {kind_of(facts.st_mode)}; {what}")
    allocated = min(facts.st_size, facts.st_blocks * BLOCK)
    return Source(facts_of(facts), mode, facts.st_gid, allocated, closed_by=closed_by)


def _list(
    path: str, facts: os.stat_result, include: tuple[str, ...], exclude: tuple[str, ...]
) -> Listing:
    from stager.tree.walk import walk  # not needed for a file

    if not include and not exclude:
        return walk(path, facts)
    from stager.tree.patterns import Patterns  # slow to import

    return walk(path, facts, Patterns(include, exclude))


def facts_of(facts: os.stat_result) -> SourceFacts:
    """Return what identifies one version of a source: the part of its stat that a write changes."""
    return SourceFacts(facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)


def gives_less(descriptor: int, source: Source) -> bool:
    """Return whether an open file may be read by fewer than the ``source`` that was looked at.

    Then it is another file, or a folder above it was closed meanwhile. Raise OSError.
    """
    group_differs = os.fstat(descriptor).st_gid != source.group
    lost = source.mode & ~reach(descriptor).mode & READ
    return bool(lost or (group_differs and source.mode & READ & stat.S_IRWXG))


def data_size(path: str, source: Source) -> int:
    """Return the bytes that a copy of the file takes on a disk: its data without holes.

    The source may take fewer, if its filesystem compresses it or keeps it on tape. So if it seems
    to have holes, open it and ask where they are. Raise SourceError.
    """
    size = source.facts.size
    if source.allocated >= size:
        return size
    with closing(FileReader(path)) as reader:
        return sum(extent.length for extent in rounded(reader.extents(size), size))
