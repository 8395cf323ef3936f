"""Pack a folder into one archive, which the option extract unpacks or a job mounts.

The archive is written under another name in the same folder, and renamed when it is complete. It
holds the digest of the folder's listing, by which a folder that did not change is not packed again.
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
from stager.archive.links import bad_links
from stager.base.errors import IntegrityError, LaunchError, SourceError, UsageError
from stager.base.formats import IMAGES, TARS, Compression, compression_of, is_image
from stager.tree.listing import Kind, text_of
from stager.tree.venv import CONDA, CONFIG
from stager.tree.walk import walk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stager.tree.listing import Listing

#: What stands before the listing's digest: in a comment at a tar's beginning, behind an image.
_MARK = b"slurm-stage listing "
#: Bytes at the beginning of a tar in which that comment is found.
_HEADERS = 4096
#: The suffix of the archive where the user names none.
SUFFIX = ".tar.zst"
#: Compression by zstd: its own default level, on all cores.
_ZSTD_LEVEL, _ALL_CORES = 3, -1
#: Compression by gzip: the default level of the program.
_GZIP_LEVEL = 6
#: What tarfile says of a file that became shorter while it was read.
_SHORTER = "unexpected end of data"


@dataclass(frozen=True, slots=True)
class Packed:
    """The archive of a folder."""

    archive: str
    files: int
    #: Bytes of the files, and of the archive.
    size: int
    packed_size: int
    #: The options to stage it with, as they follow the destination in a directive.
    options: str
    #: False if the archive was there already and holds the folder as it is.
    fresh: bool
    #: Whether the folder is a conda environment, whose programs contain its path.
    conda: bool


def pack(folder: str, archive: str) -> Packed:
    """Pack the ``folder`` into ``archive``, unless that holds the folder as it is now.

    Raise UsageError if the name has no known suffix or the option extract would refuse the archive,
    SourceError if something cannot be read, IntegrityError if the folder changes meanwhile,
    LaunchError if mksquashfs fails, and OSError if the archive cannot be written.
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
        raise UsageError(f"{archive}: the name of the archive must end in one of {known}")
    if f"{os.path.realpath(archive)}/".startswith(f"{os.path.realpath(folder)}/"):
        raise UsageError(f"{archive} lies in the folder that is to be packed; choose another place")
    if os.path.exists(archive) and not os.path.isfile(archive):
        raise UsageError(f"{archive} exists and is not a plain file; choose another name")


def _list(folder: str) -> Listing:
    try:
        return walk(folder, holes=False)
    except (NotADirectoryError, FileNotFoundError) as error:
        raise SourceError(f"{folder}: {error.strerror}") from None


def _changed(folder: str) -> str:
    return f"{folder} changed while it was packed; pack it again when nothing writes to it"


def _check_links(folder: str, listing: Listing) -> None:
    """Raise UsageError for a link because of which nothing of the archive would be unpacked."""
    links = {listing.paths[row]: target for row, target in listing.targets.items()
             if listing.kinds[row] == Kind.LINK}  # fmt: skip
    for path, why in bad_links(links):
        where = text_of(os.fsencode(folder) + b"/" + path)
        raise UsageError(f"{where} {why}, so extract would refuse it; remove it, or pack a .sqsh")


def _holds(archive: str, mark: bytes) -> bool:
    """Return whether the archive was packed from the folder whose listing has this ``mark``."""
    try:
        with open(archive, "rb") as file:
            if is_image(archive):
                file.seek(max(0, os.fstat(file.fileno()).st_size - len(mark)))
                return file.read() == mark
            first = next(filter(None, decompressed(file, archive.lower())), b"")
            return mark in first[:_HEADERS]
    except Exception:  # not an archive, or not one of ours: it is replaced
        return False


def _options(listing: Listing, archive: str) -> str:
    if is_image(archive):
        return ""
    return ",extract,relocate=venv" if CONFIG in listing.paths else ",extract"


@contextmanager
def _replaced(path: str, mode: int) -> Iterator[str]:
    """Give the name of a temporary file, which is renamed to ``path`` if nothing is raised.

    Nobody may read it who has no right to the folder, whose permissions are ``mode``.
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
        # "|" never seeks, which a compressed stream cannot.
        tar = stack.enter_context(
            tarfile.open(
                fileobj=stream, mode="w|", errorlevel=2, pax_headers={"comment": mark.decode()}
            )
        )
        for name in listing.paths:
            _add(tar, folder, os.fsdecode(name))
            tar.members.clear()  # type: ignore[attr-defined] # or all stay in memory


def _compressed(file: IO[bytes], compression: Compression) -> IO[bytes]:
    if compression is Compression.GZIP:
        # Without the file's name, which is temporary.
        return cast("IO[bytes]", gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0))
    if compression is Compression.XZ:
        return cast("IO[bytes]", lzma.LZMAFile(file, "wb"))
    if compression is Compression.ZSTD:
        packer = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, threads=_ALL_CORES)
        return cast("IO[bytes]", packer.stream_writer(file, closefd=False))
    return file


def _add(tar: tarfile.TarFile, folder: str, name: str) -> None:
    path = f"{folder}/{name}"
    try:
        member = tar.gettarinfo(path, name or ".")
        member.uid = member.gid = 0  # whoever unpacks the archive owns its files
        member.uname = member.gname = ""
        member.mtime = int(member.mtime)
        if not member.isreg():
            tar.addfile(member)
            return
        member.mode &= ~(stat.S_ISUID | stat.S_ISGID)  # extract refuses them
        with open(path, "rb") as file:
            tar.addfile(member, file)
    except FileNotFoundError:
        raise IntegrityError(_changed(folder)) from None
    except PermissionError as error:
        raise SourceError(f"{path}: {error.strerror}") from None
    except OSError as error:
        if _SHORTER in str(error):
            raise IntegrityError(_changed(folder)) from None
        raise


def _write_squashfs(folder: str, path: str, mark: bytes) -> None:
    argv = ["mksquashfs", folder, path, "-noappend", "-no-progress", "-quiet"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    except FileNotFoundError:
        raise LaunchError("mksquashfs is not installed here; pack a .tar.zst instead") from None
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    # It writes an empty file in place of one that it cannot read, and ends with code 0.
    unread = [line for line in lines if "Failed to read" in line]
    if unread:
        raise SourceError(f"mksquashfs: {unread[0].strip()}")
    if done.returncode:
        raise LaunchError(f"mksquashfs: {(lines or ['it failed'])[-1].strip()}")
    with open(path, "ab") as file:
        file.write(mark)  # behind the image, whose header says where it ends
