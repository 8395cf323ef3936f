"""By which names are archives, compressed files and images known?"""

from __future__ import annotations

import re
from enum import StrEnum


class Compression(StrEnum):
    """What a whole file is compressed with. (A zip compresses each member by itself.)"""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"
    XZ = "xz"
    BZIP2 = "bzip2"


#: The archives that ``extract`` unpacks, in the order in which messages list them: the suffixes of
#: their names in lower case, and what a whole one is compressed with.
ARCHIVES = {
    ".tar.gz": Compression.GZIP, ".tgz": Compression.GZIP,
    ".tar.zst": Compression.ZSTD, ".tzst": Compression.ZSTD,
    ".tar.xz": Compression.XZ, ".txz": Compression.XZ,
    ".tar.bz2": Compression.BZIP2, ".tbz2": Compression.BZIP2, ".tbz": Compression.BZIP2,
    ".tar": Compression.NONE,
    ".zip": Compression.NONE,
}  # fmt: skip
#: The suffixes of the tar archives, which `stagectl pack` writes.
TARS = tuple(suffix for suffix in ARCHIVES if suffix != ".zip")
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


def is_zip(path: str) -> bool:
    """Return whether the name is that of a zip."""
    return archive_suffix(path) == ".zip"


def is_image(path: str) -> bool:
    """Return whether the name is that of a squashfs image."""
    return path.lower().endswith(IMAGES)


def compression_of(path: str) -> Compression:
    """Return what an archive of this name is compressed with."""
    return ARCHIVES.get(archive_suffix(path), Compression.NONE)


def compressed_suffix(path: str) -> str:
    """Return the suffix of a compressed file's name in lower case, or an empty text.

    It is also empty if the name without it would be no name of a file.

    >>> compressed_suffix("/shared/Set.TAR.gz"), compressed_suffix("/shared/...gz")
    ('.gz', '')
    """
    name = without_version(path).rpartition("/")[2]
    suffix = next((suffix for suffix in COMPRESSIONS if name.lower().endswith(suffix)), "")
    return suffix if name[: -len(suffix)] not in ("", ".", "..") else ""
