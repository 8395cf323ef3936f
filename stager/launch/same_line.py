"""Find out whether other processes run this command line, too, and which of them stages. Pure.

The nodes of a job do to which another launcher than Slurm's gives numbers.

Let one of the processes that run the same command line on all nodes stage; the others wait.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from stager.base.errors import Failure, LaunchError
from stager.base.outcome import Outcome
from stager.node.job_state import wait_for_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stager.request.items import StageRequest

#: What numbers the nodes: dstack, an Indexed Job of Kubernetes, the options of torchrun
#: by variables, torchrun for its workers, and other launchers of torch; and the workers of a node.
_NODE_RANKS = (
    "DSTACK_NODE_RANK",
    "JOB_COMPLETION_INDEX",
    "PET_NODE_RANK",
    "GROUP_RANK",
    "NODE_RANK",
)
_LOCAL_RANK = "LOCAL_RANK"
#: What tells the jobs of one user on the same nodes apart. All have the same value on all nodes.
_OF_RUN = ("DSTACK_RUN_ID", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True, slots=True)
class Line:
    """A command line that several processes run: the first stages for all, the others wait."""

    #: The same for all of them.
    name: str
    #: The variables that tell them apart, and the numbers of this process in them.
    ranks: Mapping[str, str]

    @property
    def later(self) -> str:
        """What says that this process is not the first; empty if it is.

        >>> Line("a", {"NODE_RANK": "0", "LOCAL_RANK": "3"}).later
        'LOCAL_RANK is 3'
        """
        return next((f"{name} is {rank}" for name, rank in self.ranks.items() if int(rank)), "")

    @property
    def task(self) -> str:
        """What this process is called among those of its node."""
        return "-".join(self.ranks.values())


def find(
    environment: Mapping[str, str], hosts: Sequence[str], values: Iterable[str]
) -> Line | None:
    """Return the line that this process runs to stage ``values``; None if it alone runs it.

    ``hosts`` are those on which ranks are started without Slurm.
    """
    node = next((name for name in _NODE_RANKS if _is_number(environment, name)), "")
    if not (node and hosts):
        return None
    names = [name for name in (node, _LOCAL_RANK) if _is_number(environment, name)]
    ranks = {name: environment[name] for name in names}
    same = [*hosts], [environment.get(name, "") for name in _OF_RUN], [*values]
    return Line(xxhash.xxh3_128_hexdigest(json.dumps(same).encode()), ranks)


def _is_number(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(name, "")
    return text.isascii() and text.isdecimal()


def wait_for_first(line: Line, request: StageRequest, patience: float) -> Outcome:
    """Wait until the first process of the ``line`` has staged the ``request`` to this node.

    Return its outcome, which has no items. Raise LaunchError if no stage of the line works on this
    node for ``patience`` seconds.
    """
    begun = time.monotonic()
    code = wait_for_line(request.line, request.line_root, os.getuid(), line.task, patience)
    if code is None:
        raise LaunchError(
            f"{line.later}, so this waited for the first to stage, but for {patience:g} s no stage "
            "of this line ran on this node; see what the first says, and run the same line on all"
        )
    failures = []
    if code:
        text = (
            f"{line.later}: the first, which stages for all, failed (exit code {code}) and says why"
        )
        failures = [Failure(code, text, "")]
    return Outcome([], failures, time.monotonic() - begun)
