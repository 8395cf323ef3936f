"""Draw shares and lengths by block characters, or by ASCII where a terminal has no others. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stager.base.text import columns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self, TextIO

#: Columns of a share, which leave room for paths on a terminal of 80.
_SHARE = 8
#: Of a scale, the fewest columns of bars, and the part of its width that they have at least.
_FEWEST, _THIRD = 10, 3
#: The name of all those that have no name of their own.
_OTHERS = "others"


class Blocks(NamedTuple):
    """The characters to draw with: ``parts`` of a column from the least to a whole; ``empty``."""

    parts: str
    empty: str

    @classmethod
    def of(cls, stream: TextIO) -> Self:
        """Return what ``stream`` can show."""
        try:
            "█▏░".encode(stream.encoding or "ascii")
        except UnicodeEncodeError:
            return cls("#", ".")
        return cls("▏▎▍▌▋▊▉█", "░")

    def share(self, count: int, total: int) -> str:
        """Return a bar that is full only for all of ``total``, and empty only for none.

        >>> Blocks("#", ".").share(3, 4), Blocks("#", ".").share(1, 99)
        ('######..', '#.......')
        """
        filled = max(1, _SHARE * count // total) if count else 0
        return self.parts[-1] * filled + self.empty * (_SHARE - filled)

    def scale(self, lengths: Mapping[str, float], width: int) -> str:
        """Return the names of ``lengths``, each with its bar, in one line of ``width`` columns.

        Bars are in proportion. Where there is no room for all names, or a bar would be too short to
        be seen, the shortest are drawn as one, at the end; what has no length is left out. Return
        an empty text if ``width`` is too small even so.

        >>> Blocks("#", ".").scale({"read": 1, "sync": 0, "write": 2}, 34)
        'read ####### write #############'
        """
        ranked = sorted(lengths, key=lengths.__getitem__, reverse=True)
        for count in range(len(ranked), 0, -1):
            shown = _together(lengths, ranked[:count])
            # Blanks around each bar, and a column more for the part of one that it may end in.
            room = width + 1 - sum(columns(name) + 3 for name in shown)
            shortest = lengths[ranked[count - 1]] * room / (sum(lengths.values()) or 1)
            if room >= max(_FEWEST, width // _THIRD) and shortest * len(self.parts) >= 1:
                return self._line(shown, room)
        return ""

    def _line(self, lengths: Mapping[str, float], room: int) -> str:
        total = sum(lengths.values())
        bars = (f"{name} {self._bar(room * each / total)}" for name, each in lengths.items())
        return " ".join(bars)

    def _bar(self, length: float) -> str:
        """Return a bar of so many columns, to the next part of one; at least one part."""
        each = len(self.parts)
        whole, part = divmod(max(1, round(length * each)), each)
        return self.parts[-1] * whole + (self.parts[part - 1] if part else "")


def _together(lengths: Mapping[str, float], named: Sequence[str]) -> dict[str, float]:
    """Return the ``named`` lengths in the order of all, and the sum of the others at the end."""
    shown = {name: length for name, length in lengths.items() if name in named}
    others = sum(length for name, length in lengths.items() if name not in named)
    return shown | ({_OTHERS: others} if others else {})
