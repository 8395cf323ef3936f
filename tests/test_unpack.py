"""Archives: the harmless arrive as they are, the hostile are refused with the member's name."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import stat
import subprocess
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest
import xxhash
import zstandard

from stager.directive import ARCHIVES, archive_suffix
from stager.errors import SourceError, UsageError
from stager.unpack import Limits, unpack
from stager.walk import walk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stager.listing import Listing

WHEN = 1_700_000_000
NO_LIMITS = Limits(1 << 40, 1 << 20)


def seen(listing: Listing) -> list[tuple[object, ...]]:
    columns = listing.paths, listing.kinds, listing.modes, listing.sizes
    rows = zip(*columns, [mtime // 10**9 for mtime in listing.mtimes], strict=True)
    return [*rows, tuple(listing.targets.items())]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    out.mkdir()
    return out


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with what an archive may hold."""
    source = tmp_path / "source"
    (source / "a/closed").mkdir(parents=True)
    (source / "empty").mkdir()
    (source / "a/program").write_bytes(b"#!/bin/sh\n" * 100)
    (source / "a/closed/large").write_bytes(os.urandom(3 << 20))
    (source / "zero").touch()
    (source / "a/link").symlink_to("../zero")
    (source / "up").symlink_to("a/closed/../program")
    (source / os.fsdecode(b"\xff name")).write_bytes(b"x")
    (source / "a/program").chmod(0o755)
    (source / "a/twin").hardlink_to(source / "a/program")
    (source / "a/closed").chmod(0o555)
    for path in (source, *source.rglob("*")):
        os.utime(path, (WHEN, WHEN), follow_symlinks=False)
    return source


def pack(source: Path, suffix: str) -> bytes:
    """The folder as system tools pack it."""
    if suffix == ".zip":
        archive = source.parent / "made.zip"
        with zipfile.ZipFile(archive, "w") as made:
            for path in sorted(source.rglob("*")):
                if not path.is_symlink() and path.name.isascii():
                    made.write(path, path.relative_to(source))
        return archive.read_bytes()
    plain = subprocess.run(["tar", "-c", "-C", source, "."], check=True, capture_output=True).stdout
    for ends, compress in (
        ((".gz", "tgz"), gzip.compress), ((".xz", "txz"), lzma.compress),
        ((".zst", "tzst"), zstandard.ZstdCompressor(write_checksum=True).compress),
    ):  # fmt: skip
        if suffix.endswith(ends):
            return compress(plain)
    return plain


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_what_was_packed_arrives_as_it_was(source: Path, out: Path, suffix: str) -> None:
    digests = unpack(io.BytesIO(pack(source, suffix)), f"/data/x{suffix}", bytes(out), NO_LIMITS)
    if suffix == ".zip":
        names = {"a", "a/program", "a/twin", "a/closed", "a/closed/large", "empty", "zero"}
        assert {str(path.relative_to(out)) for path in out.rglob("*")} == names
        assert (out / "a/program").stat().st_mode == (source / "a/program").stat().st_mode
    else:
        assert seen(walk(str(out))) == seen(walk(str(source)))
    for path, digest in digests.items():
        assert xxhash.xxh3_128_digest((out / os.fsdecode(path)).read_bytes()) == digest
    files = [path for path in out.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(digests) == len(files)


def test_archives_are_known_by_their_names() -> None:
    assert all(archive_suffix(f"/a/b{suffix.upper()}") == suffix for suffix in ARCHIVES)
    names = ("/a/tar", "/a/b.gz", "/a/b.tar.bz2", "/a/zip/b")
    assert not any(archive_suffix(name) for name in names)


def test_a_later_member_takes_the_place_of_an_earlier(out: Path) -> None:
    text = tar_of(a_file("a", b"old"), a_file("a", b"new"), a_link("b", "a"), a_file("b", b"file"))
    assert set(unpack(io.BytesIO(text), "x.tar", bytes(out), NO_LIMITS)) == {b"a", b"b"}
    assert [(out / name).read_bytes() for name in "ab"] == [b"new", b"file"]
    assert not (out / "b").is_symlink()


def test_the_link_of_an_environment_to_its_interpreter_may_lead_out(out: Path) -> None:
    links = {
        "bin/python": "python3",
        "bin/python3": "/usr/bin/python3.11",
        "env/bin/python3": "/usr/bin/python3.11",
    }
    entries = [a_link(name, target) for name, target in links.items()]
    unpack(io.BytesIO(tar_of(*entries)), "x.tar", bytes(out), NO_LIMITS)
    assert {name: os.readlink(out / name) for name in links} == links


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
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode="w", format=tarfile.PAX_FORMAT) as made:
        for member, data in entries:
            made.addfile(member, io.BytesIO(data))
    return text.getvalue()


def with_time(when: float) -> Entry:
    member, data = a_file("when")
    member.pax_headers = {"mtime": str(when)}
    return member, data


BAD = "bad"
#: What is in each hostile archive, the member that is named, and what is said of it.
HOSTILE: dict[str, tuple[tuple[Entry, ...], str, str]] = {
    "above": ((a_file("../bad"),), "../bad", "has '..' in its name"),
    "above, further in": ((a_file("a/../../bad"),), "a/../../bad", "has '..' in its name"),
    "absolute": ((a_file("/tmp/bad"),), "/tmp/bad", "has an absolute name"),
    "a link out": ((a_link(BAD, "/etc"),), BAD, "is a link that leads out of the archive"),
    "an interpreter that is none": (
        (a_link("bin/python", "/etc/passwd"),), "bin/python",
        "is a link that leads out of the archive",
    ),
    "a relative link out": (
        (a_folder("a"), a_link("a/bad", "../../x")), "a/bad",
        "is a link that leads out of the archive",
    ),
    "a chain of links out": (
        (a_folder("a"), a_link("a/up", ".."), a_link(BAD, "a/up/..")), BAD,
        "is a link that leads out of the archive",
    ),
    "a file through a link": (
        (a_link("a", "."), a_file("a/bad")), "a",
        "is a folder where a file or link stands already",
    ),
    "a file through a link out": (
        (a_link("a", "/tmp"), a_file("a/bad")), "a",
        "is a folder where a file or link stands already",
    ),
    "a hard link out": (
        (of_type(BAD, tarfile.LNKTYPE, "/etc/passwd"),), BAD,
        "is a hard link to what is no file of the archive",
    ),
    "a hard link above": (
        (of_type(BAD, tarfile.LNKTYPE, "../x"),), BAD,
        "is a hard link to what is no file of the archive",
    ),
    "a hard link to a link": (
        (a_link("a", "/etc/passwd"), of_type(BAD, tarfile.LNKTYPE, "a")), BAD,
        "is a hard link to what is no file of the archive",
    ),
    "a device": ((of_type(BAD, tarfile.CHRTYPE),), BAD, "is no file, folder or link"),
    "a block device": ((of_type(BAD, tarfile.BLKTYPE),), BAD, "is no file, folder or link"),
    "a named pipe": ((of_type(BAD, tarfile.FIFOTYPE),), BAD, "is no file, folder or link"),
    "setuid": (
        (a_file(BAD, mode=0o4755),), BAD, "would run as somebody else (setuid or setgid)",
    ),
    "setgid": (
        (a_file(BAD, mode=0o2755),), BAD, "would run as somebody else (setuid or setgid)",
    ),
    "too much": (
        (a_file("a", bytes(600)), a_file(BAD, bytes(600))), BAD,
        "goes beyond the 1000 bytes that may be",
    ),
    "too many": (
        tuple(a_file(f"f{number}", b"") for number in range(11)), "f10",
        "is one more than the 10 that may be",
    ),
    "a folder's place": (
        (a_file("a/b"), a_link("a", "/etc")), "a", "stands in the place of a folder",
    ),
    "an impossible time": ((with_time(1e300),), "when", "has an impossible time"),
    "no time": ((with_time(float("nan")),), "when", "has an impossible time"),
    "a long name": (
        (a_file("/".join("d" * 2100)),), "/".join("d" * 2100)[:80], "has an impossible name",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("entries", "member", "why"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_archive_is_refused(
    out: Path, entries: tuple[Entry, ...], member: str, why: str
) -> None:
    outside = sorted(out.parent.rglob("*"))
    with pytest.raises(UsageError) as told:
        unpack(io.BytesIO(tar_of(*entries)), "x.tar", bytes(out), Limits(1000, 10))
    assert str(told.value) == f"the archive's member {member!r} {why}: nothing of it is unpacked"
    assert [path for path in sorted(out.parent.rglob("*")) if out not in path.parents] == outside


def zip_of(name: str, data: bytes = b"data", mode: int = stat.S_IFREG | 0o644) -> bytes:
    text = io.BytesIO()
    with zipfile.ZipFile(text, "w") as made:
        member = zipfile.ZipInfo(name)
        member.external_attr = mode << 16
        made.writestr(member, data)
    return text.getvalue()


@pytest.mark.parametrize(
    ("text", "member", "why"),
    [
        (zip_of("../bad"), "../bad", "has '..' in its name"),
        (zip_of("/bad"), "/bad", "has an absolute name"),
        (zip_of("bad", b"/etc", stat.S_IFLNK | 0o777), "bad",
         "is a link that leads out of the archive"),
        (zip_of("bad", mode=stat.S_IFCHR | 0o644), "bad", "is no file, folder or link"),
        (zip_of("bad", mode=stat.S_IFREG | 0o4755), "bad",
         "would run as somebody else (setuid or setgid)"),
        (zip_of("bad", bytes(2000)), "bad", "goes beyond the 1000 bytes that may be"),
    ],
)  # fmt: skip
def test_a_hostile_zip_is_refused(out: Path, text: bytes, member: str, why: str) -> None:
    with pytest.raises(UsageError) as told:
        unpack(io.BytesIO(text), "x.zip", bytes(out), Limits(1000, 10))
    assert str(told.value) == f"the archive's member {member!r} {why}: nothing of it is unpacked"


@pytest.mark.parametrize("suffix", ARCHIVES)
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text[:3000] + b"damage" + text[3006:-40] + bytes(40),
        lambda _: b"no archive at all",
        lambda _: b"",
    ],
    ids=["cut", "damaged", "something else", "empty"],
)
def test_a_damaged_archive_is_told_and_never_a_traceback(
    source: Path, out: Path, suffix: str, damage: Callable[[bytes], bytes]
) -> None:
    text = damage(pack(source, suffix))
    name = f"/data/x{suffix}"
    if suffix == ".tar" and len(text) > 3000 and b"damage" in text:
        # A plain tar has no digest of its data: what it holds is believed.
        unpack(io.BytesIO(text), name, bytes(out), NO_LIMITS)
        return
    with pytest.raises(SourceError) as told:
        unpack(io.BytesIO(text), name, bytes(out), NO_LIMITS)
    assert str(told.value).startswith(f"{name} cannot be unpacked: ")


def test_a_header_that_would_fill_the_memory_is_refused(out: Path) -> None:
    member = tarfile.TarInfo("a" * (2 << 20))
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode="w", format=tarfile.GNU_FORMAT) as made:
        made.addfile(member)
    with pytest.raises(SourceError) as told:
        unpack(io.BytesIO(text.getvalue()), "x.tar", bytes(out), NO_LIMITS)
    assert str(told.value) == "x.tar cannot be unpacked: a header of 2097153 bytes"
