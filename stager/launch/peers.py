"""Choose the library that authenticates the connections between ranks (``prolog/peers``)."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base import paths
from stager.base.errors import LaunchError

if TYPE_CHECKING:
    from stager.request.policy import Policy

#: The variable in which the library finds its key.
_KEY_VARIABLE = "STAGE_PEER_KEY"
_KEY_BYTES = 16
#: How a library begins (elf(5)).
_ELF = b"\x7fELF"


def library_for(nodes: int, policy: Policy) -> str | None:
    """Return the library that the ranks on so many ``nodes`` preload, None if they need none.

    An installation by pip alone has none. Raise LaunchError if that for a site lacks it, or if this
    user cannot load it: the loader would go on without.
    """
    if nodes < 2 or not policy.launch.authenticate:
        return None
    library = os.path.join(sys.prefix, paths.PEERS_LIBRARY)
    if _is_loadable(library):
        return library
    is_of_site = os.path.exists(os.path.join(sys.prefix, paths.SITE_SCRIPT))
    if is_of_site or os.path.exists(library):
        raise LaunchError(
            f"{library} cannot be loaded, without which ranks accept connections from anyone; tell "
            "the administrator to install slurm-stage there again"
        )
    return None


def _is_loadable(library: str) -> bool:
    with suppress(OSError), open(library, "rb") as file:
        return file.read(len(_ELF)) == _ELF
    return False


def peer_key() -> dict[str, str]:
    """Return the variable with a new key, for the ranks of one stage alone."""
    return {_KEY_VARIABLE: os.urandom(_KEY_BYTES).hex()}
