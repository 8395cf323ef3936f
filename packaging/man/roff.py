"""Write a manual page in the language of man(7).

A *text* is a piece of such a page: `plain`, `bold` and `italic` make one of ordinary characters.
"""

from __future__ import annotations

import re
from textwrap import wrap

#: The columns of a line of text; mandoc warns from 81 on.
_COLUMNS = 78
#: Characters that a formatter would replace by typographic ones, or take for its own.
_SPECIAL = {
    "\\": "\\e", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti", '"': "\\(dq",
    "…": "...",
}  # fmt: skip
#: What a paragraph may follow without a macro of its own.
_OPENING = re.compile(r"\.(SH|SS|RS|IP|TP)\b")


def plain(text: str) -> str:
    """Return ``text`` with each character meaning itself."""
    return "".join(
        _SPECIAL.get(char) or (char if char.isascii() else f"\\[u{ord(char):04X}]") for char in text
    )


def bold(text: str) -> str:
    """Return ``text`` as what is to be typed or read literally."""
    return f"\\fB{plain(text)}\\fR"


def italic(text: str) -> str:
    """Return ``text`` with emphasis."""
    return f"\\fI{plain(text)}\\fR"


def quoted(text: str) -> str:
    """Return ``text``, in which backticks enclose what is literal."""
    return "".join(bold(part) if at % 2 else plain(part) for at, part in enumerate(text.split("`")))


class Page:
    """A page under construction."""

    def __init__(self, name: str, section: int, date: str, version: str, manual: str) -> None:
        self._lines = [
            f'.TH {plain(name.upper())} {section} {date} "slurm\\-stage {version}" "{manual}"',
            ".nh",  # file names and options are not to be hyphenated
            ".ad l",
        ]

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"

    def section(self, title: str) -> None:
        """Begin a section."""
        self._lines.append(f".SH {plain(title.upper())}")

    def subsection(self, title: str) -> None:
        """Begin a part of a section."""
        self._lines.append(f".SS {plain(title)}")

    def paragraph(self, text: str) -> None:
        """Add a paragraph."""
        if not _OPENING.match(self._lines[-1]):
            self._lines.append(".PP")
        self._fill(text)

    def tagged(self, tag: str, *texts: str) -> None:
        """Add a tag and, indented, each of ``texts`` beginning on a new line."""
        self._lines.append(".TP 7")  # the indent of a list before it would stay
        self._fill(tag, columns=10_000)  # the tag is one line
        for number, text in enumerate(texts):
            if number:
                self._lines.append(".br")
            self._fill(text)

    def item(self, mark: str) -> None:
        """Begin an item of a list; its first paragraph follows, the others in a block."""
        self._lines.append(f".IP {mark} 4")

    def begin_block(self) -> None:
        """Indent what is added up to `end_block`."""
        self._lines.append(".RS 4")

    def end_block(self) -> None:
        """End what `begin_block` began."""
        self._lines.append(".RE")

    def verbatim(self, text: str) -> None:
        """Add lines that stay as they are."""
        if not _OPENING.match(self._lines[-1]):
            self._lines.append(".PP")
        lines = [_guarded(plain(line)) for line in text.splitlines()]
        self._lines += [".RS 4", ".nf", *lines, ".fi", ".RE"]

    def _fill(self, text: str, columns: int = _COLUMNS) -> None:
        lines = wrap(text, columns, break_long_words=False, break_on_hyphens=False)
        self._lines += map(_guarded, lines or ["\\&"])


def _guarded(line: str) -> str:
    """Return a line of text so that a formatter does not take it for a macro."""
    return f"\\&{line}" if line.startswith((".", "'")) else line
