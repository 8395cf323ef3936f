"""Refuse to run a rank as root where anybody else could reach it.

MPI libraries listen on TCP ports and trust what comes there. This is called before MPI_Init, which
opens them.
"""

from __future__ import annotations

import os
import sys

from stager.base import linux
from stager.base.errors import Failure, PolicyRefusal
from stager.base.outcome import Outcome, event

_MESSAGE = (
    "root cannot stage: submit as an ordinary user; to stage for all users, submit as the owner in "
    "[shared] of stage.toml"
)


def refuse_root() -> None:
    """End this process, which is root's, and tell the launcher why.

    Do nothing on a simulated node: `launch.mpiexec` starts root's in a network of their own. That
    is looked up here, because nothing in the environment could prove it.
    """
    if linux.is_alone():
        return
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    outcome = Outcome([], [Failure(PolicyRefusal.code, _MESSAGE, node)], 0.0)
    sys.stdout.write(event("result", outcome=outcome.to_json()) + "\n")
    sys.stdout.flush()
    os._exit(PolicyRefusal.code)
