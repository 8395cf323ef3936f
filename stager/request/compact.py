"""Write a long text with fewer, plain characters, and read it back. Pure."""

from __future__ import annotations

import os
import zlib
from binascii import a2b_base64, b2a_base64

#: How a compact text begins. No JSON begins so.
_MARK = "zlib:"
#: Most bytes of a text that is read back.
LARGEST = 64 << 20


def compact(text: str) -> str:
    """Return ``text`` compressed, in letters, digits and ``+/=:``, for `expand`."""
    return _MARK + b2a_base64(zlib.compress(os.fsencode(text)), newline=False).decode("ascii")


def expand(text: str) -> str:
    """Return the text that `compact` was given.

    Raise ValueError if ``text`` is not compact, was cut, or stands for more than LARGEST bytes.
    """
    if not text.startswith(_MARK):
        raise ValueError(f"it does not begin with {_MARK}")
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(a2b_base64(text.removeprefix(_MARK)), LARGEST)
    except zlib.error as error:
        raise ValueError(f"it cannot be decompressed: {error}") from None
    if not stream.eof:
        raise ValueError(f"it ends early, or has more than {LARGEST} bytes")
    return os.fsdecode(found)
