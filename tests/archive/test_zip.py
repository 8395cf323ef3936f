"""Zips: hostile members and tables of contents are refused."""

from __future__ import annotations

import io
import stat
import struct
import zipfile
from typing import TYPE_CHECKING

import pytest

from stager.archive.target import Limits
from stager.archive.unpack import unpack
from stager.base.errors import SourceError, SpaceError, UsageError
from tests.support.archives import NO_LIMITS, damaged, excess, refusal, refused, zip_of

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
