"""Write characters, sizes, times and counts as messages show them. Pure."""

from __future__ import annotations


def printable(text: str) -> str:
    """Replace what does not print by ``?``, so that a caret can stand below each character."""
    return "".join(c if c.isprintable() else "?" for c in text)


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(count: float) -> str:
    """Return a number of bytes with a unit: ``268435456`` is ``256.0 MiB``."""
    unit = 0
    while round(count, 1) >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.1f} {_UNITS[unit]}" if unit else f"{int(count)} B"


def seconds_text(seconds: float) -> str:
    """Return seconds with units: ``5000`` is ``1 h 23 min``, and ``5`` is ``5.0 s``."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def files_text(count: int) -> str:
    """Return ``1 file``, ``2 files``."""
    return f"{count} file" if count == 1 else f"{count} files"
