"""A folder in, one archive of it out, which `extract` unpacks or a job mounts: `stagectl pack`.

Made once and whole: beside its place, and put there when all of it is on the disk.
"""

from __future__ import annotations

import gzip
import lzma
import os
import stat
import subprocess
import tarfile
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, cast

import zstandard

from stager.archive.decompress import decompressed
from stager.archive.target import bad_links
from stager.base.errors import IntegrityError, LaunchError, SourceError, UsageError
from stager.base.formats import IMAGES, TARS, Compression, compression_of, is_image
from stager.tree.listing import Kind, text_of
from stager.tree.venv import CONDA, CONFIG
from stager.tree.walk import walk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stager.tree.listing import Listing

#: Where an archive says which listing it holds: in a comment at its beginning, an image at its end.
_MARK, _HEADERS = b"slurm-stage listing ", 4096
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
    """Pack the ``folder`` into ``archive``, unless that holds it as it is.

    Raises UsageError for a name that says no format and for a folder that `extract` would refuse,
    SourceError for what cannot be read, IntegrityError for a folder that changes meanwhile, and
    OSError for what cannot be written.
    """
    _check_names(folder, archive)
    listing = _list(folder)
    mark = _MARK + listing.digest().encode()
    fresh = not _holds(archive, mark)
    if fresh:
        if not is_image(archive):
            _check_links(folder, listing)
        with _replaced(archive, listing.modes[0]) as path:
            _write(listing, folder, archive, path, mark)
            if _list(folder).digest() != listing.digest():
                raise IntegrityError(_changed(folder))
    size = os.stat(archive).st_size
    options, conda = _options(listing, archive), CONDA in listing.paths
    return Packed(archive, listing.files, listing.size, size, options, fresh, conda)


def _check_names(folder: str, archive: str) -> None:
    if not archive.lower().endswith((*TARS, *IMAGES)):
        known = " ".join((*TARS, *IMAGES))
        raise UsageError(f"{archive}: what is packed must be named like one of {known}")
    if f"{os.path.realpath(archive)}/".startswith(f"{os.path.realpath(folder)}/"):
        raise UsageError(f"{archive} lies in the folder that is packed; choose another name")
    if os.path.exists(archive) and not os.path.isfile(archive):
        raise UsageError(f"{archive} is no plain file; choose another name")


def _list(folder: str) -> Listing:
    try:
        return walk(folder, holes=False)
    except (NotADirectoryError, FileNotFoundError) as error:
        raise SourceError(f"{folder}: {error.strerror}") from None


def _changed(folder: str) -> str:
    return f"{folder} changed while it was packed; pack it again once it rests"


def _check_links(folder: str, listing: Listing) -> None:
    """Raise UsageError for a link that would have the archive refused where it is unpacked."""
    links = {listing.paths[row]: target for row, target in listing.targets.items()
             if listing.kinds[row] == Kind.LINK}  # fmt: skip
    for path, why in bad_links(links):
        where = text_of(os.fsencode(folder) + b"/" + path)
        raise UsageError(f"{where} {why}, and extract would refuse it; remove it, or pack a .sqsh")


def _holds(archive: str, mark: bytes) -> bool:
    """Whether the archive was packed from a folder that was listed with this ``mark``."""
    try:
        with open(archive, "rb") as file:
            if is_image(archive):
                file.seek(max(0, os.fstat(file.fileno()).st_size - len(mark)))
                return file.read() == mark
            first = next(filter(None, decompressed(file, archive.lower())), b"")
            return mark in first[:_HEADERS]
    except Exception:  # whatever stands there is no archive of ours
        return False


def _options(listing: Listing, archive: str) -> str:
    if is_image(archive):
        return ""
    return ",extract,relocate=venv" if CONFIG in listing.paths else ",extract"


@contextmanager
def _replaced(path: str, mode: int) -> Iterator[str]:
    """The name of a file that takes the place of the one at ``path`` when all is done.

    It is for those only who have a right to the folder, whose ``mode`` that is.
    """
    above, name = os.path.split(os.path.abspath(path))
    descriptor, partial = tempfile.mkstemp(prefix=f".{name}.", dir=above)
    try:
        yield partial
        mask = os.umask(0)
        os.umask(mask)
        os.fchmod(descriptor, 0o666 & ~mask & (mode | 0o600))
        os.fsync(descriptor)
        os.rename(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
    finally:
        os.close(descriptor)


def _write(listing: Listing, folder: str, archive: str, path: str, mark: bytes) -> None:
    if is_image(archive):
        _write_squashfs(os.path.abspath(folder), path, mark)
        return
    with ExitStack() as stack:
        plain = stack.enter_context(open(path, "wb"))
        stream = stack.enter_context(_compressed(plain, compression_of(archive)))
        # As a stream, which is read as one.
        tar = stack.enter_context(
            tarfile.open(
                fileobj=stream, mode="w|", errorlevel=2, pax_headers={"comment": mark.decode()}
            )
        )
        for name in listing.paths:
            _add(tar, folder, os.fsdecode(name))
            tar.members.clear()  # type: ignore[attr-defined] # there may be a million


def _compressed(file: IO[bytes], compression: Compression) -> IO[bytes]:
    if compression is Compression.GZIP:
        # Without a name of its own, for that would be the one that the file has meanwhile.
        return cast("IO[bytes]", gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0))
    if compression is Compression.XZ:
        return cast("IO[bytes]", lzma.LZMAFile(file, "wb"))
    if compression is Compression.ZSTD:
        packer = zstandard.ZstdCompressor(level=_LEVEL, threads=_ALL_CORES)
        return cast("IO[bytes]", packer.stream_writer(file, closefd=False))
    return file


def _add(tar: tarfile.TarFile, folder: str, name: str) -> None:
    path = f"{folder}/{name}"
    try:
        member = tar.gettarinfo(path, name or ".")
        member.uid = member.gid = 0  # whoever unpacks it owns it
        member.uname = member.gname = ""
        member.mtime = int(member.mtime)
        if not member.isreg():
            tar.addfile(member)
            return
        member.mode &= ~(stat.S_ISUID | stat.S_ISGID)  # which extract refuses
        with open(path, "rb") as file:
            tar.addfile(member, file)
    except FileNotFoundError:
        raise IntegrityError(_changed(folder)) from None
    except PermissionError as error:
        raise SourceError(f"{path}: {error.strerror}") from None
    except OSError as error:
        if "unexpected end of data" in str(error):
            raise IntegrityError(_changed(folder)) from None
        raise


def _write_squashfs(folder: str, path: str, mark: bytes) -> None:
    argv = ["mksquashfs", folder, path, "-noappend", "-no-progress", "-quiet"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    except FileNotFoundError:
        raise LaunchError("mksquashfs is not installed here; pack a .tar.zst instead") from None
    told = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    # What it cannot read it leaves empty, and says no more than this of it.
    unread = [line for line in told if "Failed to read" in line]
    if unread:
        raise SourceError(f"mksquashfs: {unread[0].strip()}")
    if done.returncode:
        raise LaunchError(f"mksquashfs: {(told or ['it failed'])[-1].strip()}")
    with open(path, "ab") as file:
        file.write(mark)  # behind the image, where nobody looks
