"""Refuse to run a rank as root where anybody else could reach it.

MPI libraries listen on TCP ports and trust what comes there. This is called before MPI_Init, which
opens them.
"""

from __future__ import annotations

from stager.base import linux
from stager.base.errors import PolicyRefusal
from stager.rank.refusal import refuse

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
    refuse(PolicyRefusal.code, _MESSAGE)
