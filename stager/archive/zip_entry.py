"""Read a zip's entry as unzip does: its path, permissions and time. Pure.

Of these, Python's zipfile knows less: to it, a name that is not marked as UTF-8 is in code page
437, a backslash is part of a name, and times are those of the DOS fields.
"""

from __future__ import annotations

import calendar
import struct
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zipfile
    from collections.abc import Iterator

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
