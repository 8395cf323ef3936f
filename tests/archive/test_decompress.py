"""Compressed archives: several streams in a row, early ends, and how much memory is allowed."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
import struct
import zlib
from typing import TYPE_CHECKING

import pytest

from stager.archive.decompress import BLOCK, decompressed, zstd
from stager.base.formats import COMPRESSIONS
from tests.support.archives import NO_LIMITS, a_file, damaged, refused, tar_of, unpack

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_cut_off_zstd_archive_lacks_the_end_of_its_tar(out: Path) -> None:
    text = zstd.compress(tar_of(*(a_file(f"f{n}", os.urandom(900)) for n in range(300))))
    why = damaged("it ends early", "x.tar.zst")
    assert refused(text[:-140_000], out, "x.tar.zst") == why


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_however_much_is_in_few_bytes_it_comes_in_blocks(suffix: str) -> None:
    ways: dict[str, Callable[[bytes], bytes]] = {
        ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd.compress, ".bz2": bz2.compress,
    }  # fmt: skip
    text = ways[suffix](bytes(40 * BLOCK + 1))
    sizes = [len(one) for one in decompressed(io.BytesIO(text), COMPRESSIONS[suffix])]
    assert (max(sizes), sum(sizes)) == (BLOCK, 40 * BLOCK + 1)


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.xz", ".tar.zst"])
def test_an_archive_may_be_compressed_in_parts(out: Path, suffix: str) -> None:
    text = tar_of(a_file("a", b"1" * 3000), a_file("b"))
    ways: dict[str, Callable[[bytes], bytes]] = {
        ".tar.gz": gzip.compress, ".tar.xz": lzma.compress, ".tar.zst": zstd.compress,
    }  # fmt: skip
    parts = ways[suffix](text[:2000]) + ways[suffix](text[2000:])
    unpack(io.BytesIO(parts), f"x{suffix}", bytes(out), NO_LIMITS)
    assert [(out / name).read_bytes() for name in "ab"] == [b"1" * 3000, b"data"]
    why = damaged("something else follows the compressed data", f"x{suffix}")
    assert refused(parts + b"garbage", out, f"x{suffix}") == why


def test_a_dictionary_that_would_fill_the_memory_is_refused(out: Path) -> None:
    text = bytearray(lzma.compress(tar_of(a_file("a"))))
    # The size of the dictionary is in the first block's header, which has a digest.
    end = 12 + (text[12] + 1) * 4 - 4
    text[text.index(b"\x21\x01", 12) + 2] = 40
    text[end : end + 4] = struct.pack("<I", zlib.crc32(text[12:end]))
    assert refused(bytes(text), out, "x.tar.xz") == (
        "x.tar.xz cannot be unpacked: it takes more than 256 MiB of memory to decompress; compress "
        "it again with a smaller dictionary, such as that of xz -9"
    )


def test_a_file_that_needs_a_dictionary_is_told_as_such(out: Path) -> None:
    samples = [hashlib.sha512(bytes([number])).digest() * 8 for number in range(64)]
    trained = zstd.train_dict(samples, 1024)
    text = zstd.compress(tar_of(a_file("a")), zstd_dict=trained)
    assert refused(text, out, "x.tar.zst") == (
        "x.tar.zst cannot be unpacked: it was compressed with a dictionary; compress it again by "
        "zstd without -D"
    )


def test_a_window_that_would_fill_the_memory_is_refused(out: Path) -> None:
    made = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 28})
    text = made.compress(tar_of(a_file("a"))) + made.flush()
    assert refused(text, out, "x.tar.zst") == (
        "x.tar.zst cannot be unpacked: it takes more than 128 MiB of memory to decompress; "
        "compress it again by zstd without --ultra, with --long=27 at most"
    )
