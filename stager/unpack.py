"""An archive's bytes in, as they come, its files in a folder out; a hostile archive is refused.

The folder is one that nobody else can reach yet, so that all is judged before anybody sees it. No
member is put anywhere by way of a link, and no link leads out.
"""

from __future__ import annotations

import calendar
import gzip
import lzma
import os
import re
import stat
import tarfile
import zipfile
from typing import IO, NamedTuple, cast

import xxhash
import zstandard

from stager.errors import SourceError, StageError, UsageError

#: Archives by the ends of their names; see `directive.ARCHIVES`.
_GZIP, _ZSTD, _XZ, _ZIP = (".tar.gz", ".tgz"), (".tar.zst", ".tzst"), (".tar.xz", ".txz"), ".zip"
_BLOCK = 1 << 20
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SETUID = stat.S_ISUID | stat.S_ISGID
#: Members that describe others, and the most bytes of one.
_HEADERS = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip
_LONGEST_HEADER = 1 << 20
#: The one link that may lead out: that of a Python environment to its interpreter.
_INTERPRETER = re.compile(rb"(^|/)bin/python[0-9.]*$")
_PYTHON = re.compile(rb"(.*/)?python[0-9.]*")
#: Bytes of a path, its end included, that the kernel takes (PATH_MAX).
_LONGEST_PATH = 4096


def is_zip(path: str) -> bool:
    """Whether it is an archive whose table of contents stands at its end."""
    return path.lower().endswith(_ZIP)


class Limits(NamedTuple):
    """The most bytes and members that an archive may unpack to."""

    size: int
    members: int


def unpack(archive: IO[bytes], name: str, folder: bytes, limits: Limits) -> dict[bytes, bytes]:
    """Unpack the ``archive`` of that ``name`` into the empty ``folder``.

    Returns the xxh3-128 of each file by its path in the folder. Raises UsageError, which names the
    member, where the archive is hostile, SourceError where it is damaged, and OSError.
    """
    target = _Target(folder, limits)
    try:
        if is_zip(name):
            with zipfile.ZipFile(archive) as whole:
                _unpack_zip(whole, target)
        else:
            # As a stream: nothing is sought, and nothing that was unpacked is kept.
            with (
                _decompressed(archive, name.lower()) as plain,
                tarfile.open(fileobj=plain, mode="r|", errorlevel=2, tarinfo=_Member) as tar,
            ):
                _unpack_tar(tar, target)
                while plain.read(_BLOCK):  # a digest may stand behind the end of the archive
                    pass
    except Exception as error:
        if isinstance(error, (StageError, OSError)) and not isinstance(error, _DAMAGED):
            raise
        # Whatever the libraries raise: all that they were given is the archive.
        raise SourceError(f"{name} cannot be unpacked: {error or 'it ends early'}") from None
    target.finish()
    return target.digests


#: An OSError that says nothing of the disk: what gzip raises for data that is no gzip.
_DAMAGED = (gzip.BadGzipFile,)


class _Member(tarfile.TarInfo):
    """A member whose own headers are of a size that real ones have: they are kept in memory."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _HEADERS and self.size > _LONGEST_HEADER:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        return super()._proc_member(archive)  # type: ignore[misc,no-any-return]


def _decompressed(archive: IO[bytes], name: str) -> IO[bytes]:
    if name.endswith(_GZIP):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=archive))
    if name.endswith(_XZ):
        return cast("IO[bytes]", lzma.LZMAFile(archive))
    if name.endswith(_ZSTD):
        reader = zstandard.ZstdDecompressor().stream_reader(archive, read_across_frames=True)
        return cast("IO[bytes]", reader)
    return archive


def _unpack_tar(tar: tarfile.TarFile, target: _Target) -> None:
    for member in tar:
        runs_as = 0 if member.isdir() else member.mode & _SETUID
        path = target.judge(os.fsencode(member.name), member.size, runs_as)
        if member.isdir():
            target.make_folder(path, member.mode, member.mtime)
        elif member.isreg():
            data = tar.extractfile(member)
            assert data is not None
            target.make_file(path, member.mode, member.mtime, data, member.size)
        elif member.issym():
            target.make_link(path, os.fsencode(member.linkname), member.mtime)
        elif member.islnk():
            target.make_twin(path, os.fsencode(member.linkname))
        else:
            raise target.refusal(path, "is no file, folder or link")


def _unpack_zip(archive: zipfile.ZipFile, target: _Target) -> None:
    for member in archive.infolist():
        mode = member.external_attr >> 16
        kind = stat.S_IFMT(mode)
        runs_as = 0 if member.is_dir() else mode & _SETUID
        path = target.judge(os.fsencode(member.filename), member.file_size, runs_as)
        mtime = _zip_time(member.date_time)
        if member.is_dir():
            target.make_folder(path, mode or 0o755, mtime)
        elif kind == stat.S_IFLNK:
            with archive.open(member) as data:
                target.make_link(path, data.read(_LONGEST_PATH), mtime)
        elif kind in (0, stat.S_IFREG):
            with archive.open(member) as data:
                target.make_file(path, mode or 0o644, mtime, data, member.file_size)
        else:
            raise target.refusal(path, "is no file, folder or link")


def _zip_time(when: tuple[int, int, int, int, int, int]) -> float:
    """Seconds since 1970; a zip tells the local time of an unknown place, here taken for UTC."""
    return calendar.timegm((*when, 0, 0, 0))


class _Target:
    """The folder that is filled. Raises UsageError for what may not come into it."""

    def __init__(self, folder: bytes, limits: Limits) -> None:
        self._folder = folder
        self._limits = limits
        self._members = self._size = 0
        #: The folders that were made or are needed, with what they are to have in the end.
        self._folders: dict[bytes, tuple[int, float] | None] = {b"": None}
        self._links: list[bytes] = []
        self.digests: dict[bytes, bytes] = {}

    def refusal(self, path: bytes, why: str) -> UsageError:
        """The error that names the member."""
        name = path.decode(errors="backslashreplace")
        return UsageError(f"the archive's member {name!r} {why}: nothing of it is unpacked")

    def judge(self, name: bytes, size: int, runs_as: int) -> bytes:
        """The member's path in the folder, if it may come into it."""
        self._members += 1
        self._size += size
        if self._members > self._limits.members:
            raise self.refusal(name, f"is one more than the {self._limits.members} that may be")
        if self._size > self._limits.size:
            raise self.refusal(name, f"goes beyond the {self._limits.size} bytes that may be")
        if name.startswith(b"/"):
            raise self.refusal(name, "has an absolute name")
        if b"\0" in name or len(name) >= _LONGEST_PATH:
            raise self.refusal(name[:80], "has an impossible name")
        parts = [part for part in name.split(b"/") if part not in (b"", b".")]
        if b".." in parts:
            raise self.refusal(name, "has '..' in its name")
        if runs_as:
            raise self.refusal(name, "would run as somebody else (setuid or setgid)")
        return b"/".join(parts)

    def _at(self, path: bytes) -> bytes:
        return self._folder + b"/" + path

    def _make_way(self, path: bytes) -> None:
        """Make the folders above the member, and remove what an earlier one put in its place."""
        for at, char in enumerate(path):
            if char == ord("/") and path[:at] not in self._folders:
                self._mkdir(path[:at])
        if path in self._folders:
            raise self.refusal(path, "stands in the place of a folder")
        try:
            os.unlink(self._at(path))
        except FileNotFoundError:
            return
        self.digests.pop(path, None)

    def _set_time(self, path: bytes, mtime: float) -> None:
        try:
            os.utime(self._at(path), (mtime, mtime), follow_symlinks=False)
        except (OverflowError, ValueError):
            raise self.refusal(path, "has an impossible time") from None

    def _mkdir(self, path: bytes) -> None:
        try:
            os.mkdir(self._at(path), 0o700)
        except FileExistsError:
            raise self.refusal(path, "is a folder where a file or link stands already") from None
        self._folders[path] = None

    def make_folder(self, path: bytes, mode: int, mtime: float) -> None:
        """A folder; the archive's own root is the whole."""
        if path not in self._folders:
            self._make_way(path)
            self._mkdir(path)
        self._folders[path] = mode & 0o3755 | stat.S_IRUSR | stat.S_IXUSR, mtime

    def make_file(self, path: bytes, mode: int, mtime: float, data: IO[bytes], size: int) -> None:
        """A plain file with all of its ``data``."""
        if not path:
            raise self.refusal(path, "has no name")
        self._make_way(path)
        descriptor = os.open(self._at(path), _CREATE, 0o600)
        digest, left = xxhash.xxh3_128(), size
        with open(descriptor, "wb", buffering=0) as file:
            while left and (block := data.read(min(left, _BLOCK))):
                digest.update(block)
                file.write(block)
                left -= len(block)
            if left or data.read(1):
                raise self.refusal(path, "has another size than it says")
            os.fchmod(descriptor, mode & 0o755 | stat.S_IRUSR)
        self._set_time(path, mtime)
        self.digests[path] = digest.digest()

    def make_link(self, path: bytes, target: bytes, mtime: float) -> None:
        """A symbolic link; where it leads is judged when all is there."""
        if not target or b"\0" in target:
            raise self.refusal(path, "is a link to nothing")
        self._make_way(path)
        os.symlink(target, self._at(path))
        self._set_time(path, mtime)
        self._links.append(path)

    def make_twin(self, path: bytes, target: bytes) -> None:
        """A further name of a file that came before."""
        first = b"/".join(part for part in target.split(b"/") if part not in (b"", b"."))
        if target.startswith(b"/") or first not in self.digests:
            raise self.refusal(path, "is a hard link to what is no file of the archive")
        self._make_way(path)
        os.link(self._at(first), self._at(path), follow_symlinks=False)
        self.digests[path] = self.digests[first]

    def finish(self) -> None:
        """Judge the links, and give the folders what they are to have."""
        root = os.path.realpath(self._folder)
        for path in self._links:
            link = self._at(path)
            if not os.path.islink(link):
                continue  # a later member took its place
            to = os.readlink(link)
            if _INTERPRETER.search(path) and _PYTHON.fullmatch(to):
                continue
            where = os.path.realpath(link)
            if to.startswith(b"/") or not (where + b"/").startswith(root + b"/"):
                raise self.refusal(path, "is a link that leads out of the archive")
        for path, facts in sorted(self._folders.items(), reverse=True):
            os.chmod(self._at(path), facts[0] if facts else 0o755)
            if facts:
                self._set_time(path, facts[1])
