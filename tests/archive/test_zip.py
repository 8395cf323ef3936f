"""Zips: hostile members and tables of contents are refused."""

from __future__ import annotations

import io
import os
import stat
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING

import pytest

from stager.archive.target import Limits
from stager.base.errors import SourceError, SpaceError, UsageError
from tests.support.archives import (
    NO_LIMITS,
    WHEN,
    ZipEntry,
    damaged,
    excess,
    refusal,
    refused,
    unpack,
    zip_by,
    zip_of,
    zstd_compress,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (zip_of("../bad"), refusal("../bad", "has '..' in its path", "x.zip")),
        (zip_of("/bad"), refusal("/bad", "has an absolute path", "x.zip")),
        (zip_of("bad", b"/etc", stat.S_IFLNK | 0o777),
         refusal("bad", "is a link that leads out of the archive", "x.zip")),
        (zip_of("bad", mode=stat.S_IFCHR | 0o644),
         refusal("bad", "is not a file, folder or link", "x.zip")),
        (zip_of("bad", mode=stat.S_IFREG | 0o4755),
         refusal("bad", "would run as another user or group (setuid or setgid)", "x.zip")),
        (zip_of("bad", bytes(2000)),
         excess("1000 B", "unpacked_size, reached at 'bad'", "x.zip")),
    ],
)  # fmt: skip
def test_a_hostile_zip_is_refused(out: Path, text: bytes, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        unpack(io.BytesIO(text), "x.zip", bytes(out), Limits(1000, 10))
    assert str(caught.value) == message


def zip_of_many(count: int, stated: int) -> bytes:
    text = zip_of("d/", b"", stat.S_IFDIR | 0o755)
    table, end = text.index(b"PK\1\2"), text.index(b"PK\5\6")
    entries = text[table:end] * count
    facts = struct.pack("<HHHHIIH", 0, 0, stated, stated, len(entries), table, 0)
    return text[:table] + entries + b"PK\5\6" + facts


@pytest.mark.parametrize("stated", [11, 1])
def test_a_zip_of_many_entries_is_refused_before_they_are_read(out: Path, stated: int) -> None:
    unpack(io.BytesIO(zip_of_many(10, 10)), "x.zip", bytes(out), Limits(10, 10))
    assert refused(zip_of_many(11, stated), out, "x.zip", Limits(10, 10)) == excess(
        "10 members", "unpacked_members", "x.zip"
    )


def test_the_table_of_a_zip64_is_counted_too(out: Path) -> None:
    text = zip_of_many(11, 0xFFFF)
    table, end = text.index(b"PK\1\2"), text.index(b"PK\5\6")
    facts = 44, 45, 45, 0, 0, 1, 1, end - table, table
    long = b"PK\6\6" + struct.pack("<QHHIIQQQQ", *facts)
    long += b"PK\6\7" + struct.pack("<IQI", 0, end, 1)
    short = struct.pack("<HHHHIIH", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    text = text[:end] + long + b"PK\5\6" + short
    assert unpack(io.BytesIO(text), "x.zip", bytes(out), Limits(10, 11)) == {}
    assert "more than the 10 members" in refused(text, out, "x.zip", Limits(10, 10))


def test_a_zip_without_dates(out: Path) -> None:
    text = io.BytesIO()
    with zipfile.ZipFile(text, "w") as made:
        member = zipfile.ZipInfo("a")
        member.date_time = (1980, 0, 0, 0, 0, 0)
        made.writestr(member, b"data")
    unpack(text, "x.zip", bytes(out), NO_LIMITS)
    assert (out / "a").stat().st_mtime == 315_532_800


def test_an_encrypted_zip_is_refused(out: Path) -> None:
    text = bytearray(zip_of("a"))
    text[6] |= 1
    text[text.index(b"PK\1\2") + 8] |= 1
    assert refused(bytes(text), out, "x.zip") == refusal("a", "is encrypted", "x.zip")


def test_a_zip_with_offsets_beyond_its_end_is_damaged(tmp_path: Path, out: Path) -> None:
    text = bytearray(zip_of("a"))
    text[-6:-2] = struct.pack("<I", 0xFFFFF000)
    (tmp_path / "x.zip").write_bytes(text)
    with (tmp_path / "x.zip").open("rb") as archive, pytest.raises(SourceError) as caught:
        unpack(archive, "x.zip", bytes(out), NO_LIMITS)
    assert str(caught.value) == damaged("its table of contents names impossible offsets", "x.zip")


def test_a_part_of_a_split_zip_is_told_as_one(out: Path) -> None:
    text = bytearray(zip_of("a"))
    text[-18:-16] = struct.pack("<H", 3)
    assert refused(bytes(text), out, "x.zip") == (
        "x.zip cannot be unpacked: it is part 4 of a split zip; join its parts (zip -s 0 FILE "
        "--out OTHER.zip)"
    )


def test_a_name_that_is_wrongly_marked_as_utf_8_is_told(out: Path) -> None:
    """bsdtar writes such zips of names in Latin-1."""
    text = zip_of("lat\u00e9n").replace("\u00e9".encode(), b"\xe4i")
    assert refused(text, out, "x.zip") == (
        "x.zip cannot be unpacked: it marks the name 'lat\\xe4in' as UTF-8, which it is not; "
        "unpack it by another program (7z x), and pack it again (stagectl pack FOLDER)"
    )


def test_too_little_memory_is_not_reported_as_damage(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(zipfile.ZipFile, "infolist", fail)
    with pytest.raises(SpaceError) as caught:
        unpack(io.BytesIO(zip_of("a")), "x.zip", bytes(out), NO_LIMITS)
    assert (
        caught.value.message
        == "x.zip: too little memory to unpack it; request more for the job (--mem)"
    )


#: What each entry became: the permissions, the time, and a file's bytes.
Made = tuple[str, int, bytes]


def unpacked(text: bytes, out: Path) -> dict[str, Made]:
    """Return what is unpacked of a zip, by path."""
    unpack(io.BytesIO(text), "x.zip", bytes(out), NO_LIMITS)
    return {
        str(path.relative_to(out)): (
            stat.filemode((facts := path.lstat()).st_mode),
            int(facts.st_mtime),
            path.read_bytes() if path.is_file() else b"",
        )
        for path in out.rglob("*")
    }


def test_a_zip_of_powershell_5_has_folders(out: Path) -> None:
    text = zip_by(
        ZipEntry(b"train\\img1.txt", b"one", method=8),
        ZipEntry(b"train\\deep\\img2.txt", b"two", method=8, attributes=0x21),  # read-only
        ZipEntry(b"train\\empty\\", attributes=0x10),
        ZipEntry(b"top.txt", b"three", method=8, attributes=0x20),
    )
    found = unpacked(text, out)
    assert found.pop("train")[0] == found.pop("train/deep")[0] == "drwx------"
    assert found == {
        "train/img1.txt": ("-rw-------", WHEN, b"one"),
        "train/deep/img2.txt": ("-r--------", WHEN, b"two"),
        "train/empty": ("drwx------", WHEN, b""),
        "top.txt": ("-rw-------", WHEN, b"three"),
    }


#: A name of Unix or of a newer Windows program, in which a backslash is one.
@pytest.mark.parametrize(("made", "name"), [(3 << 8 | 30, b"a\\b"), (20, b"d/a\\b")])
def test_a_backslash_that_separates_nothing_stays(out: Path, made: int, name: bytes) -> None:
    unpacked(zip_by(ZipEntry(name, b"data", made=made)), out)
    assert (out / name.decode()).read_bytes() == b"data"


@pytest.mark.parametrize(
    ("first", "second", "path"),
    [(b"a\\b", b"a/b", "a/b"), (b"a/b", b"a\\b", "a/b"), (b"a", b"./a", "a")],
)
def test_two_names_of_one_path_are_refused(
    out: Path, first: bytes, second: bytes, path: str
) -> None:
    text = zip_by(ZipEntry(first, b"1"), ZipEntry(second, b"2"))
    why = f"has two names in it, '{first.decode()}' and '{second.decode()}'"
    assert refused(text, out, "x.zip") == refusal(path, why, "x.zip")


def test_a_backslash_leads_no_member_out(out: Path) -> None:
    for name, path, why in (
        (b"..\\bad", "../bad", "has '..' in its path"), (b"\\bad", "/bad", "has an absolute path"),
    ):  # fmt: skip
        assert refused(zip_by(ZipEntry(name)), out, "x.zip") == refusal(path, why, "x.zip")


#: macOS writes version 2.1 of Unix, names in decomposed UTF-8 without the flag, and old times.
MACOS = 3 << 8 | 21
NAME = "u\u0308ben/\u6570\u636e.txt".encode()


def old_times(mtime: int) -> bytes:
    return struct.pack("<HHii", 0x5855, 8, mtime + 100, mtime)


def test_names_and_times_of_macos_arrive(out: Path) -> None:
    times = (
        struct.pack("<HHiiHH", 0x5855, 12, WHEN + 200, WHEN + 100, 501, 20),
        old_times(WHEN + 100),
    )
    text = zip_by(
        ZipEntry(NAME[:7], made=MACOS, attributes=0o40755 << 16, extra=times),
        ZipEntry(NAME, b"1", made=MACOS, method=8, attributes=0o100640 << 16, extra=times),
    )
    assert unpacked(text, out) == {
        NAME[:6].decode(): ("drwx------", WHEN + 100, b""),
        NAME.decode(): ("-rw-------", WHEN + 100, b"1"),
    }


def unicode_name(name: bytes, of: bytes, version: int = 1) -> bytes:
    return struct.pack("<HHBI", 0x7075, 5 + len(name), version, zlib.crc32(of)) + name


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        (ZipEntry(b"\x81ben", extra=(b"", unicode_name(NAME, b"\x81ben"))), NAME),
        (ZipEntry(b"_", made=MACOS, extra=(b"", unicode_name(NAME, b"_"))), NAME),
        # That field stands for another name, has another format, or is no UTF-8.
        (ZipEntry(b"a", extra=(b"", unicode_name(NAME, b"b"))), b"a"),
        (ZipEntry(b"a", extra=(b"", unicode_name(NAME, b"a", version=2))), b"a"),
        (ZipEntry(b"a", extra=(b"", unicode_name(b"\xff", b"a"))), b"a"),
        (ZipEntry(b"a", extra=(b"", struct.pack("<HHB", 0x7075, 1, 1))), b"a"),
        # With the flag, without it, and in the code page of DOS.
        (ZipEntry(NAME, flags=0x800), NAME),
        (ZipEntry(NAME), NAME),
        (ZipEntry(b"\x81ben"), "\u00fcben".encode()),
        (ZipEntry(b"\xfcben", made=3 << 8 | 30), b"\xfcben"),
    ],
)  # fmt: skip
def test_a_name_is_what_the_program_meant(out: Path, entry: ZipEntry, name: bytes) -> None:
    unpack(io.BytesIO(zip_by(entry._replace(data=b"data"))), "x.zip", bytes(out), NO_LIMITS)
    assert (out / os.fsdecode(name)).read_bytes() == b"data"


def test_the_time_in_utc_goes_before_others(out: Path) -> None:
    times = struct.pack("<HHBi", 0x5455, 5, 3, -7)
    none = struct.pack("<HHBi", 0x5455, 5, 2, 7)
    text = zip_by(
        ZipEntry(b"a", extra=(b"", old_times(WHEN + 100) + times)),
        ZipEntry(b"b", extra=(b"", old_times(WHEN + 100) + none)),
        ZipEntry(b"c", extra=(b"", none)),
        ZipEntry(b"d", extra=(b"", struct.pack("<HHB", 0x5455, 1, 1))),
    )
    times_found = [found[1] for _, found in sorted(unpacked(text, out).items())]
    assert times_found == [-7, WHEN + 100, WHEN, WHEN]


@pytest.mark.parametrize(
    ("number", "method"),
    [(9, "Deflate64"), (93, "zstd"), (95, "xz"), (98, "PPMd"), (6, "method 6")],
)
def test_a_method_that_is_not_read_is_named(out: Path, number: int, method: str) -> None:
    text = zip_by(ZipEntry(b"a", b"data", method=number, stored=zstd_compress(b"data")))
    assert refused(text, out, "x.zip") == (
        f"x.zip: its member 'a' is compressed by {method}: nothing was unpacked; unpack it by "
        "another program (7z x), and pack it again (stagectl pack FOLDER)"
    )
