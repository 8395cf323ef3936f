"""What is a file by its first bytes? The ending of its name may be wrong."""

from __future__ import annotations

import re
from typing import IO

from stager.archive.damage import DamagedError, UnsupportedError
from stager.archive.tar import BLOCK_SIZE, decode_header
from stager.base.formats import Compression, is_zip

#: What compressed streams begin with; a zstd file may begin with a frame that is skipped.
MAGICS = {
    Compression.GZIP: (b"\x1f\x8b",),
    Compression.ZSTD: (
        b"\x28\xb5\x2f\xfd", *(b"%c\x2a\x4d\x18" % byte for byte in range(0x50, 0x60)),
    ),
    Compression.XZ: (b"\xfd7zXZ\0",),
    Compression.BZIP2: tuple(b"BZh%d" % level for level in range(1, 10)),
}  # fmt: skip
_LONGEST_MAGIC = max(len(magic) for magics in MAGICS.values() for magic in magics)
#: How HTML and XML begin, perhaps behind the mark of UTF-8.
_MARKUP = rb"(?i)(\xef\xbb\xbf)?\s*<(!doctype|html|\?xml)"
_REPACK = "unpack it by {}, and pack it again (stagectl pack FOLDER)"
_COMPRESS = "decompress it by {}, and compress it again by zstd"
#: What else files begin with that are taken for archives, and what can be done.
_ZIP = rb"PK(\x03\x04|\x05\x06)"
_OTHERS = {
    _ZIP: "a zip; give it a name that ends in .zip, and extract it",
    rb"7z\xbc\xaf\x27\x1c": f"an archive of 7-Zip; {_REPACK.format('7z x')}",
    rb"Rar!\x1a\x07": f"an archive of RAR; {_REPACK.format('7z x')}",
    rb"0707(01|02|07)|\xc7\x71|\x71\xc7": f"an archive of cpio; {_REPACK.format('cpio -id')}",
    rb"\x04\x22\x4d\x18": f"compressed by lz4; {_COMPRESS.format('lz4 -d')}",
    rb"\x1f\x9d": f"compressed by compress; {_COMPRESS.format('gzip -d')}",
    # Behind the one common setting is the size of the dictionary, a power of two.
    rb"\x5d\0\0[\0-\x80][\0-\x08]": f"compressed by lzma; {_COMPRESS.format('xz -d -F lzma')}",
    rb"LZIP": f"compressed by lzip; {_COMPRESS.format('lzip -d')}",
    rb"hsqs": "a squashfs image; give it a name that ends in .sqsh, and mount it",
    _MARKUP: "a page of HTML or XML, such as a server sends in place of a file that it refuses; "
    "download it again",
    rb"version https://git-lfs": "a pointer of Git LFS; fetch the file itself (git lfs pull)",
}


class Begun:
    """A ``file`` whose `first` bytes are known, and come again when it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.first = self._again = file.read(BLOCK_SIZE)

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes of the file."""
        if not self._again:
            return self._file.read(size)
        data, self._again = self._again[:size], self._again[size:]
        return data


def compression_in(first: bytes) -> Compression:
    """Return what a file that begins with these bytes is compressed with."""
    return next(
        (one for one, magics in MAGICS.items() if first.startswith(magics)), Compression.NONE
    )


def tar_compression(first: bytes, name: str) -> Compression | None:
    """Return what a tar that begins with these bytes is compressed with, None for a zip.

    Its ``name`` tells zips alone. Raise UnsupportedError for what is known to be no archive, or
    none that is unpacked.
    """
    if _is_tar(first):  # the name of its first member may look like another format
        return Compression.NONE
    _check_known(first, may_be_zip=is_zip(name))
    compression = compression_in(first)
    if is_zip(name) and compression is Compression.NONE:
        return None
    return compression


def _is_tar(first: bytes) -> bool:
    try:
        return len(first) == BLOCK_SIZE and bool(decode_header(first))
    except DamagedError:
        return False


def _check_known(first: bytes, *, may_be_zip: bool) -> None:
    for magic, what in _OTHERS.items():
        if re.match(magic, first) and not (may_be_zip and magic is _ZIP):
            raise UnsupportedError(f"it is {what}")


def check_compressed(first: bytes) -> None:
    """Raise UnsupportedError for what is not compressed, unless it is too short to tell."""
    _check_known(first, may_be_zip=False)
    if len(first) >= _LONGEST_MAGIC and compression_in(first) is Compression.NONE:
        raise UnsupportedError("it is not compressed; stage it without decompress")
