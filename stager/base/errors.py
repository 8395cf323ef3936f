"""Define every failure that a user can meet, as one tree.

Each class below `StageError` has its exit code, what that means, and what to do. A class without
one has that of its base.
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
    #: What the code means, and what a user does then.
    title: ClassVar[str]
    remedy: ClassVar[str]

    def __init__(self, message: str, node: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.node = node

    def __str__(self) -> str:
        return f"{self.node}: {self.message}" if self.node else self.message


class UsageError(StageError):
    """The request is wrong."""

    code = 2
    title = "The request is wrong."
    remedy = (
        "Correct the directive where the `^` points. `stagectl check` looks at it before you "
        "submit."
    )


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
    title = "The site's rules forbid it."
    remedy = (
        "Choose a DST beneath one of the folders that `stagectl site` names. If the message names"
        " stage.toml or plugstack.conf, tell the administrator. A pinned copy goes after"
        " `stagectl unpin`."
    )


class SourceError(StageError):
    """The source is missing or cannot be read."""

    code = 4
    title = "The source cannot be read."
    remedy = (
        "Check the path, and that the nodes mount it. For a URL, renew your credentials, or "
        "export them before you submit; a hub or registry says that something does not exist if "
        "you may not see it. If a store failed, submit again later."
    )


class SpaceError(StageError):
    """A node's disk has too little space."""

    code = 5
    title = "A disk has too little space."
    remedy = (
        "Free some by `stagectl evict --to-free 200G` in a job on these nodes, or use other nodes."
    )


class DestinationError(StageError):
    """The destination cannot be written."""

    code = 6
    title = "DST or its disk cannot be used."
    remedy = (
        "Choose another DST, or move what is in the way; the option `replace` deletes it. If the "
        "disk failed, use other nodes by `--exclude`, and tell the administrator."
    )


class IntegrityError(StageError):
    """The source changed while it was read, or a digest differed."""

    code = 7
    title = "Contents changed or are damaged."
    remedy = (
        "If the source changed, submit again when nobody writes to it. If a copy on a node is not"
        " as it was staged, stage it again."
    )


class LaunchError(StageError):
    """MPI or the launcher failed."""

    code = 8
    title = "A node, MPI or Slurm failed."
    remedy = (
        "Submit again without the node that is named, by `--exclude`. If it fails again, tell the"
        " administrator."
    )


class BusyError(StageError):
    """Another job held the destination for too long."""

    code = 9
    title = "Another job uses DST, or stages to it."
    remedy = "Submit again later, or choose another DST."


#: The other codes with which a job or a command may end: what each means, and what to do.
OTHER_CODES = {
    "1": (
        "`stagectl doctor` found a problem, or a task's wait for its files was ended.",
        "Do what `doctor` says. Of a task, the job's output has the reason.",
    ),
    "127": (
        "A program of slurm-stage cannot be run.",
        "Tell the administrator: it or its Python is missing on a node.",
    ),
    "128+N": (
        "Staging was cancelled, or killed by signal N.",
        "If you did not cancel it, submit again; then tell the administrator.",
    ),
}


def exit_codes() -> dict[str, tuple[str, str]]:
    """Return what each exit code means, and what to do."""
    own = {str(kind.code): (kind.title, kind.remedy) for kind in StageError.__subclasses__()}
    return dict(sorted({**own, **OTHER_CODES}.items(), key=_number))


def _number(code: tuple[str, object]) -> int:
    return int(code[0].partition("+")[0])


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
