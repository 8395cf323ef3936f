"""Tell whether the plugin started this rank, and end it when its parent, slurmstepd, was killed.

Open MPI ends then, since slurmstepd serves its PMIx. MPICH needs PMI-2 for its start alone and
would go on, out of Slurm's sight: the stage would succeed, and nothing would end such a rank when
its job is cancelled.
"""

from __future__ import annotations

import os
import time
from _thread import start_new_thread  # threading is slow to import

#: The variable in which the plugin names slurmstepd's process (gate.c); mpiexec's ranks have none.
_PARENT = "STAGE_PARENT"
#: Seconds between two looks. The kernel would tell at once, by a pidfd, but not that of RHEL 8.
_PERIOD = 1.0


def is_started_by_plugin() -> bool:
    """Return whether the plugin acted on this node, without which no task waits for the rank.

    A folder beneath /run does not show that: an earlier job may have left it.
    """
    return _PARENT in os.environ


def end_with_parent() -> None:
    """End this process, with code 1, soon after its parent has ended. Return at once.

    A parent that has ended before is only noticed if the plugin has named it. So this is what a
    rank does first.
    """
    start_new_thread(_watch, (int(os.environ.get(_PARENT) or os.getppid()),))


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PERIOD)
    os._exit(1)
