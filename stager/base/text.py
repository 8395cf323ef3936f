"""Write characters, sizes, times and counts as messages show them. Pure."""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


#: How a byte of a name that is no UTF-8 is shown, by what Python decodes it to (PEP 383).
NOT_UTF_8 = {chr(0xDC00 + byte): f"\\x{byte:02x}" for byte in range(0x80, 0x100)}
#: The name of `show_bytes` as an error handler of a stream.
SHOW_BYTES = "stager.show_bytes"


def printable(text: str) -> str:
    """Replace what does not print by ``?``, and a byte that is no UTF-8 by its number.

    >>> print(printable("a\\tb"), printable("bad\\udcff"))
    a?b bad\\xff
    """
    return "".join(c if c.isprintable() else NOT_UTF_8.get(c, "?") for c in text)


def show_bytes(error: UnicodeError) -> tuple[str, int]:
    """Return what a stream prints in place of what it cannot encode, as `printable` does."""
    assert isinstance(error, UnicodeEncodeError)
    found = error.object[error.start : error.end]
    shown = (NOT_UTF_8.get(c) or c.encode("ascii", "backslashreplace").decode() for c in found)
    return "".join(shown), error.end


codecs.register_error(SHOW_BYTES, show_bytes)


#: What may be secret in a URL: user and password, and what is behind its path.
_SECRET_PARTS = re.compile(r"(?<=://)[^/\s]+(?=@)|(?<=[?#])\S+")
_ANY_URL = re.compile(r"://\S*")  # whatever the scheme, also if its colon is escaped
_WEB_URL = re.compile(r"https?\\?://(\S*)", re.IGNORECASE)


def showable(text: str) -> str:
    """Return ``text`` without users, passwords and queries in its URLs: as many stars for each.

    In URLs of the web, a user or password may have a slash in it that is not escaped.

    >>> showable("see https://me:word@host/x?sig=a#b and /y?z")
    'see https://*******@host/x?******* and /y?z'
    >>> showable("https://me:pa/ss@host/x http://host/x?sig=a@b hf://org/model@main")
    'https://********@host/x http://************** hf://org/model@main'
    >>> print(showable("https\\\\://me:word@host/x"))
    https\\://*******@host/x
    """

    def hide(url: re.Match[str]) -> str:
        return _SECRET_PARTS.sub(lambda part: "*" * len(part[0]), url[0])

    hidden = _ANY_URL.sub(hide, text)
    for url in _WEB_URL.finditer(text):
        begin, users = url.start(1), max(0, url[1].rfind("@"))
        hidden = hidden[:begin] + "*" * users + hidden[begin + users :]
    return hidden


def columns(text: str) -> int:
    """Return the columns that a terminal needs for printable ``text``.

    >>> columns("ab"), columns("\u6570\u636e"), columns("e\u0301")
    (2, 4, 1)
    """
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width  # seldom needed

    return sum(0 if combining(c) else 1 + (east_asian_width(c) in "WF") for c in text)


def elided(text: str, width: int) -> str:
    """Return printable ``text`` in at most ``width`` columns; its middle is left out if need be.

    Two thirds of what stays are from the end, as paths differ there.

    >>> elided("/nvme/alice/img.sqsh", 20), elided("/nvme/alice/img.sqsh", 13)
    ('/nvme/alice/img.sqsh', '/nvm…img.sqsh')
    """
    if columns(text) <= width:
        return text
    head = _beginning(text, (width - 1) // 3)
    tail = _beginning(text[::-1], width - 1 - columns(head))
    return f"{head}…{tail[::-1]}"


def folded(text: str, width: int) -> list[str]:
    """Return printable ``text`` in lines of at most ``width`` columns, cut at blanks if there are.

    >>> folded("pinned, job 17", 8), folded("/nvme/img", 5)
    (['pinned,', 'job 17'], ['/nvme', '/img'])
    """
    lines = []
    while columns(text) > width:
        head = _beginning(text, width) or text[0]
        cut = head.rfind(" ") + 1 or len(head)
        lines.append(text[:cut].rstrip())
        text = text[cut:]
    return [*lines, text]


def _beginning(text: str, width: int) -> str:
    """Return as much of the beginning of ``text`` as ``width`` columns hold."""
    used = 0
    for end, character in enumerate(text):
        used += columns(character)
        if used > width:
            return text[:end]
    return text


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(count: float) -> str:
    """Return a number of bytes with a unit.

    >>> bytes_text(268435456), bytes_text(1000)
    ('256.0 MiB', '1000 B')
    """
    unit = 0
    while round(count, 1) >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.1f} {_UNITS[unit]}" if unit else f"{int(count)} B"


def bytes_range(counts: Collection[int]) -> str:
    """Return the least and the most of numbers of bytes, or one text if they look alike.

    >>> bytes_range([1 << 30, 1 << 20, 1 << 25]), bytes_range([1 << 30, (1 << 30) + 1])
    ('1.0 MiB to 1.0 GiB', '1.0 GiB')
    """
    low, high = bytes_text(min(counts)), bytes_text(max(counts))
    return low if low == high else f"{low} to {high}"


def rate_text(rate: float) -> str:
    """Return bytes a second in decimal units, as vendors of disks and networks use them.

    >>> rate_text(40.4e6), rate_text(1.25e9), rate_text(999.9e6), rate_text(4.04e6), rate_text(12)
    ('40 MB/s', '1.2 GB/s', '1.0 GB/s', '4.0 MB/s', '0.0 MB/s')
    """
    unit, name = (1e9, "GB/s") if rate >= 999.5e6 else (1e6, "MB/s")
    return f"{rate / unit:.0f} {name}" if rate >= 9.95 * unit else f"{rate / unit:.1f} {name}"


def seconds_text(seconds: float) -> str:
    """Return seconds with units.

    >>> seconds_text(5), seconds_text(90), seconds_text(5000)
    ('5.0 s', '1 min 30 s', '1 h 23 min')
    """
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def entries_text(count: int, names: Sequence[str]) -> str:
    """Return a number of files and folders, of which ``names`` has the first; a folder's ends in /.

    >>> entries_text(1, ["a"]), entries_text(1, ["a/"]), entries_text(2, ["a", "b/"])
    ('1 file', '1 folder', '2 files and folders')
    """
    folders = sum(name.endswith("/") for name in names)
    if folders == count:
        return "1 folder" if count == 1 else f"{count} folders"
    return f"{count} files and folders" if folders else files_text(count)


def files_text(count: int) -> str:
    """Return a number of files.

    >>> files_text(1), files_text(2)
    ('1 file', '2 files')
    """
    return f"{count} file" if count == 1 else f"{count} files"


def listed(names: Sequence[str], most: int = 3, of: int = 0) -> str:
    """Return the first ``most`` names, and the number of the others, if there are ``of`` in all.

    >>> listed(["a", "b", "c"]), listed(["a", "b", "c", "d", "e"]), listed(["a", "b"], of=9)
    ('a, b, c', 'a, b, c and 2 more', 'a, b and 7 more')
    """
    others = max(len(names), of) - min(len(names), most)
    more = f" and {others} more" if others else ""
    return f"{', '.join(names[:most])}{more}"
