"""Archives: the harmless arrive as they are, the hostile are refused with the member's name."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import resource
import stat
import struct
import subprocess
import tarfile
import zipfile
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import xxhash
import zstandard

from stager.archive.target import Limits, Target
from stager.archive.unpack import unpack
from stager.base.errors import SourceError, SpaceError, UsageError
from stager.base.formats import ARCHIVES, archive_suffix
from stager.tree.walk import walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from stager.tree.listing import Listing

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
        lambda text: text[:20] + b"damage" + text[26:-40] + bytes(40),
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
    with pytest.raises(SourceError) as told:
        unpack(io.BytesIO(text), name, bytes(out), NO_LIMITS)
    assert str(told.value).startswith(f"{name} cannot be unpacked: ")


def refused(text: bytes, out: Path, name: str = "x.tar", limits: Limits = NO_LIMITS) -> str:
    """What is said of an archive of which nothing is unpacked."""
    with pytest.raises((SourceError, UsageError)) as told:
        unpack(io.BytesIO(text), name, bytes(out), limits)
    return told.value.message


DAMAGED = "x.tar cannot be unpacked: "
NO_MEMBER = "there is no member where one should be; it is damaged, or no tar"


def test_a_damaged_header_is_not_the_end(out: Path) -> None:
    text = bytearray(tar_of(a_file("a"), a_file("b"), a_file("c")))
    text[1024] ^= 1
    assert refused(bytes(text), out) == DAMAGED + NO_MEMBER


@pytest.mark.parametrize("length", [0, 300, 512, 700, 1024, 1324, 1538, 2048])
def test_a_cut_archive_is_not_taken_for_a_whole_one(out: Path, length: int) -> None:
    text = tar_of(a_file("a"), a_file("b"))[:length]
    assert refused(text, out) == DAMAGED + "it ends early"


def test_a_cut_archive_of_zstd_lacks_the_end_of_its_tar(out: Path) -> None:
    text = zstandard.compress(tar_of(*(a_file(f"f{n}", os.urandom(900)) for n in range(300))))
    why = "x.tar.zst cannot be unpacked: it ends early"
    assert refused(text[:-140_000], out, "x.tar.zst") == why


def test_a_header_of_zeros_is_not_the_end(out: Path) -> None:
    text = tar_of(a_file("a"), a_file("b"))
    text = text[:1024] + bytes(512) + text[1536:]
    assert refused(text, out) == DAMAGED + "something stands behind a single mark of its end"


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.xz", ".tar.zst"])
def test_one_may_be_compressed_in_parts(out: Path, suffix: str) -> None:
    text = tar_of(a_file("a", b"1" * 3000), a_file("b"))
    ways: dict[str, Callable[[bytes], bytes]] = {
        ".tar.gz": gzip.compress, ".tar.xz": lzma.compress, ".tar.zst": zstandard.compress,
    }  # fmt: skip
    parts = ways[suffix](text[:2000]) + ways[suffix](text[2000:])
    unpack(io.BytesIO(parts), f"x{suffix}", bytes(out), NO_LIMITS)
    assert [(out / name).read_bytes() for name in "ab"] == [b"1" * 3000, b"data"]
    assert refused(parts + b"garbage", out, f"x{suffix}").startswith(f"x{suffix} cannot be")


def described(kind: bytes, body: bytes) -> bytes:
    """A member that describes the next."""
    member = tarfile.TarInfo("described")
    member.type, member.size = kind, len(body)
    return member.tobuf(tarfile.GNU_FORMAT) + body + bytes(-len(body) % 512)


def record(keyword: bytes, value: bytes) -> bytes:
    body = b" " + keyword + b"=" + value + b"\n"
    length = len(body)
    while len(b"%d" % length) + len(body) != length:
        length = len(b"%d" % length) + len(body)
    return b"%d" % length + body


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE, mode: int = 0o644) -> bytes:
    """A member's header, whatever follows."""
    member = tarfile.TarInfo(name)
    member.size, member.type, member.mode = size, kind, mode
    return member.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_that_would_fill_the_memory_is_refused(out: Path, kind: bytes) -> None:
    body = b"2 " * 40_000 + b"a="
    why = DAMAGED + "a header of 80002 bytes"
    assert refused(described(kind, body) + tar_of(a_file("a")), out) == why


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"1" * 60_000, "a header with a number that is none"),
        (b"2 " * 30_000 + b"a=", "a header with a record that is none"),
        (b"99 path=a\n", "a header with a record that is none"),
        (b"10 path=ab", "a header with a record that is none"),
        (b"0 path=a\n", "a header with a record that is none"),
        (b"-1 path=a\n", "a header with a number that is none"),
        (b" path=a\n", "a header with a number that is none"),
        (record(b"size", b"-1"), "a header with a number that is none"),
        (record(b"size", b"1" * 5000), "a header with a number that is none"),
    ],
)
def test_records_that_are_none_are_told(out: Path, body: bytes, why: str) -> None:
    text = described(tarfile.XHDTYPE, body) + tar_of(a_file("a"))
    assert refused(text, out) == DAMAGED + why


def test_a_description_of_nothing_is_told(out: Path) -> None:
    text = described(tarfile.XHDTYPE, record(b"path", b"a")) + bytes(1024)
    assert refused(text, out) == DAMAGED + "it ends behind the description of a member"


TOO_MUCH = "x.tar.zst cannot be unpacked: too much of it is no data of files; make it again"


@pytest.mark.parametrize(
    "text",
    [
        tar_of(a_file("a")) + bytes(65 << 20),
        described(tarfile.XGLTYPE, record(b"comment", b"x" * 65_000)) * 1100,
        header("d", 1 << 40, b"D", 0o755) + bytes(65 << 20),
    ],
    ids=["zeros behind the end", "global headers", "a folder's names"],
)
def test_what_is_no_data_of_files_is_bounded(out: Path, text: bytes) -> None:
    assert refused(zstandard.compress(text), out, "x.tar.zst") == TOO_MUCH


def test_global_records_are_for_all_that_follow(out: Path) -> None:
    text = described(tarfile.XGLTYPE, record(b"mtime", b"1700000000.000000001"))
    unpack(io.BytesIO(text + tar_of(a_file("a"), a_file("b"))), "x.tar", bytes(out), NO_LIMITS)
    assert [(out / name).stat().st_mtime_ns for name in "ab"] == [WHEN * 10**9 + 1] * 2


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE])
def test_a_size_below_zero_makes_no_room_for_others(out: Path, kind: bytes) -> None:
    text = header("a", -(1 << 40), kind) + tar_of(a_file("b", bytes(2000)))
    why = f"has a size of {-(1 << 40)} bytes: nothing of it is unpacked"
    assert refused(text, out, limits=Limits(1000, 10)) == f"the archive's member 'a' {why}"


def test_a_folder_that_says_a_size_has_none(out: Path) -> None:
    text = header("d", 4096, tarfile.DIRTYPE, 0o755) + tar_of(a_file("d/a"))
    unpack(io.BytesIO(text), "x.tar", bytes(out), Limits(10, 10))
    assert (out / "d/a").read_bytes() == b"data"


def test_a_hard_link_with_data_is_refused(out: Path) -> None:
    member = tarfile.TarInfo("h")
    member.type, member.linkname, member.size = tarfile.LNKTYPE, "a", 4
    text = tar_of(a_file("a"))[:1024] + member.tobuf() + b"data" + bytes(508) + tar_of(a_file("z"))
    why = "is a hard link with data of its own: nothing of it is unpacked"
    assert refused(text, out) == f"the archive's member 'h' {why}"


def test_folders_that_are_only_named_count_too(out: Path) -> None:
    text = tar_of(a_file("a/b/c/d"))
    why = "is one more than the 3 that may be: nothing of it is unpacked"
    assert refused(text, out, limits=Limits(10, 3)) == f"the archive's member 'a/b/c' {why}"
    (out.parent / "other").mkdir()
    unpack(io.BytesIO(text), "x.tar", bytes(out.parent / "other"), Limits(10, 4))


def test_many_members_deep_down(out: Path) -> None:
    deep = "/".join(["d"] * 500)  # which whoever clears up after the tests can remove
    entries = [a_file(f"{deep}/{number}", b"") for number in range(300)]
    assert len(unpack(io.BytesIO(tar_of(*entries)), "x.tar", bytes(out), NO_LIMITS)) == 300


def test_what_may_be_written_on_the_disk_is_a_limit_of_its_own(out: Path) -> None:
    text = tar_of(a_file("a", bytes(5000)), a_file("b", b"1"))
    unpack(io.BytesIO(text), "x.tar", bytes(out), Limits(10_000, 10, room=12_288))
    with pytest.raises(SpaceError) as told:
        unpack(io.BytesIO(text), "x.tar", bytes(out), Limits(10_000, 10, room=12_287))
    assert told.value.message == (
        "the archive unpacks to more than the 12287 bytes that you may still write on this disk; "
        "make room or ask for nodes with more"
    )


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_is_written_whole_or_it_is_an_error(out: Path) -> None:
    text = tar_of(a_file("a", bytes(200_000)))
    with files_of_at_most(100_000), pytest.raises(OSError, match="File too large"):
        unpack(io.BytesIO(text), "x.tar", bytes(out), NO_LIMITS)


@pytest.mark.parametrize("data", [[b"abc"], [b"ab", b"cde"], [b"abcd", b"e"], [4, 1], []])
def test_a_file_has_the_size_that_was_judged(out: Path, data: list[bytes | int]) -> None:
    target = Target(bytes(out), NO_LIMITS)
    pieces = (memoryview(piece) if isinstance(piece, bytes) else piece for piece in data)
    with pytest.raises(UsageError) as told:
        target.make_file(b"a", 0o644, 0, pieces, 4)
    why = "has another size than it says: nothing of it is unpacked"
    assert told.value.message == f"the archive's member 'a' {why}"
    assert target.digests == {}


def chain(count: int) -> bytes:
    links = (a_link(f"l{number}", f"l{number - 1}") for number in range(1, count + 1))
    return tar_of(a_file("l0"), *links)


@pytest.mark.parametrize("turned", [False, True])
def test_links_are_followed_as_far_as_the_kernel_does(out: Path, *, turned: bool) -> None:
    unpack(io.BytesIO(chain(40)), "x.tar", bytes(out), NO_LIMITS)
    assert (out / "l40").read_bytes() == b"data"
    links = [a_link(f"m{number}", f"m{number - 1}") for number in range(1, 3000)]
    text = tar_of(a_file("m0"), *(links[::-1] if turned else links))
    why = "is a link that leads by more than 40 links: nothing of it is unpacked"
    assert refused(text, out) == f"the archive's member {'m2999' if turned else 'm41'!r} {why}"


def test_many_links_by_way_of_many(out: Path) -> None:
    links = (a_link(f"m{number}", "l39") for number in range(3000))
    text = chain(39)[: 512 * 41] + tar_of(*links)
    unpack(io.BytesIO(text), "x.tar", bytes(out), NO_LIMITS)
    assert (out / "m2999").read_bytes() == b"data"


def test_a_link_in_a_ring_leads_nowhere(out: Path) -> None:
    text = tar_of(a_link("a", "b"), a_link("b", "a"))
    why = "is a link that leads by more than 40 links: nothing of it is unpacked"
    assert refused(text, out) == f"the archive's member 'a' {why}"


def test_a_link_that_gave_way_to_a_file_is_none(out: Path) -> None:
    text = tar_of(a_link("a", "/etc"), a_file("a"), a_link("b", "./a"))
    unpack(io.BytesIO(text), "x.tar", bytes(out), NO_LIMITS)
    assert (out / "b").read_bytes() == b"data"


def test_a_further_name_may_be_the_same(out: Path) -> None:
    twin = of_type("./a", tarfile.LNKTYPE, "a")
    assert set(unpack(io.BytesIO(tar_of(a_file("a"), twin)), "x.tar", bytes(out), NO_LIMITS)) == {
        b"a"
    }
    assert (out / "a").read_bytes() == b"data"


def test_a_further_name_takes_the_place_of_a_file(out: Path) -> None:
    text = tar_of(a_file("a"), a_file("b", b"old"), of_type("b", tarfile.LNKTYPE, "a"))
    digests = unpack(io.BytesIO(text), "x.tar", bytes(out), NO_LIMITS)
    assert (out / "b").samefile(out / "a")
    assert digests[b"b"] == digests[b"a"]


def test_a_label_is_no_member(out: Path) -> None:
    text = header("LABEL", 0, b"V") + tar_of(a_file("a"))
    assert set(unpack(io.BytesIO(text), "x.tar", bytes(out), Limits(4, 1))) == {b"a"}


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("bin/python3.13t", "/usr/bin/python3.13t"),
        ("bin/python", "/opt/pypy/bin/pypy3"),
        ("bin/pypy3.10", "/opt/pypy/bin/pypy3.10"),
    ],
)
def test_interpreters_of_other_names(out: Path, name: str, target: str) -> None:
    unpack(io.BytesIO(tar_of(a_link(name, target))), "x.tar", bytes(out), NO_LIMITS)
    assert os.readlink(out / name) == target


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (a_file("x/" + "n" * 256), "has an impossible name"),
        (a_link("l", "n" * 4096), "is a link to an impossible name"),
        (with_time(10**11), "has an impossible time"),
        (with_time(-(10**10)), "has an impossible time"),
        (a_link("bin/python\n", "/etc/python"), "is a link that leads out of the archive"),
    ],
)
def test_what_the_disk_cannot_hold_is_told_by_name(out: Path, entry: Entry, why: str) -> None:
    told = f"the archive's member {entry[0].name[:80]!r} {why}: nothing of it is unpacked"
    assert refused(tar_of(entry), out) == told


def test_a_link_that_is_too_far_down(out: Path) -> None:
    name = "/".join(["d" * 200] * 20)
    below = "/".join(["o" * 200] * (3900 // 201 - len(bytes(out)) // 201))
    assert "has an impossible name" in refused(tar_of(a_file(f"{name}/{below}")), out)


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


@pytest.mark.parametrize("form", ["gnu", "posix --sparse-version=0.0", "posix --sparse-version=0.1",
                                  "posix --sparse-version=1.0"])  # fmt: skip
def test_files_keep_their_holes(tmp_path: Path, out: Path, form: str) -> None:
    files = {"a": (5, 60), "empty": (0, 0), "end": (3, 30)}
    (tmp_path / "in").mkdir()
    for name, (count, last) in files.items():
        with (tmp_path / "in" / name).open("wb") as file:
            for number in range(count):
                file.seek((number * 10) << 20)
                file.write(b"x%d" % number * 3000)
            file.truncate(last << 20)
    command = ["tar", "-c", "-S", *f"--format={form}".split(), "-C", str(tmp_path / "in"), *files]
    text = subprocess.run(command, check=True, capture_output=True).stdout
    assert len(text) < 1 << 20
    digests = unpack(io.BytesIO(text), "x.tar", bytes(out), Limits(90 << 20, 3))
    for name in files:
        data = (tmp_path / "in" / name).read_bytes()
        assert (out / name).read_bytes() == data
        assert digests[name.encode()] == xxhash.xxh3_128_digest(data)
        assert (out / name).stat().st_blocks < 512


def sparse(numbers: bytes, size: int, stored: int) -> bytes:
    """A file of which a list before its data says where that belongs."""
    records = {b"major": b"1", b"minor": b"0", b"name": b"s", b"realsize": b"%d" % size}
    body = b"".join(record(b"GNU.sparse." + key, value) for key, value in records.items())
    return described(tarfile.XHDTYPE, body) + header("x", stored) + numbers


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        (b"1" * 30 + b"\n", "a header with a number that is none"),
        (b"9" * 18 + b"\n" + b"0\n" * 600_000, "a file with too many holes"),
        (b"1\n600\n512\n", "a file with holes in impossible places"),
        (b"2\n512\n1\n0\n1\n", "a file with holes in impossible places"),
        (b"1\n0\n4\n", "a file with more data than it has places for"),
        (b"1\n0\n\n", "a header with a number that is none"),
        (b"600\n0\n" + b"1\n" * 1199, "a file with a list of holes that is longer than its data"),
    ],
)
def test_impossible_holes_are_told(out: Path, numbers: bytes, why: str) -> None:
    numbers += bytes(-len(numbers) % 512)
    text = sparse(numbers, 1024, min(len(numbers) + 512, 2048)) + bytes(512) + tar_of()
    assert refused(text, out) == DAMAGED + why


def test_holes_count_as_what_they_are_read_as(out: Path) -> None:
    text = sparse(b"1\n0\n0\n".ljust(512, b"\0"), 1 << 50, 512) + tar_of()
    why = f"goes beyond the {1 << 40} bytes that may be: nothing of it is unpacked"
    assert refused(text, out) == f"the archive's member 's' {why}"


def test_a_dictionary_that_would_fill_the_memory_is_refused(out: Path) -> None:
    text = bytearray(lzma.compress(tar_of(a_file("a"))))
    # The size of the dictionary is in the first block's header, which has a digest.
    end = 12 + (text[12] + 1) * 4 - 4
    text[text.index(b"\x21\x01", 12) + 2] = 40
    text[end : end + 4] = struct.pack("<I", zlib.crc32(text[12:end]))
    assert refused(bytes(text), out, "x.tar.xz") == (
        "x.tar.xz cannot be unpacked: it takes more than 256 MiB of memory to decompress; compress "
        "it again with a smaller dictionary, as xz -9 does"
    )


def test_a_window_that_would_fill_the_memory_is_refused(out: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1, window_log=28, enable_ldm=True, write_content_size=False
    )
    made = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    text = made.compress(tar_of(a_file("a"))) + made.flush()
    assert refused(text, out, "x.tar.zst") == (
        "x.tar.zst cannot be unpacked: it takes more than 128 MiB of memory to decompress; "
        "compress it again without --ultra and with --long=27 at most"
    )


def zip_of_many(count: int, said: int) -> bytes:
    text = zip_of("d/", b"", stat.S_IFDIR | 0o755)
    table, end = text.index(b"PK\1\2"), text.index(b"PK\5\6")
    entries = text[table:end] * count
    facts = struct.pack("<HHHHIIH", 0, 0, said, said, len(entries), table, 0)
    return text[:table] + entries + b"PK\5\6" + facts


@pytest.mark.parametrize("said", [11, 1])
def test_a_zip_of_many_entries_is_refused_before_they_are_read(out: Path, said: int) -> None:
    unpack(io.BytesIO(zip_of_many(10, 10)), "x.zip", bytes(out), Limits(10, 10))
    assert refused(zip_of_many(11, said), out, "x.zip", Limits(10, 10)) == (
        "the archive has more than the 10 members that may be: nothing of it is unpacked"
    )


def test_the_long_table_of_a_zip_is_counted_too(out: Path) -> None:
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


def test_an_encrypted_zip_is_told(out: Path) -> None:
    text = bytearray(zip_of("a"))
    text[6] |= 1
    text[text.index(b"PK\1\2") + 8] |= 1
    why = "the archive's member 'a' is encrypted: nothing of it is unpacked"
    assert refused(bytes(text), out, "x.zip") == why


def test_a_zip_that_names_places_beyond_it(tmp_path: Path, out: Path) -> None:
    text = bytearray(zip_of("a"))
    text[-6:-2] = struct.pack("<I", 0xFFFFF000)
    (tmp_path / "x.zip").write_bytes(text)
    with (tmp_path / "x.zip").open("rb") as archive, pytest.raises(SourceError) as told:
        unpack(archive, "x.zip", bytes(out), NO_LIMITS)
    assert str(told.value) == "x.zip cannot be unpacked: it names places that it does not have"


def test_too_little_memory_is_no_damage(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(zipfile.ZipFile, "infolist", none)
    with pytest.raises(SpaceError) as told:
        unpack(io.BytesIO(zip_of("a")), "x.zip", bytes(out), NO_LIMITS)
    assert told.value.message == "x.zip: too little memory to unpack it; ask for more"
