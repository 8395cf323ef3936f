"""Stage files to the disks of every node of a Slurm job, before its script starts.

What may be imported from here stays as it is; everything else may change. In a job:

    import stager

    outcome = stager.stage(["/shared/model:/nvme/model"])
    if outcome.failures:
        ...  # each has the code, the message and the node
    held, silent = stager.status()

`stage` copies to the nodes of the job, or to those that `find_nodes` returns; `status` says what is
there. Whatever a command ends with as its exit code is raised as a `StageError`, or is a failure of
the `Outcome`. A `Directive` has the parts of one ``SRC:DST``:

>>> from stager import Directive
>>> str(Directive("/shared/a:b", "/nvme/a"))
'/shared/a\\\\:b:/nvme/a'

``README.md`` in this folder shows the way of the data through the packages, and where to change
what.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stager.base.errors import (
        BusyError,
        DestinationError,
        DirectiveError,
        Failure,
        IntegrityError,
        LaunchError,
        PolicyRefusal,
        SourceError,
        SpaceError,
        StageError,
        UsageError,
    )
    from stager.base.outcome import Outcome
    from stager.launch.nodes import status
    from stager.launch.targets import Nodes, find_nodes, stage
    from stager.request.grammar import Directive
    from stager.store.states import NodeStatus

__all__ = [
    "BusyError",
    "DestinationError",
    "Directive",
    "DirectiveError",
    "Failure",
    "IntegrityError",
    "LaunchError",
    "NodeStatus",
    "Nodes",
    "Outcome",
    "PolicyRefusal",
    "SourceError",
    "SpaceError",
    "StageError",
    "UsageError",
    "find_nodes",
    "stage",
    "status",
]
#: Where the names are that are no errors.
_MODULES = {
    "Directive": "request.grammar", "NodeStatus": "store.states", "Nodes": "launch.targets",
    "Outcome": "base.outcome", "find_nodes": "launch.targets", "stage": "launch.targets",
    "status": "launch.nodes",
}  # fmt: skip


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import what is asked for: a rank, and the gate, begin sooner without."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"stager.{_MODULES.get(name, 'base.errors')}"), name)
