"""Write the lines by which ranks tell the launching process of events, and read them.

An event is a JSON object on one line. A long one is sent as several lines, its *parts*: Slurm keeps
only short lines whole, and may put what other ranks print between the pieces of longer ones.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from typing import Any

#: How the line of an event begins, and the line of a part.
_EVENT, _PART = '{"event": ', "@event "
#: A part's event, the number of parts that follow, and its text.
_PART_FIELDS = re.compile(_PART + r"([0-9a-f]{16}) ([0-9]{1,9}) (.*)", re.DOTALL)
#: Bytes of the longest line. Slurm splits lines of more than 1024 (MAX_MSG_LEN in slurmstepd's
#: io.c).
LONGEST = 1000
#: Bytes of a part's text: before it come `_PART`, 16 and 9 digits, and two spaces.
_PIECE = LONGEST - len(_PART) - 16 - 9 - 2
#: The most bytes of all events of which not every part has come, where each part counts as a whole
#: one. An outcome of 10,000 nodes has a few MiB.
_MOST = 64 << 20


def event(kind: str, **fields: Any) -> str:
    """Return the lines of an event, without the last newline. They are ASCII."""
    text = json.dumps({"event": kind, **fields})
    if len(text) <= LONGEST:
        return text
    name = os.urandom(8).hex()
    pieces = [text[begin : begin + _PIECE] for begin in range(0, len(text), _PIECE)]
    last = len(pieces) - 1
    return "\n".join(
        f"{_PART}{name} {last - number} {piece}" for number, piece in enumerate(pieces)
    )


def read_event(line: str) -> dict[str, Any] | None:
    """Return the event on a line, or None if it is not one."""
    if line.startswith(_EVENT):
        with suppress(ValueError, RecursionError):
            read: dict[str, Any] = json.loads(line)
            return read
    return None


class Parts:
    """Joins the parts of events; those of several events may come in any mixture."""

    def __init__(self) -> None:
        #: The pieces of each event that is not whole, and the number of its last one.
        self._pieces: dict[str, list[str]] = {}
        self._numbers: dict[str, int] = {}
        self._size = 0

    def join(self, line: str) -> str:
        """Return the line of an event if this is its last part, and "" for an earlier part.

        Of an event that lacks a part, return "". Return any other line as it is. Raise ValueError
        if too many parts are without their last.
        """
        found = _PART_FIELDS.fullmatch(line)
        if not found:
            return line
        name, number, text = found[1], int(found[2]), found[3]
        if name in self._numbers and self._numbers[name] != number + 1:
            self._forget(name)  # what follows is not an event without this
        self._pieces.setdefault(name, []).append(text)
        self._numbers[name] = number
        self._size += max(len(text), _PIECE)
        if number == 0:
            whole = self._forget(name)
            return whole if whole.startswith(_EVENT) else ""
        if self._size > _MOST:
            raise ValueError(f"more than {_MOST} bytes of events are not whole")
        return ""

    def beginnings(self) -> list[str]:
        """Return how each event begins that is not whole."""
        return [pieces[0] for pieces in self._pieces.values()]

    def _forget(self, name: str) -> str:
        """Return what has come of an event, and keep it no more."""
        del self._numbers[name]
        pieces = self._pieces.pop(name)
        self._size -= sum(max(len(piece), _PIECE) for piece in pieces)
        return "".join(pieces)
