"""Find out whether other processes run this command line, too, and which of them stages. Pure.

The nodes of a job do to which another launcher than Slurm's gives numbers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
