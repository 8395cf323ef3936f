"""List the formats of archives and of compressed files: their names, and how they are read."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple


class Container(StrEnum):
    """How an archive holds its members."""

    #: Members in a row, read from the beginning to the end.
    TAR = "tar"
    #: Members by a table at the end of the archive, which is read first.
    ZIP = "zip"


class Compression(StrEnum):
    """What a whole file is compressed with. (A zip compresses each member by itself.)"""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"
    XZ = "xz"
    BZIP2 = "bzip2"


class Format(NamedTuple):
    """An archive format, by the ``suffixes`` of its files' names, in lower case."""

    suffixes: tuple[str, ...]
    container: Container
    compression: Compression


#: The archives that ``extract`` unpacks.
FORMATS = (
    Format((".tar.gz", ".tgz"), Container.TAR, Compression.GZIP),
    Format((".tar.zst", ".tzst"), Container.TAR, Compression.ZSTD),
    Format((".tar.xz", ".txz"), Container.TAR, Compression.XZ),
    Format((".tar.bz2", ".tbz2", ".tbz"), Container.TAR, Compression.BZIP2),
    Format((".tar",), Container.TAR, Compression.NONE),
    Format((".zip",), Container.ZIP, Compression.NONE),
)
#: Their suffixes, in the order in which messages list them.
ARCHIVES = tuple(suffix for each in FORMATS for suffix in each.suffixes)
#: The suffixes of the tar archives, which `stagectl pack` writes.
TARS = tuple(end for each in FORMATS if each.container is Container.TAR for end in each.suffixes)
#: What ``decompress`` takes: the suffixes of compressed files, in lower case.
COMPRESSIONS = {
    ".gz": Compression.GZIP,
    ".zst": Compression.ZSTD,
    ".xz": Compression.XZ,
    ".bz2": Compression.BZIP2,
}
#: The suffixes of squashfs images, which are packed and then mounted, but not extracted.
IMAGES = (".sqsh", ".squashfs")
#: The version of an object in S3, or in Azure, at the end of its URL.
_VERSION = re.compile(r"((?:s3|az)://[^?#]*)\?version[iI]d=[\w.~+:-]+", re.ASCII)


def without_version(path: str) -> str:
    """Return the URL of an object without the version that it may name; others as they are.

    >>> without_version("s3://bucket/set.tar?versionId=3sL4kqtJ.x"), without_version("/set?a=b")
    ('s3://bucket/set.tar', '/set?a=b')
    """
    found = _VERSION.fullmatch(path)
    return found[1] if found else path


def archive_suffix(path: str) -> str:
    """Return the suffix of an archive's name in lower case, or an empty text for other names.

    >>> archive_suffix("/shared/Env.TAR.gz"), archive_suffix("/shared/env")
    ('.tar.gz', '')
    """
    name = without_version(path).lower()
    return next((suffix for suffix in ARCHIVES if name.endswith(suffix)), "")


def archive_format(path: str) -> Format | None:
    """Return the format that an archive's name stands for, None for other names."""
    suffix = archive_suffix(path)
    return next((each for each in FORMATS if suffix in each.suffixes), None)


def is_zip(path: str) -> bool:
    """Return whether the name is that of a zip."""
    found = archive_format(path)
    return found is not None and found.container is Container.ZIP


def is_image(path: str) -> bool:
    """Return whether the name is that of a squashfs image."""
    return path.lower().endswith(IMAGES)


def compression_of(path: str) -> Compression:
    """Return what an archive of this name is compressed with."""
    found = archive_format(path)
    return found.compression if found else Compression.NONE


def compressed_suffix(path: str) -> str:
    """Return the suffix of a compressed file's name in lower case, or an empty text.

    It is also empty if the name without it would be no name of a file.

    >>> compressed_suffix("/shared/Set.TAR.gz"), compressed_suffix("/shared/...gz")
    ('.gz', '')
    """
    name = without_version(path).rpartition("/")[2]
    suffix = next((suffix for suffix in COMPRESSIONS if name.lower().endswith(suffix)), "")
    return suffix if name[: -len(suffix)] not in ("", ".", "..") else ""
