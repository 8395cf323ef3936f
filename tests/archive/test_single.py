"""One compressed file: what is written of it, and what is refused as a whole."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import lzma
import os
import re
import struct
import zlib
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from stager.archive.decompress import BLOCK
from stager.archive.target import Limits
from stager.archive.unpack import decompress
from stager.base.errors import SourceError, SpaceError, StageError, UsageError
from stager.fs.files import digest_of
from stager.fs.partial_file import Partial
from stager.store.cache import Cache, open_cache
from tests.support.archives import zstd_compress

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NO_LIMITS = Limits(1 << 40, 0)
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstd_compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}
SUFFIXES = pytest.mark.parametrize("suffix", COMPRESS)
HOLE = 64 << 10


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return open_cache(str(tmp_path), os.getuid())


def written(
    cache: Cache, text: bytes, suffix: str, limits: Limits = NO_LIMITS, *, direct: bool = False
) -> tuple[str, bytes]:
    """Return the digest and the bytes of what is decompressed to a file."""
    path = f"{cache.root}/copy"
    with closing(Partial(cache, direct=direct)) as partial:
        digest = decompress(io.BytesIO(text), f"/shared/x{suffix}", partial, limits)
        partial.publish(path)
    with open(path, "rb") as file:
        return digest, file.read()


def refused(cache: Cache, text: bytes, suffix: str, limits: Limits = NO_LIMITS) -> StageError:
    with pytest.raises(StageError) as caught:
        written(cache, text, suffix, limits)
    assert not os.path.exists(f"{cache.root}/copy")
    assert os.listdir(cache.partial) == []
    return caught.value


def damaged(problem: str, suffix: str) -> str:
    remedy = "get an undamaged copy of it, or create it again"
    return f"/shared/x{suffix} cannot be decompressed: the file is damaged ({problem}); {remedy}"


@SUFFIXES
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [0, 1, 4096, (1 << 20) - 1, 1 << 20, 3_000_001])
def test_all_of_a_file_is_written(cache: Cache, suffix: str, size: int, *, direct: bool) -> None:
    data = os.urandom(size)
    digest, found = written(cache, COMPRESS[suffix](data), suffix, direct=direct)
    assert found == data
    assert digest == digest_of(f"{cache.root}/copy")


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    pieces=st.lists(
        st.builds(bytes, st.sampled_from([1, 4096, HOLE - 1, HOLE, 3 * HOLE, 1 << 20]))
        | st.binary(min_size=1, max_size=20)
        | st.sampled_from([4096, HOLE, 1 << 20]).map(os.urandom),
        max_size=6,
    ),
    cut=st.integers(0, 3 << 20),
    suffix=st.sampled_from(list(COMPRESS)),
)
def test_any_mixture_of_data_and_zeros_in_any_number_of_members_is_one_file(
    cache: Cache, pieces: list[bytes], cut: int, suffix: str
) -> None:
    data = b"".join(pieces)
    text = COMPRESS[suffix](data[:cut]) + COMPRESS[suffix](data[cut:])
    digest, found = written(cache, text, suffix)
    assert found == data
    assert digest == digest_of(f"{cache.root}/copy")


def test_zeros_become_holes(cache: Cache) -> None:
    data = os.urandom(HOLE) + bytes(8 << 20) + os.urandom(4096) + bytes(4 << 20)
    _, found = written(cache, gzip.compress(data), ".gz")
    assert found == data
    assert os.stat(f"{cache.root}/copy").st_blocks * 512 < 4 * HOLE


@SUFFIXES
def test_a_file_that_is_cut_off_anywhere_is_refused(cache: Cache, suffix: str) -> None:
    member = COMPRESS[suffix](b"some data" * 100)
    ends = [1, 3, 9, len(member) // 2, len(member) - 4, len(member) - 1]
    for text in (b"", *(before + member[:end] for before in (b"", member) for end in ends)):
        error = refused(cache, text, suffix)
        assert type(error) is SourceError
        assert str(error) == damaged("it ends early", suffix)


@SUFFIXES
@pytest.mark.parametrize("garbage", [b"\n", b"x", b"abc", b"garbage", b"garbage" * 100_000])
def test_a_file_with_something_behind_it_is_refused(
    cache: Cache, suffix: str, garbage: bytes
) -> None:
    error = refused(cache, COMPRESS[suffix](b"some data") + garbage, suffix)
    assert type(error) is SourceError
    assert str(error) == damaged("something else follows the compressed data", suffix)


@SUFFIXES
def test_a_file_with_a_changed_byte_is_refused(cache: Cache, suffix: str) -> None:
    text = bytearray(COMPRESS[suffix](os.urandom(100_000)))
    text[len(text) // 2] ^= 1
    error = refused(cache, bytes(text), suffix)
    assert type(error) is SourceError
    assert "cannot be decompressed: the file is damaged (" in str(error)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    suffix=st.sampled_from(list(COMPRESS)),
    changes=st.lists(st.tuples(st.integers(0, 1 << 12), st.integers(0, 255)), max_size=3),
    end=st.none() | st.integers(0, 1 << 12),
)
def test_whatever_was_done_to_a_file_its_bytes_arrive_or_none(
    cache: Cache, suffix: str, changes: list[tuple[int, int]], end: int | None
) -> None:
    data = b"some words " * 300 + bytes(range(256)) * 4
    text = bytearray(COMPRESS[suffix](data))
    for at, value in changes:
        text[at % len(text)] = value
    with suppress(SourceError):
        _, found = written(cache, bytes(text[:end]), suffix)
        assert found == data
    assert os.listdir(cache.partial) == []


#: A flag of gzip's header for each optional part of it, and the bits that have no meaning yet.
TEXT, HEADER_CRC, EXTRA, NAME, COMMENT, RESERVED = 1, 2, 4, 8, 16, 0xE0


def gzipped(data: bytes, flags: int, field: bytes = b"field", level: int = 6) -> bytes:
    """Compress ``data`` with these optional parts in the header, each text being ``field``."""
    header = struct.pack("<4BI2B", 0x1F, 0x8B, 8, flags, 0, 0, 3)
    header += struct.pack("<H", len(field)) + field if flags & EXTRA else b""
    header += (field + b"\0") * bool(flags & NAME) + (field + b"\0") * bool(flags & COMMENT)
    header += struct.pack("<H", zlib.crc32(header) & 0xFFFF) if flags & HEADER_CRC else b""
    deflated = zlib.compress(data, level, wbits=-15)
    return header + deflated + struct.pack("<2I", zlib.crc32(data), len(data))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    flags=st.integers(0, 31),
    changes=st.lists(st.tuples(st.integers(-400, 399), st.integers(1, 255)), max_size=2),
    end=st.none() | st.integers(1, 400),
)
@example(flags=0, changes=[(-8, 1)], end=None)  # the CRC
@example(flags=0, changes=[(-4, 1)], end=None)  # the length
@example(flags=HEADER_CRC, changes=[(10, 1)], end=None)
def test_gzip_is_refused_where_zlib_refuses_it(
    cache: Cache, flags: int, changes: list[tuple[int, int]], end: int | None
) -> None:
    """ISA-L ignores the reserved flags, which zlib refuses; the data's CRC is checked anyway."""
    text = bytearray(gzipped(b"some words " * 300 + bytes(range(256)), flags))
    for at, change in changes:
        text[at % len(text)] ^= change
    text = text[:end]
    assume(len(text) < 4 or not text[3] & RESERVED)
    try:
        expected = zlib.decompress(text, wbits=31)
    except zlib.error:
        assert type(refused(cache, bytes(text), ".gz")) is SourceError
    else:
        assert written(cache, bytes(text), ".gz")[1] == expected
        os.unlink(f"{cache.root}/copy")


@pytest.mark.parametrize("cut", [5, 15, 600, 1200, 1814])
def test_a_header_of_gzip_may_lie_across_two_blocks(cache: Cache, cut: int) -> None:
    """Such as the file's first 512 bytes, by which its format is known, and the ones after them."""
    second = gzipped(b"data", TEXT | HEADER_CRC | EXTRA | NAME | COMMENT, b"field" * 120)
    size = BLOCK + 512 - cut - len(gzipped(bytes(BLOCK), 0, level=0)) + BLOCK
    first = gzipped(bytes(size), 0, level=0)
    assert len(first) == BLOCK + 512 - cut
    assert written(cache, second + first, ".gz")[1] == b"data" + bytes(size)
    assert written(cache, first + second, ".gz")[1] == bytes(size) + b"data"


@SUFFIXES
def test_what_is_not_compressed_is_refused(cache: Cache, suffix: str) -> None:
    error = refused(cache, b"plain text, and no more than that\n", suffix)
    assert str(error) == (
        f"/shared/x{suffix} cannot be decompressed: it is not compressed; stage it without "
        "decompress"
    )
    error = refused(cache, b"<html>Please log in</html>", suffix)
    assert str(error) == (
        f"/shared/x{suffix} cannot be decompressed: it is a page of HTML or XML, such as a server "
        "sends in place of a file that it refuses; download it again"
    )


@SUFFIXES
def test_a_file_is_decompressed_by_its_content(cache: Cache, suffix: str) -> None:
    for compress in COMPRESS.values():
        assert written(cache, compress(b"data"), suffix)[1] == b"data"


@SUFFIXES
def test_what_has_more_than_the_site_allows_is_refused(cache: Cache, suffix: str) -> None:
    text = COMPRESS[suffix](bytes(3_000_000))
    written(cache, text, suffix, Limits(3_000_000, 0))
    os.unlink(f"{cache.root}/copy")
    error = refused(cache, text, suffix, Limits(2_999_999, 0))
    assert type(error) is UsageError
    assert str(error) == (
        f"/shared/x{suffix}: it has more than the 2.9 MiB that the site allows (unpacked_size): "
        "nothing was unpacked; ask the administrator to allow more"
    )


def test_what_has_no_room_is_refused_and_holes_take_none(cache: Cache) -> None:
    text = gzip.compress(os.urandom(100_000) + bytes(4 << 20))
    written(cache, text, ".gz", Limits(1 << 40, 0, room=192 << 10))
    os.unlink(f"{cache.root}/copy")
    error = refused(cache, text, ".gz", Limits(1 << 40, 0, room=90_000))
    assert type(error) is SpaceError
    assert str(error) == (
        "/shared/x.gz: it unpacks to more than the 87.9 KiB that you may still write on this disk; "
        "free space there (stagectl evict), or ask for nodes with larger disks"
    )


def test_a_full_disk_is_told_as_such(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr("stager.fs.partial_file.write_all", fill)
    assert re.fullmatch(
        rf"{re.escape(cache.root)}: the disk is too full: .+ of .+ are free; free space there "
        r"\(stagectl evict\) and try again",
        str(refused(cache, gzip.compress(b"data"), ".gz")),
    )
