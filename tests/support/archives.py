"""Archives made member by member, so that each can be hostile."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import struct
import subprocess
import tarfile
import zipfile
import zlib
from typing import IO, TYPE_CHECKING, NamedTuple

import pytest

from stager.archive import unpack as unpacking
from stager.archive.decompress import zstd
from stager.archive.target import Limits, Target
from stager.base.errors import SourceError, UsageError
from stager.base.options import Share
from stager.base.text import printable

if TYPE_CHECKING:
    from pathlib import Path

    from stager.tree.listing import Listing

WHEN = 1_700_000_000
NO_LIMITS = Limits(1 << 40, 1 << 20)


def seen(listing: Listing) -> list[tuple[object, ...]]:
    """Return what an archive gives to the copy of a folder; times in whole seconds."""
    listing = listing.as_copied(Share.NONE, os.getegid())
    columns = listing.paths, listing.kinds, listing.modes, listing.sizes
    rows = zip(*columns, [mtime // 10**9 for mtime in listing.mtimes], strict=True)
    return [*rows, tuple(listing.targets.items())]


def pack(source: Path, suffix: str) -> bytes:
    """Return the folder as packed by the system's tools."""
    if suffix == ".zip":
        archive = source.parent / "made.zip"
        with zipfile.ZipFile(archive, "w") as made:
            for path in sorted(source.rglob("*")):
                if not path.is_symlink() and path.name.isascii():
                    made.write(path, path.relative_to(source))
        return archive.read_bytes()
    plain = subprocess.run(["tar", "-c", "-C", source, "."], check=True, capture_output=True).stdout
    return compressed(plain, suffix)


def zstd_compress(data: bytes) -> bytes:
    """Return the data compressed as the program zstd does, with a digest."""
    return zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1})


def compressed(plain: bytes, suffix: str) -> bytes:
    """Return the bytes compressed as the suffix says."""
    for ends, compress in (
        ((".gz", "tgz"), gzip.compress), ((".xz", "txz"), lzma.compress),
        ((".bz2", "tbz2", "tbz"), bz2.compress),
        ((".zst", "tzst"), zstd_compress),
    ):  # fmt: skip
        if suffix.endswith(ends):
            return compress(plain)
    return plain


#: A member and its data.
Entry = tuple[tarfile.TarInfo, bytes]


def a_file(name: str, data: bytes = b"data", mode: int = 0o644) -> Entry:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), mode
    return member, data


def of_type(name: str, kind: bytes, target: str = "", mode: int = 0o644) -> Entry:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = kind, target, mode
    return member, b""


def a_link(name: str, target: str) -> Entry:
    return of_type(name, tarfile.SYMTYPE, target)


def a_folder(name: str) -> Entry:
    return of_type(name, tarfile.DIRTYPE, mode=0o755)


def tar_of(*entries: Entry) -> bytes:
    """Return a tar with these members, in this order."""
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode="w", format=tarfile.PAX_FORMAT) as made:
        for member, data in entries:
            made.addfile(member, io.BytesIO(data))
    return text.getvalue()


def with_time(when: float) -> Entry:
    """Return a file with a time that a header cannot hold."""
    member, data = a_file("when")
    member.pax_headers = {"mtime": str(when)}
    return member, data


def zip_of(name: str, data: bytes = b"data", mode: int = stat.S_IFREG | 0o644) -> bytes:
    """Return a zip with one member."""
    text = io.BytesIO()
    with zipfile.ZipFile(text, "w") as made:
        member = zipfile.ZipInfo(name)
        member.external_attr = mode << 16
        made.writestr(member, data)
    return text.getvalue()


class ZipEntry(NamedTuple):
    """An entry of a zip as other programs write it; dates are DOS fields, extra fields the local
    and the central one."""

    name: bytes
    data: bytes = b""
    #: The program's system and version, the version that is needed, and flags.
    made: int = 20
    needed: int = 20
    flags: int = 0
    method: int = 0
    attributes: int = 0
    extra: tuple[bytes, bytes] = (b"", b"")
    #: The data as it is stored, where the method is none of zipfile's.
    stored: bytes | None = None


#: 14 November 2023, 22:13:20, in DOS fields: time and date.
_DOS_TIME = 22 << 11 | 13 << 5 | 20 // 2, (2023 - 1980) << 9 | 11 << 5 | 14


def zip_by(*entries: ZipEntry) -> bytes:
    """Return a zip with these entries, byte for byte."""
    text, table = b"", b""
    for one in entries:
        stored = one.stored
        if stored is None:
            packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
            stored = packer.compress(one.data) + packer.flush() if one.method == 8 else one.data
        facts = struct.pack(
            "<HHHHHIII", one.needed, one.flags, one.method, *_DOS_TIME, zlib.crc32(one.data),
            len(stored), len(one.data),
        )  # fmt: skip
        at, (local, central) = len(text), one.extra
        text += b"PK\3\4" + facts + struct.pack("<HH", len(one.name), len(local))
        text += one.name + local + stored
        table += b"PK\1\2" + struct.pack("<H", one.made) + facts
        table += struct.pack("<HHHHHII", len(one.name), len(central), 0, 0, 0, one.attributes, at)
        table += one.name + central
    count = len(entries)
    return (
        text
        + table
        + b"PK\5\6"
        + struct.pack("<HHHHIIH", 0, 0, count, count, len(table), len(text), 0)
    )


def unpack(archive: IO[bytes], name: str, folder: bytes, limits: Limits) -> dict[bytes, bytes]:
    """Unpack the ``archive`` of that ``name`` into the empty ``folder``; return files' digests."""
    target = Target(folder, limits, name)
    unpacking.unpack(archive, target)
    target.finish()
    return target.digests


def refused(text: bytes, out: Path, name: str = "x.tar", limits: Limits = NO_LIMITS) -> str:
    """Return the message for an archive that is refused."""
    with pytest.raises((SourceError, UsageError)) as caught:
        unpack(io.BytesIO(text), name, bytes(out), limits)
    return caught.value.message


def damaged(problem: str, name: str = "x.tar") -> str:
    """Return the message for an archive that cannot be read any further."""
    remedy = "get an undamaged copy of it, or create it again"
    return f"{name} cannot be unpacked: the archive is damaged ({problem}); {remedy}"


def refusal(member: str, why: str, name: str = "x.tar") -> str:
    """Return the message for an archive with a member that is refused."""
    remedy = "create the archive again without it"
    return f"{name}: its member '{printable(member)}' {why}: nothing was unpacked; {remedy}"


def excess(most: str, details: str, name: str = "x.tar") -> str:
    """Return the message for an archive that has more than the site allows."""
    return (
        f"{name}: it has more than the {most} that the site allows ({details}): nothing was "
        "unpacked; pack fewer files, or ask the administrator to allow more"
    )


def described(kind: bytes, body: bytes) -> bytes:
    """Return an extended header with ``body``, which applies to the next member."""
    member = tarfile.TarInfo("described")
    member.type, member.size = kind, len(body)
    return member.tobuf(tarfile.GNU_FORMAT) + body + bytes(-len(body) % 512)


def record(keyword: bytes, value: bytes) -> bytes:
    """Return a record of an extended header, which begins with its own length."""
    body = b" " + keyword + b"=" + value + b"\n"
    length = len(body)
    while len(b"%d" % length) + len(body) != length:
        length = len(b"%d" % length) + len(body)
    return b"%d" % length + body


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE, mode: int = 0o644) -> bytes:
    """Return the header of a member; the caller appends the data."""
    member = tarfile.TarInfo(name)
    member.size, member.type, member.mode = size, kind, mode
    return member.tobuf(tarfile.GNU_FORMAT)
