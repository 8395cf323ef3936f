"""Every failure that a user can meet, as one tree; each class owns its exit code.

====================  ====  =====================================================
class                 code  meaning
====================  ====  =====================================================
UsageError            2     the request makes no sense as it stands
 └ DirectiveError     2     …and a caret can point at the place
PolicyRefusal         3     the site's stage.toml refuses it, or is itself broken
SourceError           4     the source is missing or cannot be read
SpaceError            5     a node's disk has no room
DestinationError      6     the destination cannot be written
IntegrityError        7     the source changed while it was read, or a digest differed
LaunchError           8     MPI or the launcher failed
BusyError             9     another job held the destination for too long
====================  ====  =====================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stager.base.text import printable

#: What can be done about ranks that do not find each other, or do not begin at all.
MPI_REMEDY = (
    "set mpi in the [launch] section of stage.toml to what both this MPI library and Slurm know "
    "(srun --mpi=list names Slurm's; Open MPI needs pmix)"
)


class StageError(Exception):
    """A failure that is explained to the user by its message alone.

    The message says what happened to which path, and what to do; ``node`` says where.
    """

    code: ClassVar[int] = 8

    def __init__(self, message: str, node: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.node = node

    def __str__(self) -> str:
        return f"{self.node}: {self.message}" if self.node else self.message


class UsageError(StageError):
    """The request makes no sense as it stands."""

    code = 2


class DirectiveError(UsageError):
    """A directive that does not parse: the text, and where in it the fault lies."""

    #: Columns of the text shown around the fault: a terminal's width less the indent.
    WINDOW: ClassVar[int] = 76

    def __init__(self, problem: str, text: str, position: int) -> None:
        self.problem = problem
        self.text = text
        self.position = position
        super().__init__(f"{problem}\n{self._caret()}")

    def _caret(self) -> str:
        start = max(0, min(self.position - self.WINDOW // 2, len(self.text) - self.WINDOW))
        window = self.text[start : start + self.WINDOW]
        return f"  {printable(window)}\n  {' ' * (self.position - start)}^"


class PolicyRefusal(StageError):
    """The site's stage.toml refuses the request, or is itself broken."""

    code = 3


class SourceError(StageError):
    """The source is missing or cannot be read."""

    code = 4


class SpaceError(StageError):
    """A node's disk has no room."""

    code = 5


class DestinationError(StageError):
    """The destination cannot be written."""

    code = 6


class IntegrityError(StageError):
    """The source changed while it was read, or a digest differed."""

    code = 7


class LaunchError(StageError):
    """MPI or the launcher failed."""

    code = 8


class BusyError(StageError):
    """Another job held the destination for too long."""

    code = 9


@dataclass(frozen=True, slots=True)
class Failure:
    """A StageError as a value, to travel between ranks and to the launcher."""

    code: int
    message: str
    node: str

    @classmethod
    def of(cls, error: StageError, node: str) -> Failure:
        """The failure that ``error`` is on ``node``."""
        return cls(error.code, error.message, error.node or node)
