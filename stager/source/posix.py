"""What is a source on a mounted filesystem: which file or folder, and may all users read it?

Rank 0 alone looks, and sends what it found to the other ranks.
"""

from __future__ import annotations

import os
import stat
from array import array
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from stager.base.codec import listed_time
from stager.base.errors import IntegrityError, SourceError
from stager.base.extents import rounded
from stager.base.linux import PASS_FOLDER
from stager.base.mounts import has_own_rules, is_on_fuse
from stager.base.paths import pattern_hint
from stager.base.telemetry import Kind, doing
from stager.fs.files import kind_of, opened
from stager.fs.reader import BLOCK, OPEN_FILE, FileReader, changed, check_mounter, is_another
from stager.source.description import EVERYTHING, Listings, Selection, Source, SourceFacts

if TYPE_CHECKING:
    from stager.tree.listing import Listing
    from stager.tree.patterns import Patterns

#: What all users need of a file, and of each folder above it. A group may lack what others have.
_READ = stat.S_IRGRP | stat.S_IROTH
_PASS = stat.S_IXGRP | stat.S_IXOTH


def check_open_to_all(descriptor: int, path: str) -> None:
    """Raise SourceError unless all users can read the file that was opened at ``path``."""
    closed = closed_by(descriptor)
    if closed:
        raise SourceError(
            f"{path}: a copy there would be for all users, and {closed} is not open to all: chmod "
            "go+rX, or share=all, which opens the copy all the same"
        )


def closed_by(descriptor: int) -> str:
    """Return the path of what keeps some users from an open file, or nothing. Raise OSError.

    That is the file or a folder above it. Where it really lies counts, and not by which links it
    was found. Each folder is opened from the one below it, so that nobody can put another one in
    its place.
    """
    path = _path(descriptor)
    above, name = os.path.split(path)
    with ExitStack() as stack:
        if _is_closed(descriptor, _READ):
            return path
        current = stack.enter_context(opened(above, PASS_FOLDER))
        try:
            there = os.lstat(name, dir_fd=current)
        except OSError:  # it was moved meanwhile
            return path
        if not os.path.samestat(there, os.fstat(descriptor)):
            return path
        while not _is_closed(current, _PASS):
            higher = stack.enter_context(opened("..", PASS_FOLDER, current))
            if os.path.samestat(os.fstat(higher), os.fstat(current)):  # the root folder
                return ""
            current = higher
        return _path(current)


def _path(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _is_closed(descriptor: int, needed: int) -> bool:
    """Return whether some users may lack a right; an access control list may name them."""
    if os.fstat(descriptor).st_mode & needed != needed or has_own_rules(descriptor):
        return True
    with suppress(OSError):  # not all filesystems have any; a descriptor of O_PATH has none itself
        return "system.posix_acl_access" in os.listxattr(f"/proc/self/fd/{descriptor}")
    return False


def look_at_source(
    path: str,
    selection: Selection = EVERYTHING,
    listings: Listings | None = None,
    *,
    to_be_read: bool = False,
) -> Source:
    """Look at the source, following links; list it if it is a folder and not in ``listings`` yet.

    With ``to_be_read``, check that this user may read it. Raise SourceError if the source is
    missing, unreadable, or neither a plain file nor a folder; UsageError if the patterns do not fit
    the folder.
    """
    try:
        facts, version = _seen(path)
        if to_be_read:
            os.close(os.open(path, OPEN_FILE))
    except OSError as error:
        hint = (
            pattern_hint(path) or "check the path, and that the compute nodes mount this filesystem"
        )
        missing = isinstance(error, FileNotFoundError)
        raise SourceError(f"{path}: {error.strerror}{f'; {hint}' if missing else ''}") from None
    mode = stat.S_IMODE(facts.st_mode)
    if stat.S_ISDIR(facts.st_mode):
        listings = Listings() if listings is None else listings
        listing = listings.list_once(
            path,
            selection,
            lambda patterns: _list_all(path, facts, version, patterns, selection, listings),
        )
        environments, note = listings.environments.get((path, selection), ((), ""))
        known = {link for one in environments for link in one.links}
        from stager.tree.walk import count_leaving  # not needed for a file

        modified = version.mtime_ns if version.inode else listing.mtimes[0]
        identity = replace(version, size=listing.size, mtime_ns=modified)
        return Source(
            identity, mode, facts.st_gid, listing.allocated(), listing.files, listing.digest(),
            environments=environments, environment_note=note,
            leaving=count_leaving(path, listing, known),
        )  # fmt: skip
    if not stat.S_ISREG(facts.st_mode):
        what = "only a plain file or a folder can be staged"
        raise SourceError(f"{path} is {kind_of(facts.st_mode)}; {what}")
    if not facts.st_size:
        _check_empty(path)
    allocated = min(facts.st_size, facts.st_blocks * BLOCK)
    return Source(version, mode, facts.st_gid, allocated)


def _seen(path: str) -> tuple[os.stat_result, SourceFacts]:
    """Return the stat of what is at ``path``, and what identifies its version. Raise OSError."""
    with opened(path, os.O_PATH | os.O_CLOEXEC) as descriptor:
        check_mounter(descriptor, path)
        return os.fstat(descriptor), version_of(descriptor)


def _check_empty(path: str) -> None:
    """Raise SourceError if a file whose size is 0 has bytes all the same."""
    with suppress(OSError), opened(path, OPEN_FILE) as descriptor:
        if not os.fstat(descriptor).st_size and os.read(descriptor, 1):
            text = "is not empty, but its size is given as 0, as of files in /proc"
            raise SourceError(f"{path} {text}; copy it to a plain file, and stage that")


def _list_all(
    path: str,
    facts: os.stat_result,
    version: SourceFacts,
    patterns: Patterns | None,
    selection: Selection,
    listings: Listings,
) -> Listing:
    """List a folder and, with ``relocate``, the interpreters that come along with it.

    The environments are added to the ``listings``.
    """
    listing = _list(path, facts, version, patterns, selection.follow)
    if not selection.relocate:
        return listing
    from stager.tree.environments import find_environments, with_homes  # not needed for a file

    found = listings.environments[path, selection] = find_environments(path, listing)
    homes = {
        one.base: _list_home(os.fsdecode(one.homes[0]), packages=one.sees_packages)
        for one in found[0]
        if one.comes_along
    }
    return with_homes(listing, homes) if homes else listing


def _list_home(path: str, *, packages: bool) -> Listing:
    """List an interpreter's home, without its ``packages`` if they are not needed."""
    from stager.tree.environments import HOME_PACKAGES, HOME_PARTS
    from stager.tree.patterns import Patterns  # slow to import

    patterns = Patterns(HOME_PARTS, () if packages else HOME_PACKAGES)
    try:
        facts, version = _seen(path)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None
    return _list(path, facts, version, patterns, follow=False)


def _list(
    path: str,
    facts: os.stat_result,
    version: SourceFacts,
    patterns: Patterns | None,
    follow: bool,
) -> Listing:
    from stager.tree.walk import walk  # not needed for a file

    try:
        if version.inode:
            return walk(path, facts, patterns, follow=follow)
        listing = walk(path, None, patterns, follow=follow)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None
    from stager.tree.listing import Kind as Entry

    nothing = bytes(8 * len(listing))
    # Folders may have the time of the mount or of the look there, as of rclone and goofys.
    newest = max((listing.mtimes[row] for row in listing.rows(Entry.FILE)), default=0)
    mtimes = array("q", listing.mtimes)
    for row in listing.rows(Entry.FOLDER):
        mtimes[row] = newest
    return replace(listing, mtimes=mtimes, ctimes=array("q", nothing), inodes=array("Q", nothing))


def facts_of(facts: os.stat_result) -> SourceFacts:
    """Return what identifies one version of a source: the part of its stat that a write changes."""
    modified = listed_time(facts.st_mtime_ns)
    return SourceFacts(facts.st_size, modified, facts.st_ctime_ns, facts.st_ino)


def version_of(descriptor: int) -> SourceFacts:
    """Return what identifies the version of a source that is open. Raise OSError.

    On a FUSE filesystem the inode and the ctime may be others on each node, or at each look, as of
    rclone and s3fs: they are 0, and size and time of the contents identify it. So may be a folder's
    time: that of a folder which is listed is of its newest file.
    """
    version = facts_of(os.fstat(descriptor))
    return replace(version, ctime_ns=0, inode=0) if is_on_fuse(descriptor) else version


def _is_version(facts: os.stat_result, version: SourceFacts) -> bool:
    """Whether a stat is that of a version which `version_of` returned."""
    found = facts_of(facts)
    return version == (found if version.inode else replace(found, ctime_ns=0, inode=0))


class PosixFile(FileReader):
    """Reads a plain file that must be the ``source``; see `access.open_file`."""

    def __init__(self, path: str, source: Source, *, for_all: bool = False) -> None:
        super().__init__(path)
        self._source = source
        try:
            self.check()
            if for_all:
                check_open_to_all(self.descriptor, path)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raise IntegrityError if the file that is read is not, or no longer, the source."""
        with suppress(OSError), doing(Kind.READ, self._path):
            named, read = os.stat(self._path), os.fstat(self.descriptor)
            if all(_is_version(facts, self._source.facts) for facts in (named, read)):
                return
        raise self._changed()

    def _changed(self) -> IntegrityError:
        with suppress(OSError), doing(Kind.READ, self._path):
            now = os.fstat(self.descriptor)
            return changed(self._path, is_another=is_another(self._source.facts.inode, now))
        return changed(self._path)


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
