"""Unpack a zip into a target, by Python's zipfile, once its table of contents is found short.

The table stands at the end, so a zip is read only when all of it is on the disk.
"""

from __future__ import annotations

import calendar
import errno
import os
import stat
import struct
import zipfile
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from stager.archive.damage import DamagedError
from stager.archive.decompress import read_blocks
from stager.archive.target import LONGEST_PATH, NEITHER, may_run_as_another

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stager.archive.target import Target

#: The record at the end: signature, the table's length, and the length of the comment behind it.
_END, _END_SIGNATURE = struct.Struct("<4s 8x I 4x H"), b"PK\5\6"
#: The record that stands before it where numbers are large: signature and the table's length.
_END_64, _END_64_SIGNATURE = struct.Struct("<4s 36x Q 8x"), b"PK\6\6"
#: What stands between them, and says where the larger record is.
_LOCATOR, _LOCATOR_SIGNATURE = struct.Struct("<4s 16x"), b"PK\6\7"
#: An entry of the table: signature, and the lengths of name, extra field and comment behind it.
_ENTRY, _ENTRY_SIGNATURE = struct.Struct("<4s 24x 3H 12x"), b"PK\1\2"
_LONGEST_COMMENT = 0xFFFF
#: The bit of an entry's flags that says that its data is encrypted.
_ENCRYPTED = 1


@contextmanager
def opened_zip(archive: IO[bytes], target: Target) -> Iterator[zipfile.ZipFile]:
    """Open a zip. Raise UsageError if it has too many members, DamagedError if it is damaged."""
    with _seeking():
        target.check_members(_count_entries(archive, target.most_members))
        whole = zipfile.ZipFile(archive)
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
    if at < 0 or not tail.startswith(_END_SIGNATURE, at) or _END.unpack_from(tail, at)[2]:
        at = tail.rfind(_END_SIGNATURE, max(0, len(tail) - _END.size - _LONGEST_COMMENT))
    if at < 0 or at + _END.size > len(tail):
        return 0, 0  # zipfile says what is wrong
    _, length, _ = _END.unpack_from(tail, at)
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
    for member in archive.infolist():
        _unpack_member(archive, member, target)


def _unpack_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Target) -> None:
    mode = member.external_attr >> 16
    kind = stat.S_IFMT(mode)
    is_folder = member.is_dir()
    path = target.admit(
        os.fsencode(member.filename),
        0 if is_folder else member.file_size,
        runs_as_another=not is_folder and may_run_as_another(mode),
    )
    mtime = _nanoseconds(member.date_time)
    if member.flag_bits & _ENCRYPTED:
        raise target.refusal(path, "is encrypted")
    if is_folder:
        target.make_folder(path, mode=mode or 0o755, mtime=mtime)
    elif kind == stat.S_IFLNK:
        with _opened(archive, member) as data:
            target.make_link(path, data.read(LONGEST_PATH), mtime=mtime)
    elif kind in (0, stat.S_IFREG):
        size = member.file_size
        with _opened(archive, member) as data:
            blocks = (memoryview(block) for block in read_blocks(data))
            target.make_file(path, blocks, size=size, mode=mode or 0o644, mtime=mtime)
    else:
        raise target.refusal(path, NEITHER)


def _opened(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> IO[bytes]:
    with _seeking():
        return archive.open(member)


def _nanoseconds(when: tuple[int, int, int, int, int, int]) -> int:
    """Return a zip's date in nanoseconds since 1970.

    A zip holds local time without its zone, taken for UTC here. Some tools write no date, which
    gives a month and a day of 0.
    """
    year, month, day, *time = when
    return calendar.timegm((year, min(max(month, 1), 12), max(day, 1), *time, 0, 0, 0)) * 10**9
