"""Tars of all formats are read, and damage is never taken for the end."""

from __future__ import annotations

import io
import subprocess
import tarfile
from typing import TYPE_CHECKING

import pytest

from stager.archive.target import Limits
from stager.tree.walk import walk
from tests.support.archives import (
    NO_LIMITS,
    WHEN,
    a_file,
    damaged,
    described,
    header,
    record,
    refusal,
    refused,
    seen,
    tar_of,
    unpack,
    zstd_compress,
)

if TYPE_CHECKING:
    from pathlib import Path

BAD_HEADER = "a member's header is not valid, or it is not a tar archive"


def test_a_damaged_header_is_not_the_end(out: Path) -> None:
    text = bytearray(tar_of(a_file("a"), a_file("b"), a_file("c")))
    text[1024] ^= 1
    assert refused(bytes(text), out) == damaged(BAD_HEADER)


@pytest.mark.parametrize("length", [0, 300, 512, 700, 1024, 1324, 1538, 2048])
def test_an_archive_that_is_cut_off_is_not_taken_for_a_whole_one(out: Path, length: int) -> None:
    text = tar_of(a_file("a"), a_file("b"))[:length]
    assert refused(text, out) == damaged("it ends early")


def test_a_header_of_zeros_is_not_the_end(out: Path) -> None:
    text = tar_of(a_file("a"), a_file("b"))
    text = text[:1024] + bytes(512) + text[1536:]
    assert refused(text, out) == damaged(
        "a block of zeros, which marks the end, has data behind it"
    )


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_that_would_fill_the_memory_is_refused(out: Path, kind: bytes) -> None:
    body = b"2 " * 40_000 + b"a="
    why = damaged("an extended header has 80002 bytes; at most 65536 are allowed")
    assert refused(described(kind, body) + tar_of(a_file("a")), out) == why


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"1" * 60_000, "a header has a number that cannot be read"),
        (b"2 " * 30_000 + b"a=", "an extended header has a record that cannot be read"),
        (b"99 path=a\n", "an extended header has a record that cannot be read"),
        (b"10 path=ab", "an extended header has a record that cannot be read"),
        (b"0 path=a\n", "an extended header has a record that cannot be read"),
        (b"-1 path=a\n", "a header has a number that cannot be read"),
        (b" path=a\n", "a header has a number that cannot be read"),
        (record(b"size", b"-1"), "a header has a number that cannot be read"),
        (record(b"size", b"1" * 5000), "a header has a number that cannot be read"),
    ],
)
def test_records_that_cannot_be_read_are_damage(out: Path, body: bytes, why: str) -> None:
    text = described(tarfile.XHDTYPE, body) + tar_of(a_file("a"))
    assert refused(text, out) == damaged(why)


def test_an_extended_header_without_a_member_is_damage(out: Path) -> None:
    text = described(tarfile.XHDTYPE, record(b"path", b"a")) + bytes(1024)
    assert refused(text, out) == damaged("it ends after an extended header, without its member")


TOO_MUCH = damaged("it has far more headers and padding than its files need", "x.tar.zst")


@pytest.mark.parametrize(
    "text",
    [
        tar_of(a_file("a")) + bytes(65 << 20),
        described(tarfile.XGLTYPE, record(b"comment", b"x" * 65_000)) * 1100,
        header("d", 1 << 40, b"D", 0o755) + bytes(65 << 20),
    ],
    ids=["zeros behind the end", "global headers", "a folder's names"],
)
def test_bytes_besides_the_data_of_files_are_limited(out: Path, text: bytes) -> None:
    assert refused(zstd_compress(text), out, "x.tar.zst") == TOO_MUCH


def test_global_records_are_for_all_that_follow(out: Path) -> None:
    text = described(tarfile.XGLTYPE, record(b"mtime", b"1700000000.000000001"))
    unpack(io.BytesIO(text + tar_of(a_file("a"), a_file("b"))), "x.tar", bytes(out), NO_LIMITS)
    assert [(out / name).stat().st_mtime_ns for name in "ab"] == [WHEN * 10**9 + 1] * 2


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE])
def test_a_size_below_zero_makes_no_room_for_others(out: Path, kind: bytes) -> None:
    text = header("a", -(1 << 40), kind) + tar_of(a_file("b", bytes(2000)))
    why = f"has a size of {-(1 << 40)} bytes"
    assert refused(text, out, limits=Limits(1000, 10)) == refusal("a", why)


def test_the_size_of_a_folder_is_ignored(out: Path) -> None:
    text = header("d", 4096, tarfile.DIRTYPE, 0o755) + tar_of(a_file("d/a"))
    unpack(io.BytesIO(text), "x.tar", bytes(out), Limits(10, 10))
    assert (out / "d/a").read_bytes() == b"data"


def test_a_hard_link_with_data_is_refused(out: Path) -> None:
    member = tarfile.TarInfo("h")
    member.type, member.linkname, member.size = tarfile.LNKTYPE, "a", 4
    text = tar_of(a_file("a"))[:1024] + member.tobuf() + b"data" + bytes(508) + tar_of(a_file("z"))
    why = "is a hard link with data of its own"
    assert refused(text, out) == refusal("h", why)


def test_a_volume_label_is_not_a_member(out: Path) -> None:
    text = header("LABEL", 0, b"V") + tar_of(a_file("a"))
    assert set(unpack(io.BytesIO(text), "x.tar", bytes(out), Limits(4, 1))) == {b"a"}


@pytest.mark.parametrize("form", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_all_forms_of_tar(source: Path, out: Path, form: str) -> None:
    long = source / "/".join(["long" * 10] * 5)
    if form != "v7":
        long.mkdir(parents=True)
        (long / "file").write_bytes(b"far down")
        (source / "far").symlink_to("/".join(["long" * 10] * 2))
    command = ["tar", "-c", f"--format={form}", "-C", str(source), "."]
    text = subprocess.run(command, check=True, capture_output=True).stdout
    unpack(io.BytesIO(text), "x.tar", bytes(out), NO_LIMITS)
    assert seen(walk(str(out))) == seen(walk(str(source)))
