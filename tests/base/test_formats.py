"""The table of archive formats: which names belong to which format, whatever their case."""

from __future__ import annotations

import pytest

from stager.base.formats import (
    ARCHIVES,
    COMPRESSIONS,
    TARS,
    Compression,
    archive_suffix,
    compressed_suffix,
    compression_of,
    is_image,
    is_zip,
)


def test_messages_list_the_suffixes_in_this_order() -> None:
    assert (
        " ".join(ARCHIVES)
        == ".tar.gz .tgz .tar.zst .tzst .tar.xz .txz .tar.bz2 .tbz2 .tbz .tar .zip"
    )
    assert " ".join(TARS) == ".tar.gz .tgz .tar.zst .tzst .tar.xz .txz .tar.bz2 .tbz2 .tbz .tar"


@pytest.mark.parametrize(
    ("name", "suffix", "compression"),
    [
        ("/a/b.tar.gz", ".tar.gz", Compression.GZIP),
        ("/a/b.TGZ", ".tgz", Compression.GZIP),
        ("/a/b.tar.zst", ".tar.zst", Compression.ZSTD),
        ("/a/b.tzst", ".tzst", Compression.ZSTD),
        ("/a/b.Tar.Xz", ".tar.xz", Compression.XZ),
        ("/a/b.txz", ".txz", Compression.XZ),
        ("/a/b.tar.bz2", ".tar.bz2", Compression.BZIP2),
        ("/a/b.tbz2", ".tbz2", Compression.BZIP2),
        ("/a/b.TBZ", ".tbz", Compression.BZIP2),
        ("/a/b.tar", ".tar", Compression.NONE),
        ("/a/b.zip", ".zip", Compression.NONE),
    ],
)
def test_a_format_is_known_by_its_name(name: str, suffix: str, compression: Compression) -> None:
    assert (archive_suffix(name), compression_of(name)) == (suffix, compression)
    assert is_zip(name) == (suffix == ".zip")
    assert not is_image(name)


@pytest.mark.parametrize("name", ["/a/tar", "/a/b.gz", "/a/b.tar.lz", "/a/zip/b", "", "/a/b.sqsh"])
def test_other_names_are_no_archives(name: str) -> None:
    assert (archive_suffix(name), compression_of(name)) == ("", Compression.NONE)
    assert not is_zip(name)


@pytest.mark.parametrize("name", ["/a/b.sqsh", "/a/b.SquashFS"])
def test_images_are_known_by_their_names(name: str) -> None:
    assert is_image(name)


@pytest.mark.parametrize(
    ("name", "suffix", "compression"),
    [
        ("/a/b.gz", ".gz", Compression.GZIP),
        ("/a/b.ZST", ".zst", Compression.ZSTD),
        ("/a/b.tar.xz", ".xz", Compression.XZ),
        ("/a/b.bz2", ".bz2", Compression.BZIP2),
    ],
)
def test_a_compressed_file_is_known_by_its_name(
    name: str, suffix: str, compression: Compression
) -> None:
    assert compressed_suffix(name) == suffix
    assert COMPRESSIONS[suffix] is compression


@pytest.mark.parametrize(
    "name", ["/a/gz", "/a.gz/b", "/a.gz/", "/a.tgz", "/.gz", "/..gz", "/...gz"]
)
def test_a_name_that_would_be_no_name_without_its_suffix_has_none(name: str) -> None:
    assert compressed_suffix(name) == ""
