"""One node's facts in, a Survey out: whether its copy is current, and what a new one would meet.

Nothing is written here. Only the rank that looks at the source touches shared storage, by one
stat; the currency of a copy is judged from the disk of its own node.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import xxhash

from stager.directive import Validate
from stager.errors import DestinationError, SourceError, UsageError
from stager.layout import rounded
from stager.manifest import SourceFacts
from stager.reader import BLOCK, FileReader
from stager.store import existing_folder_above, kind_of, opened_way

if TYPE_CHECKING:
    from stager.interpreter import Interpreter
    from stager.listing import Listing
    from stager.manifest import Record
    from stager.request import StageItem
    from stager.store import Cache

#: Bytes read at a time where a copy is read again.
_READ_SIZE = 4 << 20
#: Why a copy is not current that nobody has staged.
NOT_RECORDED = "not recorded"
#: Seconds of patience between a copy's replacement and that of its record.
_PUBLICATION = (0.1, 0.5, 1.0)


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


@dataclass(frozen=True, slots=True)
class Survey:
    """One node's answer for one item. ``reason`` says why the copy is not current, else is empty.

    ``digest`` is the recorded one of a current copy.
    """

    node: str
    reason: str
    digest: str
    #: Of a current tree.
    files: int = 0
    #: Whether a current copy is of the source as it is now, and not only of its size.
    fresh: bool = True
    #: Of a current part of a folder, which split it is a part of.
    split: str = ""

    @property
    def current(self) -> bool:
        """Whether the node can do without the item, and can send it to others."""
        return not self.reason


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
    from stager.walk import walk  # what a file need not import

    if not include and not exclude:
        return walk(path, facts)
    from stager.patterns import Patterns  # what few folders need

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


def survey(item: StageItem, path: str, source: Source, cache: Cache, node: str) -> Survey:
    """What this node holds at ``path``, where ``item`` is wanted.

    Raises DestinationError where nothing could be put at ``path``.
    """
    there = _look_at_destination(path)
    folder = existing_folder_above(path)
    check_folder(folder, cache)
    check_trees_above(item, cache)
    record = cache.load(item.destination)
    reason = judge(item.validate, source.facts, record, there)
    if reason == NOT_RECORDED and os.path.lexists(cache.record_path(item.destination)):
        reason = "its record cannot be read"
    if record and record.source != item.source:
        reason = reason or "staged from another source"
    if item.shared and there and stat.S_IMODE(there.st_mode) & 0o077 & ~source.mode:
        reason = reason or "its permissions are too wide"
    if not reason and item.validate is Validate.CHECKSUM:
        assert record is not None
        reason = "" if digest_of(path) == record.digest else "its bytes differ from its digest"
    if reason or record is None:
        return Survey(node, reason, "")
    return Survey(node, reason, record.digest, fresh=record.source_facts == source.facts)


def survey_shared(item: StageItem, path: str, source: Source, cache: Cache, node: str) -> Survey:
    """What root staged at ``path`` for all, if that is what ``item`` asks for.

    Raises DestinationError where it is not: nobody but root can bring it there.
    """
    for pause in (*_PUBLICATION, 0.0):
        record = cache.load(item.destination)
        reason = judge(item.validate, source.facts, record, _look_at_shared(path))
        if record and record.source != item.source:
            reason = reason or "staged from another source"
        if not reason and item.validate is Validate.CHECKSUM and record:
            reason = "" if digest_of(path) == record.digest else "its bytes differ from its digest"
        if not reason or reason in ("absent", "validate=always"):
            break
        time.sleep(pause)  # root may be about to replace both, one after the other
    if reason or record is None:
        raise DestinationError(
            f"{path} is root's to stage, and not current there: {reason}; choose another "
            "destination, or ask the administrator"
        )
    if not os.access(path, os.R_OK):
        raise DestinationError(f"{path}: no permission to read it; choose another destination")
    return Survey(node, "", record.digest)


def _look_at_shared(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


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
    return source if plain else replace(source, mode=source.mode & stat.S_IRWXU)


def _has_acl(path: str) -> bool:
    try:
        return any("acl" in name.lower() for name in os.listxattr(path))
    except OSError as error:
        return error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS)


def judge(
    validate: Validate,
    source: SourceFacts,
    record: Record | None,
    there: os.stat_result | None,
) -> str:
    """Why a copy is not current, or nothing. Pure.

    ``stat`` compares the source and the copy with the record by all of its facts, ``size`` by
    their sizes alone; ``checksum`` compares the source by all facts and the copy by its size, and
    leaves the copy's bytes to the caller; ``always`` takes no copy for current.
    """
    if there is None:
        return "absent"
    if record is None:
        return NOT_RECORDED
    if validate is Validate.ALWAYS:
        return "validate=always"
    if not stat.S_ISREG(there.st_mode) or there.st_uid != record.copy_facts.owner:
        return "replaced"
    was, now = record.source_facts, source
    if was.size != now.size or (validate is not Validate.SIZE and was != now):
        return "the source changed"
    copy = record.copy_facts
    if copy.size != there.st_size:
        return "the copy changed"
    if validate is Validate.STAT:
        same = (copy.mtime_ns, copy.inode) == (there.st_mtime_ns, there.st_ino)
        return "" if same and there.st_nlink == 1 else "the copy changed"
    return ""


def digest_of(path: str) -> str:
    """The xxh3-128 of the file's bytes, in hexadecimal."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_READ_SIZE):
            digest.update(block)
    return digest.hexdigest()


def own_lstat(path: str) -> os.stat_result | None:
    """What is there, if anything. Raises DestinationError where it is somebody else's."""
    try:
        there = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None  # the folder above, where there is one, is looked at next
    except OSError as error:
        raise DestinationError(f"{path}: {error.strerror}") from None
    if there.st_uid != os.getuid():
        raise DestinationError(f"{path} belongs to uid {there.st_uid}; choose another destination")
    return there


def _look_at_destination(path: str) -> os.stat_result | None:
    there = own_lstat(path)
    if there and not (stat.S_ISREG(there.st_mode) or stat.S_ISLNK(there.st_mode)):
        raise DestinationError(f"{path} is {kind_of(there.st_mode)}; choose another destination")
    return there


def check_trees_above(item: StageItem, cache: Cache) -> None:
    """Raise DestinationError where the destination lies in a tree that is staged as a whole."""
    above = os.path.dirname(item.destination)
    while len(above) > len(item.root or "/"):
        record = cache.load(above)
        if record and record.tree:
            raise DestinationError(
                f"{item.destination} lies in {above}, which is staged as a whole; choose another "
                "destination"
            )
        above = os.path.dirname(above)


def check_folder(folder: str, cache: Cache) -> None:
    """Raise DestinationError where nothing can be put into ``folder`` safely."""
    if f"{folder}/".startswith(f"{cache.root}/"):  # else the root itself is only planned for
        with opened_way(cache.root, folder):
            pass
    try:
        facts = os.stat(folder)
    except OSError as error:
        raise DestinationError(f"{folder}: {error.strerror}") from None
    if not stat.S_ISDIR(facts.st_mode):
        raise DestinationError(f"{folder} is {kind_of(facts.st_mode)}, not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DestinationError(f"{folder}: no permission to write there")
    strangers = facts.st_uid not in (0, os.getuid()) and not facts.st_mode & stat.S_ISVTX
    if strangers and facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DestinationError(
            f"{folder} belongs to uid {facts.st_uid}, and others could replace what is staged "
            "there; choose another destination"
        )
    # A cache that is only planned for has no folder yet.
    if facts.st_dev != os.stat(existing_folder_above(f"{cache.folder}/")).st_dev:
        raise DestinationError(
            f"{folder} is on another filesystem than its cache root; choose another destination"
        )
