"""Choose the library that authenticates the connections between ranks (``prolog/peers``)."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from stager.base import paths

if TYPE_CHECKING:
    from stager.launch.job import JobContext
    from stager.request.policy import Policy

#: The variable in which the library finds its key.
_KEY_VARIABLE = "STAGE_PEER_KEY"
_KEY_BYTES = 16


def peers_library() -> str | None:
    """Return the path of the library, None if it was not installed beside this Python."""
    path = os.path.join(sys.prefix, paths.PEERS_LIBRARY)
    return path if os.path.exists(path) else None


def library_for(job: JobContext, policy: Policy) -> str | None:
    """Return the library that the ranks of ``job`` preload, None if they need none."""
    return peers_library() if policy.launch.authenticate and job.node_count > 1 else None


def peer_key() -> dict[str, str]:
    """Return the variable with a new key, for the ranks of one stage alone."""
    return {_KEY_VARIABLE: os.urandom(_KEY_BYTES).hex()}
