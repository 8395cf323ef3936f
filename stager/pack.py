"""A folder in, one archive of it out, which `extract` unpacks or a job mounts: `stagectl pack`.

Made once and whole: beside its place, and put there when all of it is on the disk.
"""

from __future__ import annotations

import gzip
import lzma
import os
import subprocess
import tarfile
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, cast

import zstandard

from stager.directive import ARCHIVES, archive_suffix
from stager.errors import LaunchError, SourceError, UsageError
from stager.listing import Kind
from stager.relocate import CONDA, CONFIG
from stager.walk import walk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stager.listing import Listing

#: What an archive may be named like, besides those that `extract` takes.
_SQUASHFS = (".sqsh", ".squashfs")
_ZIP = ".zip"
#: What a name gets that the caller leaves open, and the compression of it: fast, on all cores.
SUFFIX = ".tar.zst"
_LEVEL, _ALL_CORES = 3, -1
#: That of gzip itself.
_GZIP_LEVEL = 6


@dataclass(frozen=True, slots=True)
class Packed:
    """What became of a folder: bytes of its files, and of the archive; ``options`` are those by
    which it is staged. ``fresh`` is False where the archive was there already.
    """

    archive: str
    files: int
    size: int
    packed_size: int
    options: str
    fresh: bool
    #: Whether it is a conda environment, whose programs know their place.
    conda: bool


def pack(folder: str, archive: str) -> Packed:
    """Pack the ``folder`` into ``archive``, unless that is younger than all that is in it.

    Raises UsageError for a name that says no format, SourceError for what cannot be packed, and
    OSError for what cannot be written.
    """
    if not archive_suffix(archive).replace(_ZIP, "") and not archive.lower().endswith(_SQUASHFS):
        known = " ".join(end for end in (*ARCHIVES, *_SQUASHFS) if end != _ZIP)
        raise UsageError(f"{archive}: what is packed must be named like one of {known}")
    if f"{os.path.realpath(archive)}/".startswith(f"{os.path.realpath(folder)}/"):
        raise UsageError(f"{archive} lies in the folder that is packed; choose another name")
    try:
        listing = walk(folder, holes=False)
    except (NotADirectoryError, FileNotFoundError) as error:
        raise SourceError(f"{folder}: {error.strerror}") from None
    fresh = _last_change(listing) >= _written(archive)
    if fresh:
        with _replaced(archive) as path:
            _write(listing, folder, archive, path)
    size = os.stat(archive).st_size
    options, conda = _options(listing, archive), CONDA in listing.paths
    return Packed(archive, listing.files, listing.size, size, options, fresh, conda)


def _last_change(listing: Listing) -> int:
    """When something in the folder changed last, in nanoseconds since 1970."""
    folders = (listing.mtimes[row] for row in listing.rows(Kind.FOLDER))
    return max(*folders, *listing.ctimes)


def _written(archive: str) -> int:
    with suppress(OSError):
        return os.stat(archive).st_mtime_ns
    return 0


def _options(listing: Listing, archive: str) -> str:
    if archive.lower().endswith(_SQUASHFS):
        return ""
    return ",extract,relocate=venv" if CONFIG in listing.paths else ",extract"


@contextmanager
def _replaced(path: str) -> Iterator[str]:
    """The name of a file that takes the place of the one at ``path`` when all is done."""
    above, name = os.path.split(os.path.abspath(path))
    descriptor, partial = tempfile.mkstemp(prefix=f".{name}.", dir=above)
    try:
        yield partial
        mask = os.umask(0)
        os.umask(mask)
        os.fchmod(descriptor, 0o666 & ~mask)
        os.fsync(descriptor)
        os.rename(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
    finally:
        os.close(descriptor)


def _write(listing: Listing, folder: str, archive: str, path: str) -> None:
    if archive.lower().endswith(_SQUASHFS):
        _write_squashfs(folder, path)
        return
    with ExitStack() as stack:
        plain = stack.enter_context(open(path, "wb"))
        stream = stack.enter_context(_compressed(plain, archive_suffix(archive)))
        # As a stream, which is read as one.
        tar = stack.enter_context(tarfile.open(fileobj=stream, mode="w|", errorlevel=2))
        for name in listing.paths:
            _add(tar, os.fsencode(folder), name)
            tar.members.clear()  # type: ignore[attr-defined] # there may be a million


def _compressed(file: IO[bytes], suffix: str) -> IO[bytes]:
    if suffix.endswith("gz"):
        # Without a name and a time of its own, so that equal folders make equal archives.
        return cast("IO[bytes]", gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0))
    if suffix.endswith("xz"):
        return cast("IO[bytes]", lzma.LZMAFile(file, "wb"))
    if suffix.endswith("zst"):
        packer = zstandard.ZstdCompressor(level=_LEVEL, threads=_ALL_CORES)
        return cast("IO[bytes]", packer.stream_writer(file, closefd=False))
    return cast("IO[bytes]", open(os.dup(file.fileno()), "wb"))


def _add(tar: tarfile.TarFile, folder: bytes, name: bytes) -> None:
    path = os.fsdecode(folder + b"/" + name)
    try:
        member = tar.gettarinfo(path, os.fsdecode(name) or ".")
        member.uid = member.gid = 0  # whoever unpacks it owns it
        member.uname = member.gname = ""
        member.mtime = int(member.mtime)
        if not member.isreg():
            tar.addfile(member)
            return
        with open(path, "rb") as file:
            tar.addfile(member, file)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror or error}") from None


def _write_squashfs(folder: str, path: str) -> None:
    argv = ["mksquashfs", folder, path, "-noappend", "-no-progress", "-quiet"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    except FileNotFoundError:
        raise LaunchError("mksquashfs is not installed here; pack a .tar.zst instead") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "it failed").splitlines()[-1]
        raise LaunchError(f"mksquashfs: {last}")
