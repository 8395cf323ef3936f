"""Refuse to run a rank without the library by which ranks know each other (``prolog/peers``).

The loader goes on without a library that it cannot read. This is called before MPI_Init, which
opens ports, and imports little, as MPI_Init of all ranks waits for it.
"""

from __future__ import annotations

import os
import sys

from stager.base import paths


def require_library() -> None:
    """End this process and tell the launcher why, if the library is wanted here and not loaded.

    It is wanted where the environment has a key for it.
    """
    if paths.PEERS_KEY not in os.environ:
        return
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        if any(f"/{paths.PEERS_LIBRARY}" in line for line in maps):  # or "… (deleted)" by an update
            return
    from stager.base.errors import NOT_LOADABLE, LaunchError  # only for this failure
    from stager.rank.refusal import refuse

    refuse(LaunchError.code, os.path.join(sys.prefix, paths.PEERS_LIBRARY) + NOT_LOADABLE)
