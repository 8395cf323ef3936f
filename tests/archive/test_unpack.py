"""Archives arrive as they were packed; hostile and damaged ones are refused as a whole."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest
import xxhash

from stager.archive.target import Limits
from stager.base.errors import SourceError, UsageError
from stager.base.formats import ARCHIVES, archive_suffix
from stager.tree.walk import walk
from tests.support.archives import (
    NO_LIMITS,
    Entry,
    a_file,
    a_folder,
    a_link,
    compressed,
    excess,
    of_type,
    pack,
    refusal,
    refused,
    seen,
    tar_of,
    unpack,
    with_time,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_what_was_packed_arrives_as_it_was(source: Path, out: Path, suffix: str) -> None:
    digests = unpack(io.BytesIO(pack(source, suffix)), f"/data/x{suffix}", bytes(out), NO_LIMITS)
    if suffix == ".zip":
        names = {"a", "a/program", "a/second", "a/closed", "a/closed/large", "empty", "zero"}
        assert {str(path.relative_to(out)) for path in out.rglob("*")} == names
        assert stat.S_IMODE((out / "a/program").stat().st_mode) == 0o700
    else:
        assert seen(walk(str(out))) == seen(walk(str(source)))
    for path, digest in digests.items():
        assert xxhash.xxh3_128_digest((out / os.fsdecode(path)).read_bytes()) == digest
    files = [path for path in out.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(digests) == len(files)


def test_archives_are_known_by_their_names() -> None:
    assert all(archive_suffix(f"/a/b{suffix.upper()}") == suffix for suffix in ARCHIVES)
    names = ("/a/tar", "/a/b.gz", "/a/b.tar.lz", "/a/zip/b")
    assert not any(archive_suffix(name) for name in names)


BAD = "bad"


#: The members of each hostile archive, the one that is named, and why it is refused.
HOSTILE: dict[str, tuple[tuple[Entry, ...], str, str]] = {
    "above": ((a_file("../bad"),), "../bad", "has '..' in its path"),
    "above, further in": ((a_file("a/../../bad"),), "a/../../bad", "has '..' in its path"),
    "absolute": ((a_file("/tmp/bad"),), "/tmp/bad", "has an absolute path"),
    "a link out": ((a_link(BAD, "/etc"),), BAD, "is a link that leads out of the archive"),
    "a link that only looks like one to an interpreter": (
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
        (a_link("a", "."), a_file("a/bad")), "a/bad",
        "lies beneath 'a', which is a file or link earlier in the archive",
    ),
    "a file through a link out": (
        (a_link("a", "/tmp"), a_file("a/b/bad")), "a/b/bad",
        "lies beneath 'a', which is a file or link earlier in the archive",
    ),
    "a folder in the place of a file": (
        (a_file("a"), a_folder("a")), "a",
        "is a folder, but the archive has a file or link of the same name before it",
    ),
    "a hard link out": (
        (of_type(BAD, tarfile.LNKTYPE, "/etc/passwd"),), BAD,
        "is a hard link to a file that is not in the archive before it",
    ),
    "a hard link above": (
        (of_type(BAD, tarfile.LNKTYPE, "../x"),), BAD,
        "is a hard link to a file that is not in the archive before it",
    ),
    "a hard link to a link": (
        (a_link("a", "/etc/passwd"), of_type(BAD, tarfile.LNKTYPE, "a")), "a",
        "is a link that leads out of the archive",
    ),
    "a hard link to a link, from where it leads out": (
        (a_link("d/a", "../x"), of_type(BAD, tarfile.LNKTYPE, "d/a")), BAD,
        "is a link that leads out of the archive",
    ),
    "a device": ((of_type(BAD, tarfile.CHRTYPE),), BAD, "is not a file, folder or link"),
    "a block device": ((of_type(BAD, tarfile.BLKTYPE),), BAD, "is not a file, folder or link"),
    "a named pipe": ((of_type(BAD, tarfile.FIFOTYPE),), BAD, "is not a file, folder or link"),
    "setuid": (
        (a_file(BAD, mode=0o4755),), BAD, "would run as another user or group (setuid or setgid)",
    ),
    "setgid": (
        (a_file(BAD, mode=0o2755),), BAD, "would run as another user or group (setuid or setgid)",
    ),
    "a folder's place": (
        (a_file("a/b"), a_link("a", "/etc")), "a",
        "is a file or link, but the archive has a folder of the same name before it",
    ),
    "an impossible time": ((with_time(1e300),), "when", "has an impossible modification time"),
    "no time": ((with_time(float("nan")),), "when", "has an impossible modification time"),
    "a long name": (
        (a_file("/".join("d" * 2100)),), "/".join("d" * 2100)[:80], "has a path that is too long",
    ),
}  # fmt: skip


TOO_LARGE: dict[str, tuple[tuple[Entry, ...], str]] = {
    "too much": (
        (a_file("a", bytes(600)), a_file(BAD, bytes(600))),
        excess("1000 B", f"unpacked_size, reached at {BAD!r}"),
    ),
    "too many": (
        tuple(a_file(f"f{number}", b"") for number in range(11)),
        excess("10 members", "unpacked_members, reached at 'f10'"),
    ),
}
REFUSED = {
    **{name: (entries, refusal(member, why)) for name, (entries, member, why) in HOSTILE.items()},
    **TOO_LARGE,
}


@pytest.mark.parametrize(("entries", "message"), REFUSED.values(), ids=REFUSED)
def test_a_hostile_archive_is_refused(out: Path, entries: tuple[Entry, ...], message: str) -> None:
    outside = sorted(out.parent.rglob("*"))
    with pytest.raises(UsageError) as caught:
        unpack(io.BytesIO(tar_of(*entries)), "x.tar", bytes(out), Limits(1000, 10))
    assert str(caught.value) == message
    assert [path for path in sorted(out.parent.rglob("*")) if out not in path.parents] == outside


def test_a_second_name_of_a_link_is_one(source: Path, out: Path) -> None:
    os.link(source / "up", source / "up again", follow_symlinks=False)
    os.link(source / "a/link", source / "a/zz", follow_symlinks=False)
    text = pack(source, ".tar")  # by GNU tar
    with tarfile.open(fileobj=io.BytesIO(text)) as made:
        assert sum(member.islnk() for member in made) == 3
    unpack(io.BytesIO(text), "x.tar", bytes(out), NO_LIMITS)
    assert seen(walk(str(out))) == seen(walk(str(source)))
    assert os.readlink(out / "up again") == "a/closed/../program"


@pytest.mark.parametrize("suffix", ARCHIVES)
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text[:20] + b"damage" + text[26:-40] + bytes(40),
        lambda _: b"no archive at all",
        lambda _: b"",
    ],
    ids=["cut", "damaged", "something else", "empty"],
)
def test_a_damaged_archive_is_reported_and_never_a_traceback(
    source: Path,
    out: Path,
    suffix: str,
    damage: Callable[[bytes], bytes],
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = damage(pack(source, suffix))
    name = f"/data/x{suffix}"
    with pytest.raises(SourceError) as caught:
        unpack(io.BytesIO(text), name, bytes(out), NO_LIMITS)
    assert str(caught.value).startswith(f"{name} cannot be unpacked: ")
    assert capfd.readouterr().err == ""


def test_a_damaged_bzip2_member_of_a_zip_is_damage_to_the_archive(out: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("a", bytes(range(256)) * 10)
    damaged = bytearray(buffer.getvalue())
    begin = damaged.index(b"BZh") + 4
    damaged[begin : begin + 20] = bytes(20)
    with pytest.raises(SourceError) as caught:
        unpack(io.BytesIO(damaged), "x.zip", bytes(out), NO_LIMITS)
    assert str(caught.value) == (
        "x.zip cannot be unpacked: the archive is damaged (Invalid data stream); "
        "get an undamaged copy of it, or create it again"
    )


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".zip"])
def test_a_fault_of_our_own_fails_with_a_traceback(
    source: Path,
    out: Path,
    suffix: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fault(*_: object, **__: object) -> None:
        raise TypeError("our own fault")

    monkeypatch.setattr("stager.archive.target.Target.make_file", fault)
    with pytest.raises(SourceError) as caught:
        unpack(io.BytesIO(pack(source, suffix)), "x" + suffix, bytes(out), NO_LIMITS)
    assert str(caught.value) == (
        f"x{suffix} cannot be unpacked: TypeError('our own fault'); "
        "show this output to the administrator: it may be a fault of slurm-stage"
    )
    written = capfd.readouterr().err
    assert written.startswith("Traceback (most recent call last):\n")
    assert written.endswith("TypeError: our own fault\n")


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tar.zst", ".tar.xz", ".tar.bz2"])
@pytest.mark.parametrize("name", ["x.tar", "x.tgz", "x.zip"])
def test_an_archive_is_unpacked_by_its_content(out: Path, suffix: str, name: str) -> None:
    # The name of the first member looks like the beginning of a file of bzip2.
    text = compressed(tar_of(a_file("BZh9", b"data")), suffix)
    unpack(io.BytesIO(text), name, bytes(out), NO_LIMITS)
    assert (out / "BZh9").read_bytes() == b"data"


@pytest.mark.parametrize(
    ("begin", "what"),
    [
        (b"PK\3\4", "a zip; give it a name that ends in .zip, and extract it"),
        (b"7z\xbc\xaf\x27\x1c",
         "an archive of 7-Zip; unpack it by 7z x, and pack it again (stagectl pack FOLDER)"),
        (b"Rar!\x1a\7\0",
         "an archive of RAR; unpack it by 7z x, and pack it again (stagectl pack FOLDER)"),
        (b"070701000",
         "an archive of cpio; unpack it by cpio -id, and pack it again (stagectl pack FOLDER)"),
        (b"\x04\x22\x4d\x18",
         "compressed by lz4; decompress it by lz4 -d, and compress it again by zstd"),
        (b"\x1f\x9d\x90",
         "compressed by compress; decompress it by gzip -d, and compress it again by zstd"),
        (b"\x5d\0\0\x80\0\xff",
         "compressed by lzma; decompress it by xz -d -F lzma, and compress it again by zstd"),
        (b"LZIP\1", "compressed by lzip; decompress it by lzip -d, and compress it again by zstd"),
        (b"hsqs", "a squashfs image; give it a name that ends in .sqsh, and mount it"),
        (b"\xef\xbb\xbf\r\n<!DOCTYPE html>",
         ("a page of HTML or XML, such as a server sends in place of a file that it refuses; "
          "download it again")),
        (b"version https://git-lfs.github.com/spec/v1\n",
         "a pointer of Git LFS; fetch the file itself (git lfs pull)"),
    ],
)  # fmt: skip
def test_what_is_no_archive_is_named(out: Path, begin: bytes, what: str) -> None:
    for name in ("x.tar", "x.tar.gz", "x.zip"):
        if not (name == "x.zip" and begin.startswith(b"PK")):
            why = f"{name} cannot be unpacked: it is {what}"
            assert refused(begin + bytes(1000), out, name) == why
