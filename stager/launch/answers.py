"""The protocol by which a node answers on its stdout.

A node first prints that it has begun, then its answer in pieces: in short lines, since Slurm keeps
only those whole. All other lines, such as a banner or a library's complaint, are not part of it.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import sys
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stager.base.text import printable
from stager.copies.upkeep import Action

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stager.copies.upkeep import Command

#: Runs on each node, with a Command behind it. -I keeps the user's PYTHON* and site folder out.
NODE_ARGV = (sys.executable, "-I", "-m", "stager", "node")
#: Seconds in which a node must begin; and, if it only reads records, answer.
PATIENCE = 10.0
#: How each line of this protocol begins; the number is the protocol's version.
_MARK = "@stage1"
#: A piece's number, and the number of pieces; other nodes are not trusted.
_PIECE_NUMBER = re.compile(r"[0-9]{1,6}")
#: The most bytes of an answer, packed or not, and the most values in it: a short value takes some
#: 80 bytes in Python. The status of 100,000 copies has 30 MiB and 1.6 million values.
_LONGEST_ANSWER, _MOST_VALUES = 64 << 20, 4_000_000
#: Characters of a piece. Slurm splits lines of more than 1024 bytes, and those of other nodes may
#: come between the parts (MAX_MSG_LEN in slurmstepd's io.c).
_PIECE = 800


@dataclass(frozen=True, slots=True)
class Answer:
    """What one node answered, a JSON object, or the ``problem`` if it did not answer."""

    node: str
    content: dict[str, Any] | None
    problem: str = ""
    #: The node's state in Slurm.
    state: str = ""


def hello(node: str) -> str:
    """Return the line that says that the node has begun."""
    return f"{_MARK} {node} hello"


def frames(node: str, content: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a node's answer."""
    text = base64.b64encode(zlib.compress(json.dumps(content).encode(), 1)).decode()
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    for number, piece in enumerate(pieces):
        yield f"{_MARK} {node} {number} {len(pieces)} {piece}"


class Mailbox:
    """Puts the lines from several ``nodes``, in any order, together to one answer each."""

    def __init__(self, nodes: Sequence[str]) -> None:
        #: The nodes that may still answer, in their order.
        self.waiting = dict.fromkeys(nodes)
        self.begun: set[str] = set()
        self.answers: dict[str, Answer] = {}
        self._pieces: dict[str, dict[int, str]] = {}
        #: The characters of the pieces of each node.
        self._sizes: dict[str, int] = {}

    def take(self, line: str, source: str) -> bool:
        """Take one line from the node ``source``. Return False if it is not part of the protocol.

        A node that answers for another one is not believed.
        """
        fields = line.split(" ")
        if fields[0] != _MARK or len(fields) < 3 or source not in self.waiting:
            return False
        node = fields[1]
        if node != source:
            self.give_up(source, f"it answered in the name of {node}; check this node")
            return True
        self.begun.add(node)
        if len(fields) == 5 and all(_PIECE_NUMBER.fullmatch(field) for field in fields[2:4]):
            pieces = self._pieces.setdefault(node, {})
            pieces[int(fields[2])] = fields[4]
            self._sizes[node] = self._sizes.get(node, 0) + len(fields[4])
            if self._sizes[node] > _LONGEST_ANSWER:
                del self._pieces[node]
                self.give_up(node, "its answer is too long")
            elif len(pieces) == int(fields[3]):
                self._complete(node, "".join(pieces[number] for number in sorted(pieces)))
        return True

    def _complete(self, node: str, text: str) -> None:
        content = _decode(text)
        if content is None:
            self.give_up(node, "its answer cannot be read")
            return
        self.answers[node] = Answer(node, content)
        del self.waiting[node]

    def give_up(self, node: str, problem: str) -> None:
        """Stop waiting for this node, unless it has answered."""
        if node in self.waiting:
            self.answers[node] = Answer(node, None, printable(problem))
            del self.waiting[node]

    def overdue(self, command: Command) -> list[str]:
        """Return the nodes that are late once their PATIENCE is over.

        A status reads records and takes no longer; other commands must only have begun.
        """
        at_once = command.action is Action.STATUS
        return [node for node in self.waiting if at_once or node not in self.begun]


def no_answer() -> str:
    """Return the problem of a node that is late, and what to do."""
    return (
        f"no answer within {PATIENCE:g} s; ask again, and if it stays silent see whether the node "
        "and its disks work, or tell the administrator"
    )


def _decode(text: str) -> dict[str, Any] | None:
    """Return the content that `frames` encoded, or None."""
    try:
        packed = base64.b64decode(text)
        plain = zlib.decompressobj().decompress(packed, _LONGEST_ANSWER)
        if sum(map(plain.count, (b",", b"[", b"{"))) > _MOST_VALUES:
            return None
        content = json.loads(plain, parse_constant=_refuse_constant)
    except (ValueError, zlib.error, binascii.Error, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _refuse_constant(text: str) -> None:
    """Raise ValueError for NaN and the infinities, which Python's json reads as numbers."""
    raise ValueError(f"{text} is not a number")
