"""Write a long text with fewer, plain characters, and read it back. Pure."""

from __future__ import annotations

import lzma
import os
from binascii import a2b_base64, b2a_base64

#: How a compact text begins. No JSON begins so.
_MARK = "xz:"
#: Most bytes of a text that is read back.
LARGEST = 64 << 20
#: Most bytes of memory for that: the compression's largest window, and the text.
_MEMORY = 160 << 20


def compact(text: str) -> str:
    """Return ``text`` compressed, in letters, digits and ``+/=:``, for `expand`.

    By xz, which sees the repetition of a path also 100 KiB later: a request has the user's list
    and the items that were made of it.
    """
    return _MARK + b2a_base64(lzma.compress(os.fsencode(text)), newline=False).decode("ascii")


def expand(text: str) -> str:
    """Return the text that `compact` was given.

    Raise ValueError if ``text`` is not compact, was cut, or stands for more than LARGEST bytes.
    """
    if not text.startswith(_MARK):
        raise ValueError(f"it does not begin with {_MARK}")
    stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY)
    try:
        found = stream.decompress(a2b_base64(text.removeprefix(_MARK)), LARGEST)
        # The end of the stream may stand behind the last byte that was asked for.
        more = b"" if stream.eof or stream.needs_input else stream.decompress(b"", 1)
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"it cannot be decompressed: {error}") from None
    if not stream.eof or more:
        raise ValueError(f"it ends early, or has more than {LARGEST} bytes")
    return os.fsdecode(found)
