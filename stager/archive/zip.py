"""TODO."""

from __future__ import annotations

import calendar
import errno
import os
import stat
import zipfile
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from stager.archive.decompress import DamagedError, read_blocks
from stager.archive.target import LONGEST_PATH, SETUID, Limits, Target
from stager.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

# What is a zip.

_END, _END_64, _LOCATOR, _ENTRY = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2"


@contextmanager
def opened_zip(archive: IO[bytes], limits: Limits) -> Iterator[zipfile.ZipFile]:
    with _seeking():
        if _entries(archive, limits.members) > limits.members:
            raise UsageError(
                f"the archive has more than the {limits.members} members that may be: nothing of "
                "it is unpacked"
            )
        whole = zipfile.ZipFile(archive)
    with whole:
        yield whole


@contextmanager
def _seeking() -> Iterator[None]:
    """Where a place that the archive names is looked for: there may be none."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise DamagedError("it names places that it does not have") from None


def _entries(archive: IO[bytes], most: int) -> int:
    """How many entries the table of contents has, or one more than the ``most`` that matter.

    The library reads the whole table into memory, of whatever size that is.
    """
    at, length = _table(archive)
    end, count = at + length, 0
    while 0 <= at < end and count <= most:
        archive.seek(at)
        entry = archive.read(46)
        if len(entry) < 46 or not entry.startswith(_ENTRY):
            break  # the library says what is wrong
        at += 46 + sum(int.from_bytes(entry[start : start + 2], "little") for start in (28, 30, 32))
        count += 1
    return count


def _table(archive: IO[bytes]) -> tuple[int, int]:
    """Where the table of contents begins, and its length; found as the library finds it."""
    size = archive.seek(0, os.SEEK_END)
    start = max(0, size - 22 - 0xFFFF - 20 - 56)
    archive.seek(start)
    tail = archive.read()
    at = len(tail) - 22
    if at < 0 or not tail.startswith(_END, at) or tail[-2:] != b"\0\0":
        at = tail.rfind(_END, max(0, len(tail) - 22 - 0xFFFF))
    if at < 0:
        return 0, 0
    length = int.from_bytes(tail[at + 12 : at + 16], "little")
    large = at - 20 - 56
    if large >= 0 and tail.startswith(_LOCATOR, at - 20) and tail.startswith(_END_64, large):
        at, length = large, int.from_bytes(tail[large + 40 : large + 48], "little")
    return start + at - length, length


def unpack_zip(archive: zipfile.ZipFile, target: Target) -> None:
    for member in archive.infolist():
        mode = member.external_attr >> 16
        kind = stat.S_IFMT(mode)
        runs_as = 0 if member.is_dir() else mode & SETUID
        size = 0 if member.is_dir() else member.file_size
        path = target.judge(os.fsencode(member.filename), size, runs_as)
        mtime = _zip_time(member.date_time)
        if member.flag_bits & 1:
            raise target.refusal(path, "is encrypted")
        if member.is_dir():
            target.make_folder(path, mode or 0o755, mtime)
        elif kind == stat.S_IFLNK:
            with _opened(archive, member) as data:
                target.make_link(path, data.read(LONGEST_PATH), mtime)
        elif kind in (0, stat.S_IFREG):
            with _opened(archive, member) as data:
                blocks = (memoryview(block) for block in read_blocks(data))
                target.make_file(path, mode or 0o644, mtime, blocks, member.file_size)
        else:
            raise target.refusal(path, "is no file, folder or link")


def _opened(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> IO[bytes]:
    with _seeking():
        return archive.open(member)


def _zip_time(when: tuple[int, int, int, int, int, int]) -> int:
    """Nanoseconds since 1970; a zip tells the local time of an unknown place, here taken for UTC.

    Some tools write no date at all, which is a month and a day 0.
    """
    year, month, day, *time = when
    return calendar.timegm((year, min(max(month, 1), 12), max(day, 1), *time, 0, 0, 0)) * 10**9
