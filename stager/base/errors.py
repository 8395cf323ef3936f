"""Define every failure that a user can meet, as one tree. Each class has its own exit code.

====================  ====  =====================================================
class                 code  meaning
====================  ====  =====================================================
UsageError            2     the request is wrong
 ├ DirectiveError     2     a directive cannot be read; a caret shows where
 └ DirectiveErrors    2     several of these
PolicyRefusal         3     the site's stage.toml refuses the request, or has a fault itself
SourceError           4     the source is missing or cannot be read
SpaceError            5     a node's disk has too little space
DestinationError      6     the destination cannot be written
IntegrityError        7     the source changed while it was read, or a digest differed
LaunchError           8     MPI or the launcher failed
BusyError             9     another job held the destination for too long
====================  ====  =====================================================
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable

#: What helps where a disk is too small, unless the site says how a job asks for more.
LARGER_DISKS = "ask for nodes with larger disks"
#: Why a rank fails on a node where the plugin is missing: tasks there do not wait for their files.
NO_PLUGIN = (
    "slurm-stage did not run on this node; tell the administrator (stagectl doctor there says why)"
)
#: The remedy for ranks that do not find each other, or do not start.
MPI_REMEDY = (
    "try again, and if it fails again tell the administrator (mpi in the [launch] section of "
    "stage.toml may not fit this MPI library; srun --mpi=list names Slurm's plugins, Open MPI "
    "needs pmix)"
)

#: The same where mpiexec starts them.
HOSTS_REMEDY = (
    "try again, and if it fails again check that the MPI library of the ranks is that of this "
    "mpiexec (mpiexec in the [launch] section of stage.toml), and that no host is named twice"
)


#: Behind the path of the library by which ranks know each other (``prolog/peers``).
NOT_LOADABLE = (
    " cannot be loaded, without which ranks accept connections from anyone; tell the administrator "
    "to install slurm-stage there again"
)


class StageError(Exception):
    """A failure that the user understands by its message alone.

    The message says what happened, to which path, and what to do; ``node`` says where.
    """

    code: ClassVar[int] = 8

    def __init__(self, message: str, node: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.node = node

    def __str__(self) -> str:
        return f"{self.node}: {self.message}" if self.node else self.message


class UsageError(StageError):
    """The request is wrong."""

    code = 2


class DirectiveError(UsageError):
    """A directive cannot be read: the ``text``, and the ``position`` of the fault in it."""

    #: Columns of the text shown around the fault: a terminal's width less the indent.
    WINDOW: ClassVar[int] = 76

    def __init__(self, problem: str, text: str, position: int) -> None:
        self.problem = problem
        self.text = text
        self.position = position
        super().__init__(f"{problem}\n{self._caret()}")

    def _caret(self) -> str:
        # Ranks, which start fast, raise no DirectiveError.
        from stager.base.text import columns, printable, showable

        hidden = showable(self.text)
        shown, position = printable(hidden), len(printable(hidden[: self.position]))
        start = max(0, min(position - self.WINDOW // 2, len(shown) - self.WINDOW))
        window = shown[start : start + self.WINDOW]
        return f"  {window}\n  {' ' * columns(window[: position - start])}^"


class DirectiveErrors(UsageError):
    """Several directives cannot be read; ``faults`` has an error for each."""

    def __init__(self, faults: Iterable[DirectiveError]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(fault.message for fault in self.faults))


class PolicyRefusal(StageError):
    """The site's stage.toml refuses the request, or has a fault itself."""

    code = 3


class SourceError(StageError):
    """The source is missing or cannot be read."""

    code = 4


class SpaceError(StageError):
    """A node's disk has too little space."""

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


def write_traceback() -> None:
    """Write the exception that is being handled to stderr, in one piece, as a fault of stager."""
    import traceback  # rarely needed

    os.write(2, traceback.format_exc().encode(errors="replace"))


@dataclass(frozen=True, slots=True)
class Failure:
    """A StageError as a value, which travels between ranks and to the launcher."""

    code: int
    message: str
    node: str

    @classmethod
    def of(cls, error: StageError, node: str) -> Failure:
        """Return the failure for ``error``, which was met on ``node``."""
        return cls(error.code, error.message, error.node or node)
