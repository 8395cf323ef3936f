"""How is a folder packed into an archive, which the option extract unpacks or a job mounts?

The archive is written without a name, or under another one in the same folder, and gets its own
when it is complete. It holds the digests of the folder's path and of its listing, and the time that
it is given itself. By the first and the last, a file that was not packed from this folder, or was
changed since, is known and kept; by both digests, a folder that did not change is not packed again.
"""

from __future__ import annotations

import bz2
import errno
import fcntl
import gzip
import lzma
import os
import re
import stat
import subprocess
import tarfile
import tempfile
import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any, cast

import xxhash

from stager.archive.decompress import decompressed, zstd
from stager.archive.target import bad_links
from stager.base.errors import (
    DestinationError,
    IntegrityError,
    LaunchError,
    SourceError,
    UsageError,
)
from stager.base.formats import IMAGES, TARS, Compression, compression_of, is_image
from stager.base.linux import IS_LINK, open_beneath
from stager.fs.files import OPEN_FOLDER, opened, write_all
from stager.fs.partial_file import NO_UNNAMED, give_name
from stager.fs.reader import OPEN_FILE
from stager.tree.environments import CONDA
from stager.tree.listing import Kind, text_of
from stager.tree.walk import walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stager.tree.listing import Listing

    #: Is told how many bytes of the files are read, and how many they have.
    Tell = Callable[[int, int], None]

#: What stands before the two digests: in a comment at a tar's beginning, behind an image.
_MARK = b"slurm-stage pack "
#: Digits of the archive's time, in seconds since 1970: some filesystems keep no parts of these.
_TIME_DIGITS = 12
#: Bytes of a mark: the digests have 32 digits each, and blanks lie between them and the time.
_MARK_SIZE = len(_MARK) + 32 + 1 + 32 + 1 + _TIME_DIGITS
#: The bytes of a tar with that comment: the data of its first member, behind the header's block.
_COMMENT = slice(tarfile.BLOCKSIZE, 2 * tarfile.BLOCKSIZE)
#: The suffix of the archive where the user names none.
SUFFIX = ".tar.zst"
#: The most threads that zstd takes.
_MOST_THREADS = 256
#: Compression by gzip: the default level of the program.
_GZIP_LEVEL = 6
#: How a left-over is opened; NFS locks only what is open for writing.
_LEFT_OVER = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
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


@dataclass(frozen=True, slots=True)
class _Folder:
    """The folder that is packed: its path, its open descriptor, and what is in it."""

    path: str
    descriptor: int
    listing: Listing


def pack(folder: str, archive: str, tell: Tell = lambda *_: None) -> Packed:
    """Pack the ``folder`` into ``archive``, unless that holds the folder as it is now.

    ``tell`` is not called where mksquashfs reads the files.

    Raise UsageError if the name has no known suffix or the option extract would refuse the archive,
    SourceError if something cannot be read, IntegrityError if the folder changes meanwhile,
    LaunchError if mksquashfs fails, DestinationError if a file is there that was not packed from
    this folder or was changed since, or a link to be replaced, or if the archive was replaced by
    somebody else while it was written, and OSError if the archive cannot be written.
    """
    _check_names(folder, archive)
    # Opened once: a link above the folder may lead elsewhere at any moment.
    with _opened_folder(folder) as root:
        origin, there = _MARK + _digest_of_path(folder) + b" ", _mark_of(archive)
        if not there.startswith(origin):
            _check_nothing_lost(folder, archive)
        elif not _is_as_packed(archive, there):
            raise DestinationError(
                f"{archive} was changed or copied since it was packed from {folder}; delete it, or "
                "choose another name"
            )
        listing = _list(folder, root)
        content = origin + listing.digest().encode() + b" "
        fresh = not there.startswith(content)
        if fresh:
            if os.path.islink(archive):
                raise DestinationError(
                    f"{archive} is a symbolic link; delete it, or name the file that it leads to"
                )
            (_check_strangers if is_image(archive) else _check_links)(folder, listing)
            now = int(time.time())
            source = _Folder(folder, root, listing)
            with _replaced(archive) as file:
                _write(source, archive, file, content + _digits(now), tell)
                if _list(folder, root).digest() != listing.digest():
                    raise IntegrityError(_changed(folder))
                os.utime(file, (now, now))
    size = os.stat(archive).st_size
    options, conda = "" if is_image(archive) else ",extract", CONDA in listing.paths
    return Packed(archive, listing.files, listing.size, size, options, fresh, conda)


def _check_names(folder: str, archive: str) -> None:
    if not archive.lower().endswith((*TARS, *IMAGES)):
        known = " ".join((*TARS, *IMAGES))
        raise UsageError(f"{archive}: the name of the archive must end in one of {known}")
    if f"{os.path.realpath(archive)}/".startswith(f"{os.path.realpath(folder)}/"):
        raise UsageError(f"{archive} lies in the folder that is to be packed; choose another place")
    if os.path.exists(archive) and not os.path.isfile(archive):
        raise UsageError(f"{archive} exists and is not a plain file; choose another name")


@contextmanager
def _opened_folder(folder: str) -> Iterator[int]:
    try:
        root = os.open(folder, OPEN_FOLDER)
    except (NotADirectoryError, FileNotFoundError):
        raise _no_folder(folder) from None
    try:
        yield root
    finally:
        os.close(root)


def _list(folder: str, root: int) -> Listing:
    """Return the listing of the folder. Raise IntegrityError if it is not the open ``root``."""
    try:
        return walk(folder, os.fstat(root), holes=False, remedy="move it out of the folder")
    except (NotADirectoryError, FileNotFoundError):
        raise _no_folder(folder) from None


def _no_folder(folder: str) -> SourceError:
    """Return the error for what is missing, or is something else than a folder."""
    if os.path.isfile(folder):
        return SourceError(f"{folder} is not a folder; stage a file as it is, without pack")
    return SourceError(f"{folder}: there is no such folder; check the path")


def _changed(folder: str) -> str:
    return f"{folder} changed while it was packed; pack it again when nothing writes to it"


def _check_links(folder: str, listing: Listing) -> None:
    """Raise UsageError for a link because of which nothing of the archive would be unpacked."""
    links = {listing.paths[row]: target for row, target in listing.targets.items()
             if listing.kinds[row] == Kind.LINK}  # fmt: skip
    for path, why in bad_links(links):
        where = text_of(os.fsencode(folder) + b"/" + path)
        raise UsageError(f"{where} {why}, so extract would refuse it; remove it, or pack a .sqsh")


def _check_strangers(folder: str, listing: Listing) -> None:
    """Raise UsageError if other users could swap what is packed by mksquashfs.

    It finds files by their paths, and would follow a link in the place of a folder.
    """
    for row in listing.rows(Kind.FOLDER):
        if listing.owners[row] not in (0, os.getuid()) or listing.modes[row] & stat.S_IWOTH:
            where = text_of(os.fsencode(folder) + b"/" + listing.paths[row]).rstrip("/")
            text = "others could change it while mksquashfs reads it; pack a .tar.zst instead"
            raise UsageError(f"{where}: {text}")


def _digest_of_path(folder: str) -> bytes:
    """Return the xxh3-128 of the folder's path, in hexadecimal.

    Links above the folder are followed, as the current folder's path has none. If the folder is a
    link itself, that may lead to another version later.
    """
    above, name = os.path.split(os.path.abspath(folder))
    path = os.path.join(os.path.realpath(above), name)
    return xxhash.xxh3_128_hexdigest(os.fsencode(path)).encode()


def _mark_of(archive: str) -> bytes:
    """Return the mark of an archive that `pack` made, else nothing."""
    try:
        with open(archive, "rb") as file:
            if is_image(archive):
                file.seek(max(0, os.fstat(file.fileno()).st_size - _MARK_SIZE))
                return file.read()
            first = next(filter(None, decompressed(file, compression_of(archive))), b"")
            _, _, comment = bytes(first[_COMMENT]).partition(b" comment=")
            return comment[:_MARK_SIZE]
    except Exception:  # not an archive
        return b""


def _digits(seconds: int) -> bytes:
    return b"%0*d" % (_TIME_DIGITS, seconds)


def _is_as_packed(archive: str, mark: bytes) -> bool:
    """Whether nobody has written to an archive with this ``mark`` since: that changes its time."""
    seconds, parts = divmod(os.stat(archive).st_mtime_ns, 1_000_000_000)
    return not parts and mark.endswith(b" " + _digits(seconds))


def _check_nothing_lost(folder: str, archive: str) -> None:
    """Raise DestinationError if there is a file at ``archive``, unless it is empty."""
    with suppress(FileNotFoundError):
        if os.stat(archive).st_size:
            raise DestinationError(
                f"{archive} is there already, and was not packed from {folder}, or was changed "
                "since; delete it, or choose another name"
            )


@contextmanager
def _replaced(path: str) -> Iterator[int]:
    """Yield the descriptor of a new file, which is renamed to ``path`` if nothing is raised.

    It is written by its descriptor: others may be able to put another file in the place of its
    name. Only its owner may read it. Raise DestinationError if it was replaced, or if what was at
    ``path`` has changed meanwhile.
    """
    before = _state_of(path)
    above, name = os.path.split(os.path.abspath(path))
    _remove_left_overs(above, name)
    descriptor, partial = _create(above, name)
    try:
        yield descriptor
        os.fsync(descriptor)
        if not partial:
            partial = f"{above}/.{name}.{os.urandom(4).hex()}"
            give_name(descriptor, partial)
        _check_place(partial, descriptor, path)
        if _state_of(path) != before:
            raise DestinationError(
                f"{path} was written while the folder was packed; delete it, or choose another name"
            )
        os.rename(partial, path)
        _check_place(path, descriptor, path)
        with suppress(OSError), opened(above, OPEN_FOLDER) as parent:  # not all filesystems can
            os.fsync(parent)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
    finally:
        os.close(descriptor)


def _create(folder: str, name: str) -> tuple[int, str]:
    """Return the descriptor of a new file, and its path, if the filesystem demands one.

    A killed writer leaves a file with a name, but not its lock. Raise OSError.
    """
    try:
        descriptor, path = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), ""
    except OSError as error:
        if error.errno not in NO_UNNAMED:
            raise
        descriptor, path = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    with suppress(OSError):  # not all filesystems can
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor, path


def _remove_left_overs(folder: str, name: str) -> None:
    """Remove what killed writers of the archive of that ``name`` left beside it."""
    left = re.compile(rf"\.{re.escape(name)}\.[a-z0-9_]{{8}}")
    found: list[str] = []
    with suppress(PermissionError):  # the folder may be one that cannot be listed
        found = [entry for entry in os.listdir(folder) if left.fullmatch(entry)]
    for path in (f"{folder}/{entry}" for entry in found):
        with suppress(OSError), opened(path, _LEFT_OVER) as descriptor:
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)


def _state_of(path: str) -> tuple[int, int, int] | None:
    """Return what changes if another file is put at ``path``, or that one is written to."""
    with suppress(FileNotFoundError):
        there = os.lstat(path)
        return there.st_ino, there.st_size, there.st_mtime_ns
    return None


def _check_place(name: str, descriptor: int, path: str) -> None:
    """Raise DestinationError unless ``name`` is the open file."""
    with suppress(FileNotFoundError):
        if os.path.samestat(os.lstat(name), os.fstat(descriptor)):
            return
    raise DestinationError(
        f"{path}: somebody else replaced it while it was written; pack into a folder where only "
        "you may write"
    )


def _write(folder: _Folder, archive: str, file: int, mark: bytes, tell: Tell) -> None:
    if is_image(archive):
        _write_squashfs(folder.descriptor, file, mark)
        return
    with ExitStack() as stack:
        plain = stack.enter_context(open(file, "wb", closefd=False))
        stream = stack.enter_context(_COMPRESSORS[compression_of(archive)](plain))
        # "|" never seeks, which a compressed stream cannot.
        tar = stack.enter_context(
            tarfile.open(
                fileobj=stream, mode="w|", errorlevel=2, pax_headers={"comment": mark.decode()}
            )
        )
        reader = _Reader(folder.listing.size, tell)
        for row in range(len(folder.listing)):
            _add(tar, folder, row, reader)
            tar.members.clear()  # type: ignore[attr-defined] # or all stay in memory


def _zstd_file(file: IO[bytes]) -> zstd.ZstdFile:
    """Compress on all processors that this process may use."""
    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    options: dict[int, int] = {zstd.CompressionParameter.nb_workers: threads}
    return zstd.ZstdFile(file, "wb", options=options)


#: What compresses what is written to it, into the file.
_COMPRESSORS: dict[Compression, Callable[[IO[bytes]], Any]] = {
    Compression.NONE: nullcontext,
    # Without the file's name, which is temporary.
    Compression.GZIP: lambda file: gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0),
    Compression.ZSTD: _zstd_file,
    Compression.XZ: partial(lzma.LZMAFile, mode="wb"),
    Compression.BZIP2: partial(bz2.BZ2File, mode="wb"),
}


class _Reader:
    """Reads ``file`` for tarfile, one after the other, and tells how many bytes of all are read."""

    def __init__(self, size: int, tell: Tell) -> None:
        self.file: IO[bytes] | None = None
        self._done, self._size, self._tell = 0, size, tell

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes."""
        data = self.file.read(size) if self.file else b""
        self._done += len(data)
        self._tell(self._done, self._size)
        return data


def _add(tar: tarfile.TarFile, folder: _Folder, row: int, reader: _Reader) -> None:
    """Add an entry as it was listed; a file's data is read beneath the open folder."""
    listing = folder.listing
    member = _member(listing, row)
    if listing.kinds[row] != Kind.FILE:
        tar.addfile(member)
        return
    try:
        descriptor = open_beneath(folder.descriptor, listing.paths[row], OPEN_FILE)
        with open(descriptor, "rb") as file:
            facts = os.fstat(descriptor)
            now = facts.st_ino, facts.st_size, facts.st_ctime_ns
            if now != (listing.inodes[row], listing.sizes[row], listing.ctimes[row]):
                raise IntegrityError(_changed(folder.path))
            reader.file = file
            tar.addfile(member, cast("IO[bytes]", reader))
    except PermissionError as error:
        where = text_of(os.fsencode(folder.path) + b"/" + listing.paths[row])
        raise SourceError(f"{where}: {error.strerror}") from None
    except OSError as error:
        if error.errno in (errno.ENOENT, *IS_LINK) or _SHORTER in str(error):
            raise IntegrityError(_changed(folder.path)) from None
        raise


_TYPES = {
    Kind.FOLDER: tarfile.DIRTYPE,
    Kind.FILE: tarfile.REGTYPE,
    Kind.LINK: tarfile.SYMTYPE,
    Kind.HARD_LINK: tarfile.LNKTYPE,
}


def _member(listing: Listing, row: int) -> tarfile.TarInfo:
    """Return the header of an entry. Whoever unpacks the archive owns its files: it has no uid."""
    member = tarfile.TarInfo(os.fsdecode(listing.paths[row]) or ".")
    kind = Kind(listing.kinds[row])
    member.type = _TYPES[kind]
    member.mode = listing.modes[row]
    if kind is Kind.LINK:
        member.mode = 0o777
    elif kind is Kind.FILE:
        member.mode &= ~(stat.S_ISUID | stat.S_ISGID)  # extract refuses them
        member.size = listing.sizes[row]
    member.mtime = listing.mtimes[row] // 1_000_000_000
    member.linkname = os.fsdecode(listing.targets.get(row, b""))
    return member


def _write_squashfs(root: int, file: int, mark: bytes) -> None:
    # mksquashfs opens both anew, by the links of the descriptors that it inherits.
    folder, path = f"/proc/self/fd/{root}/.", f"/proc/self/fd/{file}"
    argv = ["mksquashfs", folder, path, "-noappend", "-no-progress", "-quiet"]
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            pass_fds=[root, file],
        )
    except FileNotFoundError:
        raise LaunchError("mksquashfs is not installed here; pack a .tar.zst instead") from None
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    # It writes an empty file in place of one that it cannot read, and ends with code 0.
    unread = [line for line in lines if "Failed to read" in line]
    if unread:
        raise SourceError(f"mksquashfs: {unread[0].strip()}")
    if done.returncode:
        raise LaunchError(f"mksquashfs: {(lines or ['it failed'])[-1].strip()}")
    write_all(file, mark, os.fstat(file).st_size)  # behind the image, whose header has its end
