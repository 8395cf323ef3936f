"""TODO."""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from stager.archive.decompress import BLOCK
from stager.base.errors import SpaceError, UsageError
from stager.disk.files import write_all
from stager.disk.permissions import file_mode, folder_mode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
SETUID = stat.S_ISUID | stat.S_ISGID
#: The one link that may lead out: that of a Python environment to its interpreter.
_INTERPRETER = re.compile(rb"(^|/)bin/(python|pypy)[0-9.]*[a-z]?\Z")
_PYTHON = re.compile(rb"(.*/)?(python|pypy)[0-9.]*[a-z]?")
#: Bytes of a path, its end included, that the kernel takes (PATH_MAX), and of one name (NAME_MAX).
LONGEST_PATH, _LONGEST_NAME = 4096, 255
#: Links that the kernel follows in one path.
_MOST_LINKS = 40
#: Bytes of a block of the disk.
_DISK_BLOCK = 4096


class Limits(NamedTuple):
    """The most bytes and members that an archive may unpack to, and the ``room`` on the disk."""

    size: int
    members: int
    room: int | None = None


# What is made of them.


class Target:
    """The folder that is filled. Raises UsageError for what may not come into it."""

    def __init__(self, folder: bytes, limits: Limits) -> None:
        self._base = folder + b"/"
        self._limits = limits
        self._members = self._size = self._taken = 0
        #: The folders that were made or are needed, with what they are to have in the end.
        self._folders: dict[bytes, tuple[int, int] | None] = {b"": None}
        self._links: dict[bytes, bytes] = {}
        self.digests: dict[bytes, bytes] = {}

    def refusal(self, path: bytes, why: str) -> UsageError:
        """The error that names the member."""
        name = path.decode(errors="backslashreplace")
        return UsageError(f"the archive's member {name!r} {why}: nothing of it is unpacked")

    def judge(self, name: bytes, size: int, runs_as: int) -> bytes:
        """The path in the folder of a member whose file has ``size`` bytes, if it may be there."""
        self._count(name, size)
        if name.startswith(b"/"):
            raise self.refusal(name, "has an absolute name")
        if b"\0" in name or len(self._base) + len(name) >= LONGEST_PATH:
            raise self.refusal(name[:80], "has an impossible name")
        parts = [part for part in name.split(b"/") if part not in (b"", b".")]
        if b".." in parts:
            raise self.refusal(name, "has '..' in its name")
        if parts and max(map(len, parts)) > _LONGEST_NAME:
            raise self.refusal(name[:80], "has an impossible name")
        if runs_as:
            raise self.refusal(name, "would run as somebody else (setuid or setgid)")
        return b"/".join(parts)

    def _count(self, name: bytes, size: int) -> None:
        """Count one more thing with ``size`` bytes of data."""
        limits = self._limits
        if size < 0:
            raise self.refusal(name, f"has a size of {size} bytes")
        self._members += 1
        self._size += size
        self._taken += max(1, -(-size // _DISK_BLOCK)) * _DISK_BLOCK
        if self._members > limits.members:
            raise self.refusal(name, f"is one more than the {limits.members} that may be")
        if self._size > limits.size:
            raise self.refusal(name, f"goes beyond the {limits.size} bytes that may be")
        if limits.room is not None and self._taken > limits.room:
            raise SpaceError(
                f"the archive unpacks to more than the {limits.room} bytes that you may still "
                "write on this disk; make room or ask for nodes with more"
            )

    def _make_way(self, path: bytes) -> None:
        """Make the folders above the member."""
        missing = []
        above = path
        while (above := above.rpartition(b"/")[0]) not in self._folders:
            missing.append(above)
        for folder in reversed(missing):
            self._count(folder, 0)
            self._mkdir(folder)
        if path in self._folders:
            raise self.refusal(path, "stands in the place of a folder")

    def _clear(self, path: bytes) -> None:
        """Remove what an earlier member put in the place of this one."""
        os.unlink(self._base + path)
        self.digests.pop(path, None)
        self._links.pop(path, None)

    def _set_time(self, at: bytes | int, path: bytes, mtime: int | None) -> None:
        # What does not go into 64 bits, no listing of the folder can hold.
        if mtime is None or mtime.bit_length() > 63:
            raise self.refusal(path, "has an impossible time")
        if isinstance(at, int):
            os.utime(at, ns=(mtime, mtime))
        else:
            os.utime(at, ns=(mtime, mtime), follow_symlinks=False)

    def _mkdir(self, path: bytes) -> None:
        try:
            os.mkdir(self._base + path, 0o700)
        except FileExistsError:
            raise self.refusal(path, "is a folder where a file or link stands already") from None
        self._folders[path] = None

    def make_folder(self, path: bytes, mode: int, mtime: int | None) -> None:
        """A folder; the archive's own root is the whole."""
        if path not in self._folders:
            self._make_way(path)
            self._mkdir(path)
        if mtime is None:
            raise self.refusal(path, "has an impossible time")
        self._folders[path] = folder_mode(mode), mtime

    def make_file(
        self,
        path: bytes,
        mode: int,
        mtime: int | None,
        data: Iterable[memoryview | int],
        size: int,
    ) -> None:
        """A plain file with all of its ``data``, in which numbers are the lengths of holes."""
        if not path:
            raise self.refusal(path, "has no name")
        self._make_way(path)
        descriptor = self._create(path)
        try:
            self.digests[path] = self._fill(path, descriptor, data, size)
            os.fchmod(descriptor, file_mode(mode))
            self._set_time(descriptor, path, mtime)
        finally:
            os.close(descriptor)

    def _create(self, path: bytes) -> int:
        try:
            return os.open(self._base + path, _CREATE, 0o600)
        except FileExistsError:
            self._clear(path)
            return os.open(self._base + path, _CREATE, 0o600)

    def _fill(
        self, path: bytes, descriptor: int, data: Iterable[memoryview | int], size: int
    ) -> bytes:
        digest, at, end = xxhash.xxh3_128(), 0, 0
        for piece in data:
            if isinstance(piece, int):
                _digest_zeros(digest, piece)
                at += piece
                continue
            begin, at = at, at + len(piece)
            if at > size:
                break
            digest.update(piece)
            write_all(descriptor, piece, begin)
            end = at
        if at != size:
            raise self.refusal(path, "has another size than it says")
        if end < size:  # there is a hole at its end
            os.ftruncate(descriptor, size)
        return digest.digest()

    def make_link(self, path: bytes, target: bytes, mtime: int | None) -> None:
        """A symbolic link; where it leads is judged when all is there."""
        if not target or b"\0" in target:
            raise self.refusal(path, "is a link to nothing")
        if len(target) >= LONGEST_PATH:
            raise self.refusal(path, "is a link to an impossible name")
        self._make_way(path)
        try:
            os.symlink(target, self._base + path)
        except FileExistsError:
            self._clear(path)
            os.symlink(target, self._base + path)
        self._set_time(self._base + path, path, mtime)
        self._links[path] = target

    def make_twin(self, path: bytes, target: bytes) -> None:
        """A further name of a file that came before."""
        first = b"/".join(part for part in target.split(b"/") if part not in (b"", b"."))
        if target.startswith(b"/") or first not in self.digests:
            raise self.refusal(path, "is a hard link to what is no file of the archive")
        if first == path:
            return  # some tools name a file twice that they were told of twice
        self._make_way(path)
        try:
            os.link(self._base + first, self._base + path, follow_symlinks=False)
        except FileExistsError:
            self._clear(path)
            os.link(self._base + first, self._base + path, follow_symlinks=False)
        self.digests[path] = self.digests[first]

    def finish(self) -> None:
        """Judge the links, and give the folders what they are to have."""
        for path, why in bad_links(self._links):
            raise self.refusal(path, why)
        for path, facts in sorted(self._folders.items(), reverse=True):
            os.chmod(self._base + path, facts[0] if facts else 0o755)
            if facts:
                self._set_time(self._base + path, path, facts[1])


def _digest_zeros(digest: xxhash.xxh3_128, length: int) -> None:
    zeros = bytes(min(length, BLOCK))
    for _ in range(length // BLOCK):
        digest.update(zeros)
    digest.update(zeros[: length % BLOCK])


def bad_links(links: dict[bytes, bytes]) -> Iterator[tuple[bytes, str]]:
    """Those of the ``links``, targets by paths, that no archive may have; and why. Pure."""
    ways = _Ways(links)
    for path, target in links.items():
        if _INTERPRETER.search(path) and _PYTHON.fullmatch(target):
            continue
        end, count = ways.follow(path)
        if count > _MOST_LINKS:
            yield path, f"is a link that leads by more than {_MOST_LINKS} links"
        elif end is None:
            yield path, "is a link that leads out of the archive"


class _Ways:
    """Where the ``links`` of an archive lead, whatever else is in it. Pure."""

    def __init__(self, links: dict[bytes, bytes]) -> None:
        self._links = links
        self._known: dict[bytes, tuple[bytes | None, int]] = {}

    def follow(self, link: bytes, depth: int = 1) -> tuple[bytes | None, int]:
        """The path that a link leads to, or None for outside, and how many are followed for it.

        Which is no more than some that are too many.
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
            if at in self._links:
                at, further = self.follow(at, depth + 1)
                count += further
        self._known[link] = at, count
        return at, count


def _step(at: bytes, part: bytes) -> bytes | None:
    """The path one step on from ``at``, or None for outside."""
    if part in (b"", b"."):
        return at
    if part == b"..":
        return at.rpartition(b"/")[0] if at else None
    return at + b"/" + part if at else part
