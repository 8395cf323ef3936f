"""Choose the library that authenticates the connections between ranks (``prolog/peers``)."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from stager.base import paths
from stager.base.errors import LaunchError

if TYPE_CHECKING:
    from stager.request.policy import Policy

#: The variable in which the library finds its key.
_KEY_VARIABLE = "STAGE_PEER_KEY"
_KEY_BYTES = 16


def library_for(nodes: int, policy: Policy) -> str | None:
    """Return the library that the ranks on so many ``nodes`` preload, None if they need none.

    An installation by pip alone has none. Raise LaunchError if that for a site lacks it.
    """
    if nodes < 2 or not policy.launch.authenticate:
        return None
    library = os.path.join(sys.prefix, paths.PEERS_LIBRARY)
    if os.path.exists(library):
        return library
    if os.path.exists(os.path.join(sys.prefix, paths.SITE_SCRIPT)):
        raise LaunchError(
            f"{library} is not there, without which ranks accept connections from anyone; tell the "
            "administrator to install slurm-stage there again"
        )
    return None


def peer_key() -> dict[str, str]:
    """Return the variable with a new key, for the ranks of one stage alone."""
    return {_KEY_VARIABLE: os.urandom(_KEY_BYTES).hex()}
