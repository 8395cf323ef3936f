"""How is a zip unpacked, by Python's zipfile, and its entries read as unzip reads them?

The table of contents stands at the end, so a zip is read only when all of it is on the disk, and
only once the table was found short enough. Of an entry's path, permissions and time, zipfile knows
less: to it, a name that is not marked as UTF-8 is in code page 437, a backslash is part of a name,
and times are those of the DOS fields.
"""

from __future__ import annotations

import calendar
import errno
import os
import stat
import struct
import zipfile
import zlib
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from stager.archive.damage import DamagedError, UnsupportedError
from stager.archive.decompress import read_blocks
from stager.archive.target import LONGEST_PATH, NEITHER, may_run_as_another
from stager.base.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stager.archive.target import Target

#: The bit of an entry's flags that says that its name is in UTF-8.
_UTF_8 = 0x800
#: Where an entry was made: by DOS or Windows; by Unix or macOS, which write names as they are.
_FAT, _UNIX = 0, (3, 19)
#: The attribute by which DOS and Windows mark what may not be written.
_READ_ONLY = 1
#: The beginning of a part of the extra field: what it is, and how many bytes follow.
_PART = struct.Struct("<HH")
#: The name in UTF-8, after a version and the CRC-32 of the name that it stands for.
_UNICODE_NAME, _UNICODE = 0x7075, struct.Struct("<BI")
#: When it was modified, in seconds since 1970, after a byte whose first bit says that it is there.
_TIMES, _FLAGS_AND_TIME = 0x5455, struct.Struct("<Bi")
#: The same as older tools and macOS write it, after the time of the last access.
_OLD_TIMES, _OLD_TIME = 0x5855, struct.Struct("<4xi")
_SECOND = 10**9


def path_of(member: zipfile.ZipInfo) -> bytes:
    """Return the member's path; that of a folder ends in a slash.

    PowerShell 5 and other programs of Windows separate folders by backslashes.
    """
    name = _name_of(member)
    if member.create_system == _FAT and b"/" not in name:
        return name.replace(b"\\", b"/")
    return name


def _name_of(member: zipfile.ZipInfo) -> bytes:
    """Return the member's name as it is meant. Programs of Unix and macOS seldom mark UTF-8."""
    text = member.orig_filename
    if member.flag_bits & _UTF_8:
        return text.encode()
    written = text.encode("cp437")  # which has all 256 bytes
    for (version, digest), name in _parts(member, _UNICODE_NAME, _UNICODE):
        if version == 1 and digest == zlib.crc32(written) and _is_utf_8(name):
            return name
    is_as_meant = member.create_system in _UNIX or _is_utf_8(written)
    return written if is_as_meant else text.encode()


def _is_utf_8(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def mode_of(member: zipfile.ZipInfo, *, is_folder: bool) -> int:
    """Return the member's permissions. Windows says only whether it may be written."""
    mode = member.external_attr >> 16
    if mode:
        return mode
    default = 0o755 if is_folder else 0o644
    return default & ~0o222 if member.external_attr & _READ_ONLY else default


def mtime_of(member: zipfile.ZipInfo) -> int:
    """Return when the member was modified, in nanoseconds since 1970.

    The DOS fields hold local time without its zone, taken for UTC here. Some tools write no date,
    which gives a month and a day of 0.
    """
    for (flags, seconds), _ in _parts(member, _TIMES, _FLAGS_AND_TIME):
        if flags & 1:
            return int(seconds) * _SECOND
    for (seconds,), _ in _parts(member, _OLD_TIMES, _OLD_TIME):
        return int(seconds) * _SECOND
    year, month, day, *time = member.date_time
    return calendar.timegm((year, min(max(month, 1), 12), max(day, 1), *time, 0, 0, 0)) * _SECOND


def _parts(
    member: zipfile.ZipInfo, kind: int, layout: struct.Struct
) -> Iterator[tuple[tuple[int, ...], bytes]]:
    """Yield the parts of that kind of the extra field: what the layout reads, and the rest."""
    extra, at = member.extra, 0
    while at + _PART.size <= len(extra):
        found, size = _PART.unpack_from(extra, at)
        part = extra[at + _PART.size : at + _PART.size + size]
        if found == kind and size >= layout.size:
            yield layout.unpack_from(part), part[layout.size :]
        at += _PART.size + size


#: The record at the end: signature, which part of a split zip this is (the only one is 0; the
#: number may stand in the record before), the table's length, and that of the comment behind it.
_END, _END_SIGNATURE = struct.Struct("<4s H 6x I 4x H"), b"PK\5\6"
_ELSEWHERE = 0xFFFF
#: The record that stands before it where numbers are large: signature and the table's length.
_END_64, _END_64_SIGNATURE = struct.Struct("<4s 36x Q 8x"), b"PK\6\6"
#: What stands between them, and says where the larger record is.
_LOCATOR, _LOCATOR_SIGNATURE = struct.Struct("<4s 16x"), b"PK\6\7"
#: An entry of the table: signature, and the lengths of name, extra field and comment behind it.
_ENTRY, _ENTRY_SIGNATURE = struct.Struct("<4s 24x 3H 12x"), b"PK\1\2"
_LONGEST_COMMENT = 0xFFFF
#: The bit of an entry's flags that says that its data is encrypted.
_ENCRYPTED = 1
#: Compression methods that zipfile lacks, but other programs write.
_METHODS = {9: "Deflate64", 93: "zstd", 95: "xz", 98: "PPMd"}
#: What a user can do about a member that is compressed so.
_JOIN = "join its parts (zip -s 0 FILE --out OTHER.zip)"
_REPACK = "unpack it by another program (7z x), and pack it again (stagectl pack FOLDER)"


@contextmanager
def opened_zip(archive: IO[bytes], target: Target) -> Iterator[zipfile.ZipFile]:
    """Open a zip. Raise UsageError if it has too many members, DamagedError if it is damaged."""
    with _seeking():
        target.check_members(_count_entries(archive, target.most_members))
        try:
            whole = zipfile.ZipFile(archive)
        except UnicodeDecodeError as error:
            name = printable(os.fsdecode(error.object))
            raise UnsupportedError(
                f"it marks the name '{name}' as UTF-8, which it is not; {_REPACK}"
            ) from None
    with whole:
        yield whole


@contextmanager
def _seeking() -> Iterator[None]:
    """Raise DamagedError where the archive names an offset that no file has."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise DamagedError("its table of contents names impossible offsets") from None


def _count_entries(archive: IO[bytes], most: int) -> int:
    """Return how many entries the table of contents has, but stop at ``most`` + 1.

    The numbers in the archive are not believed, since zipfile reads the whole table into memory.
    """
    at, length = _find_table(archive)
    end, count = at + length, 0
    while 0 <= at < end and count <= most:
        archive.seek(at)
        entry = archive.read(_ENTRY.size)
        if len(entry) < _ENTRY.size or not entry.startswith(_ENTRY_SIGNATURE):
            break  # zipfile says what is wrong
        _, *lengths = _ENTRY.unpack(entry)
        at += _ENTRY.size + sum(lengths)
        count += 1
    return count


def _find_table(archive: IO[bytes]) -> tuple[int, int]:
    """Return offset and length of the table of contents, found in the same way as by zipfile."""
    size = archive.seek(0, os.SEEK_END)
    start = max(0, size - _END.size - _LONGEST_COMMENT - _LOCATOR.size - _END_64.size)
    archive.seek(start)
    tail = archive.read()
    at = len(tail) - _END.size
    if at < 0 or not tail.startswith(_END_SIGNATURE, at) or _END.unpack_from(tail, at)[-1]:
        at = tail.rfind(_END_SIGNATURE, max(0, len(tail) - _END.size - _LONGEST_COMMENT))
    if at < 0 or at + _END.size > len(tail):
        return 0, 0  # zipfile says what is wrong
    _, part, length, _ = _END.unpack_from(tail, at)
    if part not in (0, _ELSEWHERE):
        raise UnsupportedError(f"it is part {part + 1} of a split zip; {_JOIN}")
    locator = at - _LOCATOR.size
    large = locator - _END_64.size
    if (
        large >= 0
        and tail.startswith(_LOCATOR_SIGNATURE, locator)
        and tail.startswith(_END_64_SIGNATURE, large)
    ):
        at = large
        _, length = _END_64.unpack_from(tail, large)
    return start + at - length, length


def unpack_zip(archive: zipfile.ZipFile, target: Target) -> None:
    """Make each member of the ``archive`` in the ``target``."""
    names: dict[bytes, str] = {}
    for member in archive.infolist():
        _unpack_member(archive, member, target, names)


def _unpack_member(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Target, names: dict[bytes, str]
) -> None:
    """Make a member; ``names`` are those of the files and links before it, by their paths."""
    name = path_of(member)
    is_folder = name.endswith(b"/")
    mode, mtime = mode_of(member, is_folder=is_folder), mtime_of(member)
    kind = stat.S_IFMT(mode)
    path = target.admit(
        name,
        0 if is_folder else member.file_size,
        runs_as_another=not is_folder and may_run_as_another(mode),
    )
    if member.flag_bits & _ENCRYPTED:
        raise target.refusal(path, "is encrypted")
    if is_folder:
        target.make_folder(path, mode=mode, mtime=mtime)
        return
    if (other := names.setdefault(path, member.orig_filename)) != member.orig_filename:
        both = f"'{printable(other)}' and '{printable(member.orig_filename)}'"
        raise target.refusal(path, f"has two names in it, {both}")
    if kind == stat.S_IFLNK:
        with _opened(archive, member, target, path) as data:
            target.make_link(path, data.read(LONGEST_PATH), mtime=mtime)
    elif kind in (0, stat.S_IFREG):
        with _opened(archive, member, target, path) as data:
            blocks = (memoryview(block) for block in read_blocks(data))
            target.make_file(path, blocks, size=member.file_size, mode=mode, mtime=mtime)
    else:
        raise target.refusal(path, NEITHER)


def _opened(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Target, path: bytes
) -> IO[bytes]:
    try:
        with _seeking():
            return archive.open(member)
    except NotImplementedError:
        number = member.compress_type
        method = _METHODS.get(number, f"method {number}")
        raise target.refusal(path, f"is compressed by {method}", _REPACK) from None
