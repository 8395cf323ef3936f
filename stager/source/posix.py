"""TODO."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stager.base.errors import SourceError, UsageError
from stager.base.extents import rounded
from stager.disk.files import kind_of
from stager.disk.permissions import private_mode
from stager.disk.reader import BLOCK, FileReader
from stager.disk.record import SourceFacts

if TYPE_CHECKING:
    from stager.tree.listing import Listing
    from stager.tree.venv import Interpreter


@dataclass(frozen=True, slots=True)
class Source:
    """What one stat of the source told; ``mode`` is its permission bits, ``group`` its gid.

    ``allocated`` is the number of bytes that it takes on its disk, holes not counted. A folder has
    its number of ``files`` and the digest of its ``listing``; its size is that of all of them.
    """

    facts: SourceFacts
    mode: int
    group: int
    allocated: int
    files: int = 0
    listing: str = ""
    #: Of an environment that is to be relocated.
    interpreter: Interpreter | None = None

    @property
    def interpreter_at(self) -> str:
        """Where on the nodes an environment's interpreter is staged too, or nothing."""
        return self.interpreter.at if self.interpreter else ""

    @property
    def is_tree(self) -> bool:
        """Whether it is a folder."""
        return bool(self.listing)


#: What folders hold, by their paths and the patterns of what is included and excluded.
Listings = dict[tuple[str, tuple[str, ...], tuple[str, ...]], "Listing"]


def look_at_source(
    path: str,
    include: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    listings: Listings | None = None,
    *,
    to_be_read: bool = False,
) -> Source:
    """Stat the source, following links; where it is ``to_be_read``, make sure that it may be.

    What a folder holds is put into ``listings``, unless it is there already. Raises SourceError
    unless the source is a plain file or a folder, UsageError for patterns with a file.
    """
    try:
        facts = os.stat(path)
        if to_be_read:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        hint = "; is the path right, and on a filesystem that the nodes see?"
        missing = isinstance(error, FileNotFoundError)
        raise SourceError(f"{path}: {error.strerror}{hint if missing else ''}") from None
    if stat.S_ISDIR(facts.st_mode):
        listings = {} if listings is None else listings
        key = path, include, exclude
        if key not in listings:
            listings[key] = _list(path, facts, include, exclude)
        return _source_tree(facts, listings[key])
    if include or exclude:
        raise UsageError(f"{path} is no folder; include and exclude are for what is in one")
    if not stat.S_ISREG(facts.st_mode):
        what = "only a plain file or a folder can be staged"
        raise SourceError(f"{path} is {kind_of(facts.st_mode)}; {what}")
    allocated = min(facts.st_size, facts.st_blocks * BLOCK)
    return Source(facts_of(facts), stat.S_IMODE(facts.st_mode), facts.st_gid, allocated)


def _list(
    path: str, facts: os.stat_result, include: tuple[str, ...], exclude: tuple[str, ...]
) -> Listing:
    from stager.tree.walk import walk  # what a file need not import

    if not include and not exclude:
        return walk(path, facts)
    from stager.tree.patterns import Patterns  # what few folders need

    return walk(path, facts, Patterns(include, exclude))


def _source_tree(facts: os.stat_result, listing: Listing) -> Source:
    whole = replace(facts_of(facts), size=listing.size)
    return Source(
        whole, stat.S_IMODE(facts.st_mode), facts.st_gid, listing.allocated(), listing.files,
        listing.digest(),
    )  # fmt: skip


def facts_of(facts: os.stat_result) -> SourceFacts:
    """The part of a source's stat that tells one version of it from another."""
    return SourceFacts(facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)


def data_size(path: str, source: Source) -> int:
    """Bytes that a copy of the source takes: those of its data, holes left out.

    What the source itself takes may be less, where it is compressed, or archived elsewhere. Raises
    SourceError.
    """
    size = source.facts.size
    if source.allocated >= size:
        return size
    with closing(FileReader(path)) as reader:
        return sum(extent.length for extent in rounded(reader.extents(size), size))


def for_all(path: str, source: Source) -> Source:
    """``source`` with the permissions that its copy may have where all users pass.

    The folders above a source may keep out those whom its own mode would let in, and an access
    control list may say what no mode does: in both cases nobody but root may read the copy.
    """
    folder = os.path.realpath(path)
    plain = facts_of(os.stat(folder)) == source.facts and not _has_acl(folder)
    while plain and folder != "/":
        folder = os.path.dirname(folder)
        plain = bool(os.stat(folder).st_mode & stat.S_IXOTH) and not _has_acl(folder)
    return source if plain else replace(source, mode=private_mode(source.mode))


def _has_acl(path: str) -> bool:
    try:
        return any("acl" in name.lower() for name in os.listxattr(path))
    except OSError as error:
        return error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS)
