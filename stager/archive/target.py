"""How is a folder filled with the members of an archive, and which of them are refused?"""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING, NamedTuple

from stager.base.codec import listed_time
from stager.base.digest import Digest, digest_of_data
from stager.base.errors import LARGER_DISKS, SpaceError, UsageError
from stager.base.telemetry import count
from stager.base.text import bytes_text
from stager.fs.files import copy_mode, write_all
from stager.tree.listing import text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

#: The one link that may lead out: from ``bin/python3`` of an environment to its interpreter.
_INTERPRETER_LINK = re.compile(rb"(^|/)bin/(python|pypy)[0-9.]*[a-z]?\Z")
_INTERPRETER = re.compile(rb"(.*/)?(python|pypy)[0-9.]*[a-z]?")
#: Links that the kernel follows in one path (path_resolution(7)).
_MOST_LINKS = 40


def bad_links(links: Mapping[bytes, bytes]) -> Iterator[tuple[bytes, str]]:
    """Yield the path of each link that no archive may have, and why; ``links`` maps to targets."""
    resolver = _Resolver(links)
    for path, target in links.items():
        if _INTERPRETER_LINK.search(path) and _INTERPRETER.fullmatch(target):
            continue
        end, count = resolver.follow(path)
        if count > _MOST_LINKS:
            yield path, f"is a link that passes through more than {_MOST_LINKS} links"
        elif end is None:
            yield path, "is a link that leads out of the archive"


class _Resolver:
    """Follows the ``links`` of an archive, each of them once."""

    def __init__(self, links: Mapping[bytes, bytes]) -> None:
        self._links = links
        self._known: dict[bytes, tuple[bytes | None, int]] = {}

    def follow(self, link: bytes, depth: int = 1) -> tuple[bytes | None, int]:
        """Return where ``link`` leads, None for outside, and how many links that takes.

        Stop where they are more than `_MOST_LINKS`; the path is of no use then.
        """
        if link in self._known:
            return self._known[link]
        if depth > _MOST_LINKS:
            return b"", depth
        target, count = self._links[link], 1
        at: bytes | None = None if target.startswith(b"/") else link.rpartition(b"/")[0]
        for part in target.split(b"/"):
            if at is None or count > _MOST_LINKS:
                break
            at = _step(at, part)
            if at is not None and at in self._links:
                at, further = self.follow(at, depth + 1)
                count += further
        self._known[link] = at, count
        return at, count


def _step(at: bytes, part: bytes) -> bytes | None:
    """Return the path of ``part`` in the folder ``at``, or None for outside."""
    if part in (b"", b"."):
        return at
    if part == b"..":
        return at.rpartition(b"/")[0] if at else None
    return at + b"/" + part if at else part


_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: Bytes of a path, with the NUL at its end, that the kernel takes (PATH_MAX in limits.h).
LONGEST_PATH = 4096
#: Bytes of the name of one file or folder (NAME_MAX).
_LONGEST_NAME = 255
#: Bytes of a name that a message repeats where the name is too long.
_SHOWN = 80
#: Bytes that may be written in the time in which a file is made on a disk that nodes share.
_PER_FILE = 1 << 20
#: Bytes of a block of the disk.
_DISK_BLOCK = 4096
#: Why a device, a pipe or an unknown kind of member is refused.
NEITHER = "is not a file, folder or link"
_BAD_TIME = "has an impossible modification time"
_EARLIER_FOLDER = "the archive has a folder of the same name before it"
#: What a user can do about a member that is refused.
_REMEDY = "create the archive again without it"


class Limits(NamedTuple):
    """The most bytes and members that an archive may unpack to, and the ``room`` on the disk."""

    size: int
    members: int
    room: int | None = None


class _Attributes(NamedTuple):
    """What a folder gets when all of its members are made; ``mtime`` in nanoseconds."""

    mode: int
    mtime: int


def may_run_as_another(mode: int) -> bool:
    """Return whether a file with these permissions runs as its owner or group."""
    return bool(mode & (stat.S_ISUID | stat.S_ISGID))


class Target:
    """The folder that is filled from the archive of a ``name``.

    Each of several ``ranks`` gets all members, of which it makes some: all deal them alike.
    Raises UsageError, which names the archive and the member that is refused.
    """

    def __init__(
        self, folder: bytes, limits: Limits, name: str, rank: int = 0, ranks: int = 1
    ) -> None:
        self._base = folder + b"/"
        self.name = name
        self._rank = rank
        #: What each rank makes, in bytes and `_PER_FILE`; and who makes what is at a path.
        self._loads = [0] * ranks
        self._makers: dict[bytes, int] = {}
        #: Hard links, and their targets, in place of what another rank makes.
        self._late: dict[bytes, bytes] = {}
        self._limits = limits
        #: The most members that it takes.
        self.most_members = limits.members
        self._members = 0
        #: Bytes of files, and of the blocks on the disk that they occupy.
        self._size = self._allocated = 0
        #: The folders made so far; None for one that is needed but was not a member yet.
        self._folders: dict[bytes, _Attributes | None] = {b"": None}
        self._links: dict[bytes, bytes] = {}
        #: The digest of each file by its path.
        self.digests: dict[bytes, bytes] = {}

    def refusal(self, path: bytes, why: str, remedy: str = _REMEDY) -> UsageError:
        """Return the error that names the member."""
        return UsageError(
            f"{self.name}: its member {_shown(path)} {why}: nothing was unpacked; {remedy}"
        )

    def check_members(self, count: int, member: bytes | None = None) -> None:
        """Raise UsageError if the archive has too many members, as found at ``member``."""
        if count > self.most_members:
            raise self._excess(f"{self.most_members} members", "unpacked_members", member)

    def _excess(self, most: str, key: str, member: bytes | None) -> UsageError:
        reached = "" if member is None else f", reached at {_shown(member)}"
        return excess(self.name, most, f"{key}{reached}", "pack fewer files, or ")

    def admit(self, name: bytes, size: int, *, runs_as_another: bool) -> bytes:
        """Return the path in the folder of a member whose file has ``size`` bytes.

        Raise UsageError if it may not be made, SpaceError if the disk has no room for it.
        """
        self._count(name, size)
        if name.startswith(b"/"):
            raise self.refusal(name, "has an absolute path")
        if b"\0" in name:
            raise self.refusal(name[:_SHOWN], "has a NUL byte in its path")
        if len(self._base) + len(name) >= LONGEST_PATH:
            raise self.refusal(name[:_SHOWN], "has a path that is too long")
        parts = [part for part in name.split(b"/") if part not in (b"", b".")]
        if b".." in parts:
            raise self.refusal(name, "has '..' in its path")
        if parts and max(map(len, parts)) > _LONGEST_NAME:
            raise self.refusal(name[:_SHOWN], f"has a name of more than {_LONGEST_NAME} bytes")
        if runs_as_another:
            raise self.refusal(name, "would run as another user or group (setuid or setgid)")
        return b"/".join(parts)

    def _count(self, name: bytes, size: int) -> None:
        """Count one more member with ``size`` bytes of data."""
        count()
        limits = self._limits
        if size < 0:
            raise self.refusal(name, f"has a size of {size} bytes")
        self._members += 1
        self._size += size
        self._allocated += max(1, -(-size // _DISK_BLOCK)) * _DISK_BLOCK
        self.check_members(self._members, name)
        if self._size > limits.size:
            raise self._excess(bytes_text(limits.size), "unpacked_size", name)
        if limits.room is not None and self._allocated > limits.room:
            raise no_room(self.name, limits.room)

    def _make_parents(self, path: bytes) -> None:
        """Make the folders above a member that is not a folder."""
        missing = []
        above = path
        while (above := above.rpartition(b"/")[0]) not in self._folders:
            missing.append(above)
        for folder in reversed(missing):
            self._count(folder, 0)
            self._mkdir(folder, path)
        if path in self._folders:
            raise self.refusal(path, f"is a file or link, but {_EARLIER_FOLDER}")

    def _take(self, path: bytes, size: int) -> bool:
        """Take ``path`` for a new member, in place of any before. Return whether it is made here.

        What is made there is that rank's again: ranks do not wait for each other.
        """
        self._make_parents(path)
        self.digests.pop(path, None)
        self._links.pop(path, None)
        if len(self._loads) == 1:
            return True
        if path in self._late.values():
            raise self.refusal(path, "is there again, after a hard link to it that replaced a file")
        self._late.pop(path, None)
        maker = self._makers.setdefault(path, self._loads.index(min(self._loads)))
        self._loads[maker] += size + _PER_FILE
        return maker == self._rank

    def _set_time(self, at: bytes | int, path: bytes, mtime: int | None) -> None:
        if mtime is None:
            raise self.refusal(path, _BAD_TIME)
        mtime = listed_time(mtime)
        if isinstance(at, int):
            os.utime(at, ns=(mtime, mtime))
        else:
            os.utime(at, ns=(mtime, mtime), follow_symlinks=False)

    def _mkdir(self, path: bytes, member: bytes) -> None:
        """Make the folder of a ``member``, or one above it; another rank may have made it."""
        is_taken = path in self.digests or path in self._links
        if not is_taken:
            try:
                os.mkdir(self._base + path, 0o700)
            except FileExistsError:
                is_alone, facts = len(self._loads) == 1, os.lstat(self._base + path)
                is_taken = is_alone or not stat.S_ISDIR(facts.st_mode)
        if is_taken:
            why = "is a folder, but the archive has a file or link of the same name before it"
            if path != member:
                why = f"lies beneath {_shown(path)}, which is a file or link earlier in the archive"
            raise self.refusal(member, why)
        self._folders[path] = None

    def make_folder(self, path: bytes, *, mode: int, mtime: int | None) -> None:
        """Make a folder. The empty path is the target itself."""
        if path not in self._folders:
            self._make_parents(path)
            self._mkdir(path, path)
        if mtime is None:
            raise self.refusal(path, _BAD_TIME)
        self._folders[path] = _Attributes(copy_mode(mode, is_folder=True), mtime)

    def make_file(
        self,
        path: bytes,
        data: Iterable[memoryview | int],
        *,
        size: int,
        mode: int,
        mtime: int | None,
    ) -> None:
        """Make a plain file of ``size`` bytes; numbers in ``data`` are the lengths of holes."""
        if not path:
            raise self.refusal(path, "has no name")
        if not self._take(path, size):
            self.digests[path] = self._fill(path, None, data, size)
            return
        descriptor = self._create(path)
        try:
            self.digests[path] = self._fill(path, descriptor, data, size)
            os.fchmod(descriptor, copy_mode(mode))
            self._set_time(descriptor, path, mtime)
        finally:
            os.close(descriptor)

    def _create(self, path: bytes) -> int:
        try:
            return os.open(self._base + path, _CREATE, 0o600)
        except FileExistsError:
            os.unlink(self._base + path)
            return os.open(self._base + path, _CREATE, 0o600)

    def _fill(
        self, path: bytes, descriptor: int | None, data: Iterable[memoryview | int], size: int
    ) -> bytes:
        """Write a file's ``data``, if it is made here, and return its digest."""
        whole, digest, at, end = b"", None, 0, 0
        for piece in data:
            if isinstance(piece, int):
                at += piece
                continue
            begin, at = at, at + len(piece)
            if at > size:
                break
            if len(piece) == size:  # quick for many small files
                whole = digest_of_data(piece)
            else:
                digest = digest or Digest()
                digest.update(piece, begin)
            if descriptor is not None:
                write_all(descriptor, piece, begin)
            end = at
        if at != size:
            raise self.refusal(path, "does not have the size that the archive states")
        if end < size and descriptor is not None:  # a hole at its end
            os.ftruncate(descriptor, size)
        return whole or (digest or Digest()).digest(size)

    def make_link(self, path: bytes, target: bytes, *, mtime: int | None) -> None:
        """Make a symbolic link; `finish` checks where it leads."""
        if not target or b"\0" in target:
            raise self.refusal(path, "is a link without a valid target")
        if len(target) >= LONGEST_PATH:
            raise self.refusal(path, "is a link with a target that is too long")
        if self._take(path, 0):
            try:
                os.symlink(target, self._base + path)
            except FileExistsError:
                os.unlink(self._base + path)
                os.symlink(target, self._base + path)
            self._set_time(self._base + path, path, mtime)
        self._links[path] = target

    def make_hard_link(self, path: bytes, target: bytes) -> None:
        """Make a further name of the earlier member ``target``, a file or a symbolic link."""
        first = b"/".join(part for part in target.split(b"/") if part not in (b"", b"."))
        known: dict[bytes, bytes] = self._links if first in self._links else self.digests
        if target.startswith(b"/") or first not in known:
            why = "is a hard link to a file that is not in the archive before it"
            raise self.refusal(path, why)
        at = self._late.get(first, first)
        if path in (first, at):
            return  # tar writes this for a file that is named twice on its command line
        found = known[first]
        maker = self._makers.setdefault(path, self._makers.get(at, 0))
        is_made_here = self._take(path, 0)
        known[path] = found
        if maker != self._makers.get(at, 0):
            self._late[path] = at
        elif is_made_here:
            self._link(at, path)

    def _link(self, first: bytes, path: bytes) -> None:
        try:
            os.link(self._base + first, self._base + path, follow_symlinks=False)
        except FileExistsError:
            os.unlink(self._base + path)
            os.link(self._base + first, self._base + path, follow_symlinks=False)

    def finish(self) -> None:
        """Check the links, and set permissions and times of the folders, deepest first.

        The first of several ranks does, when all have made what is theirs. Raise OSError.
        """
        for path, target in self._late.items():
            self._link(target, path)
        for path, why in bad_links(self._links):
            raise self.refusal(path, why)
        for path, attributes in sorted(self._folders.items(), reverse=True):
            os.chmod(self._base + path, attributes.mode if attributes else 0o700)
            if attributes:
                self._set_time(self._base + path, path, attributes.mtime)


def excess(name: str, most: str, details: str, remedy: str = "") -> UsageError:
    """Return the error for what unpacks to more than the site allows; ``remedy`` is a first one."""
    return UsageError(
        f"{name}: it has more than the {most} that the site allows ({details}): nothing was "
        f"unpacked; {remedy}ask the administrator to allow more"
    )


def no_room(name: str, room: int) -> SpaceError:
    """Return the error for what unpacks to more than the ``room`` on the disk, in bytes."""
    return SpaceError(
        f"{name}: it unpacks to more than the {bytes_text(room)} that you may still write on this "
        f"disk; free space there (stagectl evict), or {LARGER_DISKS}"
    )


def _shown(path: bytes) -> str:
    return f"'{text_of(path)}'"
