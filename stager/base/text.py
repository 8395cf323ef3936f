"""TODO."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with one column a character, so that a caret can stand below each."""
    return "".join(c if c.isprintable() else "?" for c in text)


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(count: float) -> str:
    """``268435456`` → ``256.0 MiB``."""
    unit = 0
    while round(count, 1) >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.1f} {_UNITS[unit]}" if unit else f"{int(count)} B"


def seconds_text(seconds: float) -> str:
    """``5000`` → ``1 h 23 min``; below a minute with one digit."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def files_text(count: int) -> str:
    """``1 file``, ``2 files``."""
    return f"{count} file" if count == 1 else f"{count} files"
